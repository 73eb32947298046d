"""Groups without a server: Prague's generator, and groups that nobody waits for."""

import numpy as np
import pytest

from jax_dsgd import clusters
from jax_dsgd import simulation as sim

NOISY = clusters.log_normal(1.0, 0.1)


def updates(policy, factor):
  """Of 8 workers, one of which is slow, in the time of 2000 steps; half of it is simulated."""
  cluster = clusters.with_stragglers(8, fraction=1 / 8, factor=factor)
  if policy.central is False:
    cluster = clusters.with_stragglers(8, fraction=1 / 8, factor=factor, law=NOISY)
  return 2 * int(sim.simulate_rounds(cluster, policy, until=1000.0).active.sum())


def test_the_filter_carries_prague():
  factors = (2, 5, 10)
  bulk = [updates(sim.bulk(), k) for k in factors]
  plain = [updates(sim.group_generator(4), k) for k in factors]
  filtered = [updates(sim.group_generator(4, threshold=4), k) for k in factors]
  assert bulk == [8000, 3200, 1600]
  # The specification's simulation, whose machines and sizes of groups are not known.
  assert plain == pytest.approx([8104, 8056, 8012], rel=0.3)
  assert filtered == pytest.approx([13381, 11964, 9588], rel=0.3)
  for b, p, f in zip(bulk, plain, filtered, strict=True):
    assert b < p < f
  assert filtered == sorted(filtered, reverse=True)
  # Without the filter a worker twice as slow costs nearly as much as one ten times slower.
  assert plain[2] > 0.7 * plain[0] and bulk[2] < 0.3 * bulk[0]


def test_a_group_of_all_is_bulk():
  cluster = clusters.with_stragglers(8, law=NOISY)
  one, other = (
    sim.simulate_rounds(cluster, p, rounds=20) for p in (sim.group_generator(8), sim.bulk())
  )
  np.testing.assert_allclose(one.seconds, other.seconds)
  assert one.active.all()


def test_meetings_are_in_the_order_of_time_and_end_with_their_last_member():
  trace = sim.simulate_rounds(
    clusters.with_stragglers(8, law=NOISY), sim.group_generator(3, threshold=4), rounds=300
  )
  ends = np.where(trace.active, trace.finished, 0).max(axis=1)
  np.testing.assert_array_equal(ends, trace.seconds)
  assert set(trace.active.sum(axis=1).tolist()) <= {1, 2, 3}
  assert set(trace.group.ravel().tolist()) == {0, -1}
  # Everybody computes all the time but for its wait: the next work begins as the meeting ends.
  for worker in range(8):
    met = trace.active[:, worker]
    np.testing.assert_array_equal(trace.started[met, worker][1:], trace.seconds[met][:-1])


def test_global_division_contracts_as_its_theorem_says():
  """Equal machines: E[W^T W] has second eigenvalue (n - g) / (g (n - 1)), here 1/7."""
  trace = sim.simulate_rounds(clusters.uniform(8), sim.group_generator(4), rounds=4000)
  total, matrix, count = np.zeros((8, 8)), np.eye(8), 0
  for t, active in enumerate(trace.active):
    members = active.astype(float)
    matrix = (np.diag(1 - members) + np.outer(members, members) / members.sum()) @ matrix
    if t % 2:  # both halves have met
      total, matrix, count = total + matrix.T @ matrix, np.eye(8), count + 1
  assert np.linalg.eigvalsh(total / count)[-2] == pytest.approx(1 / 7, abs=0.03)


def test_butterfly_groups_mix_exactly():
  """Rounds of groups of 4 among 16: two of them in a row are the exact mean."""
  trace = sim.simulate_rounds(clusters.uniform(16), sim.wait_avoiding_groups(4, 1000), rounds=6)
  matrices = []
  for row in trace.group:
    meets = row[:, None] == row
    assert (meets.sum(axis=1) == 4).all()
    matrices.append(meets / 4)
  for one, other in zip(matrices, matrices[1:], strict=False):
    np.testing.assert_allclose(other @ one, np.full((16, 16), 1 / 16))
  assert not trace.staleness.any()  # equal machines are never late


def test_nobody_waits_but_in_the_global_round():
  cluster = clusters.with_stragglers(8, fraction=1 / 8, factor=4)
  trace = sim.simulate_rounds(cluster, sim.wait_avoiding_groups(4, 5), rounds=10)
  # Worker 7 takes 4 s a step: its fifth ends at 20 s, and all meet. Until then the others run free.
  assert trace.seconds.tolist() == [4, 8, 12, 16, 20, 24, 28, 32, 36, 40]
  assert trace.finished[3, 0] == 4 and trace.finished[4, 0] == 5 and trace.started[5, 0] == 20
  assert (trace.group[[4, 9]] == 0).all()
  # At t + 1 s the groups of round t meet: by 4 s it has one step, done in round 0.
  assert trace.staleness[:, 7].tolist() == [1, 2, 3, 3, 0] * 2
  assert not trace.staleness[:, :7].any()


@pytest.mark.parametrize('period', [1, 4, 10])
def test_staleness_is_less_than_the_period(period):
  cluster = clusters.with_stragglers(16, fraction=0.25, factor=8, law=NOISY)
  trace = sim.simulate_rounds(cluster, sim.wait_avoiding_groups(4, period), rounds=80)
  # Where the slow meet the slow, the last but one is triggered late.
  assert period - 2 <= trace.staleness.max() < period
  assert not trace.staleness[period - 1 :: period].any()
  assert trace.active.all() and (trace.steps == 1).all()


def test_waiting_for_nobody_is_faster_and_the_grace_trades_it_for_freshness():
  cluster = clusters.uniform(16, law=clusters.log_normal(1.0, 0.5))
  policies = [sim.bulk(), *(sim.wait_avoiding_groups(4, 10, grace=g) for g in (0.5, 0.0))]
  bulk, patient, free = (sim.simulate_rounds(cluster, p, rounds=200) for p in policies)
  assert free.seconds[-1] < patient.seconds[-1] < bulk.seconds[-1]
  assert (free.staleness > 0).mean() > (patient.staleness > 0).mean() > 0
