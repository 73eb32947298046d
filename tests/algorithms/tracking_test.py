"""Methods that heterogeneous data does not bias, beside those it does: by hand and as published."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_dsgd import algorithms, ledger, runtime, topologies

AXIS, W, D = 'workers', 8, 20
RING = topologies.ring(W)
M = RING.matrix()


def test_gradient_and_momentum_tracking_by_hand(quadratics):
  """With the published recursions, whose c begins at u - y = 0 here."""
  problem = quadratics(3.0)
  for momentum in (0.0, 0.7):
    u, c = np.zeros((W, D)), np.zeros((W, D))

    def step(x, gradients, momentum=momentum):
      nonlocal u, c
      u = momentum * u + gradients(x)
      after = M @ x - 0.02 * (u - c)
      c = M @ (c - u) + u
      return after

    tx = (
      algorithms.momentum_tracking(0.02, RING, axis_name=AXIS, momentum=momentum)
      if momentum
      else algorithms.gradient_tracking(0.02, RING, axis_name=AXIS)
    )
    right = problem.by_hand(step, 25)
    np.testing.assert_allclose(problem.solve(tx, 25).models, right, rtol=1e-4, atol=1e-5)


def test_exact_diffusion_by_hand(quadratics):
  """In its one-line form x'' = W (2 x' - x - lr (g' - g)), after x' = W (x - lr g)."""
  problem = quadratics(3.0)
  before = None

  def step(x, gradients):
    nonlocal before
    g = gradients(x)
    after = M @ (x - 0.05 * g if before is None else 2 * x - before[0] - 0.05 * (g - before[1]))
    before = x, g
    return after

  tx = algorithms.exact_diffusion(0.05, RING, axis_name=AXIS)
  right = problem.by_hand(step, 25)
  np.testing.assert_allclose(problem.solve(tx, 25).models, right, rtol=1e-4, atol=1e-5)


def test_decent_lam_and_quasi_global_momentum_by_hand(quadratics):
  problem = quadratics(3.0)
  m = np.zeros((W, D))

  def decent(x, gradients):
    nonlocal m
    m = 0.8 * m + x - M @ (x - 0.02 * gradients(x))
    return x - m

  tx = algorithms.decent_lam(0.02, RING, axis_name=AXIS, momentum=0.8)
  right = problem.by_hand(decent, 25)
  np.testing.assert_allclose(problem.solve(tx, 25).models, right, rtol=1e-4, atol=1e-5)
  m = np.zeros((W, D))

  def quasi(x, gradients):
    nonlocal m
    after = M @ (x - 0.02 * (gradients(x) + 0.8 * m))
    m = 0.8 * m + 0.2 * (x - after) / 0.02
    return after

  tx = algorithms.qg_dsgdm(0.02, RING, axis_name=AXIS, momentum=0.8)
  right = problem.by_hand(quasi, 25)
  np.testing.assert_allclose(problem.solve(tx, 25).models, right, rtol=1e-4, atol=1e-5)


def test_momentum_tracking_reaches_the_optimum_where_others_keep_a_bias(quadratics):
  """The published errors at a rate of 0.01: 1e-14; 1.2 of DSGD with momentum; 0.18 of others."""
  problem = quadratics(3.0)

  def error(make, **arguments):
    tx = make(0.01, RING, axis_name=AXIS, **arguments)
    models = problem.solve(tx, 3000, np.float64).models
    return np.abs(models[-1] - problem.best).max()

  assert error(algorithms.momentum_tracking) < 3e-14
  assert error(algorithms.gradient_tracking) < 1e-6  # a tenth of the effective rate
  plain, heavy = error(algorithms.dsgd), error(algorithms.dsgd, momentum=0.9)
  assert heavy == pytest.approx(1.3, abs=0.05)
  assert plain == pytest.approx(0.2, abs=0.01)
  # These do not amplify the bias of DSGD, and do not remove it.
  assert error(algorithms.qg_dsgdm) == pytest.approx(plain, rel=1e-6)
  assert error(algorithms.decent_lam) == pytest.approx(plain, rel=1e-6)
  # Gossip before the step is no better.
  assert error(algorithms.d_psgd, momentum=0.9) > heavy


@pytest.mark.parametrize('make', [algorithms.gradient_tracking, algorithms.exact_diffusion])
def test_methods_without_momentum_reach_the_optimum_too(make, quadratics):
  problem = quadratics(3.0)
  models = problem.solve(make(0.05, RING, axis_name=AXIS), 3000, np.float64).models
  np.testing.assert_allclose(models[-1], np.tile(problem.best, (W, 1)), atol=1e-11)


@pytest.mark.parametrize(
  'topology', [RING, topologies.one_peer_exponential(W)], ids=lambda t: t.name
)
def test_the_mean_of_momentum_tracking_is_centralized_heavy_ball(topology, quadratics):
  """On gradients at the local models, to 1e-12, and the corrections sum to 0."""
  problem = quadratics(3.0)
  tx = algorithms.momentum_tracking(0.01, topology, axis_name=AXIS)
  run = problem.solve(tx, 200, np.float64)
  x, velocity, mean = np.zeros((W, D)), np.zeros(D), np.zeros(D)
  for after in run.models:
    velocity = 0.9 * velocity + problem.gradients(x).mean(0)
    mean = mean - 0.01 * velocity
    x = after
    np.testing.assert_allclose(after.mean(0), mean, atol=1e-12)
  correction = np.asarray(optax.tree.get(run.state, 'correction'))
  assert correction.dtype == np.float64
  assert np.abs(correction).max() > 1
  np.testing.assert_allclose(correction.sum(0), 0, atol=1e-12)


def test_on_the_full_graph_all_methods_coincide(quadratics):
  """At the optimum, and with the published first c and equal curvatures at every step."""
  problem, full = quadratics(3.0), topologies.complete(W)
  for make in (algorithms.momentum_tracking, algorithms.qg_dsgdm, algorithms.decent_lam):
    models = problem.solve(make(0.01, full, axis_name=AXIS), 3000, np.float64).models
    bias = np.abs(models[-1] - problem.best).max()
    assert bias < 1e-12, make
  heavy = problem.solve(algorithms.dsgd(0.01, full, axis_name=AXIS, momentum=0.9), 50).models
  center = problem.solve(algorithms.allreduce_sgd(0.01, axis_name=AXIS, momentum=0.9), 50).models
  np.testing.assert_allclose(heavy, center, atol=1e-5)

  alike = quadratics(3.0, variety=0.0)
  tx = algorithms.momentum_tracking(0.01, full, axis_name=AXIS)
  center = alike.solve(algorithms.allreduce_sgd(0.01, axis_name=AXIS, momentum=0.9), 50).models
  first = alike.gradients(np.zeros((W, D)))
  start = ((first - first.mean(0)) / (1 - 0.9)).astype(np.float32)

  def worker(A, b, start):
    def step(carry, _):
      x, state = carry
      updates, state = tx.update(A @ (x - alike.best.astype(np.float32)) + b, state, x)
      return (x + updates, state), x + updates

    x = jnp.zeros(D)
    state = optax.tree.set(tx.init(x), correction=start, trace=start)
    return jax.lax.scan(step, (x, state), length=50)[1]

  rows = alike.A.astype(np.float32), alike.b.astype(np.float32), start
  models = np.asarray(jax.jit(runtime.simulate(W).spmd(worker))(*rows)).swapaxes(0, 1)
  np.testing.assert_allclose(models, center, atol=1e-4)


def test_tracking_sends_two_models_a_step(quadratics):
  run = quadratics(3.0).solve(algorithms.momentum_tracking(0.01, RING, axis_name=AXIS), 5)
  assert ledger.bytes_sent(run.state).tolist() == [5 * 2 * 2 * 4 * D] * W


def test_exact_diffusion_refuses_small_eigenvalues_and_others():
  swap = topologies.from_matrix([[0.3, 0.7], [0.7, 0.3]])  # eigenvalue -0.4
  with pytest.raises(ValueError, match=r'eigenvalue -0\.400; accepted are none below -1/3'):
    algorithms.exact_diffusion(0.1, swap, axis_name=AXIS)
  lazy = topologies.from_matrix((np.eye(2) + swap.matrix()) / 2)
  algorithms.exact_diffusion(0.1, lazy, axis_name=AXIS)
  for wrong in (topologies.directed_ring(4), topologies.one_peer_hypercube(4)):
    with pytest.raises(ValueError, match=f'{wrong.name}.*accepted are symmetric topologies'):
      algorithms.exact_diffusion(0.1, wrong, axis_name=AXIS)


@pytest.mark.parametrize('make', [algorithms.gradient_tracking, algorithms.momentum_tracking])
def test_tracking_refuses_graphs_that_lose_the_mean(make):
  rows = topologies.from_matrix([[0.5, 0.5, 0], [0, 0.5, 0.5], [0.25, 0.25, 0.5]])
  with pytest.raises(ValueError, match="'from_matrix'; accepted are doubly stochastic ones"):
    make(0.1, rows, axis_name=AXIS)
