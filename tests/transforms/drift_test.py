"""Control variates, a pull and recursive estimates, as transforms: by hand and inside of chains."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_dsgd import ledger, runtime, transforms

AXIS, W, D, PERIOD, RATE = 'workers', 4, 3, 2, 0.1
FOUR = runtime.simulate(W)


def outer():
  return optax.chain(transforms.mean_over(AXIS), optax.sgd(1.0))


def test_variates_are_mean_gradients_of_those_who_take_part():
  """Three rounds in which two of four are active, on gradients that are drawn, by hand."""
  rng, steps = np.random.default_rng(0), 3 * PERIOD
  gradients = rng.normal(size=(steps, W, D)).astype(np.float32)
  active = np.array([[1, 1, 0, 0], [0, 1, 1, 0], [0, 1, 0, 1]], bool)
  inner = optax.chain(transforms.correct_drift(), optax.sgd(RATE))
  renew = transforms.renew_drift_correction(AXIS)
  tx = transforms.local_steps(inner, outer(), PERIOD, at_meeting=renew)
  update = FOUR.spmd(lambda g, s, x, on: tx.update(g, s, x, control=transforms.Control(active=on)))
  x = jnp.zeros((W, D))
  state = FOUR.spmd(tx.init)(x)
  own, shared, place = np.zeros((W, D)), np.zeros(D), np.zeros(D)
  for r in range(3):
    way = np.zeros((W, D))
    for g in gradients[r * PERIOD : (r + 1) * PERIOD]:
      updates, state = update(g, state, x, jnp.asarray(active[r]))
      x = x + updates
      way += g - own + shared
    place = place - RATE * way[active[r]].mean(0)
    own = np.where(active[r][:, None], own - shared + way / PERIOD, own)
    shared = own.mean(0)  # of all four, not of the two
    np.testing.assert_allclose(x, [place] * W, atol=1e-6)
    drift = state.inner[0]
    np.testing.assert_allclose(drift.own, own, atol=1e-5)
    np.testing.assert_allclose(drift.shared, [shared] * W, atol=1e-5)
    assert not np.any(drift.total) and drift.steps.tolist() == [0] * W
  # A mean of models with 4 bytes of weights, and one of variates, a round.
  assert ledger.bytes_sent(state).tolist() == [3 * (4 * D + 4 + 4 * D)] * W


def test_variates_are_the_mean_gradients_of_a_round():
  """With equal local gradients and all workers active: c_i is the mean of g_i, c that of all."""
  gradients = jnp.arange(W * D, dtype=jnp.float32).reshape(W, D)
  inner = optax.chain(transforms.correct_drift(), optax.sgd(RATE))
  renew = transforms.renew_drift_correction(AXIS)
  tx = transforms.local_steps(inner, outer(), PERIOD, at_meeting=renew)
  x = jnp.zeros((W, D))
  state, update = FOUR.spmd(tx.init)(x), FOUR.spmd(tx.update)
  for _ in range(2 * PERIOD):
    updates, state = update(gradients, state, x)
    x = x + updates
  np.testing.assert_allclose(state.inner[0].own, gradients, atol=1e-5)
  updates, _ = update(gradients, state, x)
  # From here on all workers step along the mean gradient: g - c_i + c.
  np.testing.assert_allclose(updates, [-RATE * np.asarray(gradients).mean(0)] * W, atol=1e-6)


WRAPPED = {
  'chain': lambda tx: optax.chain(optax.identity(), optax.chain(tx, optax.sgd(RATE))),
  'masked': lambda tx: optax.chain(optax.masked(tx, {'a': True, 'b': False}), optax.sgd(RATE)),
  'injected': lambda tx: optax.chain(
    optax.inject_hyperparams(lambda unused: tx)(1.0), optax.sgd(RATE)
  ),
}


@pytest.mark.parametrize('name', WRAPPED)
def test_a_round_is_renewed_wherever_the_state_is(name):
  """The pull is to where the last meeting led, found in chains, masks and injected states."""
  inner = WRAPPED[name](transforms.pull_to_start(0.5))
  tx = transforms.local_steps(inner, outer(), PERIOD, at_meeting=transforms.renew_start)
  targets = jnp.arange(4.0 * D).reshape(W, D)
  x = {'a': jnp.zeros((W, D)), 'b': jnp.zeros((W, D))}
  hand = {'a': np.zeros((W, D)), 'b': np.zeros((W, D))}
  start = {name: leaf.copy() for name, leaf in hand.items()}
  state, update = FOUR.spmd(tx.init)(x), FOUR.spmd(tx.update)
  for t in range(3 * PERIOD):
    updates, state = update(jax.tree.map(lambda x: x - targets, x), state, x)
    x = jax.tree.map(jnp.add, x, updates)
    for leaf in hand:
      pull = 0.0 if name == 'masked' and leaf == 'b' else 0.5
      g = hand[leaf] - np.asarray(targets) + pull * (hand[leaf] - start[leaf])
      hand[leaf] = hand[leaf] - RATE * g
      if t % PERIOD == PERIOD - 1:
        hand[leaf] = start[leaf] = np.tile(hand[leaf].mean(0), (W, 1))
      np.testing.assert_allclose(x[leaf], hand[leaf], rtol=1e-5, atol=1e-5)


def recursive(stage):
  inner = optax.chain(transforms.recursive_gradients(axis_name=AXIS, stage=stage), optax.sgd(RATE))
  return transforms.local_steps(inner, outer(), PERIOD, at_meeting=transforms.renew_recursion)


def test_estimates_by_hand():
  """Stages of two rounds of two steps, gradients A_w (x - c_w) whose A_w differ."""
  rng = np.random.default_rng(0)
  A, c = rng.uniform(0.5, 2, size=(W, D)), rng.normal(size=(W, D))
  tx = recursive(2)

  def step(x, state, A, c):
    grad_fn = lambda x: A * (x - c)  # noqa: E731
    updates, state = tx.update(grad_fn(x), state, x, grad_fn=grad_fn)
    return x + updates, state

  rows = jnp.asarray(A, jnp.float32), jnp.asarray(c, jnp.float32)
  x = jnp.zeros((W, D))
  state, run = FOUR.spmd(tx.init)(x), FOUR.spmd(step)
  y = start = previous = u = v = np.zeros((W, D))
  for t in range(10):
    x, state = run(x, state, *rows)
    g = lambda x: A * (x - c)  # noqa: E731
    if t % PERIOD == 0:
      anew = t % (2 * PERIOD) == 0
      u = v = np.tile((g(y) if anew else v + g(y) - g(start)).mean(0), (W, 1))
      start = y
    else:
      u = u + g(y) - g(previous)
    previous, y = y, y - RATE * u
    if t % PERIOD == PERIOD - 1:
      y = np.tile(y.mean(0), (W, 1))
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
  # Once a round the estimate and once the model, and an estimate in the first step of a round.
  assert ledger.bytes_sent(state).tolist() == [5 * 2 * 4 * D] * W


@pytest.mark.parametrize('stage', [0, -1, True, 1.5, None], ids=repr)
def test_refused_stages(stage):
  with pytest.raises(ValueError, match=f'stage={stage!r}; accepted are integers >= 1'):
    recursive(stage)


def test_two_points_need_gradients():
  tx = transforms.recursive_gradients(axis_name=AXIS, stage=1)
  with pytest.raises(ValueError, match='recursive_gradients compares gradients at two points'):
    tx.update(jnp.zeros(D), tx.init(jnp.zeros(D)), jnp.zeros(D))


@pytest.mark.parametrize('strength', [-0.1, float('nan')])
def test_refused_strengths(strength):
  with pytest.raises(ValueError, match=f'strength={strength!r}; accepted are numbers >= 0'):
    transforms.pull_to_start(strength)
