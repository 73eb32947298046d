"""Laws that every transform obeys, over the examples of `TRANSFORMS`; values are elsewhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from jax_dsgd import codes, compressors, ledger, memories, runtime, topologies, transforms

W, STEPS = 8, 5
top_k, random_k, qsgd = compressors.top_k(0.3), compressors.random_k(0.3), compressors.qsgd(7)


def compressed(compressor, memory, **options):
  return transforms.compressed_mean(compressor, axis_name='workers', memory=memory, **options)


def gossip(topology, compressor, memory, rate=0.5):
  return transforms.mix_compressed(
    topology, compressor, axis_name='workers', consensus_rate=rate, memory=memory
  )


def rounds(inner, period, *outer):
  return transforms.local_steps(inner, optax.chain(transforms.mean_over('workers'), *outer), period)


def given_gradients(tx):
  """With a `grad_fn` of a linear loss, whose gradient is the updates, where none is given."""

  def update(updates, state, params=None, **extra):
    return tx.update(updates, state, params, **({'grad_fn': lambda params: updates} | extra))

  return optax.GradientTransformationExtraArgs(tx.init, update)


def lazy(compressor, weight):
  return given_gradients(
    transforms.lazy_mean(compressor, axis_name='workers', weight=weight, window=3)
  )


def frozen_adam(refresh, **arguments):
  return transforms.scale_by_frozen_adam(
    compressors.scaled_sign(), refresh, axis_name='workers', **arguments
  )


def mixed(topology):
  return transforms.mix_neighbors(topology, axis_name='workers')


def drifting(transform, at_meeting, period=2):
  """A transform of gradients in the local steps that it is made for."""
  outer = optax.chain(transforms.mean_over('workers'), optax.sgd(1.0))
  inner = optax.chain(transform, optax.sgd(0.1))
  return given_gradients(transforms.local_steps(inner, outer, period, at_meeting=at_meeting))


def recursive(stage, period=2):
  estimate = transforms.recursive_gradients(axis_name='workers', stage=stage)
  return drifting(estimate, transforms.renew_recursion, period)


def without_waiting(n, period):
  cube = topologies.one_peer_hypercube(n)
  return transforms.mix_without_waiting(
    cube, axis_name='workers', group_size=min(n, 2), period=period
  )


def ascent(topology, **options):
  return given_gradients(
    transforms.ascend_dual(
      topology, axis_name='workers', convexity=0.5, smoothness=2.0, inner_steps=2, **options
    )
  )


def by_block(n, period=2):
  local, block = rounds(optax.sgd(0.1), period, optax.sgd(1.0)), lambda round_: round_ % 2
  return given_gradients(
    transforms.choose_chain_by_block(local, block, blocks=2, axis_name='workers')
  )


def told(tx):
  """With a row of a trace, in which all take part in one group, where none is given."""
  tx = optax.with_extra_args_support(tx)

  def update(updates, state, params=None, **extra):
    row = transforms.Control(active=True, weight=1.0, group=0, staleness=1, view=params)
    return tx.update(updates, state, params, **(extra | {'control': row}))

  return optax.GradientTransformationExtraArgs(tx.init, update)


def of_losses(gradients):
  """Makes gradients of several losses of one update, leaf by leaf, and combines them."""
  stack = lambda u: jnp.stack(gradients(u)).astype(u.dtype)  # noqa: E731
  rows = optax.stateless(lambda updates, params: jax.tree.map(stack, updates))
  return optax.chain(rows, transforms.orthogonalize())


def shrunk(params, rate):
  return jax.tree.map(lambda x: x / (1 + rate), params)


snapshot_only = optax.stateless(lambda updates, params: params)


# From the number of workers to a transform; a new one needs at least one line here and in ALONE.
TRANSFORMS = {
  'mean_over': [
    lambda n: transforms.mean_over('workers'),
    lambda n: transforms.mean_over('workers', weights=np.arange(1, n + 1)),
    lambda n: transforms.mean_over('workers', weights=lambda count: jnp.arange(1.0, n + 1)),
  ],
  'compressed_mean': [
    lambda n: compressed(top_k, memories.residual()),
    lambda n: compressed(random_k, memories.reference(step=0.5)),
    lambda n: compressed(qsgd, memories.none()),
    lambda n: compressed(top_k, memories.residual(), server=memories.residual()),
  ],
  'low_rank_mean': [
    lambda n: transforms.low_rank_mean(1, axis_name='workers', memory=memories.residual()),
  ],
  'vote_majority': [lambda n: transforms.vote_majority(axis_name='workers')],
  'mix_neighbors': [
    lambda n: transforms.mix_neighbors(topologies.ring(n), axis_name='workers'),
    lambda n: transforms.mix_neighbors(topologies.one_peer_exponential(n), axis_name='workers'),
    lambda n: transforms.mix_neighbors(
      topologies.ring(n), axis_name='workers', rounds=transforms.chebyshev(topologies.ring(n), 3)
    ),
  ],
  'mix_compressed': [
    lambda n: gossip(topologies.ring(n), top_k, memories.reference()),
    lambda n: gossip(topologies.star(n), random_k, memories.residual()),
    lambda n: transforms.mix_compressed(
      topologies.ring(n),
      top_k,
      axis_name='workers',
      consensus_rate=0.5,
      trigger=lambda squared, count: squared > 10.0,
    ),
  ],
  'mix_push_sum': [
    lambda n: transforms.mix_push_sum(
      topologies.from_arrows(n, [(i, (i + k) % n) for k in (1, 2) for i in range(n // k) if n > k]),
      axis_name='workers',
    )
  ],
  'mix_without_waiting': [lambda n: without_waiting(n, 3)],
  'before_step': [lambda n: transforms.before_step(mixed(topologies.ring(n)))],
  'track_gradients': [
    lambda n: transforms.track_gradients(mixed(topologies.ring(n))),
    lambda n: transforms.track_gradients(gossip(topologies.ring(n), top_k, memories.reference())),
  ],
  'correct_diffusion': [
    lambda n: optax.chain(transforms.correct_diffusion(), mixed(topologies.ring(n)))
  ],
  'quasi_global_momentum': [
    lambda n: transforms.quasi_global_momentum(mixed(topologies.ring(n)), 0.1)
  ],
  'ascend_dual': [
    lambda n: ascent(topologies.ring(n)),
    lambda n: ascent(topologies.ring(n), lazy=0.1),
  ],
  'local_steps': [
    lambda n: rounds(optax.sgd(0.1), 2, optax.sgd(0.7, momentum=0.9, nesterov=True)),
    lambda n: transforms.local_steps(
      optax.sgd(0.1, momentum=0.9),
      optax.chain(compressed(top_k, memories.residual()), optax.sgd(1.0)),
      lambda round_: round_ + 1,
    ),
    lambda n: transforms.local_steps(
      optax.sgd(0.1, momentum=0.9),
      optax.chain(transforms.mean_over('workers'), optax.sgd(0.7)),
      3,
      delay=1,
      pull=0.5,
      phases=lambda path, like: [0] if path == 'b' else [1],
      at_meeting=transforms.average_state('workers'),
    ),
  ],
  'in_local_units': [
    lambda n: rounds(
      optax.sgd(0.1), 2, transforms.in_local_units(optax.sgd(1.0, momentum=0.5), 0.1, 2)
    )
  ],
  'correct_drift': [
    lambda n: drifting(transforms.correct_drift(), transforms.renew_drift_correction('workers'))
  ],
  'pull_to_start': [lambda n: drifting(transforms.pull_to_start(0.5), transforms.renew_start)],
  'recursive_gradients': [lambda n: recursive(2)],
  'limit_local_steps': [
    lambda n: transforms.limit_local_steps(
      rounds(optax.sgd(0.1), 3, optax.sgd(1.0)), np.arange(n) % 3 + 1, axis_name='workers'
    )
  ],
  'average_by_block': [
    lambda n: transforms.average_by_block(
      rounds(optax.sgd(0.1), 2, optax.sgd(1.0)), lambda round_: round_ % 2, blocks=2
    )
  ],
  'choose_chain_by_block': [by_block],
  'only_when_active': [
    lambda n: optax.chain(
      transforms.only_when_active(optax.identity()), transforms.mean_over('workers')
    )
  ],
  'mix_groups': [lambda n: told(transforms.mix_groups(axis_name='workers'))],
  'fold_late': [lambda n: told(transforms.fold_late(axis_name='workers'))],
  'substitute_missing': [lambda n: told(transforms.substitute_missing(axis_name='workers'))],
  'coded_sum': [
    lambda n: transforms.coded_sum(
      codes.gradient_code(n, min(1, n - 1), seed=0), axis_name='workers'
    )
  ],
  'weighted_sum': [lambda n: told(transforms.weighted_sum(axis_name='workers'))],
  'delayed_nesterov': [lambda n: transforms.delayed_nesterov(0.1, workers=2)],
  'discount_staleness': [lambda n: told(transforms.discount_staleness(0.5))],
  'compensate_delay': [lambda n: told(transforms.compensate_delay(0.5))],
  'proximal': [lambda n: transforms.proximal(shrunk, 0.1)],
  'reduce_variance': [
    lambda n: given_gradients(transforms.reduce_variance(lambda params: params, 2))
  ],
  'sign_momentum': [lambda n: transforms.sign_momentum()],
  'orthogonalize': [
    lambda n: of_losses(lambda u: [u, u * u - 0.5, jnp.cos(u)]),
    lambda n: of_losses(lambda u: [u]),
  ],
  'step_ahead': [
    lambda n: given_gradients(transforms.step_ahead(compressed(top_k, memories.residual())))
  ],
  'average_residual': [
    lambda n: transforms.average_residual(
      compressed(top_k, memories.residual()), 2, axis_name='workers'
    )
  ],
  'recompress': [
    lambda n: transforms.recompress(top_k, memory=memories.residual()),
    lambda n: transforms.recompress(random_k, memory=memories.reference()),
  ],
  'lazy_mean': [lambda n: lazy(top_k, 1e3), lambda n: lazy(qsgd, 0.0)],
  'stages': [
    lambda n: transforms.stages(
      [compressed(c, memories.momentum_correction(0.5)) for c in (compressors.top_k(0.5), top_k)],
      lambda step: step // 2,
    )
  ],
  'scale_by_frozen_adam': [lambda n: frozen_adam(lambda step: step % 3 == 0)],
  'skip_nonfinite': [
    lambda n: transforms.skip_nonfinite(
      optax.chain(compressed(top_k, memories.residual()), optax.adam(0.1)), axis_name='workers'
    )
  ],
}
# Sends nothing.
LOCAL = {'orthogonalize', 'sign_momentum', 'recompress', 'delayed_nesterov', 'discount_staleness'}
LOCAL |= {'compensate_delay', 'proximal', 'reduce_variance'}
# These move to a place, which is as precise as the parameters.
PLACES = {'local_steps', 'mix_neighbors', 'mix_compressed', 'mix_push_sum', 'mix_without_waiting'}
PLACES |= {'mix_groups', 'before_step', 'correct_diffusion', 'quasi_global_momentum', 'ascend_dual'}
PLACES |= {'in_local_units', 'correct_drift', 'pull_to_start', 'recursive_gradients'}
PLACES |= {'limit_local_steps', 'average_by_block', 'choose_chain_by_block'}
adamw = optax.adamw(0.1, weight_decay=0.1)
# With one worker, each is a plain optax transform (on gradients without a zero).
ALONE = {
  'mean_over': (TRANSFORMS['mean_over'][1](1), optax.identity()),
  'compressed_mean': (compressed(compressors.identity(), memories.residual()), optax.identity()),
  'low_rank_mean': (
    transforms.low_rank_mean(9, axis_name='workers', memory=memories.residual()),
    optax.identity(),
  ),
  'vote_majority': (TRANSFORMS['vote_majority'][0](1), optax.scale_by_sign()),
  'mix_neighbors': (TRANSFORMS['mix_neighbors'][0](1), optax.identity()),
  'mix_compressed': (TRANSFORMS['mix_compressed'][0](1), optax.identity()),
  'local_steps': (rounds(adamw, 3, optax.sgd(1.0)), adamw),
  'mix_push_sum': (TRANSFORMS['mix_push_sum'][0](1), optax.identity()),
  'mix_without_waiting': (without_waiting(1, 3), optax.identity()),
  'before_step': (TRANSFORMS['before_step'][0](1), optax.identity()),
  'track_gradients': (TRANSFORMS['track_gradients'][0](1), optax.identity()),
  'correct_diffusion': (TRANSFORMS['correct_diffusion'][0](1), optax.identity()),
  # What is left of the gradient each time is what went into the way.
  'quasi_global_momentum': (
    transforms.quasi_global_momentum(mixed(topologies.ring(1)), 0.1, momentum=0.0),
    optax.sgd(0.1),
  ),
  # Price 0: the inner problem is the worker's own, here linear.
  'ascend_dual': (
    given_gradients(
      transforms.ascend_dual(
        topologies.ring(1), axis_name='workers', convexity=2.0, smoothness=2.0, inner_steps=1
      )
    ),
    optax.sgd(0.5),
  ),
  'only_when_active': (transforms.only_when_active(optax.trace(0.9)), optax.trace(0.9)),
  'mix_groups': (TRANSFORMS['mix_groups'][0](1), optax.identity()),
  'fold_late': (TRANSFORMS['fold_late'][0](1), optax.identity()),
  'substitute_missing': (TRANSFORMS['substitute_missing'][0](1), optax.identity()),
  'coded_sum': (TRANSFORMS['coded_sum'][0](1), optax.identity()),
  'weighted_sum': (TRANSFORMS['weighted_sum'][0](1), optax.identity()),
  'delayed_nesterov': (
    transforms.delayed_nesterov(0.1, workers=1),
    optax.sgd(0.1, momentum=0.9, nesterov=True),
  ),
  'discount_staleness': (TRANSFORMS['discount_staleness'][0](1), optax.scale(2**-0.5)),
  'compensate_delay': (TRANSFORMS['compensate_delay'][0](1), optax.identity()),
  'proximal': (transforms.proximal(lambda x, rate: x, 0.1), optax.identity()),
  # Of a linear loss all gradients are alike, and the snapshot is where the parameters are.
  'reduce_variance': (
    given_gradients(transforms.reduce_variance(lambda params: params, 1)),
    snapshot_only,
  ),
  'in_local_units': (
    rounds(optax.sgd(0.1), 1, transforms.in_local_units(optax.sgd(1.0, momentum=0.5), 0.1, 1)),
    optax.sgd(0.1, momentum=0.5),
  ),
  'correct_drift': (TRANSFORMS['correct_drift'][0](1), optax.sgd(0.1)),
  'pull_to_start': (
    drifting(transforms.pull_to_start(0.0), transforms.renew_start),
    optax.sgd(0.1),
  ),
  'recursive_gradients': (recursive(1, period=1), optax.sgd(0.1)),
  'limit_local_steps': (
    transforms.limit_local_steps(rounds(adamw, 3, optax.sgd(1.0)), [3], axis_name='workers'),
    adamw,
  ),
  'average_by_block': (TRANSFORMS['average_by_block'][0](1), optax.sgd(0.1)),
  'choose_chain_by_block': (by_block(1), optax.sgd(0.1)),
  'sign_momentum': (transforms.sign_momentum(), optax.scale_by_lion()),
  'orthogonalize': (TRANSFORMS['orthogonalize'][1](1), optax.identity()),
  'step_ahead': (
    given_gradients(transforms.step_ahead(compressed(compressors.identity(), memories.residual()))),
    optax.identity(),
  ),
  'average_residual': (
    transforms.average_residual(
      compressed(compressors.identity(), memories.residual()), 1, axis_name='workers'
    ),
    optax.identity(),
  ),
  'recompress': (
    transforms.recompress(compressors.identity(), memory=memories.reference()),
    optax.identity(),
  ),
  'lazy_mean': (lazy(compressors.identity(), 0.0), optax.identity()),
  'stages': (
    transforms.stages([optax.trace(0.9), optax.trace(0.9)], lambda step: step % 2),
    optax.trace(0.9),
  ),
  'scale_by_frozen_adam': (
    frozen_adam(lambda step: True, b1=0.0, b2=0.9),
    optax.scale_by_rms(0.9, 1e-8, eps_in_sqrt=False),
  ),
  'skip_nonfinite': (transforms.skip_nonfinite(adamw, axis_name='workers'), adamw),
}

CASES = [(name, make) for name, makes in TRANSFORMS.items() for make in makes]
IDS = [f'{name}-{i}' for name, makes in TRANSFORMS.items() for i in range(len(makes))]
every_transform = pytest.mark.parametrize(('name', 'make'), CASES, ids=IDS)
every_reduction = pytest.mark.parametrize(
  ('name', 'make'),
  [case for case in CASES if case[0] not in LOCAL],
  ids=[id_ for id_ in IDS if id_.split('-')[0] not in LOCAL],
)


def tree(*lead, seed=0, dtype=np.float32):
  rng = np.random.default_rng(seed)
  return {
    'w': rng.normal(size=(*lead, 3, 5)).astype(dtype),
    'b': rng.normal(size=lead).astype(dtype),
  }


def plain(state):
  """State as NumPy arrays, keys as their words."""
  is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
  return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(state)]


def assert_close(actual, expected, rtol=1e-5, atol=1e-6):
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for x, y in zip(plain(actual), plain(expected), strict=True):
    np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)


def one_update(tx, updates, params, count, **extra):
  """The first update of simulated workers, from rows."""
  step = lambda u, x: tx.update(u, tx.init(x), x, **extra)  # noqa: E731
  return jax.jit(runtime.simulate(count).spmd(step))(updates, params)


def traced(tx, count, updates, params, state=None):
  """Shapes of (updates, state) after the init and one update of rows."""
  spmd = runtime.simulate(count).spmd
  state = jax.eval_shape(spmd(tx.init), params) if state is None else state
  return state, jax.eval_shape(spmd(tx.update), updates, state, params)


def test_every_transform_has_examples(require_examples):
  kind = optax.GradientTransformation
  require_examples(transforms, kind, TRANSFORMS)
  require_examples(transforms, kind, ALONE)


@pytest.mark.parametrize('name', ALONE)
def test_one_worker_is_plain_optax(name, run):
  tx, expected = ALONE[name]
  gradients, params = tree(STEPS, 1), tree(1, seed=1)
  after, _, updates = run(tx, runtime.simulate(1), params, gradients)
  after_plain, _, updates_plain = run(expected, runtime.simulate(1), params, gradients)
  assert_close((after, updates), (after_plain, updates_plain))


@every_transform
def test_a_scan_on_a_mesh_is_a_loop_in_simulation(name, make, eight, run):
  tx, gradients, params = make(W), tree(STEPS, W), tree(W, seed=1)
  on_mesh = run(tx, eight, params, gradients)

  workers = runtime.simulate(W)
  state = jax.jit(workers.spmd(tx.init))(params)
  update = jax.jit(workers.spmd(tx.update))
  history = []
  for t in range(STEPS):
    updates, after = update(jax.tree.map(lambda g, t=t: g[t], gradients), state, params)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(
      lambda x: (x.shape, x.dtype), state
    )
    state, params = after, jax.tree.map(np.add, params, updates)
    history.append(updates)
  assert_close(on_mesh, (params, state, jax.tree.map(lambda *x: np.stack(x), *history)))


@every_transform
def test_a_state_made_in_the_region_fits_a_scan(name, make, eight):
  """With check_vma=True too: what `init` makes there varies as what `update` returns."""
  tx = make(W)

  def worker(params, gradients):
    def step(state, gradient):
      updates, state = tx.update(gradient, state, params)
      return state, updates

    return jax.lax.scan(step, tx.init(params), gradients)

  jax.eval_shape(eight.spmd(worker), tree(W), tree(W, 3))


def test_the_same_text_runs_in_a_pmap_of_the_user():
  txs = {id_: make(W) for id_, (_, make) in zip(IDS, CASES, strict=True) if id_.endswith('-0')}
  gradients, params = tree(W), tree(W, seed=1)

  def step(updates, params):
    return {name: tx.update(updates, tx.init(params), params)[0] for name, tx in txs.items()}

  mapped = jax.pmap(step, axis_name='workers')(gradients, params)
  assert_close(mapped, jax.jit(jax.vmap(step, axis_name='workers'))(gradients, params))


DTYPES = [('bfloat16', 'bfloat16'), ('float32', 'bfloat16'), ('float32', 'float16')]


@every_transform
@pytest.mark.parametrize('dtypes', DTYPES, ids='-'.join)
def test_state_and_updates_keep_their_types(name, make, dtypes):
  """From shapes alone, so `init` runs on ShapeDtypeStruct; a fixed point holds for all steps."""
  params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtypes[0]), tree(W))
  updates = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtypes[1]), tree(W))
  state, (stepped, after) = traced(make(W), W, updates, params)
  assert after == state
  if name in PLACES:
    wide = jnp.promote_types(*dtypes)
    assert all(leaf.dtype == wide for leaf in jax.tree.leaves(stepped))
  elif name not in LOCAL:  # there, the inner transform has its own way
    assert stepped == updates
  for path, leaf in jax.tree_util.tree_leaves_with_path(state):
    if any(getattr(entry, 'name', '') in ('residual', 'reference', 'received') for entry in path):
      assert leaf.dtype == jnp.float32


@pytest.mark.parametrize('name', TRANSFORMS)
def test_composes_with_optax(name):
  """Inside a chain, a partition by labels and injected hyperparameters, for three steps."""
  tx = TRANSFORMS[name][0](W)
  schedule = optax.piecewise_constant_schedule(0.5, {1: 0.1})  # 0.5, then 0.05
  before = optax.chain(optax.clip(1.0), optax.scale_by_adam())

  def whole(learning_rate):
    labelled = optax.partition({'on': tx, 'off': optax.set_to_zero()}, {'w': 'on', 'b': 'off'})
    return optax.chain(before, labelled, optax.scale(learning_rate))

  composed = optax.inject_hyperparams(whole)(learning_rate=schedule)

  def worker(gradients, params):
    states = composed.init(params), before.init(params), tx.init({'w': params['w']})

    def step(states, gradient):
      outer, first, second = states
      u, outer = composed.update(gradient, outer, params)
      v, first = before.update(gradient, first, params)
      v, second = tx.update({'w': v['w']}, second, {'w': params['w']})
      return (outer, first, second), (u, v)

    return jax.lax.scan(step, states, gradients)[1]

  rows = jax.tree.map(lambda g: np.moveaxis(g, 0, 1), tree(3, W))
  u, v = jax.jit(runtime.simulate(W).spmd(worker))(rows, tree(W, seed=1))
  assert not np.asarray(u['b']).any()
  rates = np.float32([0.5, 0.05, 0.05])[None, :, None, None]
  np.testing.assert_allclose(u['w'], v['w'] * rates, rtol=1e-5, atol=1e-6)


def odd(count):
  """Leaves that do not cross, and a 0-d one that does; rows of `count` workers."""
  rows = np.arange(count)
  return {
    'w': rows[:, None] + np.float32([1.5, -2, 3]),
    'scalar': rows + np.float32(0.5),
    'int': rows.astype(np.int32) + 3,
    'bool': rows % 2 == 0,
    'empty': np.zeros((count, 0), np.float32),
    'none': None,
  }


def with_quiet_inner(name, make):
  """The example, with an inner transform that leaves integers alone where there is a choice."""
  mean = transforms.mean_over('workers')
  at_once = lambda inner, outer=mean, **at: transforms.local_steps(inner, outer, 1, **at)  # noqa: E731
  renew_drift, block = transforms.renew_drift_correction('workers'), lambda round_: round_ % 2
  estimate = transforms.recursive_gradients(axis_name='workers', stage=2)
  quiet = {
    'local_steps': at_once(optax.identity()),
    'in_local_units': at_once(
      optax.identity(), transforms.in_local_units(transforms.mean_over('workers'), 0.1, 1)
    ),
    'correct_drift': at_once(transforms.correct_drift(), at_meeting=renew_drift),
    'pull_to_start': at_once(transforms.pull_to_start(0.5), at_meeting=transforms.renew_start),
    'recursive_gradients': given_gradients(
      at_once(estimate, at_meeting=transforms.renew_recursion)
    ),
    'limit_local_steps': transforms.limit_local_steps(
      at_once(optax.identity()), [1, 1], axis_name='workers'
    ),
    'average_by_block': transforms.average_by_block(at_once(optax.identity()), block, blocks=2),
    'choose_chain_by_block': given_gradients(
      transforms.choose_chain_by_block(
        at_once(optax.identity()), block, blocks=2, axis_name='workers'
      )
    ),
  }
  if name in quiet:
    return quiet[name]
  return transforms.skip_nonfinite(mean, axis_name='workers') if 'skip' in name else make(2)


@every_reduction
def test_leaves_that_do_not_cross_stay_and_cost_nothing(name, make):
  tx, rows = with_quiet_inner(name, make), odd(2)
  crossing = {'w': rows['w'], 'scalar': rows['scalar']}
  both = lambda *trees: tuple(tx.update(x, tx.init(x), x) for x in trees)  # noqa: E731
  spmd = jax.jit(runtime.simulate(2).spmd(both))
  (updates, state), (expected, least) = spmd(rows, crossing)
  for leaf in ('int', 'bool', 'empty'):
    assert updates[leaf].dtype == rows[leaf].dtype
    np.testing.assert_array_equal(updates[leaf], rows[leaf])
  assert updates['none'] is None
  assert updates['scalar'].shape == (2,)
  assert (ledger.bytes_sent(state) == ledger.bytes_sent(least)).all()
  assert np.all(ledger.bytes_sent(state) > 0)
  # Keys go by the place among the leaves that cross, so they are the same too.
  np.testing.assert_allclose(updates['w'], expected['w'], rtol=1e-6)


@every_reduction
def test_gradients_of_integers_pass(name, make):
  """`jax.grad(allow_int=True)` gives float0 for integers."""
  tx = with_quiet_inner(name, make)

  def step(params):
    gradient = jax.grad(lambda p: jnp.sum(p['w'] ** 2), allow_int=True)(params)
    updates, _ = tx.update(gradient, tx.init(params), params)
    assert updates['int'].dtype == jax.dtypes.float0
    return updates['w']

  rows = odd(2)
  params = {name: rows[name] for name in ('w', 'int')}
  assert jax.eval_shape(runtime.simulate(2).spmd(step), params).shape == (2, 3)


@pytest.mark.parametrize('name', ['compressed_mean', 'vote_majority', 'mix_compressed'])
def test_complex_leaves_are_refused_by_name(name):
  params = {'layer': {'phase': np.ones((2, 3), np.complex64)}}
  with pytest.raises(ValueError, match='layer/phase.*complex64') as error:
    traced(TRANSFORMS[name][0](2), 2, params, params)
  assert '\n' not in str(error.value)


def test_a_mean_accepts_complex_leaves():
  rows = np.array([[3 + 4j], [1 - 2j]], np.complex64)
  updates, _ = one_update(transforms.mean_over('workers'), rows, rows, 2)
  np.testing.assert_allclose(updates, [[2 + 1j]] * 2)


REMEMBER = {
  'residual': compressed(top_k, memories.residual()),
  'reference': compressed(top_k, memories.reference()),
  'gossip': gossip(topologies.ring(2), top_k, memories.reference()),
  'anchor': rounds(optax.sgd(0.1), 2),
}


@pytest.mark.parametrize('name', REMEMBER)
@pytest.mark.parametrize(
  ('change', 'leaf'),
  [
    (lambda p: p | {'more': p['a']}, 'more'),
    (lambda p: {'a': p['a']}, 'b'),
    (lambda p: p | {'b': np.zeros((2, 1), np.float32)}, 'b'),
    (lambda p: p | {'b': p['b'].astype(np.int32)}, 'b'),
  ],
  ids=['more', 'fewer', 'shape', 'kind'],
)
def test_a_tree_that_changed_is_refused_by_name(name, change, leaf):
  params = {'a': np.zeros((2, 3), np.float32), 'b': np.zeros((2, 4), np.float32)}
  state = jax.eval_shape(runtime.simulate(2).spmd(REMEMBER[name].init), params)
  changed = change(params)
  with pytest.raises(ValueError, match=rf"'{leaf}'"):
    traced(REMEMBER[name], 2, changed, changed, state)


@pytest.mark.parametrize('name', REMEMBER)
def test_the_order_of_a_dict_does_not_matter(name):
  rng = np.random.default_rng(0)
  params = {k: rng.normal(size=(2, 4)).astype(np.float32) for k in ('a', 'b')}
  turned = dict(reversed(params.items()))
  tx = REMEMBER[name]
  state = jax.eval_shape(runtime.simulate(2).spmd(tx.init), params)
  traced(tx, 2, turned, turned, state)
  assert_close(one_update(tx, params, params, 2), one_update(tx, turned, turned, 2))


@every_reduction
def test_gradients_that_were_summed_already_are_refused(name, make, eight):
  """Inside shard_map the gradient of a replicated value is a sum over workers: fact 2."""
  tx = make(W)

  def step(params, target):
    gradient = jax.grad(lambda p: jnp.sum((p['w'] - target[0]) ** 2))(params)
    return tx.update(gradient, tx.init(params), params)[0]

  specs = PartitionSpec(), PartitionSpec('workers')
  sharded = jax.shard_map(step, mesh=eight.mesh, in_specs=specs, out_specs=specs[1])
  with pytest.raises(ValueError, match="'w' do not vary over axis 'workers'"):
    jax.eval_shape(sharded, {'w': np.zeros(3, np.float32)}, np.zeros((W, 3), np.float32))


@pytest.mark.parametrize('name', ['mix_neighbors', 'mix_compressed'])
def test_a_topology_of_another_size_is_refused(name):
  with pytest.raises(ValueError, match='for 4 workers.*has 3'):
    traced(TRANSFORMS[name][0](4), 3, tree(3), tree(3))


@pytest.mark.parametrize('name', sorted(TRANSFORMS.keys() - LOCAL))
def test_an_axis_that_is_not_bound_is_refused(name):
  tx = TRANSFORMS[name][0](2)
  with pytest.raises(ValueError, match="axis_name='workers' is not bound"):
    jax.eval_shape(lambda x: tx.update(x, tx.init(x), x), tree())


@every_transform
def test_extra_arguments_are_accepted(name, make):
  tx = optax.with_extra_args_support(make(2))
  updates, state = tree(2), tree(2, seed=1)
  step = lambda u, x: tx.update(  # noqa: E731
    u, tx.init(x), x, value=1.0, grad_fn=lambda params: params, control=None
  )
  jax.eval_shape(runtime.simulate(2).spmd(step), updates, state)


@pytest.mark.parametrize(
  'name', ['mix_neighbors', 'mix_compressed', 'local_steps', 'step_ahead', 'lazy_mean']
)
def test_transforms_that_need_params_say_so(name):
  tx = TRANSFORMS[name][0](2)
  with pytest.raises(ValueError, match=r'update\(updates, state, params'):
    jax.eval_shape(runtime.simulate(2).spmd(lambda x: tx.update(x, tx.init(x))), tree(2))


def test_wrappers_pass_everything_on():
  """`value`, `grad_fn` and params reach what is inside: u = value grad_fn(params)."""

  def update(updates, state, params=None, *, value, grad_fn, **extra):
    return jax.tree.map(lambda g: value * g, grad_fn(params)), state

  asking = optax.GradientTransformationExtraArgs(lambda params: (), update)
  local = transforms.local_steps(asking, optax.identity(), 3)
  outer = transforms.local_steps(optax.set_to_zero(), asking, 1)
  params = {'x': jnp.array([[1.0], [2.0]])}
  for tx in (local, outer, transforms.skip_nonfinite(asking, axis_name='workers')):
    grad_fn = lambda p: jax.tree.map(lambda x: 10 * x, p)  # noqa: E731
    updates, _ = one_update(tx, params, params, 2, value=2.0, grad_fn=grad_fn)
    assert updates['x'].tolist() == [[20.0], [40.0]]
