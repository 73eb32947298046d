"""PSP between ASP and BSP: the two ends exactly, and what is between in order."""

import heapq

import numpy as np
import pytest

from jax_dsgd import clusters
from jax_dsgd import simulation as sim
from tests.simulation.clock_test import same

FORTY = clusters.with_stragglers(40, fraction=0.1, factor=5, law=clusters.log_normal(1.0, 0.2))


def pushes(policy, cluster=FORTY, until=100.0):
  trace = sim.simulate_events(cluster, policy, until=until)
  return np.bincount(trace.worker[trace.pushes], minlength=cluster.size)


@pytest.mark.parametrize(
  'psp, end',
  [
    (lambda: sim.psp(0), sim.asp),
    (lambda: sim.psp(0, 3), sim.asp),
    (lambda: sim.psp(39), sim.bsp),
    (lambda: sim.psp(39, 4), lambda: sim.ssp(4)),
    (lambda: sim.ssp(0), sim.bsp),
    (lambda: sim.ssp(10**6), sim.asp),
  ],
)
@pytest.mark.parametrize('seed', range(3))
def test_the_ends_of_the_family_are_exact(psp, end, seed):
  one, other = (
    sim.simulate_events(FORTY, policy(), events=3000, seed=seed, up_bytes=1e7, down_bytes=1e6)
    for policy in (psp, end)
  )
  assert same(one, other)


def test_bsp_is_lockstep_by_hand():
  trace = sim.simulate_events(
    clusters.Cluster('c', tuple(map(clusters.constant, (1.0, 2.0, 3.0)))), sim.bsp(), events=12
  )
  assert trace.seconds.tolist() == [0, 0, 0, 1, 2, 3, 3, 3, 4, 5, 6, 6]
  assert trace.worker.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 0, 1, 2, 0]
  assert trace.pushes[3:].tolist() == [True, True, True, False, False, True, True, True, False]
  # The last to push pulls in the same event, and all read what it made.
  assert trace.pulls[3:6].tolist() == [False, False, True]
  assert trace.staleness.tolist() == [0, 0, 0, 0, 1, 2, 0, 0, 0, 1, 2, 0]


def test_staleness_of_equal_workers_is_one_less_than_their_number():
  trace = sim.simulate_events(clusters.uniform(8), sim.asp(), events=400)
  assert (trace.staleness[16:] == 7).all()


@pytest.mark.parametrize('slack', [0, 1, 4])
def test_ssp_keeps_its_slack(slack):
  trace = sim.simulate_events(FORTY, sim.ssp(slack), until=100.0)
  counts = np.zeros(40, int)
  spread = 0
  for worker in trace.worker[trace.pushes]:
    counts[worker] += 1
    spread = max(spread, np.ptp(counts))
  assert spread == slack + 1


def by_hand(sample, slack, until, seed):
  """Steps of the forty, where each that waits really draws at each push of anyone."""
  rng = np.random.default_rng(seed)
  slow = np.where(np.arange(40) < 36, 1.0, 5.0)
  seconds = lambda w: slow[w] * np.exp(0.2 * rng.standard_normal() - 0.02)  # noqa: E731
  counts, heap, waiting = np.zeros(40, int), [(seconds(w), w) for w in range(40)], set()
  heapq.heapify(heap)
  while heap[0][0] <= until:
    now, worker = heapq.heappop(heap)
    counts[worker] += 1
    waiting.add(worker)
    for w in list(waiting):
      others = rng.permutation(39)[:sample]
      if (counts[others + (others >= w)] >= counts[w] - slack).all():
        waiting.discard(w)
        heapq.heappush(heap, (now + seconds(w), w))
  return counts


@pytest.mark.parametrize(('sample', 'slack'), [(1, 0), (4, 0), (12, 0), (4, 2)])
def test_draws_at_every_push_have_the_law_of_draws_one_by_one(sample, slack):
  right = [by_hand(sample, slack, 30.0, seed) for seed in range(6)]
  ours = []
  for seed in range(20):
    trace = sim.simulate_events(FORTY, sim.psp(sample, slack), until=30.0, seed=seed)
    ours.append(np.bincount(trace.worker[trace.pushes], minlength=40))
  for number, noise in ((np.mean, 0.03), (np.ptp, 0.15)):
    one, other = np.mean([number(n) for n in ours]), np.mean([number(n) for n in right])
    assert one == pytest.approx(other, rel=noise, abs=0.5)


def test_more_samples_slow_down_and_even_out():
  """The paper's picture, monotone in the sample from ASP to BSP."""
  plain = [pushes(p) for p in (sim.asp(), *(sim.psp(k) for k in (1, 4, 16)), sim.bsp())]
  means, spreads = [n.mean() for n in plain], [np.ptp(n) for n in plain]
  assert means == sorted(means, reverse=True) and spreads == sorted(spreads, reverse=True)
  assert len(set(means)) == len(means)
  # 36 workers make 100 steps and 4 make 20; in step with the slow, the noise of all 40 counts.
  assert means[0] == pytest.approx(92, rel=0.05) and spreads[0] > 75
  assert 12 < means[-1] <= 20 and spreads[-1] <= 1
  assert means[1] == pytest.approx(87, abs=3) and means[2] == pytest.approx(75, abs=4)
  slack, all_slack = pushes(sim.psp(4, 4)), pushes(sim.ssp(4))
  assert means[2] < slack.mean() < means[0] and slack.mean() > all_slack.mean() > means[-1]
  assert np.ptp(all_slack) <= 5 < np.ptp(slack)


def test_without_noise_bsp_makes_the_steps_of_the_slowest():
  assert pushes(sim.bsp(), clusters.with_stragglers(40)).tolist() == [20] * 40
  assert set(pushes(sim.ssp(4), clusters.with_stragglers(40)).tolist()) == {24, 20}
