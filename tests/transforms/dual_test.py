"""Dual ascent: published rates, how approximate and how lazy it may be, Chebyshev's weights."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_dsgd import algorithms, exchange, ledger, runtime, topologies, transforms

AXIS, W, D = 'workers', 8, 10
RING = topologies.ring(W)


def problem():
  """Curvatures H [W, D, D] with eigenvalues from 1 to 10, centers b [W, D], and the optimum."""
  rng = np.random.default_rng(0)
  q = np.linalg.qr(rng.normal(size=(W, D, D)))[0]
  values = np.concatenate(
    [np.ones((W, 1)), rng.uniform(1, 10, (W, D - 2)), np.full((W, 1), 10.0)], axis=1
  )
  H = np.einsum('wij,wj,wkj->wik', q, values, q)
  b = 3 * rng.normal(size=(W, D))
  return H, b, np.linalg.solve(H.sum(0), np.einsum('wij,wj->i', H, b))


@functools.cache
def ascend(steps=250, **arguments):
  """Largest errors after each step, in double precision, the models and the last state."""
  H, b, best = problem()
  arguments = {'inner_steps': 10, **arguments}
  tx = algorithms.lazy_dual_ascent(
    RING, axis_name=AXIS, convexity=1.0, smoothness=10.0, **arguments
  )

  def worker(H, b):
    grad_fn = lambda x: H @ (x - b)  # noqa: E731

    def step(carry, _):
      x, state = carry
      updates, state = tx.update(grad_fn(x), state, x, grad_fn=grad_fn)
      return (x + updates, state), x + updates

    x = jnp.zeros(D)
    (_, state), models = jax.lax.scan(step, (x, tx.init(x)), length=steps)
    return models, state

  with jax.enable_x64(True):
    models, state = jax.jit(runtime.simulate(W).spmd(worker))(H, b)
  models = np.asarray(models).swapaxes(0, 1)
  return np.abs(models - best).max(axis=(1, 2)), models, state


def iterations(errors, below=1e-6):
  assert (errors < below).any()
  return int(np.argmax(errors < below))


def exact_by_hand(steps):
  """SSDA with L = I - W, and argmin f - <x, .> = b + H^-1 x."""
  H, b, best = problem()
  L = np.eye(W) - RING.matrix()
  values = np.linalg.eigvalsh(L)
  q = np.sqrt(10 * values[-1] / values[1])
  x, y, models = np.zeros((W, D)), np.zeros((W, D)), []
  for _ in range(steps):
    models.append(b + np.linalg.solve(H, x[..., None])[..., 0])
    after = x - L @ models[-1] / values[-1]
    x, y = after + (q - 1) / (q + 1) * (after - y), after
  return np.stack(models)


def test_exact_solutions_are_ssda_with_a_linear_rate():
  errors, models, _ = ascend(inner_steps=100)
  np.testing.assert_allclose(models, exact_by_hand(250), atol=1e-8)
  assert iterations(errors) == 114
  # A line in the logarithm: as many again for as much again.
  assert iterations(errors, 1e-11) < 2 * 114


def test_few_inner_steps_are_as_good_until_they_are_too_few():
  exact = iterations(ascend(inner_steps=100)[0])
  assert iterations(ascend()[0]) == exact
  assert iterations(ascend(inner_steps=3)[0]) > 1.4 * exact
  diverging = ascend(inner_steps=2)[0]
  assert diverging[-1] > 0.1


def test_chebyshev_rounds_need_fewer_dual_steps():
  errors, _, state = ascend(rounds=3)
  assert iterations(errors) < 0.55 * iterations(ascend()[0])
  # Three rounds of a ring, eight bytes an entry.
  assert ledger.bytes_sent(state).tolist() == [250 * 3 * 2 * 8 * D] * W


def test_a_threshold_of_zero_is_bitwise_that_without_a_rule(monkeypatch):
  """Operation by operation: XLA fuses, and so rounds, two programs differently."""
  send = exchange.send
  with jax.disable_jit():
    _, lazy, state = ascend(steps=5)
    monkeypatch.setattr(exchange, 'send', lambda *args, trigger, **kwargs: send(*args, **kwargs))
    _, always, same = ascend.__wrapped__(steps=5)
  np.testing.assert_array_equal(lazy, always)
  assert ledger.bytes_sent(state).tolist() == ledger.bytes_sent(same).tolist()


def test_some_laziness_saves_messages_and_too_much_diverges():
  sent = lambda state: ledger.bytes_sent(state).mean()  # noqa: E731
  errors, _, state = ascend()
  always, exact = sent(state), iterations(errors)
  for lazy, share in ((0.01, 0.8), (0.1, 0.6)):
    errors, _, state = ascend(lazy=lazy)
    assert iterations(errors) < 1.15 * exact
    assert sent(state) < share * always
  assert ascend(lazy=10.0)[0][-1] > 1e3


def test_prices_sum_to_zero():
  _, _, state = ascend(lazy=0.1)
  price = np.asarray(state.price)
  assert np.abs(price).max() > 1
  np.testing.assert_allclose(price.sum(0), 0, atol=1e-10)


@pytest.mark.parametrize('rounds', [1, 2, 5])
def test_chebyshev_is_the_smallest_polynomial(rounds):
  """T_k(w / s) / T_k(1 / s), by NumPy's own Chebyshev polynomials."""
  w = np.linalg.eigvalsh(RING.matrix())
  s = np.abs(w[:-1]).max()
  before, mixed = np.ones(W), w
  for weight in transforms.chebyshev(RING, rounds)[1:]:
    before, mixed = mixed, before + weight * (w * mixed - before)
  polynomial = np.polynomial.chebyshev.Chebyshev.basis(rounds)
  np.testing.assert_allclose(mixed, polynomial(w / s) / polynomial(1 / s), atol=1e-12)
  assert mixed[-1] == pytest.approx(1)


def test_chebyshev_of_an_exact_mean_is_plain():
  assert transforms.chebyshev(topologies.complete(4), 3) == (1.0, 1.0, 1.0)
  assert transforms.chebyshev(topologies.ring(1), 2) == (1.0, 1.0)


@pytest.mark.parametrize(
  ('topology', 'arguments', 'message'),
  [
    (topologies.directed_ring(8), {}, "'directed_ring' of period 1; accepted are symmetric"),
    (topologies.one_peer_hypercube(8), {}, 'of period 3; accepted are symmetric'),
    (RING, {'convexity': 0.0}, r'convexity=0\.0'),
    (RING, {'convexity': 20.0}, r'smoothness=10\.0; accepted are 0 < convexity <= smoothness'),
    (RING, {'inner_steps': 0}, 'inner_steps=0; accepted are integers >= 1'),
    (RING, {'window': 1.5}, r'window=1\.5; accepted are integers >= 1'),
    (RING, {'lazy': -1.0}, r'lazy=-1\.0; accepted are numbers >= 0'),
  ],
)
def test_bad_arguments_are_refused(topology, arguments, message):
  given = {'convexity': 1.0, 'smoothness': 10.0, 'inner_steps': 10, **arguments}
  with pytest.raises(ValueError, match=f'ascend_dual got .*{message}'):
    transforms.ascend_dual(topology, axis_name=AXIS, **given)


def test_chebyshev_refuses_no_rounds():
  with pytest.raises(ValueError, match='chebyshev got rounds=0'):
    transforms.chebyshev(RING, 0)


def test_an_inner_problem_is_needed():
  tx = algorithms.lazy_dual_ascent(RING, axis_name=AXIS, convexity=1.0, smoothness=10.0)
  state = tx.init(jnp.zeros(D))
  for params, extra in ((jnp.zeros(D), {}), (None, {'grad_fn': optax.identity})):
    with pytest.raises(ValueError, match='ascend_dual solves an inner problem'):
      tx.update(jnp.zeros(D), state, params, **extra)
