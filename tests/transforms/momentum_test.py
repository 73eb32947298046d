"""Momentum from the learning rate: values by hand, and the paper's valley of minima."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_dsgd import algorithms, runtime, transforms


def test_a_float_gives_a_float():
  momentum = transforms.momentum_from_learning_rate(0.008, scale=0.5)
  assert isinstance(momentum, float)
  assert momentum == pytest.approx(1 - 0.5 * 0.04)
  assert transforms.momentum_from_learning_rate(0.25, scale=1.0, exponent=0.5) == 0.5
  assert transforms.momentum_from_learning_rate(1.0, scale=3.0) == 0.0  # clipped
  assert 0.9999 < transforms.momentum_from_learning_rate(0.0, scale=3.0) < 1


def test_a_schedule_gives_a_schedule_that_follows_it():
  rate = optax.piecewise_constant_schedule(0.008, {3: 0.125, 5: 0.0})  # 8e-3, 1e-3, 0
  momentum = transforms.momentum_from_learning_rate(rate, scale=2.0)
  values = np.asarray([momentum(jnp.asarray(t)) for t in range(6)])
  np.testing.assert_allclose(values, [0.92, 0.92, 0.92, 0.98, 0.98, 1], rtol=1e-6)
  assert (values < 1).all()
  one = transforms.momentum_from_learning_rate(optax.constant_schedule(1.0), scale=3.0)
  assert float(one(0)) == 0


@pytest.mark.parametrize(
  'arguments',
  [
    {'learning_rate': 0.1, 'scale': 0.0},
    {'learning_rate': 0.1, 'scale': 1.0, 'exponent': -1.0},
    {'learning_rate': -0.1, 'scale': 1.0},
    {'learning_rate': 0.1, 'scale': float('nan')},
  ],
  ids=str,
)
def test_refusals(arguments):
  with pytest.raises(ValueError, match='momentum_from_learning_rate got .*accepted are numbers'):
    transforms.momentum_from_learning_rate(**arguments)


def test_is_the_momentum_of_sgd_with_injected_hyperparameters():
  rate = optax.piecewise_constant_schedule(0.008, {2: 0.125})
  momentum = transforms.momentum_from_learning_rate(rate, scale=2.0)
  tx = optax.inject_hyperparams(optax.sgd)(learning_rate=rate, momentum=momentum)
  state, trace = tx.init(jnp.zeros(())), 0.0
  for eta, beta in ((0.008, 0.92), (0.008, 0.92), (0.001, 0.98)):
    updates, state = tx.update(jnp.ones(()), state)
    trace = 1 + beta * trace
    assert float(updates) == pytest.approx(-eta * trace, rel=1e-5)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_scaled_momentum_sgd_by_hand(dtype):
  """p <- b p - lr mean g, x <- x + p: what is carried keeps the rate at which it was made."""
  rate = optax.piecewise_constant_schedule(0.008, {2: 0.125})
  tx = algorithms.scaled_momentum_sgd(rate, axis_name='workers', scale=2.0)
  spmd = runtime.simulate(2).spmd
  rows = jnp.asarray([1.0, 3.0], dtype)
  state, p = spmd(tx.init)(rows), 0.0
  for eta, beta in ((0.008, 0.92), (0.008, 0.92), (0.001, 0.98)):
    updates, after = spmd(tx.update)(rows, state, rows)
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, state)
    state, p = after, beta * p - eta * 2
    np.testing.assert_allclose(
      np.float32(updates), [p, p], rtol=1e-5 if dtype == 'float32' else 0.01
    )


def test_the_best_momentum_follows_the_rate_to_the_power_of_two_thirds():
  """L = (u v - 1 - noise)^2 / 2 drifts along u v = 1 to the flat u = v, fastest at 1 - b ~ lr^2/3.

  The drift is of |u^2 - v^2| to a fifth, over 64 runs that share a seed for all momenta.
  """
  rates = np.float32([0.002, 0.004, 0.008, 0.016])
  left = np.geomspace(0.004, 0.3, 25).astype(np.float32)  # 1 - b
  runs, most = 64, 2000

  @jax.jit
  def steps(rate, momentum):
    def step(carry, key):
      x, p = carry
      noise = jax.random.rademacher(key, (runs,), jnp.float32)
      error = x[0] * x[1] - 1 - noise
      p = momentum * p - rate * error[None] * x[::-1]
      x = x + p
      return (x, p), jnp.mean(jnp.abs(x[0] ** 2 - x[1] ** 2))

    x = jnp.stack([jnp.full(runs, 1.5), jnp.full(runs, 1 / 1.5)])
    keys = jax.random.split(jax.random.key(0), most)
    _, distance = jax.lax.scan(step, (x, jnp.zeros_like(x)), keys)
    arrived = distance < 0.2 * (1.5**2 - 1.5**-2)
    return jnp.where(arrived.any(), jnp.argmax(arrived) + 1, most)

  grid = jax.vmap(jax.vmap(steps, (None, 0)), (0, None))
  taken = np.asarray(grid(rates, 1 - left))
  best, fewest = left[taken.argmin(1)], taken.min(1)
  assert (fewest < most).all()
  slope = lambda y: np.polyfit(np.log(rates), np.log(y), 1)[0]  # noqa: E731
  assert slope(best) == pytest.approx(2 / 3, abs=0.1)
  assert slope(fewest) == pytest.approx(-2 / 3, abs=0.1)
