"""Replay: the numbers of a run from its trace, the degenerate cases, and theory beside them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_dsgd import algorithms, clusters, runtime, servers, topologies, transforms
from jax_dsgd import simulation as sim

W, D = 8, 5
RNG = np.random.default_rng(0)
A, B = RNG.uniform(0.5, 2, (W, D)), RNG.normal(size=(W, D))
BEST = (A * B).sum(axis=0) / A.sum(axis=0)
UNEVEN = clusters.with_stragglers(W, fraction=0.25, factor=4.0, law=clusters.log_normal(1.0, 0.3))
AXIS = 'workers'


def gradient(x, work):
  a, b = jnp.asarray(A, x.dtype), jnp.asarray(B, x.dtype)
  return a[work.shard] * (x - b[work.shard])


def models(trace, method, gradient=gradient, start=None):
  start = jnp.zeros(D) if start is None else start
  done = sim.replay_events(trace, method, gradient, start, record=lambda x: x)
  return np.asarray(done.history, float)


def test_a_replay_is_the_run_event_by_event():
  """Stale views, several steps a push, shards that move: in NumPy from the columns alone."""
  trace = sim.simulate_events(UNEVEN, sim.dynamic_local_updates(4, least=1), events=300)
  got = models(trace, servers.ParameterServer(optax.sgd(0.05), optax.sgd(0.5)))
  x, views = np.zeros(D), np.zeros((W, D))
  for e in range(300):
    k, s = trace.worker[e], trace.shard[e]
    if trace.pushes[e]:
      y = views[k].copy()
      for _ in range(trace.steps[e]):
        y -= 0.05 * A[s] * (y - B[s])
      x = x - 0.5 * (views[k] - y)
    if trace.pulls[e]:
      views[k] = x
    np.testing.assert_allclose(got[e], x, atol=1e-5)
  assert trace.staleness.max() > W and len(set(trace.steps.tolist())) > 2


def test_one_worker_is_sgd_bit_for_bit():
  weights = jnp.asarray(RNG.normal(size=(6, 6)), jnp.float32)
  grad = jax.grad(lambda x, t: jnp.sum(jnp.tanh(weights @ x) ** 2) * (1 + 0.1 * jnp.sin(t)))
  start = jnp.asarray(RNG.normal(size=6), jnp.float32)
  rate = 2.0**-7  # so that a fused multiply-add rounds as a product and a sum do
  trace = sim.simulate_events(clusters.uniform(1), sim.asp(), events=101)
  done = sim.replay_events(
    trace,
    algorithms.async_sgd(rate),
    lambda x, work: grad(x, work.count),
    start,
    record=lambda x: x,
  )
  tx = optax.sgd(rate)

  def step(carry, t):
    x, state = carry
    updates, state = tx.update(grad(x, t), state, x)
    x = optax.apply_updates(x, updates)
    return (x, state), x

  plain = jax.jit(lambda x: jax.lax.scan(step, (x, tx.init(x)), jnp.arange(100))[1])(start)
  np.testing.assert_array_equal(done.history[1:], plain)
  assert np.ptp(plain, axis=0).min() > 1e-3


def test_lockstep_is_synchronous_averaging():
  """BSP: all W pushes of a step are taken at one view, so together they are the mean gradient."""
  trace = sim.simulate_events(UNEVEN, sim.bsp(), until=200.0)
  pushed = np.flatnonzero(trace.pushes)
  steps = pushed.size // W
  got = models(trace, algorithms.async_sgd(0.1 / W))[pushed[W - 1 : steps * W : W]]
  x = np.zeros(D)
  for model in got:
    x = x - 0.1 * (A * (x - B)).mean(axis=0)
    np.testing.assert_allclose(model, x, atol=2e-6)
  assert steps > 20


@pytest.mark.parametrize(
  ('policy', 'tx'),
  [
    (sim.group_generator(3, threshold=4), algorithms.prague_sgd(0.1, axis_name=AXIS)),
    (sim.elastic_norm(0.6), optax.chain(optax.sgd(0.1), transforms.fold_late(axis_name=AXIS))),
  ],
  ids=['prague', 'elastic'],
)
def test_a_mesh_replays_what_one_device_does(policy, tx):
  trace = sim.simulate_rounds(UNEVEN, policy, rounds=60)
  meshed = runtime.on_mesh(runtime.make_mesh(workers=W), AXIS)
  rows = [
    sim.replay_rounds(trace, tx, gradient, jnp.zeros(D), workers, record=lambda x: x)
    for workers in (runtime.simulate(W), meshed)
  ]
  np.testing.assert_allclose(rows[0][2], rows[1][2], rtol=0, atol=1e-6)
  assert np.abs(np.asarray(rows[0][0])).min() > 1e-3


def test_local_steps_of_a_round_count_on():
  """Two steps a round; the batch number goes on from round to round."""
  trace = sim.simulate_rounds(clusters.uniform(2), sim.bulk(), rounds=3)
  params, _, history = sim.replay_rounds(
    trace,
    optax.sgd(1.0),
    lambda x, work: -(10.0 ** work.count.astype(jnp.float32)),
    jnp.zeros(()),
    runtime.simulate(2),
    period=2,
    record=lambda x: x,
  )
  assert history.tolist() == [[11, 1111, 111111]] * 2 and params.tolist() == [111111] * 2


# Theory: one curvature, taken in turns or at random.
def scalar(trace, step):
  """|x| after each push of a quadratic of curvature 1."""
  done = sim.replay_events(
    trace, algorithms.async_sgd(step), lambda x, work: x, jnp.float32(1.0), record=lambda x: x
  )
  return np.abs(np.asarray(done.history, float))[trace.pushes]


@pytest.mark.parametrize('delay', [1, 4])
def test_thresholds_and_best_steps_hold_for_replays(delay):
  trace = sim.simulate_events(clusters.uniform(delay + 1), sim.asp(), events=400)
  edge, best = sim.stability_threshold(delay), sim.best_step(delay)
  assert scalar(trace, 0.95 * edge)[-20:].max() < 0.5 < 2 < scalar(trace, 1.05 * edge)[-20:].max()
  x = scalar(trace, best.step)
  # Two roots meet: x_k ~ k rho^k.
  assert (x[80] / x[20] * 20 / 80) ** (1 / 60) == pytest.approx(best.rate, rel=0.015)
  for other in (0.7, 1.4):
    slow = scalar(trace, other * best.step)
    assert slow[70:80].max() > 2 * x[70:80].max()


def test_random_delays_contract_as_the_measured_law_predicts():
  cluster = clusters.uniform(6, law=clusters.shifted_exponential(0.2, 0.8))
  trace = sim.simulate_events(cluster, sim.asp(), events=4000)
  late = trace.staleness[trace.pushes]
  law = np.bincount(late) / late.size
  for step in (0.02, 0.05):
    x = scalar(trace, step)
    predicted = sim.contraction(step, law)
    upto = 200 + int(-40 / np.log(predicted))  # before float32 ends
    measured = (x[upto] / x[200]) ** (1 / (upto - 200))
    assert np.log(measured) == pytest.approx(np.log(predicted), rel=0.03)


# Elastic consistency: how far views are from the iterate.
def test_in_lockstep_views_are_the_iterate():
  trace = sim.simulate_rounds(UNEVEN, sim.bulk(), rounds=30)
  tx = optax.chain(optax.sgd(0.1), transforms.mean_over(AXIS))
  rows = sim.replay_rounds(
    trace, tx, gradient, jnp.zeros(D), runtime.simulate(W), record=lambda x: x
  )[2]
  for views in np.moveaxis(np.asarray(rows), 1, 0):
    assert sim.elastic_constant(views, views[0], learning_rate=0.1) == 0


def test_stale_views_stay_within_the_bound():
  """Views are the server's parameters at the pull: from the history and the trace."""
  rate = 0.05
  trace = sim.simulate_events(UNEVEN, sim.asp(), events=600)
  x = models(trace, algorithms.async_sgd(rate))
  view, constant, largest = np.zeros((W, D)), 0.0, 0.0
  for e in range(600):
    k = trace.worker[e]
    if trace.pushes[e]:
      constant = max(constant, sim.elastic_constant(view[[k]], x[e - 1], learning_rate=rate))
      largest = max(largest, np.linalg.norm(A[k] * (view[k] - B[k])))
    view[k] = x[e]
  bound = sim.staleness_bound(int(trace.staleness.max()), largest)
  assert 0 < constant < bound
  assert constant > bound / 1000  # it is loose, and means something


def test_substituted_gradients_stay_within_nine_variances():
  """30 % missing: own gradients in their place, corrected a round later."""
  rounds, rate, noise = 400, 0.05, 1.0
  active = RNG.random((rounds, W)) > 0.3
  seconds, shape = np.arange(1.0, rounds + 1), (rounds, W)
  trace = sim.RoundTrace(
    seconds=seconds,
    active=active,
    steps=active.astype(int),
    weight=active / W,
    staleness=np.zeros(shape, int),
    group=np.where(active, 0, -1),
    started=np.broadcast_to(seconds[:, None] - 1, shape),
    finished=np.broadcast_to(seconds[:, None], shape),
  )

  def noisy(x, work):
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), work.worker), work.count)
    return x - 1.0 + noise * jax.random.normal(key, x.shape)

  tx = optax.chain(optax.sgd(rate), transforms.substitute_missing(axis_name=AXIS))
  workers = runtime.simulate(W)
  rows = sim.replay_rounds(trace, tx, noisy, jnp.zeros(D), workers, record=lambda x: x)[2]
  views = np.moveaxis(np.asarray(rows, float), 1, 0)
  # Worker i lacks (1/W) sum over missing j of lr (g_j - g_i); all of it returns a round later.
  constants = [sim.elastic_constant(v, v.mean(axis=0), learning_rate=rate) for v in views]
  variance = noise**2 * D
  assert 0.01 < np.mean(constants) < 9 * variance


def test_wait_avoiding_groups_agree_every_period():
  trace = sim.simulate_rounds(UNEVEN, sim.wait_avoiding_groups(4, 5), rounds=60)
  late = trace.staleness > 0
  assert not late[4::5].any() and 0.2 < late.mean() < 0.9 and trace.staleness.max() < 5
  tx = algorithms.wagma_sgd(
    0.1, topologies.one_peer_hypercube(W), axis_name=AXIS, group_size=4, period=5
  )
  rows = sim.replay_rounds(
    trace, tx, gradient, jnp.zeros(D), runtime.simulate(W), record=lambda x: x
  )[2]
  spread = np.ptp(np.asarray(rows), axis=0).max(axis=-1)
  assert spread[4::5].max() < 1e-6 and np.delete(spread, np.s_[4::5]).min() > 1e-3
  assert np.abs(np.asarray(rows)[0, -1] - BEST).max() < 0.2


# PSP: loss against time.
TWENTY = clusters.with_stragglers(20, fraction=0.1, factor=5.0, law=clusters.log_normal(1.0, 0.2))


def losses(skew, seconds=(60.0,), rate=0.03):
  """Mean excess loss over the last fifth, for ASP, PSP of 1, 3 and 8, and BSP."""
  rng = np.random.default_rng(3)
  centers = 1 + skew * rng.normal(size=(20, D))
  centers[18:] += 2 * skew  # what only the slow have

  def noisy(x, work):
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(4), work.shard), work.count)
    return x - jnp.asarray(centers, x.dtype)[work.shard] + jax.random.normal(key, x.shape)

  ends = []
  for policy in (sim.asp(), sim.psp(1), sim.psp(3), sim.psp(8), sim.bsp()):
    trace = sim.simulate_events(TWENTY, policy, events=4000)
    x = models(trace, algorithms.async_sgd(rate), noisy)
    error = 0.5 * ((x - centers.mean(axis=0)) ** 2).sum(axis=-1)
    near = lambda t: (trace.seconds > 0.8 * t) & (trace.seconds <= t)  # noqa: B023, E731
    ends.append([error[near(t)].mean() for t in seconds])
  return np.array(ends)


def test_an_interior_sample_wins_in_the_middle_of_a_run_and_not_at_its_ends():
  asp, *inner, bsp = losses(0.5, (10.0, 40.0, 80.0), rate=0.01)
  inner = np.min(inner, axis=0)
  # At first only the number of steps counts.
  assert asp[0] < inner[0] < bsp[0] / 5
  # Then asynchrony's bias towards the fast ones' data, and lockstep's few steps, both cost.
  assert inner[1] < 0.7 * min(asp[1], bsp[1])
  assert inner[2] < 0.95 * min(asp[2], bsp[2])
  # In the end, where data differ more, nothing is as good as lockstep.
  asp, *inner, bsp = losses(1.0, (80.0,), rate=0.01)[:, 0]
  assert bsp < 0.8 * min(inner) < 0.8 * asp


def test_asynchrony_wins_throughout_where_steps_are_small():
  asp, *inner, bsp = losses(0.0, (10.0, 40.0, 80.0), rate=0.003)
  assert (asp < np.min(inner, axis=0)).all() and (np.max(inner, axis=0) < bsp).all()


# What is refused.
def test_bad_input():
  trace = sim.simulate_rounds(clusters.uniform(4), sim.bulk(), rounds=2)
  with pytest.raises(ValueError, match='the trace has 4 workers, and there are 8'):
    sim.replay_rounds(trace, optax.sgd(0.1), gradient, jnp.zeros(D), runtime.simulate(8))
  with pytest.raises(ValueError, match=r'staleness\[2\] must be 0, .* not 1'):
    pushes = np.array([False, False, True])
    one = pushes.astype(int)
    sim.EventTrace([0, 0, 1], [0, 1, 0], pushes, ~pushes, one, one, one, [0, 0, 0], 2)


def test_a_round_that_says_no_group_is_refused():
  with pytest.raises(ValueError, match='mix_groups follows a trace'):
    tx = algorithms.prague_sgd(0.1, axis_name=AXIS)
    runtime.simulate(2).spmd(lambda x: tx.update(x, tx.init(x), x))(jnp.zeros((2, 3)))
