"""Rounds with one end: the k fastest, elastic schedulers, and k and load from the bound."""

import numpy as np
import pytest

from jax_dsgd import clusters
from jax_dsgd import simulation as sim

STEPS = clusters.Cluster('c', tuple(map(clusters.constant, (1.0, 2.0, 3.0, 10.0))))


def play(policy, cluster=STEPS, rounds=3, **options):
  return sim.simulate_rounds(cluster, policy, rounds=rounds, **options)


def test_bulk_waits_for_all():
  trace = play(sim.bulk())
  assert trace.seconds.tolist() == [10, 20, 30] and trace.active.all()
  assert (trace.weight == 0.25).all() and not trace.staleness.any()


def test_the_fastest_call_off_the_others():
  trace = play(sim.fastest(2))
  assert trace.seconds.tolist() == [2, 4, 6]
  assert trace.active.tolist() == [[True, True, False, False]] * 3
  assert trace.finished[1].tolist() == [3, 4, 4, 4] and not trace.staleness.any()


def test_elastic_norm_folds_the_late_into_a_later_round():
  trace = play(sim.elastic_norm(0.75), rounds=5)
  # Three of four: at 3 s. The last arrives at 10 s, in the fourth round, three rounds old.
  assert trace.seconds[:3].tolist() == [3, 6, 9]
  assert not trace.active[:3, 3].any() and trace.active[3, 3] and trace.staleness[3, 3] == 3
  assert trace.seconds[3] == 11 and trace.started[3].tolist()[:2] == [9, 9]
  assert np.isnan(trace.started[3, 2]) and trace.started[3, 3] == 0
  # Worker 2, cut off by the third arrival, is late by one round.
  assert trace.staleness[4, 2] == 1 and trace.started[4, 2] == 9


def test_elastic_norm_is_faster_than_bulk_on_noisy_machines():
  cluster = clusters.uniform(16, law=clusters.log_normal(1.0, 0.3))
  ends = [play(policy, cluster, 300).seconds[-1] for policy in (sim.bulk(), sim.elastic_norm(0.8))]
  # The paper speaks of about 20 % with beta = 0.8.
  assert 0.6 < ends[1] / ends[0] < 0.9
  np.testing.assert_array_equal(
    play(sim.elastic_norm(1.0), cluster, 5).seconds, play(sim.bulk(), cluster, 5).seconds
  )


def test_elastic_variance_ends_at_its_deadline():
  trace = play(sim.elastic_variance(2.5), rounds=4)
  assert trace.seconds.tolist() == [2.5, 5, 7.5, 10]
  assert trace.active[0].tolist() == [True, True, False, False]
  assert trace.active[1].tolist() == [True, True, True, False] and trace.staleness[1, 2] == 1
  assert trace.active[3, 3] and trace.staleness[3, 3] == 3
  # Whoever is first ends a round that began with a deadline too short, and all end one early.
  assert play(sim.elastic_variance(0.1)).seconds.tolist() == [1, 2, 3]
  assert play(sim.elastic_variance(50.0)).seconds.tolist() == [10, 20, 30]


def bound(loads, target=0.05):
  """Time, computation and messages until the bound on the error reaches the target."""
  cluster = clusters.uniform(20, law=clusters.shifted_exponential(0.0, 1.0, delay=0.1))
  policy = sim.adaptive_fastest(loads, error=1.0, floor=5.0, contraction=0.01)
  pairs = []

  def meet(view):
    pairs.append(view.memory['pair'])
    return policy.meet(view)

  trace = play(policy._replace(meet=meet), cluster, 700, batch=100)
  load = np.array([loads[pair[0]] for pair in pairs])
  k = trace.active.sum(axis=1)
  # The bound, written anew: every round leaves e + (1 - c)(E - e).
  error, rounds = 1.0, 0
  while error > target:
    floor = 5.0 / (k[rounds] * load[rounds])
    error, rounds = floor + 0.99 * (error - floor), rounds + 1
  assert (np.diff(k * load) >= 0).mean() > 0.95  # small to large
  return trace.seconds[rounds - 1], (k * load)[:rounds].sum(), k[:rounds].sum()


def test_adapting_the_load_too_saves_time_and_computation_for_messages():
  seconds, load, messages = bound([100])
  both = bound(list(range(10, 101, 10)))
  assert both[0] < 0.97 * seconds
  assert both[1] < 0.97 * load
  assert both[2] > messages  # the price


def test_order_statistics_of_exponentials():
  """E of the k-th of n arrivals is H_n - H_{n-k}: the mean end of rounds of the k fastest."""
  cluster = clusters.uniform(10, law=clusters.shifted_exponential(0.0, 1.0))
  for k in (1, 5, 10):
    seconds = play(sim.fastest(k), cluster, 4000).seconds[-1] / 4000
    assert seconds == pytest.approx(sum(1 / j for j in range(11 - k, 11)), rel=0.05)
