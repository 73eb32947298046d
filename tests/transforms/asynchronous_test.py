"""What servers and late workers do: delayed Nesterov, discounts, compensation, prox and SVRG."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_dsgd import transforms

N, RATE, BETA = 4, 0.7, 0.9
PUSHES = np.random.default_rng(0).normal(size=(3 * N, 5))


def walked(tx, pushes, x=None):
  """Parameters after each push, in double precision."""
  with jax.enable_x64(True):
    x = jnp.zeros(pushes.shape[1]) if x is None else jnp.asarray(x)

    def step(carry, push):
      x, state = carry
      updates, state = tx.update(push, state, x)
      x = optax.apply_updates(x, updates)
      return (x, state), x

    return np.asarray(jax.lax.scan(step, (x, tx.init(x)), jnp.asarray(pushes))[1])


def nesterov(means):
  x, m, models = np.zeros(5), np.zeros(5), []
  for mean in means:
    m = BETA * m + mean
    x = x - RATE * (BETA * m + mean)
    models.append(x)
  return np.stack(models)


def test_a_block_of_delayed_nesterov_is_one_nesterov_step():
  tx = transforms.delayed_nesterov(RATE, workers=N, momentum=BETA)
  blocks = walked(tx, PUSHES)[N - 1 :: N]
  right = nesterov(PUSHES.reshape(3, N, 5).mean(axis=1))
  np.testing.assert_allclose(blocks, right, rtol=0, atol=2e-15)
  assert np.abs(blocks[0] - right[0]).max() < 4e-16


def test_a_spread_momentum_is_not():
  """c = 1/N applies the old momentum N - 1 times before it is renewed: a choice, not a detail."""
  tx = transforms.delayed_nesterov(RATE, workers=N, momentum=BETA, spread=1 / N)
  got = walked(tx, PUSHES)
  right = nesterov(PUSHES.reshape(3, N, 5).mean(axis=1))
  assert np.abs(got[N - 1 :: N] - right).max() > 0.3
  x, m, total = np.zeros(5), np.zeros(5), np.zeros(5)
  for t, push in enumerate(PUSHES):
    total = total + push
    share = 1 / N
    if (t + 1) % N == 0:
      m, total, share = BETA * m + total / N, np.zeros(5), 1 - 1 + 1 / N
    x = x - RATE * (share * BETA * m + push / N)
    np.testing.assert_allclose(got[t], x, atol=1e-14)


def test_one_worker_is_plain_nesterov():
  tx = transforms.delayed_nesterov(RATE, workers=1, momentum=BETA)
  plain = walked(optax.sgd(RATE, momentum=BETA, nesterov=True), PUSHES)
  np.testing.assert_allclose(walked(tx, PUSHES), plain, atol=1e-14)


def test_what_is_late_counts_less():
  tx = transforms.discount_staleness(0.5)
  for staleness, factor in ((0, 1.0), (3, 0.5), (15, 0.25)):
    control = transforms.Control(staleness=jnp.int32(staleness))
    updates, _ = tx.update(jnp.array([4.0, -8.0]), tx.init(None), control=control)
    assert updates.tolist() == [4.0 * factor, -8.0 * factor]


def test_compensation_by_hand():
  tx = transforms.compensate_delay(0.5)
  control = transforms.Control(view=jnp.array([1.0, 2.0]))
  updates, _ = tx.update(
    jnp.array([1.0, 2.0]), tx.init(None), jnp.array([3.0, 1.0]), control=control
  )
  assert updates.tolist() == [1 + 0.5 * 1 * 2, 2 + 0.5 * 4 * -1]


def soft(x, rate):
  return jax.tree.map(lambda x: jnp.sign(x) * jnp.maximum(jnp.abs(x) - 0.3 * rate, 0), x)


def test_the_proximal_step_rests_at_the_optimum():
  """min |x - b|^2 / 2 + 0.3 |x|_1 has its optimum at the soft threshold of b."""
  b = jnp.array([1.0, 0.2, -2.0, -0.1])
  best = jnp.array([0.7, 0.0, -1.7, 0.0])
  tx = optax.chain(optax.sgd(0.25), transforms.proximal(soft, 0.25))
  updates, _ = tx.update(best - b, tx.init(best), best)
  np.testing.assert_allclose(updates, 0, atol=1e-7)
  models = walked(tx, np.zeros((1, 4)), best + 1)
  np.testing.assert_allclose(models[0], np.asarray(best) + 1 - 0.075 * np.sign(best + 1), atol=1e-6)


def test_variance_is_gone_at_the_snapshot_and_renewed_on_time():
  rng = np.random.default_rng(1)
  A, b = rng.uniform(1, 2, (6, 3)), rng.normal(size=(6, 3))
  full = lambda x: jnp.mean(jnp.asarray(A) * (x[None] - jnp.asarray(b)), axis=0)  # noqa: E731
  with jax.enable_x64(True):
    tx = transforms.reduce_variance(full, 3)
    x = jnp.zeros(3)
    state, snapshot = tx.init(x), np.zeros(3)
    for t in range(7):
      i = t % 6
      grad_fn = lambda x, i=i: jnp.asarray(A[i]) * (x - jnp.asarray(b[i]))  # noqa: E731
      if t % 3 == 0:
        snapshot = np.asarray(x)
      g, state = tx.update(grad_fn(x), state, x, grad_fn=grad_fn)
      right = A[i] * (x - snapshot) + (A * (snapshot - b)).mean(axis=0)
      np.testing.assert_allclose(g, right, atol=1e-14)
      x = x - 0.3 * g


@pytest.mark.parametrize(
  ('build', 'message'),
  [
    (lambda: transforms.delayed_nesterov(0.1, workers=0), 'workers=0; accepted are integers >= 1'),
    (lambda: transforms.delayed_nesterov(0.1, workers=4, spread=0.3), r'spread=0\.3; .* 0 to 1/4'),
    (lambda: transforms.discount_staleness(-1.0), r'power=-1\.0; accepted are numbers >= 0'),
    (lambda: transforms.compensate_delay(float('nan')), 'strength=nan'),
    (lambda: transforms.reduce_variance(lambda x: x, 0), 'period=0; accepted are integers >= 1'),
  ],
)
def test_bad_arguments_are_refused(build, message):
  with pytest.raises(ValueError, match=message):
    build()


@pytest.mark.parametrize(
  ('tx', 'message'),
  [
    (transforms.discount_staleness(), r'discount_staleness needs control\.staleness'),
    (transforms.compensate_delay(1.0), r'compensate_delay needs control\.view'),
    (transforms.proximal(soft, 0.1), 'proximal moves parameters'),
    (
      transforms.reduce_variance(lambda x: x, 1),
      'reduce_variance compares gradients at two points',
    ),
  ],
)
def test_what_is_not_given_is_asked_for(tx, message):
  with pytest.raises(ValueError, match=message):
    tx.update(jnp.zeros(2), tx.init(jnp.zeros(2)))
