"""What is saved comes back bit for bit, in a fresh process too, or is refused by name."""

import os
import pathlib
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

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

ROOT = pathlib.Path(__file__).resolve().parents[1]


class SomeState(NamedTuple):
  count: Any
  inner: Any


def mesh_workers(count):
  return runtime.on_mesh(runtime.make_mesh(workers=count), 'workers')


def words(x):
  return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def assert_identical(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
    assert isinstance(x, jax.Array) and isinstance(y, jax.Array), path
    assert (x.shape, x.dtype) == (y.shape, y.dtype), path
    assert words(x).tobytes() == words(y).tobytes(), path


def everything():
  key = jax.random.key(3)
  return {
    'key': key,
    'keys': jax.random.split(key, 4),
    'none': None,
    'nothing': {},
    'state': SomeState(jnp.array(16_777_217), (optax.EmptyState(), [jnp.arange(3)], ())),
    'empty': jnp.zeros((4, 0, 2)),
    'half': jnp.array([1.0, 2.5], jnp.bfloat16),
    'meters': jnp.array([[0, 2**32 - 1], [7, 0]], jnp.uint32),
    'scalar': jnp.array(0.1),
    'not finite': jnp.array([jnp.nan, -jnp.inf, -0.0]),
    'flags': jnp.array([True, False]),
    'bits': jnp.array([255, 1], jnp.uint8),
  }


def abstract(tree):
  return jax.eval_shape(lambda: tree)


@pytest.mark.parametrize('of', [lambda tree: tree, abstract], ids=['arrays', 'shapes'])
def test_everything_comes_back_in_the_structure_of_the_target(tmp_path, of):
  saved = everything()
  like = of(jax.tree.map(jnp.zeros_like, saved) | {k: saved[k] for k in ('key', 'keys')})
  with checkpoint.Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(3, saved)
    restored = checkpoints.restore(like)
  assert type(restored['state']) is SomeState
  assert isinstance(restored['state'].inner[0], optax.EmptyState)
  assert_identical(restored, saved)


def test_a_restored_state_goes_through_jit(tmp_path):
  with checkpoint.Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(0, everything())
    restored = checkpoints.restore(abstract(everything()))
  assert_identical(jax.jit(lambda tree: tree)(restored), everything())


def test_leaves_whose_names_would_be_the_same_are_not_mixed_up(tmp_path):
  state = {'a/b': jnp.array(1.0), 'a': {'b': jnp.array(2.0)}}
  with checkpoint.Checkpoints(tmp_path) as checkpoints:
    try:
      checkpoints.save(0, state)
    except ValueError as refusal:
      assert 'a/b' in str(refusal)
      return
    assert_identical(checkpoints.restore(state), state)


def test_restore_puts_rows_where_the_target_says(tmp_path):
  mesh = runtime.make_mesh(workers=4)
  rows, whole = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (('workers',), ()))
  saved = {'rows': jnp.arange(8.0).reshape(4, 2), 'keys': jax.random.split(jax.random.key(0), 4)}
  saved |= {'scalar': jnp.array(5)}
  shardings = {'rows': rows, 'keys': rows, 'scalar': whole}
  like = jax.tree.map(
    lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), saved, shardings
  )
  with checkpoint.Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(1, saved)
    restored = checkpoints.restore(like)
  assert_identical(restored, saved)
  assert restored['rows'].sharding == rows
  assert restored['keys'].sharding.is_equivalent_to(rows, 1)
  assert restored['scalar'].sharding == whole


SAVED = {'layer': {'w': jnp.ones((2, 3)), 'n': jnp.array([1, 2])}, 'key': jax.random.key(0)}
REFUSED = {
  'missing': ({**SAVED, 'new': jnp.ones(2)}, "leaf 'new' is absent in .* and float32"),
  'left over': ({'layer': SAVED['layer']}, "leaf 'key' is key<fry>.* and absent"),
  'reshaped': (
    {**SAVED, 'layer': {**SAVED['layer'], 'w': jnp.ones((3, 2))}},
    r"leaf 'layer/w' is float32\[2, 3\] in .* and float32\[3, 2\]",
  ),
  'longer': (
    {**SAVED, 'layer': {**SAVED['layer'], 'w': jnp.ones((4, 3))}},
    r"leaf 'layer/w' is float32\[2, 3\] in .* and float32\[4, 3\]",
  ),
  'integer to float': (
    {**SAVED, 'layer': {**SAVED['layer'], 'n': jnp.ones(2)}},
    r"leaf 'layer/n' is int32\[2\] in .* and float32\[2\]",
  ),
  'float to half': (
    {**SAVED, 'layer': {**SAVED['layer'], 'w': jnp.ones((2, 3), jnp.bfloat16)}},
    r"leaf 'layer/w' is float32\[2, 3\] in .* and bfloat16\[2, 3\]",
  ),
  'key to words': ({**SAVED, 'key': jnp.zeros(2, jnp.uint32)}, r"leaf 'key' is key<fry>\[\] in .*"),
  'other key': (
    {**SAVED, 'key': jax.random.key(0, impl='rbg')},
    "leaf 'key' is key<fry>.*key<rbg>",
  ),
}


@pytest.fixture(scope='module')
def checkpoints_of_saved(tmp_path_factory):
  with checkpoint.Checkpoints(tmp_path_factory.mktemp('saved')) as checkpoints:
    checkpoints.save(4, SAVED)
    yield checkpoints


@pytest.mark.parametrize('name', REFUSED)
def test_other_leaves_are_refused_by_name(checkpoints_of_saved, name):
  like, message = REFUSED[name]
  with pytest.raises(ValueError, match=message) as error:
    checkpoints_of_saved.restore(like)
  assert 'checkpoint of step 4' in str(error.value) and '\n' not in str(error.value)


def test_no_checkpoint_is_an_error_that_lists_those_there_are(tmp_path):
  with checkpoint.Checkpoints(tmp_path / 'new') as checkpoints:
    assert checkpoints.latest_step() is None
    with pytest.raises(ValueError, match=r'no checkpoint of step None in .*new: it has \[\]'):
      checkpoints.restore(SAVED)
    for step in (5, 10, 15):
      checkpoints.save(step, SAVED)
    assert checkpoints.latest_step() == 15
    with pytest.raises(ValueError, match=r'no checkpoint of step 7 in .*: it has \[10, 15\]'):
      checkpoints.restore(SAVED, 7)


def test_the_last_ones_are_kept(tmp_path):
  with checkpoint.Checkpoints(tmp_path, keep=2) as checkpoints:
    for step in (1, 2, 3):
      checkpoints.save(step, {'x': jnp.array(float(step))})
  with checkpoint.Checkpoints(tmp_path, keep=2) as checkpoints:
    for step in (2, 3):
      assert float(checkpoints.restore({'x': jnp.zeros(())}, step)['x']) == step
    assert float(checkpoints.restore({'x': jnp.zeros(())})['x']) == 3
    with pytest.raises(ValueError, match=r'step 1 .*\[2, 3\]'):
      checkpoints.restore({'x': jnp.zeros(())}, 1)


def test_a_step_may_be_restored_while_it_is_being_saved(tmp_path):
  state = {'x': jnp.arange(1 << 20)}
  with checkpoint.Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(1, state)
    assert_identical(checkpoints.restore(state, 1), state)


@pytest.mark.parametrize('make', [runtime.simulate, mesh_workers])
def test_the_state_may_be_donated_while_it_is_being_saved(tmp_path, make):
  workers = make(4)
  step = jax.jit(workers.spmd(lambda s: {'x': s['x'] * 2, 'n': s['n'] + 1}), donate_argnums=0)
  state = step(workers.place({'x': jnp.ones((4, 1 << 18)), 'n': jnp.arange(4)}))
  with checkpoint.Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(1, state)
    for _ in range(3):
      state = step(state)
    restored = checkpoints.restore(abstract(state))
  np.testing.assert_array_equal(restored['x'], np.full((4, 1 << 18), 2.0))
  assert restored['n'].tolist() == [1, 2, 3, 4]
  assert state['x'][0, 0] == 16.0


# A run that is interrupted, continued in a fresh process: this file is its program


WORKERS = runtime.simulate(4)


def transform():
  outer = optax.chain(
    transforms.compressed_mean(
      compressors.random_k(0.5), axis_name='workers', memory=memories.residual(), seed=11
    ),
    optax.sgd(1.0, momentum=0.5),
  )
  inner = optax.sgd(optax.linear_schedule(0.2, 0.05, 15), momentum=0.9)
  growing = lambda round_: jnp.where(round_ < 3, 1, 4)  # noqa: E731
  return transforms.skip_nonfinite(
    transforms.local_steps(inner, outer, growing), axis_name='workers'
  )


def begin():
  params = WORKERS.replicate({'w': jnp.linspace(-1.0, 1.0, 12), 'b': jnp.zeros(5, jnp.bfloat16)})
  keys = jax.random.split(jax.random.key(5), 4)
  return {'params': params, 'opt': WORKERS.spmd(transform().init)(params), 'keys': keys}


def train(state, start, end):
  def one(state, step):
    key = jax.random.fold_in(state['keys'], step)
    noise = jax.random.normal(key, (12,)) + jnp.where((step == 4) | (step == 9), jnp.nan, 0.0)
    gradients = {'w': state['params']['w'] + noise, 'b': state['params']['b'] - 1}
    updates, opt = transform().update(gradients, state['opt'], state['params'])
    params = optax.apply_updates(state['params'], updates)
    return {'params': params, 'opt': opt, 'keys': jax.random.split(state['keys'], 1)[0]}

  step = jax.jit(WORKERS.spmd(one))
  for i in range(start, end):
    state = step(state, jnp.full(4, i))
  return state


def resume(directory):
  """What the fresh process does: continues from the newest checkpoint to step 20."""
  with checkpoint.Checkpoints(directory) as checkpoints:
    state = checkpoints.restore(jax.eval_shape(begin))
    checkpoints.save(20, train(state, checkpoints.latest_step(), 20))


def test_a_run_that_is_continued_in_a_fresh_process_is_bit_identical(tmp_path):
  seven = train(begin(), 0, 7)
  # Nothing is at its initial value, so nothing comes back by luck.
  assert seven['opt'].skipped.tolist() == [1] * 4
  local = seven['opt'].inner
  assert (local.round.tolist(), local.step.tolist()) == ([3] * 4, [3] * 4)
  exchange = local.outer[0]
  assert exchange.count.min() > 0 and exchange.bytes_sent[:, 1].min() > 0
  for leaf in jax.tree.leaves((exchange.memory, local.inner, local.outer[1])):
    assert np.asarray(leaf).any()
  with checkpoint.Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(7, seven)
  environment = os.environ | {
    'PYTHONPATH': os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')]),
    'JAX_PLATFORMS': 'cpu',
  }
  command = [sys.executable, __file__, str(tmp_path)]
  fresh = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
  assert fresh.returncode == 0, fresh.stderr
  with checkpoint.Checkpoints(tmp_path) as checkpoints:
    continued = checkpoints.restore(jax.eval_shape(begin), 20)
  straight = train(begin(), 0, 20)
  assert straight['opt'].skipped.tolist() == [2] * 4
  assert_identical(continued, straight)


# Another number of workers


def rows_of(count, seed=0):
  generator = np.random.default_rng(seed)
  return {
    'params': jnp.asarray(generator.normal(size=(count, 5)), jnp.float32),
    'memory': memories.ResidualState(
      {'w': jnp.asarray(generator.normal(size=(count, 2, 3)), jnp.float32)}
    ),
    'scalar': jnp.asarray(generator.normal(size=count), jnp.float32),
    'half': jnp.full((count, 2), 1.5, jnp.bfloat16),
    'empty': jnp.zeros((count, 0)),
    'none': None,
    'count': jnp.arange(count) + 5,
    'meter': jnp.asarray([[i % 2, 100 - i] for i in range(count)], jnp.uint32),
    'shared': jnp.broadcast_to(jax.random.key(1), (count,)),
    'own': jax.random.split(jax.random.key(2), count),
  }


@pytest.mark.parametrize(('old', 'new'), [(4, 2), (4, 8), (3, 5), (4, 1), (1, 3), (5, 3), (4, 4)])
def test_resizing_keeps_means_counters_and_keys(old, new):
  rows = rows_of(old)
  resized = checkpoint.resize_workers(rows, new)
  assert jax.tree.structure(resized) == jax.tree.structure(rows)
  for a, b in zip(jax.tree.leaves(rows), jax.tree.leaves(resized), strict=True):
    assert b.shape == (new, *a.shape[1:]) and b.dtype == a.dtype
    if a.dtype == jnp.float32:
      before, after = np.asarray(a, np.float64).mean(0), np.asarray(b, np.float64).mean(0)
      np.testing.assert_allclose(after, before, atol=1e-6)
  assert np.asarray(resized['half'].astype(jnp.float32) == 1.5).all()
  if new == old:
    return
  assert resized['count'].tolist() == [old + 4] * new
  # The greatest high half, and of those the greatest low half: 1 * 2^32 + 99, if two began.
  assert resized['meter'].tolist() == [[1, 99] if old > 1 else [0, 100]] * new
  shared, own = words(resized['shared']), words(resized['own'])
  assert (shared == words(rows['shared'])[0]).all()
  # The key of a worker alone counts as shared.
  assert len({tuple(row) for row in own.tolist()}) == (new if old > 1 else 1)
  kept = min(old, new)
  assert own[:kept].tolist() == words(rows['own'])[:kept].tolist()


def test_meters_after_resizing_read_the_greatest_number():
  class State(NamedTuple):
    bytes_sent: jax.Array

  meters = State(jnp.array([[0, 2**32 - 1], [1, 3], [1, 2]], jnp.uint32))
  assert ledger.bytes_sent(checkpoint.resize_workers(meters, 2)).tolist() == [2**32 + 3] * 2


@pytest.mark.parametrize('count', [0, -2, 2.0, True, None, '3'])
def test_resizing_refuses_what_is_no_count(count):
  with pytest.raises(ValueError, match=f'resize_workers got count={count!r}; accepted are integ'):
    checkpoint.resize_workers(rows_of(2), count)


def test_resizing_takes_numpy_integers():
  assert checkpoint.resize_workers({'x': jnp.ones((2, 3))}, np.int64(4))['x'].shape == (4, 3)


def gossip_step(size):
  tx = algorithms.choco_sgd(
    optax.exponential_decay(0.3, 40, 0.5),
    topologies.ring(size),
    compressors.top_k(0.5),
    axis_name='workers',
    consensus_rate=0.5,
  )

  def one(params, state, target):
    updates, state = tx.update(jax.tree.map(jnp.subtract, params, target), state, params)
    return optax.apply_updates(params, updates), state

  def run(workers, params, state, targets, steps):
    def step(carry, _):
      return workers.spmd(one)(*carry, targets), None

    return jax.jit(lambda *carry: jax.lax.scan(step, carry, length=steps)[0])(params, state)

  return tx, run


def test_choco_continues_on_another_number_of_workers(tmp_path):
  """Four simulated workers become six on a mesh, with data of the same mean."""
  targets = {'x': np.random.default_rng(1).normal(size=(4, 6)).astype(np.float32)}
  (tx, run), four = gossip_step(4), runtime.simulate(4)
  params = four.replicate({'x': jnp.zeros(6)})
  params, state = run(four, params, four.spmd(tx.init)(params), targets, 20)
  with checkpoint.Checkpoints(tmp_path) as checkpoints:
    checkpoints.save(20, (params, state))
    saved = checkpoints.restore(jax.eval_shape(lambda: (params, state)))

  (tx, run), six = gossip_step(6), mesh_workers(6)
  params, state = six.place(checkpoint.resize_workers(saved, 6))
  believed = lambda state: state[1].memory  # noqa: E731
  # `received` is the mixing of all references, under the new ring.
  consistent = lambda memory: np.testing.assert_allclose(  # noqa: E731
    memory.received['x'], topologies.ring(6).matrix() @ np.asarray(memory.reference['x']), atol=1e-5
  )
  consistent(believed(state))
  mean = targets['x'].mean(0)
  near = np.random.default_rng(2).normal(size=(6, 6)).astype(np.float32)
  new_targets = {'x': near - near.mean(0) + mean}
  start = np.abs(np.asarray(params['x']).mean(0) - mean).max()
  params, state = run(six, params, state, six.place(new_targets), 400)
  consistent(believed(state))
  assert np.abs(np.asarray(params['x']).mean(0) - mean).max() < min(1e-4, start / 10)
  assert runtime.consensus_distance(params) < 0.05
  assert state[1].count.tolist() == [420] * 6


if __name__ == '__main__':
  jax.config.update('jax_numpy_rank_promotion', 'raise')
  resume(sys.argv[1])
