"""A worker may be a slice of a mesh that shards its model: 2 workers of 4 devices each."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jax_dsgd import (
  algorithms,
  compressors,
  ledger,
  memories,
  runtime,
  topologies,
  transforms,
)

AXIS = 'workers'
SPECS = {'bias': PartitionSpec(), 'kernel': PartitionSpec(None, 'model')}


def slices():
  return runtime.on_mesh(runtime.make_mesh(workers=2, model=4), AXIS)


def whole_problem():
  generator = np.random.default_rng(3)
  draw = lambda *shape: generator.normal(size=shape).astype(np.float32)  # noqa: E731
  return {'bias': draw(2, 16), 'kernel': draw(2, 8, 16)}


def on_slices(workers, tree):
  place = lambda x, spec: jax.device_put(  # noqa: E731
    x, NamedSharding(workers.mesh, PartitionSpec(AXIS, *spec))
  )
  return {name: place(x, SPECS[name]) for name, x in tree.items()}


def train(workers, tx, params, state, targets, steps=5):
  """Steps on 0.5 |x - target|^2 of each worker, in one program."""

  def step(params, state, target):
    updates, state = tx.update(jax.tree.map(jnp.subtract, params, target), state, params)
    return optax.apply_updates(params, updates), state

  def one(carry, _):
    return workers.spmd(step)(*carry, targets), None

  return jax.lax.scan(one, (params, state), length=steps)[0]


def as_leaves(tree):
  """Each shard of the kernel as a leaf of its own."""
  shards = np.split(np.asarray(tree['kernel']), 4, axis=-1)
  return {'bias': tree['bias'], **{f'kernel{i}': shard for i, shard in enumerate(shards)}}


def compressed(compressor, memory=memories.residual):
  return optax.chain(
    optax.sgd(0.1),
    transforms.compressed_mean(compressor, axis_name=AXIS, memory=memory()),
  )


def gossip(compressor):
  return optax.chain(
    optax.sgd(0.1),
    transforms.mix_compressed(topologies.ring(2), compressor, axis_name=AXIS, consensus_rate=0.5),
  )


# A device's own shard has a kernel of [8, 4] and the whole bias of 16:
# signs: 4 + 2 bytes of bits and 2 magnitudes; top quarter: 8 + 4 values and as many uint16 places.
SHARDED = {
  'signs': (
    lambda: compressed(compressors.scaled_sign()),
    [('all-gather', 6), ('all-gather', 8)],
  ),
  'choco': (
    lambda: gossip(compressors.top_k(0.25)),
    [('collective-permute', 24), ('collective-permute', 48)],
  ),
  'allreduce': (
    lambda: algorithms.allreduce_sgd(0.1, axis_name=AXIS, momentum=0.9),
    [('all-reduce', 4 * 32 + 4 * 16)],
  ),
}


def run_slices(tx):
  """Trains on the 2 x 4 mesh: the program, parameters and state."""
  workers = slices()
  tx = workers.per_shard(tx, SPECS)
  targets = on_slices(workers, whole_problem())
  params = jax.tree.map(jnp.zeros_like, targets)
  state = jax.jit(workers.spmd(tx.init))(params)
  run = jax.jit(functools.partial(train, workers, tx))
  program = run.lower(params, state, targets).compile()
  return program.as_text(), *program(params, state, targets)


@pytest.fixture(scope='module')
def sharded_runs():
  return functools.cache(lambda name: run_slices(SHARDED[name][0]()))


def devices_sends(hlo):
  return sorted((x.kind, x.nbytes) for x in ledger.collectives(hlo))


@pytest.mark.parametrize('name', SHARDED)
def test_each_device_sends_only_its_own_shards_payload(sharded_runs, name):
  hlo, _, state = sharded_runs(name)
  assert devices_sends(hlo) == SHARDED[name][1]
  # The state's count is that of each device, over five steps.
  sent = next(
    leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    if getattr(path[-1], 'name', '') == 'bytes_sent'
  )
  np.testing.assert_array_equal(
    sent[..., 1], np.full((2, 4), 5 * sum(n for _, n in SHARDED[name][1]))
  )


@pytest.mark.parametrize('name', SHARDED)
def test_shards_are_trained_as_leaves_of_their_own(sharded_runs, name):
  _, params, _ = sharded_runs(name)
  workers, tx = runtime.simulate(2), SHARDED[name][0]()
  targets = workers.place(as_leaves(whole_problem()))
  start = jax.tree.map(jnp.zeros_like, targets)
  run = jax.jit(functools.partial(train, workers, tx))
  leaves, _ = run(start, workers.spmd(tx.init)(start), targets)
  for leaf, right in leaves.items():
    np.testing.assert_allclose(as_leaves(params)[leaf], right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('name', SHARDED)
def test_the_state_of_a_shard_lies_with_the_shard(sharded_runs, name):
  _, params, state = sharded_runs(name)
  for path, leaf in jax.tree_util.tree_leaves_with_path((state, params)):
    if path[0].idx == 0:
      assert leaf.shape[:2] == (2, 4), path
      assert {shard.data.shape[:2] for shard in leaf.addressable_shards} == {(1, 1)}, path
  assert {shard.data.shape for shard in params['kernel'].addressable_shards} == {(1, 8, 4)}


RANDOM = {
  'qsgd': lambda: compressed(compressors.qsgd(3, block=8), memories.none),
  'random_k': lambda: compressed(compressors.random_k(0.25)),
  'qsgd gossip': lambda: gossip(compressors.qsgd(7, block=8)),
}


@pytest.mark.parametrize('name', [*SHARDED, *RANDOM])
def test_a_replicated_leaf_agrees_on_all_devices_of_a_worker(sharded_runs, name):
  if name in SHARDED:
    _, params, _ = sharded_runs(name)
  else:
    _, params, _ = run_slices(RANDOM[name]())
  copies = {0: set(), 1: set()}
  for shard in params['bias'].addressable_shards:
    copies[shard.index[0].start or 0].add(np.asarray(shard.data).tobytes())
  assert len(params['bias'].addressable_shards) == 8
  assert [len(distinct) for distinct in copies.values()] == [1, 1]
  assert np.abs(params['bias']).max() > 0.1


def test_per_shard_passes_extra_arguments_on():
  workers = slices()

  def update(updates, state, params=None, *, scale):
    return jax.tree.map(lambda u: scale * u, updates), state

  tx = workers.per_shard(
    optax.chain(
      optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update),
      transforms.mean_over(AXIS),
    ),
    SPECS,
  )

  def one(updates, state, scale):
    return tx.update(updates, state, scale=scale)[0]

  updates = on_slices(workers, jax.tree.map(np.ones_like, whole_problem()))
  state = workers.spmd(tx.init)(updates)
  scaled = jax.jit(workers.spmd(one))(updates, state, workers.place(jnp.array([1.0, 3.0])))
  np.testing.assert_allclose(scaled['kernel'], np.full((2, 8, 16), 2.0))
  np.testing.assert_allclose(scaled['bias'], np.full((2, 16), 2.0))


def test_per_shard_takes_a_prefix_of_specs():
  workers = slices()
  tx = workers.per_shard(transforms.mean_over(AXIS), PartitionSpec('model'))
  updates = workers.place({'a': jnp.arange(8.0).reshape(2, 4), 'b': jnp.arange(16.0).reshape(2, 8)})
  state = workers.spmd(tx.init)(updates)
  mean, state = jax.jit(workers.spmd(tx.update))(updates, state)
  np.testing.assert_allclose(mean['a'], [[2.0, 3.0, 4.0, 5.0]] * 2)
  assert state.count.tolist() == [[1] * 4] * 2


def test_per_shard_refuses_gradients_that_are_summed_already():
  workers = slices()
  tx = workers.per_shard(transforms.mean_over(AXIS), PartitionSpec())

  def one(x):
    constant = jnp.ones(2)  # the same on every worker by type
    return tx.update(constant, tx.init(constant))[0] + x

  with pytest.raises(ValueError, match='do not vary over axis'):
    jax.jit(workers.spmd(one))(jnp.ones((2, 1)))


def test_per_shard_refuses_workers_that_shard_nothing():
  alone = runtime.on_mesh(runtime.make_mesh(workers=2), AXIS)
  for workers in (runtime.simulate(2), alone):
    with pytest.raises(ValueError, match='per_shard needs runtime.on_mesh with a mesh that has'):
      workers.per_shard(transforms.mean_over(AXIS), PartitionSpec())


def test_a_mean_on_a_partly_automatic_mesh_moves_only_shards():
  """Without per_shard: nothing is flattened, so XLA keeps the shards where they are."""
  workers, tx = slices(), transforms.mean_over(AXIS)
  updates = on_slices(workers, whole_problem())
  state = workers.spmd(tx.init)(updates)
  program = jax.jit(workers.spmd(tx.update)).lower(updates, state).compile()
  assert devices_sends(program.as_text()) == [('all-reduce', 4 * 32 + 4 * 16)]
  mean, _ = program(updates, state)
  for name, x in whole_problem().items():
    np.testing.assert_allclose(mean[name], np.stack([x.mean(0)] * 2), rtol=1e-6)
  assert {shard.data.shape for shard in mean['kernel'].addressable_shards} == {(1, 8, 4)}
