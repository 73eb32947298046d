"""Asynchronous methods on replayed traces: what their papers claim, and where they do not win."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_dsgd import algorithms, clusters, runtime, servers, transforms
from jax_dsgd import simulation as sim

# The four speeds of asynchronous local SGD, and a quadratic a shard of data.
FOUR = clusters.Cluster('toy', tuple(map(clusters.constant, (0.58, 0.75, 1.51, 3.33))))
RNG = np.random.default_rng(0)
CURVES, CENTERS = RNG.uniform(0.5, 1.5, (4, 8)), RNG.normal(size=(4, 8))
BEST = (CURVES * CENTERS).sum(axis=0) / CURVES.sum(axis=0)
SGD = optax.sgd(0.005)


def loss(x):
  return 0.5 * (CURVES * (x[..., None, :] - CENTERS) ** 2).sum(-1).mean(-1)


def noisy(x, work):
  key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), work.shard), work.count)
  curves, centers = jnp.asarray(CURVES, x.dtype), jnp.asarray(CENTERS, x.dtype)
  return curves[work.shard] * (x - centers[work.shard]) + 0.3 * jax.random.normal(key, x.shape)


def local_updates(until=800.0, **options):
  return sim.simulate_events(FOUR, sim.dynamic_local_updates(50, **options), until=until)


def histories(trace, method, rates=(0.7, 0.07)):
  """Server parameters after each event, for each outer rate: [rates, E, 8]."""

  def history(rate):
    record = lambda x: x  # noqa: E731
    return sim.replay_events(trace, method(rate), noisy, jnp.full(8, 3.0), record=record).history

  return np.asarray(jax.vmap(history)(jnp.array(rates)), float)


def excess(history):
  return (loss(history) - loss(BEST))[..., -10:].mean(-1)


def nesterov(rate, *before):
  """The naive server: momentum at every push, whose weight is sqrt(K) / K."""
  outer = optax.chain(*before, optax.scale(0.5), optax.sgd(rate, momentum=0.9, nesterov=True))
  return servers.ParameterServer(SGD, outer)


def delayed(rate):
  return algorithms.async_local_sgd(SGD, 4, outer_rate=rate)


def test_delayed_nesterov_with_fewer_steps_of_the_slow_is_flat_in_the_rate():
  free, fewer = local_updates(least=50), local_updates()
  assert fewer.pushes.sum() > 1.5 * free.pushes.sum()
  naive, dn, both = (
    excess(histories(trace, method))
    for trace, method in ((free, nesterov), (free, delayed), (fewer, delayed))
  )
  first = loss(np.full(8, 3.0)) - loss(BEST)
  # Naive momentum diverges, unless its rate is ten times smaller.
  assert naive[0] > first and naive[1] < 0.01 * first
  assert dn[0] < 0.2 * first and dn[0] < naive[0] / 5
  assert (both < 0.03 * first).all() and (both < dn).all()
  # The unflattering half: without momentum the large rate does better still.
  plain = lambda rate: servers.ParameterServer(SGD, optax.sgd(rate / 4))  # noqa: E731
  assert excess(histories(free, plain, (0.7,)))[0] < both.min() * 2


def test_pinned_shards_bias_every_form():
  """Distance from the optimum in the long run, with shard sampling and without."""
  for method in (nesterov, delayed):
    away = []
    for pinned in (False, True):
      history = histories(local_updates(3200.0, pinned=pinned), method, (0.07,))[0]
      away.append(np.linalg.norm(history[-150:].mean(axis=0) - BEST))
    assert away[1] > 3 * away[0]


@pytest.mark.parametrize(
  'method',
  [
    lambda rate: algorithms.fed_buff(SGD, 4, outer=optax.sgd(rate, momentum=0.9, nesterov=True)),
    lambda rate: nesterov(rate, transforms.discount_staleness(0.5)),
    lambda rate: nesterov(rate, transforms.compensate_delay(0.1)),
  ],
  ids=['buffered', 'polynomial', 'delay-compensated'],
)
def test_the_baselines_solve_with_a_small_rate(method):
  first = loss(np.full(8, 3.0)) - loss(BEST)
  assert excess(histories(local_updates(least=50), method, (0.07,)))[0] < 0.05 * first


# Proximal methods: lasso plus ridge on forty samples.
FEATURES = RNG.normal(size=(40, 6))
TARGETS = FEATURES @ np.array([1.0, -2.0, 0.5, 0.0, 0.0, 0.0]) + 0.3 * RNG.normal(size=40)
L1, RIDGE = 0.1, 0.5


def soft(x, rate):
  x = x / (1 + rate * RIDGE)
  return jnp.sign(x) * jnp.maximum(jnp.abs(x) - rate * L1 / (1 + rate * RIDGE), 0)


def shrink(x, rate):
  return x / (1 + rate * RIDGE)


def objective(x, l1=L1):
  residual = x @ FEATURES.T - TARGETS
  ridge, lasso = (x**2).sum(-1), np.abs(x).sum(-1)
  return 0.5 * (residual**2).mean(-1) + 0.5 * RIDGE * ridge + l1 * lasso


def optimum(l1):
  x = np.zeros(6)
  for _ in range(3000):
    x = x - 0.2 * FEATURES.T @ (FEATURES @ x - TARGETS) / 40
    x = np.sign(x) * np.maximum(np.abs(x) - 0.2 * l1, 0) / (1 + 0.2 * RIDGE)
  return x


def sample(x, work):
  """The gradient of one sample, drawn anew by every worker at every step."""
  key = jax.random.fold_in(jax.random.fold_in(jax.random.key(1), work.shard), work.count)
  i = jax.random.randint(key, (), 0, 40)
  a = jnp.asarray(FEATURES, x.dtype)[i]
  return a * (a @ x - jnp.asarray(TARGETS, x.dtype)[i])


def full(x):
  features = jnp.asarray(FEATURES, x.dtype)
  return features.T @ (features @ x - jnp.asarray(TARGETS, x.dtype)) / 40


def taking_turns(workers, pushes):
  """Equal workers: every gradient is W - 1 updates old, after the first round."""
  trace = sim.simulate_events(clusters.uniform(workers), sim.asp(), events=workers + pushes)
  assert set(trace.staleness[2 * workers :].tolist()) == {workers - 1}
  return trace


@functools.cache
def gaps(method, workers, pushes=2000):
  """Excess objective after each push, mean of four seeds of a diminishing rate."""
  rate = lambda count, per: 0.05 / (1 + 0.01 * per * count)  # noqa: E731
  if method == 'dap':
    server = algorithms.dap_sgd(lambda count: rate(count, workers), soft)
  else:
    server = algorithms.tap_sgd(lambda count: rate(count, 1), soft)
  trace = taking_turns(workers, pushes)

  def history(seed):
    drawn = lambda x, work: sample(x, work._replace(shard=work.shard + 100 * seed))  # noqa: E731
    return sim.replay_events(trace, server, drawn, jnp.zeros(6), record=lambda x: x).history

  models = np.asarray(jax.vmap(history)(jnp.arange(4)), float)
  return (objective(models) - objective(optimum(L1))).mean(axis=0)[workers:]


def test_decoupling_costs_nothing_an_update():
  """The same method without delay; with a delay of 16 some 10 % apart."""
  np.testing.assert_allclose(gaps('dap', 1), gaps('tap', 1), rtol=1e-2, atol=1e-6)
  dap, tap = (gaps(name, 17)[-500:].mean() for name in ('dap', 'tap'))
  assert dap == pytest.approx(tap, rel=0.15)


def test_the_gap_falls_as_log_t_over_t():
  """gap * T grows with log T, and no faster, at a delay of 16."""
  gap = gaps('dap', 17)
  at = [gap[t - 100 : t].mean() * t for t in (500, 1000, 2000)]
  assert max(at) < 2 * min(at)


def svrg(workers, prox, pushes, rate=0.05):
  with jax.enable_x64(True):
    server = algorithms.dap_sgd(rate, prox, estimator=transforms.reduce_variance(full, 20))
    done = sim.replay_events(
      taking_turns(workers, pushes), server, sample, jnp.zeros(6), record=lambda x: x
    )
    return np.asarray(done.history)


def test_variance_reduction_is_linear_for_a_smooth_term_and_a_constant_rate_stalls():
  best = optimum(0.0)
  for workers in (1, 5):
    error = np.abs(svrg(workers, shrink, 4000)[[1000, 2000, -1]] - best).max(axis=1)
    assert error[-1] < 1e-12 and error[1] < 1e-3 * max(error[0], 1e-9)
  stalls = sim.replay_events(
    taking_turns(5, 4000),
    algorithms.dap_sgd(0.05, shrink),
    sample,
    jnp.zeros(6),
    record=lambda x: x,
  )
  error = np.abs(np.asarray(stalls.history)[-1000:] - best).max(axis=1)
  assert error.mean() > 1e-2


def test_variance_reduction_on_the_lasso_has_a_floor_with_delay_that_falls_with_the_rate():
  """Linear without delay only: zeroing entries with a constant delay keeps it from the optimum."""
  best = optimum(L1)
  error = lambda *run: np.abs(svrg(*run)[-200:] - best).max()  # noqa: E731
  assert error(1, soft, 2000) < 1e-12
  high, low = (error(5, soft, 5000, rate) for rate in (0.05, 0.0125))
  assert 1e-3 < low < high / 3


def test_a_zeroing_prox_with_delay_cycles_for_ever():
  """f = 0, h = |x|: an entry at zero obeys x+ = x - x_then, an integrator with delay."""
  rate, ends = 2.0**-4, {}
  size = lambda x, rate: jnp.sign(x) * jnp.maximum(jnp.abs(x) - rate, 0)  # noqa: E731
  for workers in (1, 3, 5):
    done = sim.replay_events(
      taking_turns(workers, 600),
      algorithms.dap_sgd(rate, size),
      lambda x, work: jnp.zeros_like(x),
      jnp.float32(1.0),
      record=lambda x: x,
    )
    last = np.asarray(done.history)[-100:]
    ends[workers - 1] = np.abs(last).max() / rate
  assert ends == {0: 0, 2: 2, 4: 4}


def test_sparse_both_ways_ends_where_dense_does():
  """Ten times fewer values each way for a third more error: 0.28 against 0.21, all of it noise."""
  rng = np.random.default_rng(5)
  centers = rng.normal(size=(4, 40))

  def gradient(x, work):
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(2), work.shard), work.count)
    b = jnp.asarray(centers, x.dtype)[work.shard]
    return x - b + 0.5 * jax.random.normal(key, x.shape)

  trace = sim.simulate_events(
    clusters.uniform(4, law=clusters.log_normal(1.0, 0.3)), sim.asp(), events=6000
  )
  errors, nbytes = [], []
  for fraction in (0.1, 1.0):
    method = algorithms.dgs(0.002, fraction, momentum=0.7)
    done = sim.replay_events(trace, method, gradient, jnp.zeros(40), record=lambda x: x)
    end = np.asarray(done.history)[-1500:]
    errors.append(np.sqrt(((end - centers.mean(0)) ** 2).sum(-1)).mean())
    nbytes.append((done.push_bytes, done.answer_bytes))
  assert errors[0] < 1.5 * errors[1] and errors[1] < 1
  assert nbytes == [(24, 24), (160, 160)]


def test_layers_are_synchronous_sgd():
  """Two nodes of four workers, nested, beside eight in a row: equal up to association."""
  rows = jnp.asarray(RNG.normal(size=(8, 5)), jnp.float32)

  def walk(tx, b):
    x = jnp.zeros(5)

    def step(carry, _):
      x, state = carry
      updates, state = tx.update(2.0 * (x - b), state, x)
      x = optax.apply_updates(x, updates)
      return (x, state), x

    return jax.lax.scan(step, (x, tx.init(x)), length=50)[1]

  layered = algorithms.lsgd(0.1, axis_name='nodes', inner_axis_name='workers', momentum=0.9)
  inner = jax.vmap(functools.partial(walk, layered), axis_name='workers')
  nested = jax.jit(jax.vmap(inner, axis_name='nodes'))(rows.reshape(2, 4, 5)).reshape(8, 50, 5)
  plain = algorithms.allreduce_sgd(0.1, axis_name='workers', momentum=0.9)
  flat = runtime.simulate(8).spmd(functools.partial(walk, plain))(rows)
  np.testing.assert_allclose(nested, flat, rtol=0, atol=1e-6)
  # Bit for bit, if the flat sum is made by the same tree: 2, 4 and 2 divide exactly.
  g = -np.float32(2) * np.asarray(rows)
  tree = g.reshape(2, 4, 5).sum(axis=1) / np.float32(4)
  first = -np.float32(0.1) * (tree.sum(0) / 2)
  np.testing.assert_array_equal(nested[:, 0], np.tile(first, (8, 1)))


# Prague: one worker of eight is five times slower.
EIGHT = np.random.default_rng(7).normal(size=(8, 5))
SLOW = clusters.with_stragglers(8, fraction=0.125, factor=5.0, law=clusters.log_normal(1.0, 0.1))


def prague(policy, rate, until, skew):
  """The worker's parameters, one row a worker, after `until` seconds."""
  centers = jnp.asarray(1.0 + skew * EIGHT, jnp.float32)
  trace = sim.simulate_rounds(SLOW, policy, until=until)
  params, _, _ = sim.replay_rounds(
    trace,
    algorithms.prague_sgd(rate, axis_name='workers'),
    lambda x, work: x - centers[work.worker],
    jnp.zeros(5),
    runtime.simulate(8),
  )
  return np.asarray(params), np.asarray(centers, float)


def test_groups_on_demand_reach_consensus():
  spreads = []
  for rate in (0.1, 0.01):
    rows, centers = prague(sim.group_generator(4), rate, 600.0, 1.0)
    spreads.append(np.ptp(rows, axis=0).max())
    assert np.abs(rows.mean(0) - centers.mean(0)).max() < 0.5
  assert spreads[1] < 0.2 * spreads[0]


def test_the_filter_is_faster_than_all_reduce_where_one_is_slow():
  """At 100 seconds with like data; with unlike data the slow one's share is what is lost."""
  policies = {
    'all': sim.static_groups([[0] * 8]),
    'groups': sim.group_generator(4),
    'filter': sim.group_generator(4, threshold=4),
  }
  ends = {}
  for name, policy in policies.items():
    rows, centers = prague(policy, 0.05, 100.0, 0.0)
    ends[name] = 0.5 * ((rows - centers.mean(0)) ** 2).sum(axis=1).mean()
  assert ends['filter'] < 0.5 * ends['groups'] and ends['groups'] < 0.1 * ends['all']
  away = {}
  for name in ('all', 'filter'):
    rows, centers = prague(policies[name], 0.02, 1500.0, 1.0)
    away[name] = np.linalg.norm(rows.mean(0) - centers.mean(0))
  assert away['all'] < 1e-2 and away['filter'] > 0.1
