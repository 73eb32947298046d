"""Schedules: who meets whom, exact means, and what is refused."""

import itertools

import numpy as np
import pytest

from jax_dsgd import topologies


def group_mean(n, groups):
  matrix = np.eye(n)
  for group in groups:
    matrix[np.ix_(group, group)] = 1 / len(group)
  return matrix


def product(topology):
  result = np.eye(topology.size)
  for t in range(topology.period):
    result = topology.matrix(t) @ result
  return result


@pytest.mark.parametrize('n', [1, 2, 8, 64])
def test_one_peer_hypercube(n):
  topology = topologies.one_peer_hypercube(n)
  assert topology.period == max(1, n.bit_length() - 1)
  for t in range(n.bit_length() - 1):
    expected = group_mean(n, [(i, i ^ 2**t) for i in range(n)])
    np.testing.assert_array_equal(topology.matrix(t), expected)
  np.testing.assert_array_equal(product(topology), np.full((n, n), 1 / n))
  assert topology.spectral_gap() == 1 and topology.symmetric


@pytest.mark.parametrize('n', [2, 7, 8])
def test_random_pairs(n):
  topology = topologies.random_pairs(n, 200, seed=1)
  met = np.zeros((n, n))
  for t in range(200):
    matrix = topology.matrix(t)
    np.testing.assert_array_equal(matrix, matrix.T)
    assert sorted(matrix.diagonal()) == [0.5] * (n // 2 * 2) + [1] * (n % 2)
    assert set(matrix[~np.eye(n, dtype=bool)]) <= {0, 0.5}
    met += (matrix > 0) & ~np.eye(n, dtype=bool)
  expected = 200 * (n // 2) / (n * (n - 1) / 2)
  assert np.abs(met[~np.eye(n, dtype=bool)] - expected).max() < 5 * np.sqrt(expected)
  again = topologies.random_pairs(n, 200, seed=1)
  np.testing.assert_array_equal(again.rounds[7].destinations, topology.rounds[7].destinations)


def test_who_is_left_out_keeps_its_value():
  topology = topologies.random_pairs(3, 5, seed=0)
  for t, entry in enumerate(topology.rounds):
    (lone,) = np.flatnonzero(topology.sends[t] == 0)
    assert entry.self_weights[lone] == 1
    assert entry.destinations[0, lone] == lone


def test_random_groups():
  topology = topologies.random_groups(12, 3, 300, seed=0)
  together = np.zeros((12, 12))
  for t in range(300):
    matrix = topology.matrix(t)
    groups = {tuple(np.flatnonzero(row)) for row in matrix}
    assert len(groups) == 4 and sorted(itertools.chain(*groups)) == list(range(12))
    np.testing.assert_allclose(matrix, group_mean(12, groups), atol=1e-15)
    together += matrix > 0
  expected = 300 * 2 / 11
  assert np.abs(together[~np.eye(12, dtype=bool)] - expected).max() < 5 * np.sqrt(expected)
  assert topologies.random_groups(4, 4, 1, seed=0).spectral_gap() == 1


@pytest.mark.parametrize(
  ('n', 'size', 'period', 'exact'),
  [(16, 4, 2, 2), (16, 2, 4, 4), (8, 2, 3, 3), (8, 8, 1, 1), (8, 4, 3, 2), (64, 8, 2, 2)],
)
def test_butterfly_groups(n, size, period, exact):
  topology = topologies.butterfly_groups(n, size)
  bits, width = n.bit_length() - 1, size.bit_length() - 1
  assert topology.period == period
  for t in range(period):
    window = {(t * width + r) % bits for r in range(width)}
    rest = [bit for bit in range(bits) if bit not in window]
    keys = [tuple(i >> bit & 1 for bit in rest) for i in range(n)]
    groups = [[i for i in range(n) if keys[i] == key] for key in set(keys)]
    np.testing.assert_array_equal(topology.matrix(t), group_mean(n, groups))
  assert topology.sends.tolist() == [[size - 1] * n] * period
  # Windows that together hold all bits leave the exact mean, from any round on.
  for start in range(period):
    result = np.eye(n)
    for t in range(exact):
      result = topology.matrix(start + t) @ result
    np.testing.assert_array_equal(result, np.full((n, n), 1 / n))


@pytest.mark.parametrize(('nodes', 'per_node'), [(1, 1), (1, 4), (4, 1), (2, 2), (3, 4), (4, 3)])
def test_inter_intra(nodes, per_node):
  n, topology = nodes * per_node, topologies.inter_intra(nodes, per_node)
  whole = [list(range(v * per_node, (v + 1) * per_node)) for v in range(nodes)]
  apart = [[node[0] for node in whole], *(node[1:] for node in whole if node[1:])]
  np.testing.assert_allclose(topology.matrix(0), group_mean(n, apart), atol=1e-15)
  np.testing.assert_allclose(topology.matrix(1), group_mean(n, whole), atol=1e-15)
  heads = [nodes - 1 if w % per_node == 0 else per_node - 2 for w in range(n)]
  assert topology.sends.tolist() == [heads, [per_node - 1] * n]


def test_concatenate():
  parts = topologies.one_peer_hypercube(4), topologies.ring(4)
  topology = topologies.concatenate(*parts)
  assert (topology.name, topology.period) == ('one_peer_hypercube, ring', 3)
  np.testing.assert_array_equal(topology.matrix(1), parts[0].matrix(1))
  np.testing.assert_array_equal(topology.matrix(2), parts[1].matrix())
  with pytest.raises(ValueError, match=r'all topologies must have one size, not \[4, 5\]'):
    topologies.concatenate(topologies.ring(4), topologies.ring(5))


@pytest.mark.parametrize('period', [1, 2, 3, 4, 10])
def test_then_mean_every(period):
  groups = topologies.butterfly_groups(16, 4)
  topology = topologies.then_mean_every(groups, period)
  for t in range(3 * topology.period):
    meets = np.full((16, 16), 1 / 16) if t % period == period - 1 else groups.matrix(t)
    np.testing.assert_allclose(topology.matrix(t), meets, atol=1e-15)
  assert topology.spectral_gap() == 1
  with pytest.raises(ValueError, match='then_mean_every: period must be an int >= 1, not 0'):
    topologies.then_mean_every(groups, 0)
