"""Local steps with every kind of inner and outer: what crosses, what is kept, what is refused."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_dsgd import (
  algorithms,
  checkpoint,
  compressors,
  ledger,
  memories,
  runtime,
  topologies,
  transforms,
)

AXIS, W, RATE, PERIOD = 'workers', 8, 0.1, 3
EIGHT, RING = runtime.simulate(W), topologies.ring(W)
# Toy leaves: gathering them from eight workers costs more than a dense mean, and is flagged.
pytestmark = pytest.mark.filterwarnings('ignore:gathering:UserWarning')


def centers():
  """Minima of workers: a tree of two leaves of rows."""
  rng = np.random.default_rng(0)
  return {'kernel': rng.normal(size=(W, 4, 5)), 'bias': rng.normal(size=(W, 5))}


@pytest.fixture(scope='module')
def descend():
  """Runs `|x - center|^2 / 2` from 0: models after each step, [steps, W, ...], rows and state."""

  def descend(tx, steps, *, rows=None, state=None, dtype=np.float32, control=None):
    tx = optax.with_extra_args_support(tx)

    def worker(x, state, center, control):
      extra = {} if control is None else {'control': control}

      def step(carry, _):
        x, state = carry
        grad_fn = lambda x: jax.tree.map(jnp.subtract, x, center)  # noqa: E731
        updates, state = tx.update(grad_fn(x), state, x, grad_fn=grad_fn, **extra)
        x = jax.tree.map(jnp.add, x, updates)
        return (x, state), x

      return jax.lax.scan(step, (x, state), length=steps)

    with jax.enable_x64(dtype == np.float64):
      center = jax.tree.map(lambda x: jnp.asarray(x, dtype), centers())
      rows = jax.tree.map(jnp.zeros_like, center) if rows is None else rows
      state = EIGHT.spmd(tx.init)(rows) if state is None else state
      (rows, state), history = EIGHT.spmd(worker)(rows, state, center, control)
    history = jax.tree.map(lambda x: np.asarray(x, np.float64).swapaxes(0, 1), history)
    return history, rows, state

  return descend


def averaged(*outer):
  return optax.chain(transforms.mean_over(AXIS), *outer)


# ---- what outer may be


@pytest.mark.parametrize(
  ('compressor', 'memory', 'scale'),
  [
    (compressors.qsgd(4), memories.none(), 0.0),
    (compressors.top_k(0.3), memories.residual(), 1.0),
    (compressors.top_k(0.3), memories.reference(), 0.0),
  ],
  ids=['none', 'residual', 'reference'],
)
def test_pseudo_gradients_are_compressed(descend, compressor, memory, scale):
  """Workers agree after every meeting, and what a residual holds back is all that is missing."""
  outer = optax.chain(
    transforms.compressed_mean(compressor, axis_name=AXIS, memory=memory), optax.sgd(1.0)
  )
  rounds = 60
  history, _, state = descend(transforms.local_steps(optax.sgd(RATE), outer, PERIOD), 3 * rounds)
  target, meetings = centers(), slice(PERIOD - 1, None, PERIOD)
  payload = 0
  for name, c in target.items():
    models = history[name]
    assert np.ptp(models[meetings], axis=1).max() < 1e-5
    assert np.ptp(models[0], axis=0).max() > 0.01
    payload += ledger.payload_bytes(
      jax.eval_shape(compressor.encode, jax.random.key(0), jnp.zeros(c.shape[1:]))
    )
    before = models[PERIOD - 2 :: PERIOD]
    starts = np.concatenate([0 * models[:1], models[meetings][:-1]])
    ways = (starts - (before - RATE * (before - c))).mean(1)  # anchor - params, mean of workers
    here, missing = models[-1, 0], -ways.sum(0)
    if scale:
      residual = np.asarray(optax.tree.get(state, 'residual')[name]).mean(0)
      assert np.abs(residual).max() > 1e-3
      np.testing.assert_allclose(here - residual, missing, atol=1e-5)
    if memory.kind == 'reference':
      np.testing.assert_allclose(here, c.mean(0), atol=1e-4)
    assert np.abs(here - c.mean(0)).max() < 0.3
  assert ledger.bytes_sent(state).tolist() == [rounds * payload] * W


GOSSIPED = {
  'step': optax.sgd(1.0),
  'nesterov': optax.sgd(0.7, momentum=0.9, nesterov=True),
  'adam': optax.adam(0.1),
  'yogi': optax.yogi(0.1),
  'slow momentum': transforms.in_local_units(optax.sgd(1.0, momentum=0.5), RATE, PERIOD),
  'sign momentum': transforms.in_local_units(
    optax.chain(transforms.sign_momentum(), optax.scale(-1.0)), RATE, PERIOD
  ),
}


@pytest.mark.parametrize('name', GOSSIPED)
def test_gossip_in_place_of_a_mean_keeps_the_mean(descend, name):
  """After a meeting: the mean model is that of unmixed workers, and they are closer together."""
  step = GOSSIPED[name]
  mixed, alone = (
    descend(transforms.local_steps(optax.sgd(RATE), outer, PERIOD), PERIOD)[0]
    for outer in (optax.chain(step, transforms.mix_neighbors(RING, axis_name=AXIS)), step)
  )
  for leaf in mixed:
    last, unmixed = mixed[leaf][-1], alone[leaf][-1]
    np.testing.assert_allclose(last.mean(0), unmixed.mean(0), atol=2e-6)
    assert last.var(0).sum() < 0.9 * unmixed.var(0).sum()
    assert np.abs(last.mean(0)).max() > 1e-3


def test_compressed_gossip_of_rounds_keeps_the_mean(descend):
  mix = transforms.mix_compressed(
    RING, compressors.top_k(0.3), axis_name=AXIS, memory=memories.reference(), consensus_rate=0.3
  )
  tx = transforms.local_steps(optax.sgd(RATE), optax.chain(optax.sgd(1.0), mix), PERIOD)
  history, _, _ = descend(tx, 10 * PERIOD)
  for leaf, c in centers().items():
    mean = (1 - (1 - RATE) ** (10 * PERIOD)) * c.mean(0)  # all Hessians are 1
    np.testing.assert_allclose(history[leaf][-1].mean(0), mean, atol=1e-6)
    assert history[leaf][-1].var(0).sum() < 0.9 * c.var(0).sum()


def test_labels_do_not_multiply_meetings(descend):
  """`optax.partition` with two labels: as many rounds, and as many bytes, as without."""
  whole = algorithms.diloco(optax.sgd(RATE), PERIOD, axis_name=AXIS)
  parts = optax.partition({'kernel': whole, 'bias': whole}, {'kernel': 'kernel', 'bias': 'bias'})
  models, _, state = descend(whole, 10)
  split, _, states = descend(parts, 10)
  jax.tree.map(np.testing.assert_array_equal, models, split)
  inner = [states.inner_states[label].inner_state for label in ('kernel', 'bias')]
  for own in inner:
    assert own.round.tolist() == state.round.tolist() == [3] * W
    assert own.step.tolist() == state.step.tolist() == [1] * W
  assert ledger.bytes_sent(states).tolist() == ledger.bytes_sent(state).tolist()
  assert ledger.bytes_sent(state).tolist() == [3 * 25 * 4] * W


def test_injected_rates_count_steps_inside_and_rounds_outside(descend):
  inner = optax.inject_hyperparams(optax.sgd)(lambda count: 0.1 / (1 + count))
  outer = optax.inject_hyperparams(optax.sgd)(lambda count: 1.0 / (1 + count))
  _, _, state = descend(transforms.local_steps(inner, averaged(outer), PERIOD), 10)
  assert state.inner.count.tolist() == [10] * W
  np.testing.assert_allclose(state.inner.hyperparams['learning_rate'], 0.1 / 10, rtol=1e-6)
  assert state.outer[1].count.tolist() == [3] * W
  np.testing.assert_allclose(state.outer[1].hyperparams['learning_rate'], 1 / 3, rtol=1e-6)


# ---- when


def test_each_worker_has_the_inner_state_of_the_steps_that_it_took(descend):
  """Control gives workers 0, 1, 2 and 3 of three steps: inner counts differ, rounds do not."""
  control = transforms.Control(steps=jnp.arange(W) % 4)
  tx = transforms.local_steps(optax.adam(RATE), averaged(optax.sgd(1.0)), PERIOD)
  _, rows, state = descend(tx, 2 * PERIOD, control=control)
  assert optax.tree.get(state.inner, 'count').tolist() == [0, 2, 4, 6] * 2
  assert state.round.tolist() == [2] * W
  assert np.ptp(rows['bias'], axis=0).max() < 1e-6


def test_what_is_late_arrives_when_it_is_said_to(descend):
  """A way is computed at steps 2, 5, 8 and reaches the workers two steps later."""
  tx = transforms.local_steps(optax.sgd(RATE), averaged(optax.sgd(1.0)), PERIOD, delay=2)
  history, _, _ = descend(tx, 12, dtype=np.float64)
  c = centers()['bias']
  x, anchor, pending = np.zeros_like(c), np.zeros(5), None
  for t in range(12):
    x = x - RATE * (x - c)
    if pending is not None and t % PERIOD == 1:
      x[:] = anchor = anchor + pending
    if t % PERIOD == PERIOD - 1:
      pending = (x - anchor).mean(0)
    np.testing.assert_allclose(history['bias'][t], x, rtol=0, atol=1e-13)


RESTORED = {
  'streaming': algorithms.streaming_diloco(
    optax.adamw(1e-2), 4, axis_name=AXIS, fragments=2,
    fragment=lambda path, like: [int(path == 'bias')],
  ),
  'post-local': algorithms.local_sgd(
    RATE, transforms.post_local_period(5, 3), axis_name=AXIS, momentum=0.9
  ),
}  # fmt: skip


@pytest.mark.parametrize('name', ['streaming', 'post-local'])
def test_a_run_that_was_saved_inside_a_round_goes_on_as_if_it_was_not(descend, tmp_path, name):
  """Saved at 7, run to 14: bit-identical, with meetings at the same steps."""
  tx = RESTORED[name]
  straight, _, _ = descend(tx, 14)
  first, rows, state = descend(tx, 7)
  with checkpoint.Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(7, (rows, state))
    rows, state = checkpoints.restore(jax.eval_shape(lambda: (rows, state)))
  second, _, after = descend(tx, 7, rows=rows, state=state)
  for leaf, models in straight.items():
    np.testing.assert_array_equal(models, np.concatenate([first[leaf], second[leaf]]))
  assert (after.round > state.round).all()


def test_evaluation_changes_nothing(descend):
  """`runtime.average` names the mean model; workers stay where they are, inside a round too."""
  tx = algorithms.local_sgd(RATE, PERIOD, axis_name=AXIS)
  history, rows, _ = descend(tx, 4)
  kept = jax.tree.map(np.array, rows)
  mean = runtime.average(rows)
  jax.tree.map(np.testing.assert_array_equal, rows, kept)
  assert np.ptp(kept['bias'], axis=0).max() > 0.01
  np.testing.assert_allclose(mean['bias'], history['bias'][-1].mean(0), rtol=1e-5)


# ---- what it costs


two = {'block': lambda round_: round_ % 2, 'blocks': 2}
# Copies of the model in the state, as docstrings say.
COPIES = {
  'local_sgd': (algorithms.local_sgd(RATE, PERIOD, axis_name=AXIS), 1),
  'averaged momentum': (
    algorithms.local_sgd(
      RATE, PERIOD, axis_name=AXIS, momentum=0.9, at_meeting=transforms.average_state(AXIS)
    ), 2
  ),
  'slow_mo': (algorithms.slow_mo(RATE, PERIOD, axis_name=AXIS), 2),
  'overlap_local_sgd': (algorithms.overlap_local_sgd(RATE, PERIOD, axis_name=AXIS), 3),
  'diloco': (algorithms.diloco(optax.adamw(1e-3), PERIOD, axis_name=AXIS), 2 + 2),
  'streaming_diloco': (RESTORED['streaming'], 3 + 2),
  'distributed_sign_momentum': (
    algorithms.distributed_sign_momentum(optax.sgd(RATE), RATE, PERIOD, axis_name=AXIS), 2
  ),
  'dream_ddp': (
    algorithms.dream_ddp(
      optax.sgd(RATE), PERIOD, axis_name=AXIS, phases=lambda path, like: [int(path == 'bias')]
    ), 1
  ),
  'fed_avg': (algorithms.fed_avg(RATE, PERIOD, axis_name=AXIS, steps=range(W)), 1),
  'fed_opt': (algorithms.fed_opt(RATE, optax.adam(RATE), PERIOD, axis_name=AXIS), 1 + 2),
  'fed_prox': (algorithms.fed_prox(RATE, PERIOD, axis_name=AXIS, strength=0.1), 2),
  'scaffold': (algorithms.scaffold(RATE, PERIOD, axis_name=AXIS), 4),
  'bvr_l_sgd': (algorithms.bvr_l_sgd(RATE, PERIOD, axis_name=AXIS, stage=2), 5),
  'mm_psgd': (algorithms.mm_psgd(RATE, PERIOD, axis_name=AXIS, **two), 1 + 2),
  'mc_psgd': (algorithms.mc_psgd(RATE, PERIOD, axis_name=AXIS, **two), 3 * 2 + 1),
}  # fmt: skip


@pytest.mark.parametrize('name', COPIES)
def test_state_holds_as_many_models_as_it_says_and_shares_no_buffer(name):
  tx, copies = COPIES[name]
  params = {'kernel': jnp.zeros((4, 5)), 'bias': jnp.zeros(5)}
  state = tx.init(params)
  floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.inexact)]
  assert sum(x.nbytes for x in floats) == copies * 25 * 4
  others = sum(x.nbytes for x in jax.tree.leaves(state)) - copies * 25 * 4
  assert others < 150  # counters and meters
  pointer = lambda x: x.unsafe_buffer_pointer()  # noqa: E731
  assert not {pointer(x) for x in floats} & {pointer(x) for x in jax.tree.leaves(params)}


# In laws/wire_test.py is the plain one; here late, phased, limited, in states and in inner chains.
@pytest.mark.parametrize(
  'name',
  [
    'averaged momentum',
    'overlap_local_sgd',
    'streaming_diloco',
    'fed_avg',
    'scaffold',
    'bvr_l_sgd',
  ],
)
def test_collectives_are_in_branches_and_laps(name):
  """None is in the program that always runs, so between meetings nothing crosses."""
  tx, _ = COPIES[name]
  workers = runtime.on_mesh(runtime.make_mesh(workers=W), AXIS)

  def step(x, state, center):
    grad_fn = lambda x: jax.tree.map(jnp.subtract, x, center)  # noqa: E731
    return tx.update(grad_fn(x), state, x, grad_fn=grad_fn)

  center = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), centers())
  state = jax.eval_shape(workers.spmd(tx.init), center)
  text = workers.spmd(step).lower(center, state, center).compile().as_text()
  found = ledger.collectives(text)
  conditionals = ' '.join(re.findall(r' (?:conditional|while)\(.*', text))
  branches = set(re.findall(r'[\w.\-]+', conditionals))
  assert found and branches
  assert {c.computation for c in found} <= branches
  entry = re.search(r'^ENTRY %?([\w.\-]+)', text, re.MULTILINE)
  assert entry and entry.group(1) not in branches


# ---- what is refused


@pytest.mark.parametrize(
  ('period', 'arguments', 'message'),
  [
    (0, {}, 'period=0; accepted are integers >= 1'),
    (True, {}, 'period=True; accepted are integers >= 1'),
    (3, {'delay': 4}, 'delay=4; accepted are at most period=3 steps'),
    (3, {'delay': -1}, 'delay=-1; accepted are integers from 0'),
    (3, {'delay': True}, 'delay=True; accepted are integers from 0'),
    (3, {'delay': 3}, 'pull=1.0 and delay=3 of a whole period'),
    (3, {'pull': 0}, r'pull=0; accepted are numbers in \(0, 1\]'),
    (3, {'pull': 1.5}, r'pull=1.5; accepted are numbers in \(0, 1\]'),
    (3, {'pull': float('nan')}, 'pull=nan; accepted'),
    (lambda round_: round_ + 1, {'delay': 1}, 'a period that is a schedule'),
    (lambda round_: round_ + 1, {'phases': lambda path, like: [0]}, 'a period that is a schedule'),
  ],
)
def test_refused_arguments(period, arguments, message):
  with pytest.raises(ValueError, match=f'local_steps got .*{message}'):
    transforms.local_steps(optax.sgd(RATE), averaged(optax.sgd(1.0)), period, **arguments)


@pytest.mark.parametrize(
  ('own', 'delay', 'message'),
  [
    ([], 0, 'would never meet'),
    ([3], 0, 'one or more steps of the round, from 0 to 2'),
    ([-1], 0, 'one or more steps of the round, from 0 to 2'),
    ([0.5], 0, 'one or more steps of the round, from 0 to 2'),
    ([0, 1], 2, 'meet again before what it sent has arrived'),
  ],
)
def test_refused_phases_name_the_leaf(own, delay, message):
  choose = lambda path, like: own if path == 'bias' else [0]  # noqa: E731
  tx = transforms.local_steps(
    optax.sgd(RATE), averaged(optax.sgd(1.0)), 3, phases=choose, delay=delay
  )
  with pytest.raises(ValueError, match=f"phases .* for leaf 'bias'.*{message}"):
    tx.init({'kernel': jnp.zeros(2), 'bias': jnp.zeros(2)})
