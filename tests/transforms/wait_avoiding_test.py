"""Group averages that wait for nobody: butterflies, means of all, and who is late."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_dsgd import algorithms, ledger, runtime, topologies, transforms

AXIS = 'workers'


def group_matrix(workers, size, t):
  """Who shares a group at step t: partners differ in bits (t log2 S + r) mod log2 P, r < log2 S."""
  bits, width = workers.bit_length() - 1, size.bit_length() - 1
  free = sum(1 << (t * width + r) % bits for r in range(width))
  i = np.arange(workers)
  return ((i[:, None] & ~free) == (i & ~free)) / size


def mixer(workers, size, period):
  cube = topologies.one_peer_hypercube(workers)
  return transforms.mix_without_waiting(cube, axis_name=AXIS, group_size=size, period=period)


@pytest.mark.parametrize(('workers', 'size'), [(16, 4), (8, 4), (8, 2), (8, 8)])
def test_groups_are_those_of_the_butterfly(walk, workers, size):
  """One column of the identity a worker, so that rows of parameters are the product so far."""
  steps = 6
  history, _ = walk(mixer(workers, size, 1000), np.eye(workers, dtype=np.float32), steps)
  right = np.eye(workers)
  for t in range(steps):
    right = group_matrix(workers, size, t) @ right
    np.testing.assert_allclose(history[t], right, atol=1e-6)


def test_log_p_over_log_s_groups_are_the_exact_mean(walk):
  history, _ = walk(mixer(16, 4, 1000), np.eye(16, dtype=np.float32), 2)
  np.testing.assert_array_equal(history[0] == 0.25, group_matrix(16, 4, 0) > 0)
  np.testing.assert_array_equal(history[1], np.full((16, 16), 1 / 16))  # exactly


def test_every_period_is_the_mean_of_all(walk):
  rows = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)
  history, state = walk(mixer(8, 2, 2), rows, 2)
  np.testing.assert_allclose(history[0], group_matrix(8, 2, 0) @ rows, atol=1e-6)
  np.testing.assert_allclose(history[1], np.tile(rows.mean(0), (8, 1)), atol=1e-6)
  # One message in the group, then one to the all-reduce.
  assert ledger.bytes_sent(state).tolist() == [20 + 20] * 8


def test_late_workers_by_hand(walk):
  """Others take a late worker's old buffer; it adds what it has now to what it finds."""
  steps, period, rng = 9, 4, np.random.default_rng(1)
  rows = rng.normal(size=(8, 3)).astype(np.float32)
  updates = rng.normal(size=(steps, 8, 3)).astype(np.float32)
  late = rng.random((steps, 8)) < 0.4
  history, _ = walk(
    mixer(8, 4, period), rows, steps, updates=updates, control=transforms.Control(late=late)
  )
  x, buffer = rows.astype(np.float64), rows.astype(np.float64)
  for t in range(steps):
    y = x + updates[t]
    if (t + 1) % period == 0:
      x = np.tile(y.mean(0), (8, 1))
    else:
      mean = group_matrix(8, 4, t) @ np.where(late[t][:, None], buffer, y)
      x = np.where(late[t][:, None], (4 * mean + y) / 5, mean)
    buffer = y
    np.testing.assert_allclose(history[t], x, atol=1e-5)


def errors_and_spreads(rate, late):
  """Of WAGMA on sixteen quadratics of one curvature, in double precision, after each step."""
  rng = np.random.default_rng(2)
  A, c = np.linspace(1, 3, 4), rng.normal(size=(16, 4))
  tx = optax.with_extra_args_support(
    algorithms.wagma_sgd(
      rate, topologies.one_peer_hypercube(16), axis_name=AXIS, group_size=4, period=10
    )
  )

  def worker(c, late):
    def step(carry, late):
      x, state = carry
      control = transforms.Control(late=late)
      updates, state = tx.update(A * (x - c), state, x, control=control)
      return (x + updates, state), x + updates

    x = jnp.zeros(4)
    return jax.lax.scan(step, (x, tx.init(x)), late)[1]

  with jax.enable_x64(True):
    models = np.asarray(jax.jit(runtime.simulate(16).spmd(worker))(c, late.T))
  return np.abs(models.mean(0) - c.mean(0)).max(-1), np.ptp(models, axis=0).max(-1)


def test_nobody_late_solves_and_lateness_costs_little():
  nobody = np.zeros((400, 16), bool)
  errors, _ = errors_and_spreads(0.05, nobody)
  assert errors[-1] < 1e-9
  some = np.random.default_rng(3).random((400, 16)) < 0.3
  errors, spreads = errors_and_spreads(0.05, some)
  assert 1e-3 < errors[-100:].mean() < 2e-2
  # Every tenth step they agree, and never else.
  assert spreads[9::10].max() < 1e-14
  assert np.delete(spreads, np.s_[9::10]).min() > 1e-3


@pytest.mark.parametrize(
  ('size', 'period', 'message'),
  [
    (3, 4, 'group_size=3; accepted are powers of two up to 8'),
    (16, 4, 'group_size=16'),
    (0, 4, 'group_size=0'),
    (2.0, 4, r'group_size=2\.0'),
    (4, 0, 'period=0; accepted are integers >= 1'),
    (4, True, 'period=True'),
  ],
)
def test_bad_arguments_are_refused(size, period, message):
  with pytest.raises(ValueError, match=f'mix_without_waiting got {message}'):
    mixer(8, size, period)


def test_graphs_without_butterflies_are_refused():
  for topology in (topologies.ring(8), topologies.one_peer_exponential(8)):
    with pytest.raises(ValueError, match=f'{topology.name}.*one_peer_hypercube'):
      transforms.mix_without_waiting(topology, axis_name=AXIS, group_size=4, period=3)
