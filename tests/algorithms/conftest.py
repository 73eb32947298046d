"""Heterogeneous quadratics, solved by a transform and by hand."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_dsgd import runtime

W, D = 8, 20


class Quadratics:
  """f_w(x) = (x - best)^T A_w (x - best) / 2 + b_w x, where sum_w b_w = 0.

  `best` is the optimum of the mean, `skew` the size of the b_w (zeta), and the A_w differ by the
  share `variety`.
  """

  def __init__(self, skew: float, variety: float = 1.0, count: int = W):
    rng = np.random.default_rng(0)
    factors = rng.normal(size=(count, D, D)) / D**0.5
    shared = factors.mean(0) * count**0.5
    own = factors @ factors.transpose(0, 2, 1) + 0.5 * np.eye(D)
    self.A = (1 - variety) * (shared @ shared.T + 0.5 * np.eye(D)) + variety * own
    b = rng.normal(size=(count, D))
    self.b = skew * (b - b.mean(0))
    self.best = rng.normal(size=D)
    self.count = count

  def gradients(self, x):
    """Of workers at their rows, float64 [W, D]."""
    return np.einsum('wij,wj->wi', self.A, x - self.best) + self.b

  def solve(self, tx, steps, dtype=np.float32):
    """From 0: models after each step [steps, W, D], updates like them, and the last state."""
    with jax.enable_x64(dtype == np.float64):
      return self._solve(optax.with_extra_args_support(tx), steps, dtype)

  def _solve(self, tx, steps, dtype):
    best = jnp.asarray(self.best, dtype)

    def worker(A, b):
      def grad_fn(x):
        return A @ (x - best) + b

      def step(carry, _):
        x, state = carry
        updates, state = tx.update(grad_fn(x), state, x, grad_fn=grad_fn)
        return (x + updates, state), (x + updates, updates)

      x = jnp.zeros(D, dtype)
      (_, state), history = jax.lax.scan(step, (x, tx.init(x)), length=steps)
      return *history, state

    rows = self.A.astype(dtype), self.b.astype(dtype)
    models, updates, state = jax.jit(runtime.simulate(self.count).spmd(worker))(*rows)
    in_time = lambda x: np.asarray(x, np.float64).swapaxes(0, 1)  # noqa: E731
    return types.SimpleNamespace(models=in_time(models), updates=in_time(updates), state=state)

  def by_hand(self, step, steps):
    """Models from a NumPy `step(x, gradients) -> x` of all workers; gradients is a function."""
    x, models = np.zeros((self.count, D)), []
    for _ in range(steps):
      x = np.broadcast_to(step(x, self.gradients), x.shape)
      models.append(x)
    return np.stack(models)

  def error(self, models):
    """|x - best| of the mean model at the end."""
    return float(np.linalg.norm(models[-1].mean(0) - self.best))


@pytest.fixture(scope='session')
def quadratics():
  """The class above."""
  return Quadratics


@pytest.fixture(scope='session')
def largest():
  """Each row's k entries of largest magnitude, else 0."""

  def largest(x, k):
    places = np.argsort(-np.abs(x), axis=-1)[..., :k]
    kept = np.zeros_like(x)
    np.put_along_axis(kept, places, np.take_along_axis(x, places, -1), -1)
    return kept

  return largest


@pytest.fixture(scope='session')
def signs():
  """Each row's mean magnitude, with the signs of its entries."""
  return lambda x: np.abs(x).mean(-1, keepdims=True) * np.where(x >= 0, 1, -1)
