"""Laws that every topology obeys, the definition of each graph, and what is refused."""

import functools
import inspect
import itertools

import networkx as nx
import numpy as np
import pytest

from jax_dsgd import topologies

SIZES = [*range(1, 10), 64]
POWERS = [n for n in SIZES if n & (n - 1) == 0]


def random_doubly_stochastic(n, terms, seed):
  """A random mixture of the identity, a cyclic shift and `terms` random permutations, [n, n]."""
  generator = np.random.default_rng(seed)
  orders = [np.arange(n), np.roll(np.arange(n), 1)]
  orders += [generator.permutation(n) for _ in range(terms)]
  matrix = np.zeros((n, n))
  for share, order in zip(generator.dirichlet(np.ones(len(orders))), orders, strict=True):
    matrix[np.arange(n), order] += share
  return matrix


def chorded_path(n):
  """The edges of a path with chords of length 3: degrees differ."""
  return [(i, i + step) for step in (1, 3) for i in range(n - step)]


def both_ways(edges):
  return [*edges, *((j, i) for i, j in edges)]


MEMBERS = {
  'ring': [(n,) for n in SIZES],
  'torus': [*itertools.product((1, 2, 3, 4), (1, 2, 3)), (1, 7), (8, 8)],
  'complete': [(n,) for n in SIZES],
  'star': [(n,) for n in SIZES],
  'hypercube': [(n,) for n in POWERS],
  'exponential': [(n,) for n in SIZES],
  'one_peer_exponential': [(n,) for n in SIZES],
  'random_regular': [
    (2, 1, 0),
    *((n, d, 0) for n in range(3, 10) for d in range(2, n) if n * d % 2 == 0),
    (64, 4, 0),
  ],
  'directed_ring': [(n,) for n in SIZES],
  'one_peer_hypercube': [(n,) for n in POWERS],
  'random_pairs': [(n, 3 * n, 0) for n in range(1, 10)] + [(64, 40, 0)],
  'random_groups': [(1, 1, 1, 0), (6, 2, 12, 0), (6, 3, 9, 0), (6, 6, 1, 0), (64, 8, 9, 0)],
  'butterfly_groups': [(1, 1), (2, 2), (8, 2), (8, 4), (16, 4), (16, 16), (64, 8)],
  'inter_intra': [(1, 1), (1, 4), (4, 1), (2, 2), (3, 4), (4, 3), (8, 8)],
  'from_edges': [(n, chorded_path(n)) for n in SIZES],
  'from_arrows': [(n, both_ways(chorded_path(n))) for n in (1, 2)],
  'from_matrix': [(random_doubly_stochastic(n, 3, seed=n),) for n in SIZES],
}


def make(name, args):
  if name.startswith('random_'):
    return getattr(topologies, name)(*args[:-1], seed=args[-1])
  return getattr(topologies, name)(*args)


every_member = pytest.mark.parametrize(
  ('name', 'args'), [(name, args) for name, cases in MEMBERS.items() for args in cases]
)


def send(entry, values):
  """Plays one round message by message: [n] values before, [n] values after."""
  after = [weight * value for weight, value in zip(entry.self_weights, values, strict=True)]
  for destinations, weights in zip(entry.destinations, entry.weights, strict=True):
    for sender, receiver in enumerate(destinations):
      after[receiver] += weights[receiver] * values[sender]
  return np.array(after)


def neighbour_average(n, edges):
  """The Metropolis matrix of an undirected graph, edge by edge."""
  edges = {frozenset(edge) for edge in edges}
  degrees = [sum(i in edge for edge in edges) for i in range(n)]
  matrix = np.zeros((n, n))
  for i, j in map(sorted, edges):
    matrix[i, j] = matrix[j, i] = 1 / (1 + max(degrees[i], degrees[j]))
  return matrix + np.diag(1 - matrix.sum(axis=1))


def shift_average(n, shifts):
  """The matrix in which worker i hears i - shift mod n for every shift, and itself."""
  matrix = np.zeros((n, n))
  for i, shift in itertools.product(range(n), {0, *shifts}):
    matrix[i, (i - shift) % n] = 1 / len({0, *shifts})
  return matrix


def test_every_constructor_is_a_member():
  functions = {name: it for name, it in vars(topologies).items() if inspect.isfunction(it)}
  made = {name for name, it in functions.items() if it.__annotations__['return'] == 'Topology'}
  assert made == MEMBERS.keys() | {'concatenate', 'then_mean_every'}


@every_member
def test_law_full_permutations_and_doubly_stochastic(name, args):
  topology = make(name, args)
  workers = list(range(topology.size))
  assert topology.name == name
  for t, entry in enumerate(topology.rounds):
    for row in entry.destinations.tolist():
      assert sorted(row) == workers
      assert row != workers, 'a permutation that moves nothing is wasted'
    matrix = topology.matrix(t)
    assert matrix.min() >= 0
    np.testing.assert_allclose([matrix.sum(axis=0), matrix.sum(axis=1)], 1, atol=1e-12)
    np.testing.assert_array_equal(matrix, topology.matrix(t + 3 * topology.period))


@every_member
def test_law_messages_give_the_matrix_and_are_counted(name, args):
  topology = make(name, args)
  values = np.random.default_rng(1).normal(size=topology.size)
  assert topology.sends.shape == (topology.period, topology.size)
  for t, entry in enumerate(topology.rounds):
    np.testing.assert_allclose(send(entry, values), topology.matrix(t) @ values, atol=1e-12)
    for worker, count in enumerate(topology.sends[t].tolist()):
      table = zip(entry.destinations.tolist(), entry.weights, strict=True)
      assert count == sum(row[worker] != worker and w[row[worker]] > 0 for row, w in table)


@every_member
def test_law_consensus_at_the_spectral_gap(name, args):
  topology = make(name, args)
  gap = topology.spectral_gap()
  assert 0 < gap <= 1 + 1e-12
  start = np.random.default_rng(2).normal(size=topology.size)
  values, mean, steps = start, start.mean(), 4 * topology.period
  for t in range(steps):
    values = send(topology.rounds[t % topology.period], values)
  bound = (1 - gap) ** steps * np.linalg.norm(start - mean)
  assert np.linalg.norm(values - mean) <= bound + 1e-12


@every_member
def test_law_spectral_gap_is_reached(name, args):
  """Some start contracts by no more than the gap says: the gap is not too small a promise."""
  topology = make(name, args)
  product = np.eye(topology.size)
  for entry in topology.rounds:
    product = np.stack([send(entry, column) for column in product.T], axis=1)
  away = product - 1 / topology.size
  sigma = np.sqrt(max(np.linalg.eigvalsh(away.T @ away).max(), 0))
  assert (1 - topology.spectral_gap()) ** topology.period == pytest.approx(sigma, abs=1e-7)


def log2_up(n):
  return int(np.ceil(np.log2(n)))


# name: the matrix, the messages of each worker and the spectral gap, all of n.
DEFINITIONS = {
  'ring': (
    lambda n: shift_average(n, {1 % n, -1 % n}),
    lambda n: [min(n - 1, 2)] * n,
    lambda n: 1 - abs(1 + 2 * np.cos(2 * np.pi / n)) / 3 if n >= 3 else 1,
  ),
  'complete': (lambda n: np.full((n, n), 1 / n), lambda n: [n - 1] * n, lambda n: 1),
  'star': (
    lambda n: neighbour_average(n, [(0, leaf) for leaf in range(1, n)]),
    lambda n: [n - 1] + [1] * (n - 1),
    lambda n: 1 / n if n >= 3 else 1,
  ),
  'hypercube': (
    lambda n: neighbour_average(n, [(i, i ^ 2**t) for i in range(n) for t in range(log2_up(n))]),
    lambda n: [log2_up(n)] * n,
    lambda n: 2 / (log2_up(n) + 1) if n > 1 else 1,
  ),
  'exponential': (
    lambda n: shift_average(n, [2**t for t in range(log2_up(n))]),
    lambda n: [log2_up(n)] * n,
    lambda n: 2 / (log2_up(n) + 1) if n > 1 else 1,
  ),
}


@pytest.mark.parametrize(
  ('name', 'n'), [(name, n) for name in DEFINITIONS for (n,) in MEMBERS[name]]
)
def test_definition(name, n):
  topology = make(name, (n,))
  matrix, sends, gap = (define(n) for define in DEFINITIONS[name])
  np.testing.assert_allclose(topology.matrix(), matrix, atol=1e-15)
  assert topology.sends.tolist() == [sends]
  if name == 'exponential' and n in (3, 5, 7, 9):
    assert topology.spectral_gap() > gap
  else:
    assert topology.spectral_gap() == pytest.approx(gap)


@pytest.mark.parametrize(('rows', 'columns'), MEMBERS['torus'])
def test_torus(rows, columns):
  topology = topologies.torus(rows, columns)
  cells = list(itertools.product(range(rows), range(columns)))
  edges = [(r * columns + c, (r + 1) % rows * columns + c) for r, c in cells if rows > 1]
  edges += [(r * columns + c, r * columns + (c + 1) % columns) for r, c in cells if columns > 1]
  np.testing.assert_allclose(topology.matrix(), neighbour_average(len(cells), edges), atol=1e-15)
  degree = min(rows - 1, 2) + min(columns - 1, 2)
  assert topology.sends.tolist() == [[degree] * len(cells)]
  if min(rows, columns) >= 3:
    cosine = np.cos(2 * np.pi / max(rows, columns))
    assert topology.spectral_gap() == pytest.approx(2 * (1 - cosine) / 5)


@pytest.mark.parametrize('n', SIZES)
def test_one_peer_exponential(n):
  topology = topologies.one_peer_exponential(n)
  k = log2_up(n)
  assert topology.period == max(k, 1)
  for t in range(k):
    np.testing.assert_allclose(topology.matrix(t), shift_average(n, [2**t]), atol=1e-15)
  if n in POWERS:
    product = functools.reduce(np.matmul, [topology.matrix(t) for t in range(topology.period)])
    np.testing.assert_allclose(product, np.full((n, n), 1 / n), atol=1e-15)
    assert topology.spectral_gap() == 1
  else:
    angles = np.pi * np.arange(1, n) / n
    sigma = np.abs(np.sin(2**k * angles) / (2**k * np.sin(angles))).max()
    assert topology.spectral_gap() == pytest.approx(1 - sigma ** (1 / k))


@pytest.mark.parametrize(('n', 'degree', 'seed'), MEMBERS['random_regular'])
def test_random_regular(n, degree, seed):
  matrix = topologies.random_regular(n, degree, seed=seed).matrix()
  links = matrix > 0
  assert (links.sum(axis=1) == degree + 1).all() and links.diagonal().all()
  np.testing.assert_allclose(matrix[links], 1 / (degree + 1), atol=1e-15)
  assert nx.is_connected(nx.from_numpy_array(links))
  np.testing.assert_array_equal(matrix, topologies.random_regular(n, degree, seed=seed).matrix())


def test_random_regular_expands_and_draws_all_graphs_alike():
  """Of the 70 cubic graphs on 6 named workers 60 are prisms and 10 are K33, which is bipartite."""
  matrices = [topologies.random_regular(6, 3, seed=seed).matrix() for seed in range(140)]
  graphs = [nx.from_numpy_array((matrix > 0) & ~np.eye(6, dtype=bool)) for matrix in matrices]
  assert 8 <= sum(map(nx.is_bipartite, graphs)) <= 32  # 20 expected, 4.1 the standard deviation
  assert len({matrix.tobytes() for matrix in matrices}) > 45
  # Friedman's gap, where the circulant graph that the shuffle starts from has 0.01.
  gaps = [topologies.random_regular(64, 4, seed=seed).spectral_gap() for seed in range(5)]
  assert min(gaps) > 0.8 * (4 - 2 * np.sqrt(3)) / 5


@pytest.mark.parametrize('size', [True, False, 2.0, 0, -3, '4', None])
@pytest.mark.parametrize('name', [name for name in MEMBERS if name != 'from_matrix'])
def test_sizes_are_refused(name, size):
  others = {'torus': (3,), 'random_regular': (2, 0), 'random_pairs': (2, 0), 'inter_intra': (2,)}
  others |= {'random_groups': (2, 2, 0), 'butterfly_groups': (2,)}
  others |= {'from_edges': ([],), 'from_arrows': ([],)}
  with pytest.raises(ValueError, match=rf'{name}: \w+ must be an int >= 1, not {size!r}'):
    make(name, (size, *others.get(name, ())))


@pytest.mark.parametrize(
  ('name', 'args', 'message'),
  [
    ('torus', (3, 0), 'columns must be an int >= 1, not 0'),
    ('hypercube', (6,), 'power of two, as 4 or 8, not 6'),
    ('random_regular', (4, 0, 0), 'degree must be an int >= 1, not 0'),
    ('random_regular', (4, 4, 0), 'less than n = 4, .* not degree = 4'),
    ('random_regular', (5, 3, 0), r'n \* degree even, .* not degree = 3'),
    ('random_regular', (4, 1, 0), 'degree >= 2 if n > 2, not degree = 1'),
    ('random_regular', (4, 2, -1), 'seed must be an int >= 0, not -1'),
    ('random_regular', (4, 2, None), 'seed must be an int >= 0, not None'),
    ('one_peer_hypercube', (6,), 'power of two, as 4 or 8, not 6'),
    ('random_pairs', (4, 0, 0), 'rounds must be an int >= 1, not 0'),
    ('random_pairs', (4, 2, -1), 'seed must be an int >= 0, not -1'),
    ('random_groups', (6, 4, 1, 0), 'size must divide n = 6, not 4'),
    ('random_groups', (6, 3, 1, None), 'seed must be an int >= 0, not None'),
    ('butterfly_groups', (12, 4), 'n must be a power of two, as 8 or 16, not 12'),
    ('butterfly_groups', (8, 3), 'size must be a power of two, as 2 or 4, not 3'),
    ('butterfly_groups', (8, 16), 'size must be from 2 to n = 8, not 16'),
    ('butterfly_groups', (8, 1), 'size must be from 2 to n = 8, not 1'),
    ('inter_intra', (2, 0), 'per_node must be an int >= 1, not 0'),
  ],
)
def test_arguments_are_refused(name, args, message):
  with pytest.raises(ValueError, match=f'^{name}: .*{message}') as error:
    make(name, args)
  assert '\n' not in str(error.value)
