"""Topologies of edges, arrows and matrices: colourings, covers, weights, and what is refused."""

import itertools

import networkx as nx
import numpy as np
import pytest

from jax_dsgd import topologies

SIZES = [*range(1, 10), 64]


def metropolis(n, edges):
  """The Metropolis matrix of an undirected graph, edge by edge."""
  edges = {frozenset(edge) for edge in edges}
  degrees = [sum(i in edge for edge in edges) for i in range(n)]
  matrix = np.zeros((n, n))
  for i, j in map(sorted, edges):
    matrix[i, j] = matrix[j, i] = 1 / (1 + max(degrees[i], degrees[j]))
  return matrix + np.diag(1 - matrix.sum(axis=1))


def random_doubly_stochastic(n, terms, seed):
  """A random mixture of the identity, a cyclic shift and `terms` random permutations, [n, n]."""
  generator = np.random.default_rng(seed)
  orders = [np.arange(n), np.roll(np.arange(n), 1)]
  orders += [generator.permutation(n) for _ in range(terms)]
  matrix = np.zeros((n, n))
  for share, order in zip(generator.dirichlet(np.ones(len(orders))), orders, strict=True):
    matrix[np.arange(n), order] += share
  return matrix


def random_row_stochastic(n, density, seed):
  """Random weights where a cycle and random arrows allow them, [n, n]."""
  generator = np.random.default_rng(seed)
  matrix = generator.random((n, n)) * (generator.random((n, n)) < density)
  matrix += np.eye(n) + np.roll(np.eye(n), 1, axis=0)
  return matrix / matrix.sum(axis=1, keepdims=True)


def busiest(matrix):
  """The most entries off the diagonal in a row or a column."""
  links = (matrix > 0) & ~np.eye(len(matrix), dtype=bool)
  return max(links.sum(axis=0).max(), links.sum(axis=1).max())


def check_permutations(topology):
  workers = list(range(topology.size))
  for row in topology.rounds[0].destinations.tolist():
    assert sorted(row) == workers
    assert row != workers


GRAPHS = {
  'petersen': nx.petersen_graph(),
  **{f'K{n}': nx.complete_graph(n) for n in (5, 6)},
  'path': nx.path_graph(9),
  'tree': nx.balanced_tree(3, 3),
  **{
    f'random {n} {p} {seed}': graph
    for n, p, seed in itertools.product((6, 11, 24), (0.3, 0.5, 0.8), range(6))
    if nx.is_connected(graph := nx.gnp_random_graph(n, p, seed=seed))
  },
}


@pytest.mark.parametrize('graph', GRAPHS.values(), ids=GRAPHS.keys())
def test_from_edges_colours_properly(graph):
  n = graph.number_of_nodes()
  topology = topologies.from_edges(n, graph.edges)
  destinations = topology.rounds[0].destinations.tolist()
  assert len(destinations) <= max(degree for _, degree in graph.degree) + 1
  coloured = []
  for row in destinations:
    assert [row[end] for end in row] == list(range(n))
    coloured += [(i, j) for i, j in enumerate(row) if i < j]
  assert sorted(coloured) == sorted(tuple(sorted(edge)) for edge in graph.edges)
  np.testing.assert_allclose(topology.matrix(), metropolis(n, graph.edges), atol=1e-15)


def test_from_edges_takes_generators_and_merges_duplicates():
  edges = [(0, 1), (1, 0), (2, 1), (1, 2), (0, 1)]
  topology = topologies.from_edges(3, ((np.int64(i), j) for i, j in edges), name='mine')
  assert (topology.name, topology.sends.tolist()) == ('mine', [[1, 2, 1]])
  expected = np.array([[2, 1, 0], [1, 1, 1], [0, 1, 2]]) / 3
  np.testing.assert_allclose(topology.matrix(), expected, atol=1e-15)


@pytest.mark.parametrize('n', SIZES)
@pytest.mark.parametrize('terms', [2, 5, 300])
def test_from_matrix_round_trip(n, terms):
  matrix = random_doubly_stochastic(n, terms, seed=n)
  topology = topologies.from_matrix(matrix)
  np.testing.assert_allclose(topology.matrix(), matrix, atol=1e-9)
  np.testing.assert_allclose(topology.matrix().sum(axis=0), 1, atol=1e-12)
  assert len(topology.rounds[0].destinations) == busiest(matrix)
  check_permutations(topology)


@pytest.mark.parametrize('n', SIZES)
@pytest.mark.parametrize('density', [0, 0.2, 0.5])
def test_from_matrix_takes_rows_and_columns(n, density):
  matrix = random_row_stochastic(n, density, seed=n)
  by_row, by_column = topologies.from_matrix(matrix), topologies.from_matrix(matrix.T)
  np.testing.assert_allclose(by_row.matrix(), matrix, atol=1e-12)
  np.testing.assert_allclose(by_column.matrix(), matrix.T, atol=1e-12)
  assert by_row.row_stochastic and by_column.column_stochastic
  for topology in (by_row, by_column):
    assert len(topology.rounds[0].destinations) == busiest(matrix)
    check_permutations(topology)
  assert by_row.sends.tolist() == [((matrix > 0).sum(axis=0) - 1).tolist()]
  if n > 2 and density > 0:
    assert not by_row.column_stochastic and not by_column.row_stochastic


def test_from_matrix_covers_dense_matrices_with_few_permutations():
  """A mean of permutations would need 978 of them."""
  topology = topologies.from_matrix(random_doubly_stochastic(64, 300, seed=0))
  assert len(topology.rounds[0].destinations) <= 63


@pytest.mark.parametrize('make_topology', [topologies.ring, topologies.complete, topologies.star])
def test_from_matrix_is_as_cheap_as_the_graph(make_topology):
  topology = make_topology(8)
  rebuilt = topologies.from_matrix(topology.matrix())
  np.testing.assert_allclose(rebuilt.matrix(), topology.matrix(), atol=1e-12)
  np.testing.assert_array_equal(rebuilt.sends, topology.sends)
  assert len(rebuilt.rounds[0].destinations) == topology.sends.max()


def test_from_matrix_takes_out_rounding():
  matrix = random_doubly_stochastic(16, 4, seed=0).astype(np.float32)
  topology = topologies.from_matrix(matrix)
  np.testing.assert_allclose(topology.matrix(), matrix, atol=1e-6)
  np.testing.assert_allclose(topology.matrix().sum(axis=0), 1, atol=1e-12)
  noisy = matrix.astype(float) + np.random.default_rng(0).uniform(-3e-8, 3e-8, matrix.shape)
  topology = topologies.from_matrix(noisy)
  assert topology.doubly_stochastic
  np.testing.assert_allclose(topology.matrix(), matrix, atol=2e-6)


def test_from_matrix_mixes_without_self_weights():
  """Rounds 0 -> 1 -> 2 -> 0 and 0 <-> 1: cycles of 3 and of 2 have no common period."""
  matrix = [[0, 0.5, 0.5], [1, 0, 0], [0, 1, 0]]
  topology = topologies.from_matrix(matrix)
  assert topology.row_stochastic and not topology.column_stochastic
  # z^3 - z/2 - 1/2 has the roots 1 and (-1 +- i)/2.
  assert topology.spectral_gap() == pytest.approx(1 - np.sqrt(0.5))


def strongly_connected(n, density, seed):
  links = random_row_stochastic(n, density, seed) > 0
  return [(j, i) for i, j in np.argwhere(links).tolist() if i != j]


@pytest.mark.parametrize('n', SIZES)
@pytest.mark.parametrize('density', [0, 0.2, 0.6])
def test_from_arrows(n, density):
  arrows = strongly_connected(n, density, seed=n)
  topology = topologies.from_arrows(n, arrows)
  expected = np.eye(n)
  for sender, receiver in arrows:
    expected[receiver, sender] = 1
  outs = expected.sum(axis=0).astype(int)
  np.testing.assert_allclose(topology.matrix(), expected / outs, atol=1e-15)
  assert topology.sends.tolist() == [(outs - 1).tolist()]
  assert topology.column_stochastic
  assert len(topology.rounds[0].destinations) == busiest(expected)
  check_permutations(topology)


def test_from_arrows_is_what_push_sum_needs():
  """The 3 workers whose raw values tend to 1, 2/3 and 4/3, and their ratios to the mean 1."""
  topology = topologies.from_arrows(3, [(0, 1), (0, 2), (1, 2), (2, 0), (0, 1)])
  matrix = np.array([[2, 0, 3], [2, 3, 0], [2, 3, 3]]) / 6
  np.testing.assert_allclose(topology.matrix(), matrix, atol=1e-15)
  assert not topology.row_stochastic and not topology.symmetric
  x, w = np.array([3.0, 0, 0]), np.ones(3)
  for _ in range(200):
    x, w = topology.matrix() @ x, topology.matrix() @ w
  np.testing.assert_allclose(x, [1, 2 / 3, 4 / 3], atol=1e-9)
  np.testing.assert_allclose(x / w, 1, atol=1e-9)
  # Without the eigenvalue 1 the trace leaves 1/3, the determinant 1/12: z^2 - z/3 + 1/12.
  assert topology.spectral_gap() == pytest.approx(1 - np.sqrt(1 / 12))


def test_chains_are_closed_by_messages_that_do_not_count():
  """A ring fills one permutation, and its chord 0 -> 2 needs another, closed by 2 -> 0."""
  topology = topologies.from_arrows(4, [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)])
  assert len(topology.rounds[0].destinations) == 2
  moved = (topology.rounds[0].destinations != np.arange(4)).sum()
  assert (moved, topology.sends.tolist()) == (6, [[2, 1, 1, 1]])


def make(name, args):
  return getattr(topologies, name)(*args)


@pytest.mark.parametrize(
  ('name', 'args', 'message'),
  [
    ('from_edges', (3, [(1, 1)]), r'two different workers below 3, not \(1, 1\)'),
    ('from_edges', (3, [(0, 3)]), r'two different workers below 3, not \(0, 3\)'),
    ('from_edges', (3, [(0, 1, 2)]), r'two different workers below 3, not \(0, 1, 2\)'),
    ('from_edges', (3, [(0, -1)]), r'edge \(0, -1\) must be an int >= 0, not -1'),
    ('from_edges', (3, [(0, 1.0)]), r'edge \(0, 1.0\) must be an int >= 0, not 1.0'),
    ('from_edges', (5, [(0, 2), (2, 4), (1, 3)]), r'connected; no edge leaves \[1, 3\]'),
    ('from_arrows', (3, [(1, 1)]), r'arrow must be two different workers below 3, not \(1, 1\)'),
    ('from_arrows', (3, [(3, 0)]), r'two different workers below 3, not \(3, 0\)'),
    ('from_arrows', (3, [(0, -1)]), r'arrow \(0, -1\) must be an int >= 0, not -1'),
    ('from_arrows', (3, [(0, 1), (1, 2)]), r'not only inside the parts \[\[0\], \[1\], \[2\]\]'),
    ('from_arrows', (4, [(0, 1), (1, 0), (2, 3), (3, 2), (1, 2)]), r'\[\[0, 1\], \[2, 3\]\]'),
    ('from_matrix', ([[0.5, 0.5]],), r'square, not of shape \(1, 2\)'),
    ('from_matrix', ([[1.1, -0.1], [-0.1, 1.1]],), 'entry 0, 1 must be >= 0, not -0.1'),
    ('from_matrix', ([[np.nan, 1], [1, 0]],), 'entry 0, 0 must be >= 0, not nan'),
    ('from_matrix', ([[0.5, np.inf], [1, 0]],), 'row 0 must sum to 1 .*, not inf'),
    ('from_matrix', ([[0.5, 0.5], [0.5, 0.4]],), r'row 1 must sum to 1 \(or .* column\), not 0.9'),
    ('from_matrix', (np.kron(np.eye(2), [[0.5] * 2] * 2),), r'the parts \[\[0, 1\], \[2, 3\]\]'),
    ('from_matrix', ([[0, 1], [1, 0]],), r'not move values around between \[\[0\], \[1\]\]'),
    ('from_matrix', (np.roll(np.eye(3), 1, axis=0),), r'between \[\[0\], \[1\], \[2\]\] for ever'),
  ],
)
def test_arguments_are_refused(name, args, message):
  with pytest.raises(ValueError, match=f'^{name}: .*{message}') as error:
    make(name, args)
  assert '\n' not in str(error.value)
