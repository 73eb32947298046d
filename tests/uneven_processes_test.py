"""Four processes, one of them slow, in synchronous rounds: recorded, replayed and predicted."""

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
from jax.sharding import NamedSharding, PartitionSpec

from jax_dsgd import algorithms, clusters, runtime, servers, simulation

ROOT = pathlib.Path(__file__).resolve().parents[1]
AXIS = 'workers'
WORKERS, ROUNDS, SLOW = 4, 16, 2
SLEEPS = [0.4 if worker == SLOW else 0.1 for worker in range(WORKERS)]  # seconds
SECONDS = 60

TX = algorithms.allreduce_sgd(0.2, axis_name=AXIS, momentum=0.5)
TARGETS = np.random.default_rng(0).normal(size=(WORKERS, 6)).astype(np.float32)


def gradient(params, work):
  key = jax.random.fold_in(jax.random.fold_in(jax.random.key(1), work.shard), work.count)
  return params - jnp.asarray(TARGETS)[work.shard] + 0.1 * jax.random.normal(key, params.shape)


def main(directory, process, port):
  """What each process does: compute as slowly as it is told, then meet the others."""
  index = int(process)
  jax.distributed.initialize(f'localhost:{port}', num_processes=WORKERS, process_id=index)
  workers = runtime.on_mesh(runtime.make_mesh(workers=WORKERS), AXIS)
  sharding = NamedSharding(runtime.make_mesh(workers=WORKERS), PartitionSpec(AXIS))
  local = jax.jit(gradient)

  def meet(params, state, gradients):
    updates, state = TX.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  meet = jax.jit(workers.spmd(meet))
  rows = lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)[None])  # noqa: E731
  params = workers.replicate(jnp.zeros(6))
  state = jax.jit(workers.spmd(TX.init))(params)

  def one_round(params, state, count, sleep):
    started = time.monotonic()
    work = servers.Work(*map(np.int32, (index, index, count, 1)))
    own = local(params.addressable_shards[0].data[0], work)
    own.block_until_ready()
    time.sleep(sleep)
    finished = time.monotonic()
    params, state = jax.block_until_ready(meet(params, state, rows(own)))
    return params, state, (started, finished, time.monotonic())

  for _ in range(2):  # compiles, and then all begin together
    one_round(params, state, 0, 0.0)
  times = []
  for count in range(ROUNDS):
    params, state, row = one_round(params, state, count, SLEEPS[index])
    times.append(row)
  own = np.asarray(params.addressable_shards[0].data)[0]
  np.savez(pathlib.Path(directory, f'process{index}.npz'), times=times, params=own)
  jax.distributed.shutdown()


def run_processes(directory):
  with socket.socket() as free:
    free.bind(('localhost', 0))
    port = free.getsockname()[1]
  environment = os.environ | {
    'PYTHONPATH': os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')]),
    'JAX_PLATFORMS': 'cpu',
    'JAX_NUM_CPU_DEVICES': '1',
    'JAX_CPU_COLLECTIVES_IMPLEMENTATION': 'gloo',
  }
  processes, logs = [], [directory / f'process{i}.log' for i in range(WORKERS)]
  for i, log in enumerate(logs):
    with log.open('w') as stream:
      command = [sys.executable, __file__, str(directory), str(i), str(port)]
      processes.append(
        subprocess.Popen(command, env=environment, stdout=stream, stderr=subprocess.STDOUT)
      )
  end = time.monotonic() + SECONDS
  try:
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
      time.sleep(0.05)
    codes = [process.poll() for process in processes]
  finally:
    for process in processes:
      process.kill()
      process.wait()
  missing = [i for i, code in enumerate(codes) if code is None]
  texts = '\n'.join(f'--- {log.name}\n{log.read_text()}' for log in logs)
  assert not missing, f'processes {missing} did not end within {SECONDS} s\n{texts}'
  assert codes == [0] * WORKERS, texts


@pytest.fixture(scope='module')
def recorded(tmp_path_factory):
  """The trace of the run, as it is read from its file, and the parameters of each process."""
  directory = tmp_path_factory.mktemp('uneven')
  run_processes(directory)
  files = [np.load(directory / f'process{i}.npz') for i in range(WORKERS)]
  times = np.stack([file['times'] for file in files], axis=1)  # [T, W, 3], of one clock
  times -= times[0, :, 0].min()
  ones = np.ones((ROUNDS, WORKERS), int)
  trace = simulation.RoundTrace(
    seconds=times[..., 2].max(axis=1),
    active=ones > 0,
    steps=ones,
    weight=ones / WORKERS,
    staleness=0 * ones,
    group=0 * ones,
    started=times[..., 0],
    finished=times[..., 1],
  )
  trace.save(directory / 'trace.npz')
  loaded = simulation.RoundTrace.load(directory / 'trace.npz', workers=WORKERS)
  return loaded, np.stack([file['params'] for file in files])


pytestmark = pytest.mark.multihost


def test_the_trace_says_who_is_slow(recorded):
  trace, _ = recorded
  durations = trace.finished - trace.started
  assert (durations.argmax(axis=1) == SLOW).mean() > 0.8
  assert (durations >= SLEEPS).all()
  assert (trace.started[1:] >= trace.finished[:-1].max(axis=1, keepdims=True)).all()  # all wait


def test_the_replay_gives_the_same_parameters(recorded):
  trace, params = recorded
  workers = runtime.simulate(WORKERS)
  replayed, _, _ = simulation.replay_rounds(trace, TX, gradient, jnp.zeros(6), workers)
  assert np.abs(params).max() > 0.1
  np.testing.assert_allclose(replayed, params, rtol=1e-6, atol=1e-6)


def test_the_first_half_predicts_the_seconds_of_the_second(recorded):
  trace, _ = recorded
  half = ROUNDS // 2
  durations = trace.finished - trace.started
  meeting = (trace.seconds - trace.finished.max(axis=1))[:half].mean()
  cluster = clusters.Cluster(
    'measured',
    tuple(clusters.recorded(row) for row in durations[:half].T),
    server_latency=meeting / 2,  # there and back
  )
  predicted = simulation.simulate_rounds(cluster, simulation.bulk(), rounds=half).seconds[-1]
  measured = trace.seconds[-1] - trace.seconds[half - 1]
  assert predicted == pytest.approx(measured, rel=0.15)
  assert measured >= half * max(SLEEPS)


if __name__ == '__main__':
  main(*sys.argv[1:])
