"""The wire gives the same numbers under vmap, shard_map and pmap, and refuses what is wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from jax_dsgd import collectives, topologies

ROWS = PartitionSpec('w')


def devices_mesh(*sizes, names=('w',)):
  devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
  return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(sizes))


def by_vmap(function, count):
  return jax.jit(jax.vmap(function, axis_name='w', axis_size=count))


def by_shard_map(function, count, check_vma=True):
  def one(*rows):
    return jax.tree.map(lambda x: x[None], function(*jax.tree.map(lambda x: x[0], rows)))

  mesh = devices_mesh(count)
  return jax.jit(jax.shard_map(one, mesh=mesh, in_specs=ROWS, out_specs=ROWS, check_vma=check_vma))


def by_shard_map_unchecked(function, count):
  return by_shard_map(function, count, check_vma=False)


def by_pmap(function, count):
  return jax.pmap(function, axis_name='w', devices=jax.devices()[:count])


def nested_vmaps(function):
  return jax.jit(jax.vmap(jax.vmap(function, axis_name='inner'), axis_name='outer'))


def on_two_axes(function):
  def one(*rows):
    return jax.tree.map(lambda x: x[None, None], function(*jax.tree.map(lambda x: x[0, 0], rows)))

  def call(*rows):
    spec = PartitionSpec('outer', 'inner')
    mesh = devices_mesh(*jax.tree.leaves(rows)[0].shape[:2], names=('outer', 'inner'))
    return jax.jit(jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec))(*rows)

  return call


both = pytest.mark.parametrize('run', [by_vmap, by_shard_map])
every_runtime = pytest.mark.parametrize(
  'run', [by_vmap, by_shard_map, by_shard_map_unchecked, by_pmap]
)
two_levels = pytest.mark.parametrize('run', [nested_vmaps, on_two_axes])


def lists(tree):
  return jax.tree.map(lambda x: np.asarray(x.astype(jnp.float32)).tolist(), tree)


# Sums and means


@every_runtime
def test_sum_and_mean_of_a_tree(run):
  rows = {
    'vector': jnp.array([[0.0, 4.0], [1.0, 0.0], [2.0, 2.0], [5.0, 0.0]]),
    'half': jnp.array([1.0, 2.0, 3.0, 10.0], jnp.bfloat16),
    'complex': jnp.array([1j, 1j, 2.0, 2.0], jnp.complex64),
    'count': jnp.array([7, 8, 9, 10]),
    'flag': jnp.array([True, False, True, True]),
    'empty': jnp.zeros((4, 0)),
  }
  total, mean = run(lambda x: (collectives.sum(x, 'w'), collectives.mean(x, 'w')), 4)(rows)
  np.testing.assert_array_equal(total['vector'], [[8.0, 6.0]] * 4)
  np.testing.assert_array_equal(mean['vector'], [[2.0, 1.5]] * 4)
  np.testing.assert_array_equal(mean['half'].astype(jnp.float32), [4.0] * 4)
  np.testing.assert_array_equal(mean['complex'], [1.0 + 0.5j] * 4)
  for name in ('count', 'flag', 'empty'):  # They do not cross.
    np.testing.assert_array_equal(total[name], rows[name])
    np.testing.assert_array_equal(mean[name], rows[name])
  assert jax.tree.map(lambda x: x.dtype, mean) == jax.tree.map(lambda x: x.dtype, rows)


@both
def test_a_tree_of_nothing_that_crosses(run):
  tree = {'count': jnp.arange(2), 'none': None, 'nest': {}}
  for reduce in (collectives.sum, collectives.mean):
    result = run(lambda x, reduce=reduce: reduce(x, 'w'), 2)(tree)
    assert jax.tree.structure(result) == jax.tree.structure(tree)
    assert result['count'].tolist() == [0, 1]


@every_runtime
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
@pytest.mark.parametrize(
  ('weights', 'values', 'right'),
  [
    ((1, 3), (1, 5), (4, 4)),  # by the numbers of examples
    ((0, 2), (1, 5), (5, 5)),
    ((0, 2), (np.nan, 5), (5, 5)),
    ((0, 2), (np.inf, 5), (5, 5)),
    ((0, 0), (1, 5), (1, 5)),
    ((0.25, 0.75), (1, 5), (4, 4)),
  ],
  ids=str,
)
def test_weighted_mean(run, dtype, weights, values, right):
  mean = run(lambda x, weight: collectives.mean({'x': x}, 'w', weight), 2)
  result = mean(jnp.array(values, dtype), jnp.array(weights, jnp.float32))['x']
  assert result.dtype == dtype
  assert lists(result) == list(right)


@both
def test_a_nan_of_a_worker_that_counts_is_not_hidden(run):
  mean = run(lambda x, weight: collectives.mean(x, 'w', weight), 2)
  assert np.isnan(mean(jnp.array([jnp.nan, 1.0]), jnp.array([1.0, 1.0]))).all()


@both
@pytest.mark.parametrize('scale', [1e-3, 70_000.0])
def test_only_the_ratios_of_weights_matter(run, scale):
  """70,000 examples a client are beyond float16, their mean is not."""
  mean = run(lambda x, weight: collectives.mean(x, 'w', weight), 2)
  result = mean(jnp.array([1.0, 3.0], jnp.float16), jnp.array([scale, scale]))
  np.testing.assert_allclose(lists(result), [2.0, 2.0], rtol=2e-3)


@both
def test_a_weight_may_be_a_plain_number(run):
  mean = run(lambda x: collectives.mean(x, 'w', 2), 4)
  assert mean(jnp.arange(4.0)).tolist() == [1.5] * 4


# Levels


@two_levels
def test_mean_over_two_levels(run):
  x = jnp.arange(6.0).reshape(2, 3)
  assert run(lambda x: collectives.mean(x, ('outer', 'inner')))(x).tolist() == [[2.5] * 3] * 2
  assert run(lambda x: collectives.mean(x, ['inner', 'outer']))(x).tolist() == [[2.5] * 3] * 2


@two_levels
def test_mean_over_the_inner_level_only(run):
  x = jnp.arange(4.0).reshape(2, 2)
  assert run(lambda x: collectives.mean(x, 'inner'))(x).tolist() == [[0.5, 0.5], [2.5, 2.5]]
  assert run(lambda x: collectives.mean(x, 'outer'))(x).tolist() == [[1.0, 2.0], [1.0, 2.0]]


@two_levels
def test_mean_over_uneven_groups_is_weighted(run):
  """Nodes of four and two workers: 2.5, not the mean of the nodes' means, 3."""
  x = jnp.array([[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, jnp.nan, jnp.nan]])
  weight = jnp.array([[1.0] * 4, [1.0, 1.0, 0.0, 0.0]])
  mean = run(lambda x, weight: collectives.mean(x, ('outer', 'inner'), weight))
  assert mean(x, weight).tolist() == [[2.5] * 4] * 2


@two_levels
def test_means_of_each_level_in_turn(run):
  x = jnp.arange(8.0).reshape(2, 4)
  turns = run(lambda x: collectives.mean(collectives.mean(x, 'inner'), 'outer'))
  assert turns(x).tolist() == [[3.5] * 4] * 2


# Messages


@every_runtime
def test_gather_and_permute(run):
  rows = {
    'matrix': jnp.arange(12.0).reshape(3, 2, 2),
    'scalar': jnp.array([1.0, 2.0, 3.0]),
    'bits': jnp.array([[255, 0], [1, 2], [3, 4]], jnp.uint8),
    'half': jnp.array([0.5, 1.5, 2.5], jnp.bfloat16),
    'flag': jnp.array([True, False, True]),
    'empty': jnp.zeros((3, 0), jnp.int32),
  }
  gathered, moved = run(
    lambda x: (collectives.gather(x, 'w'), collectives.permute(x, [1, 2, 0], 'w')), 3
  )(rows)
  for name, row in rows.items():
    assert gathered[name].dtype == moved[name].dtype == row.dtype
    np.testing.assert_array_equal(gathered[name], np.stack([row] * 3))
    np.testing.assert_array_equal(moved[name], np.asarray(row)[[2, 0, 1]])


@both
@pytest.mark.parametrize(
  'destinations', [(0, 1), (0, 0, 1), (1, 2, 3), (0, 1, 2, 3), (-1, 0, 1), ()], ids=str
)
def test_permute_refuses_what_is_not_a_permutation(run, destinations):
  with pytest.raises(ValueError, match='is not a permutation of 3 workers'):
    run(lambda x: collectives.permute(x, destinations, 'w'), 3)(jnp.arange(3.0))


@both
def test_permute_takes_any_iterable_of_destinations(run):
  """An iterator that is used up must not become a permutation of nobody, which gives zeros."""
  for destinations in (iter([1, 2, 0]), np.array([1, 2, 0]), (i for i in (1, 2, 0))):
    permute = run(lambda x, to=destinations: collectives.permute(x, to, 'w'), 3)
    assert permute(jnp.array([1.0, 2.0, 3.0])).tolist() == [3.0, 1.0, 2.0]


FAMILIES = [
  topologies.ring(1),
  topologies.ring(2),
  topologies.ring(5),
  topologies.torus(2, 3),
  topologies.complete(4),
  topologies.star(5),
  topologies.hypercube(8),
  topologies.exponential(3),
  topologies.exponential(8),
  topologies.one_peer_exponential(1),
  topologies.one_peer_exponential(3),
  topologies.one_peer_exponential(8),
  topologies.random_regular(6, 3, seed=1),
  topologies.from_edges(5, [(0, 1), (1, 2), (2, 3), (1, 4)]),
  topologies.from_matrix([[0.5, 0.5, 0.0], [0.1, 0.2, 0.7], [0.4, 0.3, 0.3]]),
]


@both
@pytest.mark.parametrize('topology', FAMILIES, ids=lambda t: f'{t.name}-{t.size}')
def test_mix_is_the_dense_matrix_of_each_round(run, topology):
  x = np.random.default_rng(topology.size).normal(size=(topology.size, 3)).astype(np.float32)
  times = range(2 * topology.period + 1)

  def rounds(x):
    def one(carry, time):
      return carry, collectives.mix(x, x, lambda p: p, topology, time=time, axis_name='w')

    return jax.lax.scan(one, 0, jnp.array(times))[1]

  mixed = run(rounds, topology.size)(x)
  for time in times:
    np.testing.assert_allclose(mixed[:, time], topology.matrix(time) @ x, rtol=2e-6, atol=2e-6)


@both
def test_mix_takes_the_round_from_a_plain_number(run):
  topology = topologies.one_peer_exponential(4)
  x = jnp.array([0.0, 4.0, 8.0, 12.0])
  mix = run(lambda x: collectives.mix(x, x, lambda p: p, topology, time=3, axis_name='w'), 4)
  assert mix(x).tolist() == [4.0, 8.0, 4.0, 8.0]  # Round 1 of 2: the worker two before.


@both
def test_mix_decodes_what_arrives_and_takes_own_as_given(run):
  """Worker i holds i exactly, others see i rounded down to tens: 1/3 own + 1/3 of each of two."""

  def one(x):
    payload = {'tens': (x // 10).astype(jnp.uint8)}
    decode = lambda p: {'x': 10.0 * p['tens'].astype(jnp.float32)}  # noqa: E731
    return collectives.mix({'x': x}, payload, decode, topologies.ring(3), time=0, axis_name='w')

  mixed = run(one, 3)(jnp.array([3.0, 24.0, 36.0]))['x']
  np.testing.assert_allclose(mixed, [(3 + 20 + 30) / 3, (24 + 0 + 30) / 3, (36 + 0 + 20) / 3])


@both
def test_mix_accumulates_in_float32(run):
  """In bfloat16, 256 + 1 is 256."""
  x = jnp.array([256.0, 1.0, 1.0, 1.0], jnp.bfloat16)
  topology = topologies.complete(4)
  mix = run(lambda x: collectives.mix(x, x, lambda p: p, topology, time=0, axis_name='w'), 4)
  mixed = mix(x)
  assert mixed.dtype == jnp.float32
  assert mixed.tolist() == [64.75] * 4


@both
def test_mix_refuses_a_topology_of_another_size(run):
  mix = run(lambda x: collectives.mix(x, x, lambda p: p, RING, time=0, axis_name='w'), 2)
  with pytest.raises(ValueError, match="topology 'ring' is for 4 workers; axis 'w' has 2"):
    mix(jnp.arange(2.0))


RING = topologies.ring(4)


# Who am I


@every_runtime
def test_count_index_and_entry(run):
  table = np.array([0.5, 2.0, 4.0])
  rows = run(
    lambda x: (
      x * collectives.worker_count('w'),
      collectives.worker_index('w'),
      x * collectives.own_entry(table, 'w'),
      x * collectives.own_entry(np.full(3, 0.25), 'w'),
    ),
    3,
  )(jnp.ones(3))
  assert [row.tolist() for row in rows] == [[3.0] * 3, [0, 1, 2], [0.5, 2.0, 4.0], [0.25] * 3]


@both
def test_own_entry_refuses_a_table_of_another_length(run):
  for table in (np.ones(2), np.ones((3, 1)), np.ones(())):
    with pytest.raises(ValueError, match='does not have one entry for each of 3 workers'):
      run(lambda x, table=table: x * collectives.own_entry(table, 'w'), 3)(jnp.ones(3))


def test_worker_keys_differ_by_worker_and_agree_between_runtimes():
  def draw(seed):
    return jax.random.bits(collectives.worker_key(jax.random.key(seed), 'w'), (2,))

  seeds = jnp.full(4, 7)
  draws = [np.asarray(run(draw, 4)(seeds)) for run in (by_vmap, by_shard_map, by_pmap)]
  np.testing.assert_array_equal(draws[0], draws[1])
  np.testing.assert_array_equal(draws[0], draws[2])
  assert len({tuple(row) for row in draws[0].tolist()}) == 4


@every_runtime
@pytest.mark.parametrize('flags', [(1, 1, 1), (1, 0, 1), (0, 0, 0)], ids=str)
def test_all_agree(run, flags):
  agreed = run(lambda flag: collectives.all_agree(flag, 'w'), 3)(jnp.array(flags, bool))
  assert agreed.tolist() == [flags == (1, 1, 1)] * 3


UNBOUND = {
  'worker_count': lambda x: collectives.worker_count('w'),
  'worker_index': lambda x: collectives.worker_index('w'),
  'worker_key': lambda x: collectives.worker_key(jax.random.key(0), 'w'),
  'own_entry': lambda x: collectives.own_entry(np.ones(3), 'w'),
  'vary': lambda x: collectives.vary(x, 'w'),
  'require_varying': lambda x: collectives.require_varying(x, 'w'),
  'sum': lambda x: collectives.sum(x, 'w'),
  'mean': lambda x: collectives.mean(x, 'w'),
  'weighted mean': lambda x: collectives.mean(x, 'w', 1.0),
  'all_agree': lambda x: collectives.all_agree(jnp.array(True), 'w'),
  'gather': lambda x: collectives.gather(x, 'w'),
  'permute': lambda x: collectives.permute(x, [1, 0, 2], 'w'),
  'mix': lambda x: collectives.mix(x, x, lambda p: p, topologies.ring(3), time=0, axis_name='w'),
}


@pytest.mark.parametrize('name', UNBOUND)
def test_an_axis_that_nothing_binds_is_a_clear_error(name):
  with pytest.raises(ValueError, match="axis_name='w' is not bound here") as error:
    jax.vmap(UNBOUND[name], axis_name='workers')(jnp.arange(3.0))
  assert '\n' not in str(error.value)
