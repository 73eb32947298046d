"""Two processes of two devices train as four simulated workers do, and save together."""

import functools
import os
import pathlib
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_dsgd import algorithms, checkpoint, collectives, compressors, runtime, topologies

ROOT = pathlib.Path(__file__).resolve().parents[1]
AXIS = 'workers'
SECONDS = 60


def methods():
  return {
    'topk_sgd': algorithms.topk_sgd(0.1, 0.5, axis_name=AXIS),
    'dsgd': algorithms.dsgd(0.1, topologies.ring(4), axis_name=AXIS),
  }


def targets():
  return np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)


def train(workers, tx, steps=3):
  def step(params, state, target):
    updates, state = tx.update(params - target, state, params)
    return optax.apply_updates(params, updates), state

  params = workers.replicate(jnp.zeros(6))
  state = jax.jit(workers.spmd(tx.init))(params)
  step = jax.jit(workers.spmd(step), donate_argnums=(0, 1))
  for _ in range(steps):
    params, state = step(params, state, workers.place(targets()))
  return params, state


def draws(workers):
  """What random_k sends of 0, 1, ..., 15 with the key that workers share, and a draw of each."""
  compressor = compressors.random_k(k=4)

  def one(x):
    key = jax.random.key(9)
    own = jax.random.bits(collectives.worker_key(key, AXIS), (2,))
    return compressor.encode(key, x), own

  return jax.jit(workers.spmd(one))(workers.replicate(jnp.arange(16.0)))


def own_rows(x):
  """The rows of this process, by their number."""
  return {shard.index[0].start: np.asarray(shard.data)[0] for shard in x.addressable_shards}


def main(directory, process, port):
  """What each of the two processes does."""
  jax.distributed.initialize(f'localhost:{port}', num_processes=2, process_id=int(process))
  assert (jax.device_count(), jax.local_device_count()) == (4, 2)
  workers = runtime.on_mesh(runtime.make_mesh(workers=4), AXIS)
  results = {}
  for name, tx in methods().items():
    params, state = train(workers, tx)
    results |= {f'{name}/{row}': x for row, x in own_rows(params).items()}

  with checkpoint.Checkpoints(pathlib.Path(directory, 'checkpoints')) as checkpoints:
    checkpoints.save(3, (params, state))
    like = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), (params, state)
    )
    restored = checkpoints.restore(like)
  words = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
  for saved, x in zip(jax.tree.leaves((params, state)), jax.tree.leaves(restored), strict=True):
    assert x.sharding.is_equivalent_to(saved.sharding, x.ndim)
    before, after = own_rows(words(saved)), own_rows(words(x))
    assert before.keys() == after.keys()
    assert all(before[row].tobytes() == after[row].tobytes() for row in before)

  shared, own = draws(workers)
  results |= {f'shared/{row}': x for row, x in own_rows(shared).items()}
  results |= {f'own/{row}': x for row, x in own_rows(own).items()}
  np.savez(pathlib.Path(directory, f'process{process}.npz'), **results)
  jax.distributed.shutdown()


def run_processes(directory):
  with socket.socket() as free:
    free.bind(('localhost', 0))
    port = free.getsockname()[1]
  environment = os.environ | {
    'PYTHONPATH': os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')]),
    'JAX_PLATFORMS': 'cpu',
    'JAX_NUM_CPU_DEVICES': '2',
    'JAX_CPU_COLLECTIVES_IMPLEMENTATION': 'gloo',
  }
  processes, logs = [], [directory / f'process{i}.log' for i in range(2)]
  for i, log in enumerate(logs):
    with log.open('w') as stream:
      command = [sys.executable, __file__, str(directory), str(i), str(port)]
      processes.append(
        subprocess.Popen(command, env=environment, stdout=stream, stderr=subprocess.STDOUT)
      )
  texts = lambda: '\n'.join(f'--- {log.name}\n{log.read_text()}' for log in logs)  # noqa: E731
  try:
    end = time.monotonic() + SECONDS
    codes = [process.wait(max(end - time.monotonic(), 0)) for process in processes]
  except subprocess.TimeoutExpired:
    pytest.fail(f'the processes did not end within {SECONDS} s\n{texts()}')
  finally:
    for process in processes:
      process.kill()
      process.wait()
  assert codes == [0, 0], texts()


@pytest.fixture(scope='module')
def results(tmp_path_factory):
  """Rows by name and worker, of both processes."""
  directory = tmp_path_factory.mktemp('multihost')
  run_processes(directory)
  files = [np.load(directory / f'process{i}.npz') for i in range(2)]
  assert [sorted(name for name in file if name.startswith('dsgd/')) for file in files] == [
    ['dsgd/0', 'dsgd/1'],
    ['dsgd/2', 'dsgd/3'],
  ]
  return functools.reduce(lambda a, b: a | dict(b), files, {})


pytestmark = pytest.mark.multihost


@pytest.mark.parametrize('name', methods())
def test_two_processes_train_as_simulated_workers(results, name):
  params, _ = train(runtime.simulate(4), methods()[name])
  rows = np.stack([results[f'{name}/{row}'] for row in range(4)])
  assert np.abs(rows).max() > 0.01
  np.testing.assert_allclose(rows, params, rtol=1e-5, atol=1e-6)


def test_keys_agree_where_they_are_shared_and_differ_where_they_are_not(results):
  shared, own = draws(runtime.simulate(4))
  for row in range(4):
    np.testing.assert_array_equal(results[f'shared/{row}'], shared[0])
    np.testing.assert_array_equal(results[f'own/{row}'], own[row])
  assert len({tuple(row) for row in own.tolist()}) == 4


if __name__ == '__main__':
  main(*sys.argv[1:])
