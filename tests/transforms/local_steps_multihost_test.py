"""Two processes that meet every five steps exchange bytes every five steps, and none between."""

from __future__ import annotations

import os
import pathlib
import socket
import struct
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest

from jax_dsgd import algorithms, runtime

ROOT = pathlib.Path(__file__).resolve().parents[2]
ENTRIES = 1 << 18
pytestmark = [
  pytest.mark.multihost,
  pytest.mark.skipif(not sys.platform.startswith('linux'), reason='reads TCP counters of Linux'),
]


def bytes_of_sockets():
  """Bytes that this process has sent (and seen acknowledged) and received over TCP so far."""
  time.sleep(0.3)  # the last acknowledgements are on their way
  total = 0
  for name in os.listdir('/proc/self/fd'):
    try:
      with socket.socket(fileno=os.dup(int(name))) as copy:
        info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:  # a file, or closed in the meantime
      continue
    total += sum(struct.unpack_from('QQ', info, 120))
  return total


def main(process, port):
  """What each of the two processes does."""
  jax.distributed.initialize(f'localhost:{port}', num_processes=2, process_id=int(process))
  workers = runtime.on_mesh(runtime.make_mesh(workers=2), 'workers')
  tx = algorithms.local_sgd(0.1, 5, axis_name='workers')

  def step(x, state):
    updates, state = tx.update(x - 1.0, state, x)
    return x + updates, state

  x = workers.replicate(jnp.zeros(ENTRIES))
  state = workers.spmd(tx.init)(x)
  step = workers.spmd(step).lower(x, state).compile()
  counts = [bytes_of_sockets()]
  for _ in range(10):
    x, state = jax.block_until_ready(step(x, state))
    counts.append(bytes_of_sockets())
  print('bytes', *(b - a for a, b in zip(counts, counts[1:], strict=False)))
  jax.distributed.shutdown()


def test_between_meetings_no_bytes_move():
  with socket.socket() as free:
    free.bind(('localhost', 0))
    port = free.getsockname()[1]
  environment = os.environ | {
    'PYTHONPATH': os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')]),
    'JAX_PLATFORMS': 'cpu',
    'JAX_NUM_CPU_DEVICES': '1',
    'JAX_CPU_COLLECTIVES_IMPLEMENTATION': 'gloo',
  }
  start = lambda i: subprocess.Popen(  # noqa: E731
    [sys.executable, __file__, str(i), str(port)],
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  processes = [start(0), start(1)]
  try:
    texts = [process.communicate(timeout=60)[0] for process in processes]
  finally:
    for process in processes:
      process.kill()
      process.wait()
  for process, text in zip(processes, texts, strict=True):
    assert process.returncode == 0, text
    line = next(line for line in text.splitlines() if line.startswith('bytes'))
    moved = [int(word) for word in line.split()[1:]]
    for t, count in enumerate(moved, start=1):
      if t % 5:
        assert count < 10_000, moved  # heartbeats
      else:
        assert 2 * 4 * ENTRIES <= count < 2.2 * 4 * ENTRIES, moved  # half sent, half received


if __name__ == '__main__':
  main(*sys.argv[1:])
