"""The rate of rounds drawn at random, against the theorem on random groups and by hand."""

import itertools

import numpy as np
import pytest

from jax_dsgd import topologies

rate = topologies.expected_consensus_rate


def partitions(workers, size):
  """All partitions into groups of `size`."""
  if not workers:
    yield []
    return
  first, rest = workers[0], workers[1:]
  for others in itertools.combinations(rest, size - 1):
    left = [worker for worker in rest if worker not in others]
    for more in partitions(left, size):
      yield [(first, *others), *more]


def by_shifts(n, groups):
  """One round in which each group takes its mean."""
  size = len(groups[0])
  destinations = np.zeros((size - 1, n), int)
  for group, shift in itertools.product(groups, range(1, size)):
    for place, worker in enumerate(group):
      destinations[shift - 1, worker] = group[(place + shift) % size]
  return topologies.Round(np.full(n, 1 / size), destinations, np.full((size - 1, n), 1 / size))


@pytest.mark.parametrize(
  ('n', 'size', 'count'), [(4, 2, 3), (6, 2, 15), (6, 3, 10), (8, 2, 105), (8, 4, 35), (9, 3, 280)]
)
def test_all_partitions_give_the_rate_of_the_theorem(n, size, count):
  rounds = tuple(by_shifts(n, groups) for groups in partitions(list(range(n)), size))
  assert len(rounds) == count
  expected = 1 - (n - size) / (size * (n - 1))
  assert rate(topologies.Topology('all', rounds)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(('n', 'size'), [(8, 2), (8, 4), (16, 4), (12, 3)])
def test_random_groups_come_near_the_theorem(n, size):
  expected = (n - size) / (size * (n - 1))
  second = 1 - rate(topologies.random_groups(n, size, 2000, seed=0))
  # The greatest eigenvalue of a mean of 2,000 draws lies above that of its expectation.
  assert expected < second < expected + 0.05


def test_a_single_round_by_hand():
  assert rate(topologies.complete(5)) == pytest.approx(1)
  assert rate(topologies.ring(6)) == pytest.approx(1 - (1 - topologies.ring(6).spectral_gap()) ** 2)
  # The mean of W^T W has the eigenvalue 1 for one half of the dimensions.
  assert rate(topologies.one_peer_hypercube(4)) == pytest.approx(1 / 2)
  assert rate(topologies.complete(1)) == 1


def test_only_doubly_stochastic_rounds_have_a_rate():
  rows, columns = [[0.5, 0.5], [0.25, 0.75]], [[0.5, 0.25], [0.5, 0.75]]
  for matrix, kind in ((rows, 'row'), (columns, 'column')):
    with pytest.raises(ValueError, match=f'mine must be doubly stochastic, not only {kind}-'):
      rate(topologies.from_matrix(matrix, name='mine'))
