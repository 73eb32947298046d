"""Federated methods: weights, unequal work, control variates and recursive estimates."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_dsgd import algorithms, runtime, transforms

AXIS, W, D = 'workers', 8, 20
RATE = 0.1
EXAMPLES = np.array([1, 1, 2, 4, 8, 16, 16, 16])  # 64: float32 holds their shares


@pytest.fixture(scope='module')
def skewed(quadratics):
  return quadratics(1.0)


def solve(problem, tx, steps):
  return problem.solve(tx, steps, np.float64)


def scalars(tx, gradient, start, steps, control=None):
  """Of one number a worker and its `gradient(x, worker)`: models [steps, W], and the state."""
  rows, workers = jnp.asarray(start, jnp.float32), runtime.simulate(len(start))

  def step(x, state, worker, row):
    updates, state = tx.update(gradient(x, worker), state, x, control=row)
    return x + updates, state

  step, state, models = workers.spmd(step), workers.spmd(tx.init)(rows), []
  for _ in range(steps):
    rows, state = step(rows, state, jnp.arange(len(start)), control)
    models.append(np.asarray(rows))
  return np.stack(models), state


@pytest.mark.parametrize('order', [(0, 1), (1, 0)])
@pytest.mark.parametrize(('examples', 'right'), [((1, 3), 4.0), (None, 3.0), ((2.0, 2.0), 3.0)])
def test_clients_count_by_their_examples(order, examples, right):
  """Clients at 1 and 5 of 1 and 3 examples: 4, not 3, and their order does not matter."""
  ends = jnp.asarray([1.0, 5.0])[jnp.asarray(order)]
  examples = None if examples is None else [examples[i] for i in order]
  tx = algorithms.fed_avg(1.0, 1, axis_name=AXIS, examples=examples)
  models, _ = scalars(tx, lambda x, worker: x - ends[worker], [0.0, 0.0], 1)
  np.testing.assert_allclose(models[0], right, rtol=1e-6)


def test_one_full_step_of_all_is_weighted_gradient_descent(skewed):
  run = solve(skewed, algorithms.fed_avg(RATE, 1, axis_name=AXIS, examples=EXAMPLES), 50)
  hand = skewed.by_hand(lambda x, g: x - RATE * EXAMPLES @ g(x) / 64, 50)
  np.testing.assert_allclose(run.models, hand, rtol=0, atol=1e-12)
  plain = solve(skewed, algorithms.fed_avg(RATE, 1, axis_name=AXIS), 50)
  hand = skewed.by_hand(lambda x, g: x - RATE * g(x).mean(0), 50)
  np.testing.assert_allclose(plain.models, hand, rtol=0, atol=1e-12)


def test_more_local_work_takes_fewer_rounds_to_a_higher_floor(skewed):
  """Rounds to a tenth of the first error, and the error in the end, for 1, 5, 20 and 100 steps."""
  rounds, floor = [], []
  for period in (1, 5, 20, 100):
    tx = algorithms.fed_avg(0.01, period, axis_name=AXIS)
    models = solve(skewed, tx, max(60 * period, 3000)).models[period - 1 :: period, 0]
    errors = np.linalg.norm(models - skewed.best, axis=1)
    far = errors > 0.1 * np.linalg.norm(skewed.best)
    rounds.append(int(far.nonzero()[0].max()) + 2)
    floor.append(errors[-1])
  assert rounds[0] > 4 * rounds[1] > 12 * rounds[2]
  assert rounds[2] > 2 * rounds[3]
  assert floor[0] < 1e-12 < 0.01 < floor[1] < floor[2] / 3
  assert floor[2] < floor[3] / 3


def test_clients_take_steps_of_their_own_by_hand(skewed):
  """Client w takes the first w of 7 steps, so that client 0 takes none."""
  period, rounds = 7, 3
  hand, x = [], np.zeros((W, D))
  for _ in range(rounds):
    for k in range(period):
      works = np.arange(W)[:, None] > k
      x = np.where(works, x - RATE * skewed.gradients(x), x)
      if k == period - 1:
        x = np.broadcast_to(EXAMPLES @ x / 64, x.shape)
      hand.append(x)
  tx = algorithms.fed_avg(RATE, period, axis_name=AXIS, examples=EXAMPLES, steps=range(W))
  run = solve(skewed, tx, period * rounds)
  np.testing.assert_allclose(run.models, hand, rtol=0, atol=1e-12)


def test_places_in_a_round_are_filled_through_control():
  """A place has the weight and the steps of the client that fills it; an empty one has neither.

  Gradients are -1.5, -3.5 and NaN, at rate 1: the clients end at 1.5 and 7.
  """
  row = transforms.Control(
    active=jnp.array([True, True, False]),
    weight=jnp.array([2.0, 1.0, 5.0]),
    steps=jnp.array([1, 2, 0]),
  )
  slope = jnp.array([1.5, 3.5, jnp.nan])
  tx = algorithms.fed_avg(1.0, 2, axis_name=AXIS)
  models, _ = scalars(tx, lambda x, worker: -slope[worker], [0.0] * 3, 2, row)
  assert models[0].tolist() == [1.5, 3.5, 0]
  np.testing.assert_allclose(models[1], (2 * 1.5 + 7.0) / 3, rtol=1e-6)


def test_a_round_that_nobody_takes_part_in_keeps_each_model():
  row = transforms.Control(weight=jnp.zeros(2))
  tx = algorithms.fed_avg(1.0, 2, axis_name=AXIS)
  models, state = scalars(tx, lambda x, worker: -1.0 - worker, [0.0, 0.0], 2, row)
  assert models[-1].tolist() == [2, 4]
  assert state.round.tolist() == [1, 1]


@pytest.mark.parametrize('steps', [[1, -1], [1.0, 2.0], 3], ids=repr)
def test_refused_steps(steps):
  with pytest.raises(ValueError, match='accepted is one integer >= 0 a worker'):
    algorithms.fed_avg(RATE, 2, axis_name=AXIS, steps=steps)


def test_scaffold_by_the_numbers():
  """One of four clients takes two steps of 0.5 along gradient 1, from 1 to 0: c_0 = 1, c = 1/4."""
  row = transforms.Control(active=jnp.array([True, False, False, False]))
  tx = algorithms.scaffold(0.5, 2, axis_name=AXIS)
  models, state = scalars(tx, lambda x, worker: jnp.ones(()), [1.0] * 4, 2, row)
  drift = optax.tree.get(state, 'inner')[0]
  assert models[-1].tolist() == [0] * 4
  assert drift.own.tolist() == [1, 0, 0, 0]
  assert drift.shared.tolist() == [0.25] * 4
  # The correction is g - c_i + c: 0.25 on the client that was drawn, and 1.25 on the others.
  updates = runtime.simulate(4).spmd(tx.update)(jnp.ones(4), state, jnp.asarray(models[-1]))[0]
  np.testing.assert_allclose(updates, [-0.125, -0.625, -0.625, -0.625])


def test_scaffold_settles_at_the_optimum(skewed):
  """Where local SGD is biased."""
  scaffold = solve(skewed, algorithms.scaffold(0.02, 8, axis_name=AXIS), 8 * 600)
  local = solve(skewed, algorithms.local_sgd(0.02, 8, axis_name=AXIS), 8 * 600)
  np.testing.assert_allclose(scaffold.models[-1], [skewed.best] * W, atol=1e-12)
  assert skewed.error(local.models) > 0.05
  own = optax.tree.get(scaffold.state, 'own')
  np.testing.assert_allclose(own, skewed.gradients(np.stack([skewed.best] * W)), atol=1e-10)


def test_fed_prox_by_hand(skewed):
  start, t = np.zeros((W, D)), 0

  def step(x, gradients):
    nonlocal start, t
    x, t = x - RATE * (gradients(x) + 0.7 * (x - start)), t + 1
    if t % 4 == 0:
      x = start = np.broadcast_to(x.mean(0), x.shape)
    return x

  run = solve(skewed, algorithms.fed_prox(RATE, 4, axis_name=AXIS, strength=0.7), 20)
  np.testing.assert_allclose(run.models, skewed.by_hand(step, 20), rtol=0, atol=1e-12)


@pytest.mark.parametrize('name', ['adam', 'yogi'])
def test_adaptive_servers_by_hand(skewed, name):
  """Moments of the pseudo-gradient, both with optax's correction of their bias."""
  rate, b1, b2, eps = 0.05, 0.9, 0.99, 1e-3
  outers = {
    'adam': optax.adam(rate, b1, b2, eps),
    'yogi': optax.chain(
      optax.scale_by_yogi(b1, b2, eps, initial_accumulator_value=0.0), optax.scale(-rate)
    ),
  }
  anchor, m, v, t = np.zeros(D), np.zeros(D), np.zeros(D), 0

  def step(x, gradients):
    nonlocal anchor, m, v, t
    x, t = x - RATE * gradients(x), t + 1
    if t % 4 == 0:
      delta, n = anchor - x.mean(0), t // 4
      m = b1 * m + (1 - b1) * delta
      if name == 'adam':
        v = b2 * v + (1 - b2) * delta**2
      else:
        v = v - (1 - b2) * np.sign(v - delta**2) * delta**2
      x = anchor = anchor - rate * (m / (1 - b1**n)) / (np.sqrt(v / (1 - b2**n)) + eps)
    return x

  run = solve(skewed, algorithms.fed_opt(RATE, outers[name], 4, axis_name=AXIS), 40)
  np.testing.assert_allclose(run.models, skewed.by_hand(step, 40), rtol=0, atol=1e-10)


def test_recursive_estimates_with_equal_hessians_are_gradient_descent(quadratics):
  """K local steps are K steps on the common loss, whatever the minima: K times fewer rounds."""
  problem = quadratics(2.0, variety=0.0)
  tx = algorithms.bvr_l_sgd(RATE, 16, axis_name=AXIS, stage=10**6)
  run = solve(problem, tx, 16 * 6)
  hand = problem.by_hand(lambda x, gradients: x - RATE * gradients(x).mean(0), 16 * 6)
  np.testing.assert_allclose(run.models, hand, rtol=0, atol=1e-12)


def test_recursive_estimates_do_not_stall_where_hessians_differ(quadratics):
  """Where FedAvg stalls, at a floor that grows with the difference of Hessians."""
  floors = []
  for variety in (0.1, 0.5):
    problem = quadratics(2.0, variety=variety)
    bvr = solve(problem, algorithms.bvr_l_sgd(0.05, 16, axis_name=AXIS, stage=10**6), 16 * 100)
    average = solve(problem, algorithms.fed_avg(0.05, 16, axis_name=AXIS), 16 * 100)
    np.testing.assert_allclose(bvr.models[-1], [problem.best] * W, atol=1e-12)
    floors.append(problem.error(average.models))
  assert 0.05 < floors[0] < floors[1] / 3


def test_recursive_estimates_of_one_step_are_sarah(skewed):
  """v <- v + mean g(x_t) - mean g(x_t-1), of one mini-batch at both points, anew every 5 steps."""
  rng, steps, stage = np.random.default_rng(0), 23, 5
  scale = rng.uniform(0.5, 1.5, size=(steps, W))  # of a step's batch: its Hessian
  noise = rng.normal(size=(steps, W, D))

  def batch(t, x):
    return scale[t][:, None] * skewed.gradients(x) + noise[t]

  tx = algorithms.bvr_l_sgd(RATE, 1, axis_name=AXIS, stage=stage)

  def worker(A, b, scale, noise):
    def step(carry, drawn):
      x, state = carry
      grad_fn = lambda x: drawn[0] * (A @ (x - jnp.asarray(skewed.best)) + b) + drawn[1]  # noqa: E731
      updates, state = tx.update(grad_fn(x), state, x, grad_fn=grad_fn)
      return (x + updates, state), x + updates

    x = jnp.zeros(D)
    return jax.lax.scan(step, (x, tx.init(x)), (scale, noise))[1]

  with jax.enable_x64(True):
    rows = (skewed.A, skewed.b, scale.T, noise.swapaxes(0, 1))
    models = runtime.simulate(W).spmd(worker)(*map(jnp.asarray, rows))
  x = before = v = np.zeros((W, D))
  for t in range(steps):
    change = (batch(t, x) - batch(t, before)).mean(0)
    v = batch(t, x).mean(0) if t % stage == 0 else v + change
    before, x = x, x - RATE * v
    np.testing.assert_allclose(models[:, t], x, rtol=0, atol=1e-10)
