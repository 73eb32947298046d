"""Selection of devices that come and go: AW-PSP and its controls."""

import functools

import numpy as np
import pytest

from jax_dsgd import clusters
from jax_dsgd import simulation as sim

RARE = np.arange(100) < 30
# Three rare labels on devices that are up 15 % of the time in runs of four rounds, seven others.
LABEL = np.where(RARE, np.arange(100) % 3, 3 + np.arange(100) % 7)
CHAINS = clusters.Availability(up=np.where(RARE, 4, 20), down=np.where(RARE, 4 * 0.85 / 0.15, 1.05))
DEVICES = clusters.Cluster('devices', (clusters.constant(1.0),) * 100, availability=CHAINS)


@functools.cache
def measured(score):
  """Labels a round, the share of rare ones among contributions, and the Gini index of devices."""
  policy = sim.availability_weighted(10, score=score)
  active = np.concatenate(
    [sim.simulate_rounds(DEVICES, policy, rounds=1500, seed=s).active for s in range(3)]
  )
  counts = np.sort(active.sum(axis=0))
  gini = (2 * np.arange(1, 101) - 101) @ counts / (100 * counts.sum())
  labels = np.mean([len(set(LABEL[row])) for row in active])
  return labels, active[:, RARE].sum() / active.sum(), gini


def test_the_rule_helps_modestly():
  psp, rule = measured(sim.at_random), measured(sim.availability_and_freshness)
  assert rule[0] > psp[0]
  assert 1.02 < rule[1] / psp[1] < 1.6 and rule[1] < 0.3  # far from the fair share
  assert rule[2] < psp[2]


def test_availability_alone_starves_rare_labels():
  psp, alone = measured(sim.at_random), measured(sim.availability_only)
  assert psp[1] == pytest.approx(0.062, abs=0.01)
  assert alone[1] < 0.4 * psp[1]
  assert alone[2] > psp[2]


def test_the_inverse_gives_rare_labels_most():
  shares = [
    measured(score)[1]
    for score in (
      sim.availability_only,
      sim.at_random,
      sim.availability_and_freshness,
      sim.inverse_availability,
    )
  ]
  assert shares == sorted(shares)


def test_equal_availability_takes_turns():
  """Freshness alone decides: ten devices, five a round, each once in two rounds."""
  trace = sim.simulate_rounds(clusters.uniform(10), sim.availability_weighted(5), rounds=40)
  assert (trace.active[::2] ^ trace.active[1::2]).all()


def test_ties_are_random():
  flat = sim.availability_weighted(5, score=lambda a, freshness, rng: np.ones(10))
  trace = sim.simulate_rounds(clusters.uniform(10), flat, rounds=2000)
  np.testing.assert_allclose(trace.active.mean(axis=0), 0.5, atol=0.05)


def test_the_score_sees_the_window_and_the_last_selection():
  seen = []

  def score(availability, freshness, rng):
    seen.append((availability.copy(), freshness.copy()))
    return np.arange(4.0)

  chains = clusters.Availability(up=3.0, down=3.0)
  cluster = clusters.Cluster('c', (clusters.constant(1.0),) * 4, availability=chains)
  sim.simulate_rounds(cluster, sim.availability_weighted(2, score=score, window=2), rounds=40)
  # a is 0, 1/2 or 1 over two rounds, and half of what is missing is expected back.
  assert {value for a, _ in seen for value in a.tolist()} == {0.5, 0.75, 1.0}
  assert [freshness.tolist() for _, freshness in seen[:3]] == [[1] * 4, [2, 2, 1, 1], [3, 3, 1, 1]]


def test_pairs_that_fail_together_are_not_asked_together():
  """Twenty places of five devices: contributions become steadier, for a few of them less."""
  place = np.arange(100) // 5
  chains = clusters.Availability(up=200.0, down=1.0, groups=place, group_up=8.0, group_down=4.0)
  laws, near = (clusters.constant(1.0),) * 100, np.where(place[:, None] == place, 1e-3, 0.1)
  cluster = clusters.Cluster('places', laws, latency=near, availability=chains)
  counts = {}
  for neighbors in (0, 4):
    policy = sim.availability_weighted(10, neighbors=neighbors)
    active = sim.simulate_rounds(cluster, policy, rounds=700).active
    counts[neighbors] = active.sum(axis=1)
    alike = [np.bincount(place[row]).max() for row in active[100:] if row.any()]
    assert (max(alike) == 1) == bool(neighbors)
  assert counts[4].std() < 0.8 * counts[0].std()
  assert 0.9 < counts[4].mean() / counts[0].mean() < 1  # the price
