"""One step on three runtimes gives the same numbers, and leaves without rows are refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_dsgd import (
  algorithms,
  collectives,
  ledger,
  runtime,
  topologies,
)

AXIS = 'workers'


def mesh_workers(count):
  return runtime.on_mesh(runtime.make_mesh(workers=count), AXIS)


def train(workers, tx, params, state, targets, steps=5):
  """Steps on 0.5 |x - target|^2 of each worker, in one program."""

  def step(params, state, target):
    updates, state = tx.update(jax.tree.map(jnp.subtract, params, target), state, params)
    return optax.apply_updates(params, updates), state

  def one(carry, _):
    return workers.spmd(step)(*carry, targets), None

  return jax.lax.scan(one, (params, state), length=steps)[0]


def problem(count, seed=0):
  generator = np.random.default_rng(seed)
  draw = lambda *shape: jnp.asarray(generator.normal(size=shape), jnp.float32)  # noqa: E731
  return {'a': draw(count, 6), 'b': draw(count, 2, 3)}


METHODS = {
  'topk_sgd': lambda: algorithms.topk_sgd(0.1, 0.5, axis_name=AXIS),
  'dsgd': lambda: algorithms.dsgd(0.1, topologies.ring(4), axis_name=AXIS),
}


def run_on(workers, tx, targets, steps=5):
  params = workers.replicate(jax.tree.map(lambda x: jnp.zeros(x.shape[1:]), targets))
  state = workers.spmd(tx.init)(params)
  run = jax.jit(functools.partial(train, workers, tx, steps=steps))
  return run(params, state, workers.place(targets))


def assert_close(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      x, y = jax.random.key_data(x), jax.random.key_data(y)
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6, err_msg=str(path))


# Simulated, on a mesh, in a user's own pmap


@pytest.mark.parametrize('method', METHODS)
def test_simulated_workers_equal_those_on_a_mesh(method):
  targets = problem(4)
  simulated = run_on(runtime.simulate(4), METHODS[method](), targets)
  meshed = run_on(mesh_workers(4), METHODS[method](), targets)
  assert_close(simulated, meshed)
  assert meshed[0]['a'].sharding.spec[0] == AXIS


@pytest.mark.parametrize('method', METHODS)
def test_a_users_own_pmap(method):
  targets, tx = problem(4), METHODS[method]()
  devices = jax.devices()[:4]
  params = jax.tree.map(jnp.zeros_like, targets)
  state = jax.pmap(tx.init, axis_name=AXIS, devices=devices)(params)

  @functools.partial(jax.pmap, axis_name=AXIS, devices=devices)
  def step(params, state, target):
    gradients = jax.tree.map(jnp.subtract, params, target)
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  for _ in range(5):
    params, state = step(params, state, targets)
  assert_close(run_on(runtime.simulate(4), tx, targets), (params, state))


def test_a_mean_over_workers_by_hand():
  """From 0 with rate 0.5: 0.5, then 0.75 of the mean target 1.5."""
  for workers in (runtime.simulate(4), mesh_workers(4)):
    tx = algorithms.allreduce_sgd(0.5, axis_name=AXIS)
    params, _ = run_on(workers, tx, {'x': jnp.arange(4.0)}, steps=2)
    assert params['x'].tolist() == [1.125] * 4


@pytest.mark.parametrize('make', [runtime.simulate, mesh_workers])
def test_a_step_by_step_loop_may_donate_what_it_replaces(make):
  workers, targets, tx = make(4), problem(4), METHODS['topk_sgd']()

  def step(params, state, target):
    updates, state = tx.update(jax.tree.map(jnp.subtract, params, target), state, params)
    return optax.apply_updates(params, updates), state

  params = workers.replicate(jax.tree.map(lambda x: jnp.zeros(x.shape[1:]), targets))
  state = jax.jit(workers.spmd(tx.init))(params)
  step = jax.jit(workers.spmd(step), donate_argnums=(0, 1))
  for _ in range(5):
    before = params
    params, state = step(params, state, workers.place(targets))
    assert before['a'].is_deleted()
  assert_close(run_on(runtime.simulate(4), tx, targets), (params, state))


@pytest.mark.parametrize('make', [runtime.simulate, mesh_workers])
def test_spmd_gives_and_takes_rows_of_any_tree(make):
  workers = make(2)

  def one(x, tree):
    return {'index': collectives.worker_index(AXIS), 'constant': jnp.ones(2), 'none': None}, x, tree

  rows = jnp.array([[1, 2], [3, 4]]), {'key': jax.random.split(jax.random.key(0), 2), 'empty': ()}
  result, x, tree = jax.jit(workers.spmd(one))(*rows)
  assert result['index'].tolist() == [0, 1]
  assert result['constant'].tolist() == [[1.0, 1.0]] * 2
  assert result['none'] is None
  assert x.tolist() == rows[0].tolist()
  assert jax.random.key_data(tree['key']).tolist() == jax.random.key_data(rows[1]['key']).tolist()


@pytest.mark.parametrize('make', [runtime.simulate, mesh_workers])
def test_one_worker(make):
  params, _ = run_on(
    make(1), algorithms.topk_sgd(0.5, 1.0, axis_name=AXIS), {'x': jnp.ones((1, 2))}
  )
  np.testing.assert_allclose(params['x'], [[1 - 0.5**5] * 2])


# Many workers on few devices, and several steps in a call


def test_simulated_workers_spread_over_a_mesh_give_the_same_numbers():
  targets, tx = problem(24), algorithms.local_sgd(0.1, 2, axis_name=AXIS)
  spread = runtime.simulate(24, mesh=runtime.make_mesh(hosts=2, chips=4))
  params, state = run_on(spread, tx, targets)
  assert_close(run_on(runtime.simulate(24), tx, targets), (params, state))
  assert {shard.data.shape for shard in params['a'].addressable_shards} == {(3, 6)}


def test_a_mean_over_spread_workers_is_an_all_reduce():
  spread = runtime.simulate(24, mesh=runtime.make_mesh(chips=8))
  mean = spread.spmd(lambda x: collectives.mean(x, AXIS))
  program = mean.lower(spread.place(jnp.ones((24, 5)))).compile().as_text()
  assert [(c.kind, c.nbytes) for c in ledger.collectives(program)] == [('all-reduce', 20)]


@pytest.mark.parametrize('make', [runtime.simulate, mesh_workers])
def test_a_scanned_round_is_as_many_steps(make):
  workers, tx = make(4), algorithms.local_sgd(0.1, 3, axis_name=AXIS)
  targets = jax.random.normal(jax.random.key(0), (4, 6, 5))

  def step(carry, target):
    x, state = carry
    updates, state = tx.update(x - target, state, x)
    return (optax.apply_updates(x, updates), state), jnp.sum((x - target) ** 2)

  x = workers.replicate(jnp.zeros(5))
  carry = x, workers.spmd(tx.init)(x)
  scanned, losses = workers.scan(step)(carry, workers.place(targets))
  for t in range(6):
    carry, loss = workers.spmd(step)(carry, workers.place(targets[:, t]))
    np.testing.assert_allclose(losses[:, t], loss, rtol=1e-5)
  assert_close(scanned, carry)


# What is refused


def test_simulate_refuses_workers_that_a_mesh_does_not_divide():
  with pytest.raises(ValueError, match='count=12 for a mesh of 8 devices; accepted are multiples'):
    runtime.simulate(12, mesh=runtime.make_mesh(chips=8))


@pytest.mark.parametrize('count', [0, -1, 2.0, True, '4', None])
def test_simulate_refuses_what_is_no_count(count):
  with pytest.raises(ValueError, match=f'simulate got count={count!r}; accepted are integers >= 1'):
    runtime.simulate(count)


def test_simulate_takes_numpy_integers():
  workers = runtime.simulate(np.int64(3))
  assert workers == runtime.Workers(3, 'workers')
  assert type(workers.count) is int


def test_make_mesh_is_auto_and_takes_some_of_the_devices():
  mesh = runtime.make_mesh(workers=2, model=3)
  assert mesh.shape == {'workers': 2, 'model': 3}
  assert mesh.axis_types == (AxisType.Auto,) * 2
  assert set(mesh.devices.ravel()) == set(jax.devices()[:6])


def test_make_mesh_refuses_more_devices_than_there_are():
  with pytest.raises(ValueError, match='needs 12 devices and there are 8') as error:
    runtime.make_mesh(workers=4, model=3)
  assert 'jax_num_cpu_devices' in str(error.value) and '\n' not in str(error.value)


def test_on_mesh_refuses_an_unknown_axis():
  with pytest.raises(ValueError, match="no axis 'worker'; its axes are 'workers', 'model'"):
    runtime.on_mesh(runtime.make_mesh(workers=2, model=2), 'worker')


def test_on_mesh_refuses_explicit_axes():
  mesh = jax.make_mesh((4,), ('workers',), axis_types=(AxisType.Explicit,))
  with pytest.raises(ValueError, match='make it with runtime.make_mesh, whose axes are Auto'):
    runtime.on_mesh(mesh, 'workers')


@pytest.mark.parametrize('make', [runtime.simulate, mesh_workers])
@pytest.mark.parametrize('leaf', [jnp.zeros(()), jnp.zeros((3, 4)), 1.0], ids=str)
def test_leaves_without_a_row_a_worker_are_refused_by_name(make, leaf):
  workers = make(4)
  tree = {'good': jnp.zeros(4), 'layer': {'bad': leaf}}
  for call in (workers.spmd(lambda tree: tree), workers.place):
    with pytest.raises(ValueError, match="leaf '(0/)?layer/bad' of shape .* for each of 4 workers"):
      call(tree)


# Rows


@pytest.mark.parametrize('make', [runtime.simulate, mesh_workers])
def test_replicate_and_place(make):
  workers = make(4)
  rows = workers.replicate({'x': jnp.array([1.0, 2.0]), 'n': 3, 'key': jax.random.key(5)})
  assert rows['x'].tolist() == [[1.0, 2.0]] * 4
  assert rows['n'].tolist() == [3] * 4
  assert (
    jax.random.key_data(rows['key']).tolist()
    == [jax.random.key_data(jax.random.key(5)).tolist()] * 4
  )
  placed = workers.place({'x': np.arange(8.0, dtype=np.float32).reshape(4, 2)})['x']
  assert isinstance(placed, jax.Array) and placed.tolist() == np.arange(8.0).reshape(4, 2).tolist()
  if workers.mesh is not None:
    for array in (rows['x'], placed):
      assert array.sharding == NamedSharding(workers.mesh, PartitionSpec(AXIS))


def test_average_and_consensus_distance_by_hand():
  rows = {
    'x': jnp.array([[0.0, 2.0], [4.0, 2.0]]),
    'half': jnp.array([1.0, 2.0], jnp.bfloat16),
    'n': jnp.array([7, 8]),
  }
  averaged = runtime.average(rows)
  assert averaged['x'].tolist() == [2.0, 2.0]
  assert averaged['half'].dtype == jnp.bfloat16 and float(averaged['half']) == 1.5
  assert averaged['n'] == 7
  # Squares of distances to the mean, each twice: 4 of x, 0.25 of half; integers do not count.
  distance = jax.jit(runtime.consensus_distance)(rows)
  np.testing.assert_allclose(distance, np.sqrt(4.25))
  assert runtime.consensus_distance({'n': jnp.array([7, 8])}) == 0.0


def test_average_and_distance_do_not_overflow_in_half_precision():
  rows = jnp.array([60_032.0, 40_064.0], jnp.float16)  # multiples of 32, and so is their mean
  assert float(runtime.average(rows)) == 50_048
  assert float(runtime.consensus_distance(rows)) == 9_984


def test_a_mesh_whose_workers_lie_on_the_second_axis():
  devices = np.array(jax.devices()).reshape(4, 2)
  mesh = Mesh(devices, ('model', AXIS), axis_types=(AxisType.Auto,) * 2)
  workers = runtime.on_mesh(mesh, AXIS)
  assert workers.count == 2
  mean = jax.jit(workers.spmd(lambda x: collectives.mean(x, AXIS)))(workers.place(jnp.arange(2.0)))
  assert mean.tolist() == [0.5, 0.5]


def test_what_communicates_nothing_may_be_computed_some_workers_at_a_time():
  workers = runtime.simulate(7)
  double = workers.spmd(lambda x, y: 2 * x + y, at_once=3)
  rows = jnp.arange(7.0)
  np.testing.assert_array_equal(double(rows, rows), 3 * rows)
  mean = workers.spmd(lambda x: collectives.mean(x, 'workers'), at_once=3)
  with pytest.raises(ValueError, match="axis_name='workers' is not bound here"):
    mean(rows)
