"""Local updates: fixed points in closed form, recurrences by hand, and what papers measured."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_dsgd import algorithms, runtime, transforms

AXIS, W, D = 'workers', 8, 20
RATE = 0.1


def settled(problem, period, rate=RATE):
  """(mean M_i)^-1 mean M_i b_i, M_i = I - (I - lr A_i)^period, of gradients A_i (x - b_i)."""
  minima = problem.best - np.linalg.solve(problem.A, problem.b[..., None])[..., 0]
  M = np.eye(D) - np.linalg.matrix_power(np.eye(D) - rate * problem.A, period)
  return np.linalg.solve(M.mean(0), np.einsum('wij,wj->i', M, minima) / W)


@pytest.fixture(scope='module')
def biased(quadratics):
  return quadratics(1.0)


def solve(problem, tx, steps):
  return problem.solve(tx, steps, np.float64)


@pytest.mark.parametrize('momentum', [None, 0.5])
def test_one_step_a_round_is_synchronous_sgd(biased, momentum):
  sync = solve(biased, algorithms.allreduce_sgd(RATE, axis_name=AXIS, momentum=momentum), 40)
  for tx in (
    algorithms.local_sgd(RATE, 1, axis_name=AXIS, momentum=momentum),
    algorithms.slow_mo(RATE, 1, axis_name=AXIS, slow_momentum=0.0, momentum=momentum),
  ):
    np.testing.assert_allclose(solve(biased, tx, 40).models, sync.models, rtol=0, atol=1e-13)


def test_local_sgd_settles_where_its_closed_form_says(biased):
  """The bias grows with the period: 0 at one step."""
  bias = []
  for period in (1, 4, 16):
    run = solve(biased, algorithms.local_sgd(RATE, period, axis_name=AXIS), 600 * period)
    np.testing.assert_allclose(run.models[-1], [settled(biased, period)] * W, atol=1e-12)
    bias.append(biased.error(run.models))
  assert bias[0] < 1e-12 < 0.05 < bias[1] < bias[2] / 2


def test_slow_mo_is_faster_and_keeps_the_bias(biased):
  """With a local rate that is too small: at a large one momentum makes it slower."""
  period, rate, rounds = 4, 0.02, {}
  where = settled(biased, period, rate)
  for momentum in (0.0, 0.5, 0.7):
    tx = algorithms.slow_mo(rate, period, axis_name=AXIS, slow_momentum=momentum)
    models = solve(biased, tx, 300 * period).models[period - 1 :: period].mean(1)
    np.testing.assert_allclose(models[-1], where, atol=1e-11)
    far = np.linalg.norm(models - where, axis=1) > 1e-3 * np.linalg.norm(where)
    rounds[momentum] = int(far.nonzero()[0].max()) + 2
  assert max(rounds[0.5], rounds[0.7]) < 0.7 * rounds[0.0]
  assert np.linalg.norm(where - biased.best) > 0.02


def test_post_local_sgd_is_synchronous_until_the_switch(biased):
  """Momentum included: an implementation once lost 7 points of accuracy here."""
  start, period = 12, 5
  schedule = transforms.post_local_period(start, period)
  local = solve(biased, algorithms.local_sgd(RATE, schedule, axis_name=AXIS, momentum=0.9), 30)
  sync = solve(biased, algorithms.allreduce_sgd(RATE, axis_name=AXIS, momentum=0.9), 30)
  np.testing.assert_allclose(local.models[:start], sync.models[:start], rtol=0, atol=1e-13)
  apart = np.ptp(local.models, axis=1).max(-1)
  assert [t for t, gap in enumerate(apart, start=1) if gap < 1e-12] == [*range(1, 13), 17, 22, 27]
  assert apart[start] > 0.01


def test_overlap_moves_by_its_effective_step(biased):
  """Without anchor momentum: y+ = y - (1 - a) lr sum of mean gradients, over 400 rounds."""
  period, pull = 3, 0.6
  tx = algorithms.overlap_local_sgd(RATE, period, axis_name=AXIS, pull=pull, anchor_momentum=0.0)
  models = solve(biased, tx, 400 * period).models
  at = np.concatenate([np.zeros((1, W, D)), models[:-1]])
  mean_gradients = np.stack([biased.gradients(x).mean(0) for x in at])
  sums = mean_gradients.reshape(400, period, D).sum(1)
  y = np.concatenate([np.zeros((1, D)), models[period - 1 :: period].mean(1)])
  np.testing.assert_allclose(np.diff(y, axis=0), -(1 - pull) * RATE * sums, rtol=0, atol=1e-12)
  assert np.abs(np.diff(y, axis=0)[0]).max() > 0.01


@pytest.mark.parametrize('momentum', [None, 0.5])
def test_overlap_by_hand(biased, momentum):
  period, pull, slow, steps = 2, 0.6, 0.7, 24
  tx = algorithms.overlap_local_sgd(
    RATE, period, axis_name=AXIS, pull=pull, anchor_momentum=slow, momentum=momentum
  )
  z, v, trace, t = np.zeros(D), np.zeros((W, D)), np.zeros((W, D)), 0

  def step(x, gradients):
    nonlocal z, v, trace, t
    trace = gradients(x) + (momentum or 0) * trace
    x, t = x - RATE * trace, t + 1
    if t % period == 0:
      x = (1 - pull) * x + pull * z
      v = slow * v + (z - x) / RATE
      z = (z - RATE * v).mean(0)  # arrives a round later
    return x

  np.testing.assert_allclose(
    solve(biased, tx, steps).models, biased.by_hand(step, steps), rtol=0, atol=1e-12
  )


@pytest.mark.parametrize('momentum', [0.0, 0.5])
def test_overlap_that_never_moves_is_refused(momentum):
  """All workers would end a round where it began, so that anchor momentum would see nothing."""
  with pytest.raises(ValueError, match='pull=1.0 and delay=2 of a whole period'):
    algorithms.overlap_local_sgd(RATE, 2, axis_name=AXIS, pull=1.0, anchor_momentum=momentum)


def test_diloco_by_hand(biased):
  """Nesterov momentum on the mean way; the local momentum is neither averaged nor reset."""
  period, steps = 3, 24
  tx = algorithms.diloco(optax.sgd(RATE, momentum=0.5), period, axis_name=AXIS)
  anchor, m, trace, t = np.zeros(D), np.zeros(D), np.zeros((W, D)), 0

  def step(x, gradients):
    nonlocal anchor, m, trace, t
    trace = gradients(x) + 0.5 * trace
    x, t = x - RATE * trace, t + 1
    if t % period == 0:
      delta = anchor - x.mean(0)
      m = delta + 0.9 * m
      x = anchor = anchor - 0.7 * (delta + 0.9 * m)
    return x

  np.testing.assert_allclose(
    solve(biased, tx, steps).models, biased.by_hand(step, steps), rtol=0, atol=1e-12
  )


def test_streaming_diloco_by_hand():
  """Fragments leave after steps 0 and 2 of a round of 4, arrive a step later, and pull half way."""
  rng, steps, workers = np.random.default_rng(0), 14, runtime.simulate(4)
  centers = {name: rng.normal(size=(4, 3)) for name in ('encoder', 'decoder')}
  tx = algorithms.streaming_diloco(
    optax.sgd(RATE), 4, axis_name=AXIS, fragments=2,
    fragment=lambda path, like: [int(path == 'decoder')],
  )  # fmt: skip

  def worker(center):
    def step(carry, _):
      x, state = carry
      updates, state = tx.update(jax.tree.map(jnp.subtract, x, center), state, x)
      x = jax.tree.map(jnp.add, x, updates)
      return (x, state), x

    x = jax.tree.map(jnp.zeros_like, center)
    return jax.lax.scan(step, (x, tx.init(x)), length=steps)[1]

  with jax.enable_x64(True):
    models = workers.spmd(worker)(jax.tree.map(jnp.asarray, centers))
  for name, first in (('encoder', 0), ('decoder', 2)):
    x, anchor, m, pending = np.zeros((4, 3)), np.zeros(3), np.zeros(3), None
    for t in range(steps):
      x = x - RATE * (x - centers[name])
      if pending is not None and t % 4 == first + 1:
        anchor = anchor + pending
        x = (x + anchor) / 2
      if t % 4 == first:
        delta = anchor - x.mean(0)
        m = delta + 0.9 * m
        pending = -0.4 * (delta + 0.9 * m)
      np.testing.assert_allclose(models[name][:, t], x, rtol=0, atol=1e-12)


@pytest.mark.parametrize('fragments', [3, 0, 1.5])
def test_fragments_divide_the_period(fragments):
  with pytest.raises(ValueError, match=f'fragments={fragments}; accepted are divisors of period'):
    algorithms.streaming_diloco(
      optax.sgd(RATE), 10, axis_name=AXIS, fragment=lambda path, like: [0], fragments=fragments
    )


@pytest.mark.parametrize('own', [[], [2], [-1]])
def test_leaves_lie_in_fragments_that_there_are(own):
  tx = algorithms.streaming_diloco(
    optax.sgd(RATE), 10, axis_name=AXIS, fragment=lambda path, like: own, fragments=2
  )
  with pytest.raises(ValueError, match="for leaf 'kernel'; accepted are some of 0 to 1"):
    tx.init({'kernel': jnp.zeros(3)})


def test_sign_momentum_with_one_worker_and_one_step_is_lion(quadratics):
  alone = quadratics(0.0, count=1)
  rate, scale, decay = 0.01, 0.5, 0.2
  ours = algorithms.distributed_sign_momentum(
    optax.sgd(rate), rate, 1, axis_name=AXIS, b1=0.9, b2=0.97, outer_rate=scale, weight_decay=decay
  )
  lion = optax.lion(scale * rate, b1=0.9, b2=0.97, weight_decay=decay)
  np.testing.assert_allclose(
    alone.solve(ours, 50).models, alone.solve(lion, 50).models, rtol=0, atol=2e-6
  )


def test_sign_momentum_by_hand(quadratics):
  """Rounds of three steps of four workers, in units of the rate at the last step of a round."""
  problem, steps = quadratics(1.0, count=4), 24
  rate = lambda count: 0.05 / (1 + 0.1 * count)  # noqa: E731
  tx = algorithms.distributed_sign_momentum(
    optax.sgd(rate), rate, 3, axis_name=AXIS, b1=0.95, b2=0.98, outer_rate=0.8, weight_decay=0.1
  )
  anchor, m, t = np.zeros(D), np.zeros(D), 0

  def step(x, gradients):
    nonlocal anchor, m, t
    x, now, t = x - rate(t) * gradients(x), rate(t), t + 1
    if t % 3 == 0:
      delta = (anchor - x.mean(0)) / now
      c, m = 0.95 * m + 0.05 * delta, 0.98 * m + 0.02 * delta
      x = anchor = anchor * (1 - 0.1 * 0.8 * now) - 0.8 * now * np.sign(c)
    return x

  # The momentum is float32 whatever the parameters are.
  np.testing.assert_allclose(
    solve(problem, tx, steps).models, problem.by_hand(step, steps), rtol=0, atol=1e-12
  )


def noisy(schedules, slope, steps, replicas=512):
  """Mean squares of the mean model of 32 workers, of many one-dimensional problems at once.

  Gradients are slope(x) x plus noise, and rates 2 / (t + 36). A schedule is a list of rounds' steps
  up to the end, which is a meeting: a traced table, so that one program runs all.
  """

  def one(table, key):
    tx = algorithms.local_sgd(
      lambda t: 2 / (t + 36), lambda round_: table[round_ % steps], axis_name=AXIS
    )

    def step(carry, t):
      x, state = carry
      noise = jax.random.normal(jax.random.fold_in(key, t), (replicas,))
      updates, state = tx.update(slope(x) * x + noise, state, x)
      return (x + updates, state), None

    x = jnp.ones(replicas)
    return jax.lax.scan(step, (x, tx.init(x)), jnp.arange(steps))[0][0]

  tables = np.ones((len(schedules), steps), np.int32)
  for table, schedule in zip(tables, schedules, strict=True):
    meetings = np.cumsum(schedule)
    meetings = np.append(meetings[meetings < steps], steps)
    table[: meetings.size] = np.diff(meetings, prepend=0)
  keys = jax.random.split(jax.random.key(0), 32)
  each = jax.vmap(one, in_axes=(None, 0), axis_name=AXIS)
  square = lambda table: jnp.mean(each(table, keys).mean(0) ** 2)  # noqa: E731
  return np.asarray(jax.jit(lambda tables: jax.lax.map(square, tables))(jnp.asarray(tables)))


def test_how_often_workers_must_meet():
  """As many meetings as workers are enough, and where the Hessian is smooth at the optimum one is.

  Where it has a kink, the square root of that many lose a factor 4, and 7 with one. Growing rounds
  are the paper's; equal ones with as many meetings are better here.
  """
  steps, workers = 512, 32

  def growing(meetings):
    period = transforms.growing_period(2 * steps / meetings**2)
    return [int(period(i)) for i in range(meetings)]

  schedules = {
    'every': [1] * steps, 'one': [steps], 'root': growing(6), 'workers': growing(workers),
    'twice': growing(2 * workers), 'fixed': [steps // workers] * workers,
  }  # fmt: skip
  kink = noisy(schedules.values(), lambda x: jnp.where(x > 0, 1.0, 4.0), steps)
  ratio = dict(zip(schedules, kink / kink[0], strict=True))
  assert 5 < ratio['one'] < 9
  assert 3 < ratio['root'] < 5 < ratio['one']
  assert 1.5 < ratio['workers'] < 2.2
  assert 1.2 < ratio['twice'] < ratio['workers'] - 0.2
  assert ratio['fixed'] < ratio['workers'] - 0.1
  smooth = noisy([[1] * steps, [steps]], lambda x: 2.5 - 1.5 * jnp.tanh(x), steps)
  assert smooth[1] < 1.2 * smooth[0]


def of_layers(problem, tx, steps, noise, dtype=np.float32):
  """Models [steps, W, D] of quadratics whose parameters are four layers of five entries."""

  def worker(A, b, key):
    def step(carry, t):
      layers, state = carry
      drawn = noise * jax.random.normal(jax.random.fold_in(key, t), (D,), dtype)
      gradient = A @ (jnp.concatenate(layers) - jnp.asarray(problem.best, dtype)) + b + drawn
      updates, state = tx.update(jnp.split(gradient, 4), state, layers)
      layers = jax.tree.map(jnp.add, layers, updates)
      return (layers, state), jnp.concatenate(layers)

    layers = [jnp.zeros(D // 4, dtype)] * 4
    return jax.lax.scan(step, (layers, tx.init(layers)), jnp.arange(steps))[1]

  rows = jnp.asarray(problem.A, dtype), jnp.asarray(problem.b, dtype)
  keys = jax.random.split(jax.random.key(0), W)
  models = jax.jit(runtime.simulate(W).spmd(worker))(*rows, keys)
  return np.asarray(models, np.float64).swapaxes(0, 1)


def by_layer(path, like):
  """Layer 0 meets in the first step of a round, layer 3 in the last of four."""
  return [int(path)]


def test_layers_meet_before_the_update_of_the_point_before(biased):
  """One step a round averages parameters, and then applies gradients of the un-averaged ones."""
  average = algorithms.dream_ddp(optax.sgd(RATE), 1, axis_name=AXIS, phases=lambda path, like: [0])
  hand = biased.by_hand(lambda x, gradients: x.mean(0) - RATE * gradients(x), 20)
  np.testing.assert_allclose(solve(biased, average, 20).models, hand, rtol=0, atol=1e-12)
  t = 0

  def step(x, gradients):
    nonlocal t
    met = x.copy()
    own = slice(5 * (t % 4), 5 * (t % 4) + 5)
    met[:, own], t = x[:, own].mean(0), t + 1
    return met - RATE * gradients(x)

  phased = algorithms.dream_ddp(optax.sgd(RATE), 4, axis_name=AXIS, phases=by_layer)
  with jax.enable_x64(True):
    models = of_layers(biased, phased, 20, 0.0, np.float64)
  np.testing.assert_allclose(models, biased.by_hand(step, 20), rtol=0, atol=1e-12)


def test_layers_that_meet_in_turn_drift_less_at_the_worst_and_more_on_average(quadratics):
  """The mean model is that of local SGD; the distance of workers has a lower peak, and no zeros."""
  problem, rate = quadratics(1.0, variety=0.1), 0.05
  methods = {
    'sync': algorithms.allreduce_sgd(rate, axis_name=AXIS),
    'local': algorithms.local_sgd(rate, 4, axis_name=AXIS),
    'phased': algorithms.dream_ddp(optax.sgd(rate), 4, axis_name=AXIS, phases=by_layer),
  }
  error, peak, mean = {}, {}, {}
  for name, tx in methods.items():
    models = of_layers(problem, tx, 1200, 0.3)
    error[name] = np.linalg.norm(models[400:].mean(1) - problem.best, axis=-1).mean()
    squares = ((models - models.mean(1, keepdims=True)) ** 2).sum(-1).mean(1)
    peak[name], mean[name] = squares.max() ** 0.5, squares.mean() ** 0.5
  assert max(error.values()) < 1.03 * min(error.values())
  assert peak['phased'] < 0.93 * peak['local']
  assert mean['phased'] > 1.2 * mean['local']


def test_a_layer_that_never_meets_is_refused():
  tx = algorithms.dream_ddp(
    optax.sgd(RATE), 4, axis_name=AXIS, phases=lambda path, like: [1] if 'a' in path else []
  )
  with pytest.raises(ValueError, match="phases \\[\\] for leaf 'b'.* would never meet"):
    tx.init({'a': jnp.zeros(2), 'b': jnp.zeros(2)})
