"""PSP between ASP and BSP: the two ends exactly, and what is between in order."""

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


def test_more_samples_slow_down_and_even_out():
  """The paper's picture; where the laggard is slow, a sample of one already costs most of ASP."""
  plain = [pushes(p) for p in (sim.asp(), *(sim.psp(k) for k in (1, 4, 16)), sim.bsp())]
  means, spreads = [n.mean() for n in plain], [np.ptp(n) for n in plain]
  assert means == sorted(means, reverse=True) and spreads == sorted(spreads, reverse=True)
  assert len(set(means)) == len(means)
  # 36 workers make 100 steps and 4 make 20; in step with the slow, the noise of all 40 counts.
  assert means[0] == pytest.approx(92, rel=0.05) and spreads[0] > 75
  assert 12 < means[-1] <= 20 and spreads[-1] <= 1
  assert 20 < means[1] < 40
  slack, all_slack = pushes(sim.psp(4, 4)), pushes(sim.ssp(4))
  assert means[2] < slack.mean() < means[0] and slack.mean() > all_slack.mean() > means[-1]
  assert np.ptp(all_slack) <= 5 < np.ptp(slack)


def test_without_noise_bsp_makes_the_steps_of_the_slowest():
  assert pushes(sim.bsp(), clusters.with_stragglers(40)).tolist() == [20] * 40
  assert set(pushes(sim.ssp(4), clusters.with_stragglers(40)).tolist()) == {24, 20}


def test_samples_are_of_others_and_without_replacement():
  from jax_dsgd.simulation import _barriers

  for size in (0, 1, 3, 9):
    draw = _barriers._others(np.random.default_rng(0), 10, size)
    seen = np.zeros(10)
    for _ in range(3000):
      drawn = draw(4)
      assert len(set(drawn)) == len(drawn) == size and 4 not in drawn
      seen[drawn] += 1
    np.testing.assert_allclose(np.delete(seen, 4), 3000 * size / 9, rtol=0.2)
