"""Topologies: who talks to whom at round t, and with which weight.

A topology is a table of full permutations, self-loops included, and of per-worker weights. With its
mixing matrix W, worker i replaces its value by sum_j W[i, j] x_j. Every constructor returns doubly
stochastic matrices, so mixing keeps the mean over workers; symmetric and of period 1 unless it says
otherwise. Sizes are ints >= 1, anything else is a ValueError. Gaps are `Topology.spectral_gap()`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import reprlib
from collections.abc import Iterable, Sequence

import numpy as np
from numpy import typing as npt
from scipy import optimize
from scipy.sparse import csgraph

__all__ = ['Round', 'Topology', 'complete', 'exponential', 'from_edges', 'from_matrix', 'hypercube']
__all__ += ['one_peer_exponential', 'random_regular', 'ring', 'star', 'torus']


@dataclasses.dataclass(frozen=True, eq=False)
class Round:
  """One round of messages between n workers through k permutations; arrays become read-only.

  Attributes:
    self_weights: [n] float64, the weight that worker i gives to its own value.
    destinations: [k, n] int, in permutation j worker i sends to `destinations[j, i]`; i itself is a
      self-loop, and nothing crosses.
    weights: [k, n] float64, the weight that the receiver i gives to what permutation j brings.
  """

  self_weights: np.ndarray
  destinations: np.ndarray
  weights: np.ndarray

  def __post_init__(self):
    for name, dtype in (('self_weights', float), ('destinations', None), ('weights', float)):
      array = np.array(getattr(self, name), dtype)
      array.setflags(write=False)
      object.__setattr__(self, name, array)


@dataclasses.dataclass(frozen=True, eq=False)
class Topology:
  """A cycle of rounds: step t uses `rounds[t % period]`.

  Attributes:
    name: what errors and reports call it.
    rounds: the rounds of one period, all between the same workers.

  Raises:
    ValueError: a row of destinations is not a permutation, shapes disagree, a weight is negative or
      not finite, or a row of a mixing matrix does not sum to 1.

  >>> swap = Round(np.full(2, 0.5), np.array([[1, 0]]), np.full((1, 2), 0.5))
  >>> Topology('swap', (swap,)), Topology('swap', (swap,)).matrix().tolist()
  (Topology('swap', size=2, period=1), [[0.5, 0.5], [0.5, 0.5]])
  """

  name: str
  rounds: tuple[Round, ...]

  def __post_init__(self):
    if not self.rounds:
      raise ValueError(f'{self.name}: rounds must hold at least one Round, not {self.rounds!r}')
    for t, entry in enumerate(self.rounds):
      _check_round(f'{self.name}: round {t}', entry, self.size)
      sums = self.matrix(t).sum(axis=1)
      where = f'{self.name}: round {t}: the weights of worker'
      _refuse(where, sums, np.abs(sums - 1) > 1e-9, 'sum to 1')

  def __repr__(self) -> str:
    return f'Topology({self.name!r}, size={self.size}, period={self.period})'

  @property
  def size(self) -> int:
    """The number of workers n."""
    return self.rounds[0].self_weights.size

  @property
  def period(self) -> int:
    """The number of rounds before they repeat."""
    return len(self.rounds)

  @property
  def sends(self) -> np.ndarray:
    """How many messages each worker sends to others in each round, [period, n] int."""
    workers = np.arange(self.size)
    return np.stack([(entry.destinations != workers).sum(axis=0) for entry in self.rounds])

  def matrix(self, t: int = 0) -> np.ndarray:
    """Returns W of round t, [n, n] float64: W[i, j] is the weight that i gives to j's value."""
    entry = self.rounds[t % self.period]
    matrix = np.diag(entry.self_weights)
    for receivers, weights in zip(entry.destinations, entry.weights, strict=True):
      matrix[receivers, np.arange(self.size)] += weights[receivers]
    return matrix

  def spectral_gap(self) -> float:
    """Returns 1 - sigma^(1/period), the rate of consensus a round.

    sigma is the 2-norm of P - 11^T/n, P = W_{period-1} ... W_0 the product of one period: the
    second singular value of a doubly stochastic P, |lambda_2| of one symmetric W. Over t rounds, a
    multiple of the period, the distance to the mean shrinks at least by (1 - gap)^t: a gap of 1 is
    the exact mean once a period (one worker has it always), a gap of 0 is no progress.
    """
    product = functools.reduce(np.matmul, map(self.matrix, reversed(range(self.period))))
    sigma = float(np.linalg.norm(product - 1 / self.size, 2))
    # The root would make a visible rate of the rounding noise that an exact mean leaves.
    noise = self.size * self.period * np.finfo(np.float64).eps
    return 1.0 - sigma ** (1 / self.period) if sigma > noise else 1.0


def ring(n: int) -> Topology:
  """A ring: worker i averages with i - 1 and i + 1 mod n, with weights 1/3; two swap with 1/2.

  Spectral gap: 1 - |1 + 2 cos(2 pi/n)| / 3 for n >= 3, else 1. Messages a worker: 2; 1 if n = 2.

  >>> ring(4).matrix().round(2).tolist()[0]
  [0.33, 0.33, 0.0, 0.33]
  """
  n = _integer('ring: n', n)
  return Topology('ring', (_circulant(n, {1 % n, -1 % n} - {0}),))


def torus(rows: int, columns: int) -> Topology:
  """A ring in each of two directions; worker (r, c) is number r * columns + c.

  Each averages with its d neighbours (r +- 1, c) and (r, c +- 1), with weights 1/(d + 1). A side of
  2 has one neighbour for both directions, a side of 1 none. Spectral gap, if both sides are >= 3:
  2 (1 - cos(2 pi / max(rows, columns))) / 5. Messages a worker: d, then 4.

  >>> torus(3, 4).matrix()[0].nonzero()[0].tolist()
  [0, 1, 3, 4, 8]
  """
  rows, columns = _integer('torus: rows', rows), _integer('torus: columns', columns)
  workers = np.arange(rows * columns).reshape(rows, columns)
  moves = {(r % rows, c % columns) for r, c in ((1, 0), (-1, 0), (0, 1), (0, -1))} - {(0, 0)}
  moved = [np.roll(workers, move, axis=(0, 1)).ravel() for move in sorted(moves)]
  return Topology('torus', (_uniform(rows * columns, moved),))


def complete(n: int) -> Topology:
  """Everyone with everyone: W = 11^T / n, the exact mean, in n - 1 cyclic shifts.

  Spectral gap: 1. Messages a worker: n - 1.

  >>> complete(4).matrix().tolist()[0]
  [0.25, 0.25, 0.25, 0.25]
  """
  n = _integer('complete: n', n)
  return Topology('complete', (_circulant(n, range(1, n)),))


def star(n: int) -> Topology:
  """A star: worker 0 is the hub, and the only neighbour of all others.

  Metropolis weights are 1/n on every edge, so the hub holds the mean after a round. Spectral gap:
  1/n for n >= 3, else 1. Messages: n - 1 from the hub, 1 from every other worker.

  >>> star(4).matrix().tolist()[:2]
  [[0.25, 0.25, 0.25, 0.25], [0.25, 0.75, 0.0, 0.0]]
  """
  n = _integer('star: n', n)
  return from_edges(n, ((0, leaf) for leaf in range(1, n)), name='star')


def hypercube(n: int) -> Topology:
  """A hypercube: i averages with the d = log2 n workers whose number differs from i in one bit.

  All weights are 1/(d + 1). Spectral gap: 2/(d + 1), or 1 if n = 1. Messages a worker: d.

  >>> hypercube(8).matrix().tolist()[0]
  [0.25, 0.25, 0.25, 0.0, 0.25, 0.0, 0.0, 0.0]
  """
  n = _integer('hypercube: n', n)
  d = n.bit_length() - 1
  if n != 2**d:
    raise ValueError(f'hypercube: n must be a power of two, as {2**d} or {2 ** (d + 1)}, not {n}')
  return Topology('hypercube', (_uniform(n, [np.arange(n) ^ 2**t for t in range(d)]),))


def exponential(n: int) -> Topology:
  """The static exponential graph, directed: i sends to i + 2^t mod n for t < k = ceil(log2 n).

  Weights: 1/(k + 1). Spectral gap: 2/(k + 1) for even n, more for odd n. Messages a worker: k.
  Reference: Ying et al., Exponential graph is provably efficient for decentralized deep training,
  2021, arXiv 2110.13363.

  >>> exponential(8).rounds[0].destinations[:, 0].tolist()
  [1, 2, 4]
  """
  n = _integer('exponential: n', n)
  return Topology('exponential', (_circulant(n, [2**t for t in range((n - 1).bit_length())]),))


def one_peer_exponential(n: int) -> Topology:
  """The exponential graph, one peer a round: in round t worker i sends to i + 2^t mod n.

  t < k = ceil(log2 n), the period (one empty round if n = 1); both weights are 1/2. Spectral gap:
  1 - sigma^(1/k), sigma = max_j |sin(pi j 2^k / n) / (2^k sin(pi j / n))| over 0 < j < n, that is 0
  for n a power of two: there a period is the exact mean. Messages a worker: 1.
  Reference: Assran et al., Stochastic gradient push for distributed deep learning, 2019, arXiv
  1811.10792; Ying et al., 2021, arXiv 2110.13363, for the exact mean.

  >>> one_peer_exponential(8).period, one_peer_exponential(8).spectral_gap()
  (3, 1.0)
  """
  n = _integer('one_peer_exponential: n', n)
  rounds = tuple(_circulant(n, [2**t]) for t in range((n - 1).bit_length()))
  return Topology('one_peer_exponential', rounds or (_circulant(n, []),))


def random_regular(n: int, degree: int, *, seed: int) -> Topology:
  """A random connected simple graph where every worker has d = `degree` neighbours.

  d < n and n * d is even. Random switches of two edges, (a, b) and (c, d) to (a, d) and (c, b),
  shuffle a circulant graph until it is connected. All weights are 1/(d + 1). Messages a worker: d.
  Spectral gap: near (d - 2 sqrt(d - 1)) / (d + 1), d >= 3, n large (Friedman, arXiv cs/0405020).

  >>> random_regular(8, 3, seed=0).sends.tolist()
  [[3, 3, 3, 3, 3, 3, 3, 3]]
  """
  n, degree = _integer('random_regular: n', n), _integer('random_regular: degree', degree)
  generator = np.random.default_rng(_integer('random_regular: seed', seed, least=0))
  if degree >= n or n * degree % 2 or degree == 1 < n - 1:
    rule = f'degree must be less than n = {n}, n * degree even, and degree >= 2 if n > 2'
    raise ValueError(f'random_regular: {rule}, not degree = {degree}')
  offsets = [*range(1, degree // 2 + 1), *range(n - degree // 2, n)] + [n // 2] * (degree % 2)
  linked = np.isin(np.subtract.outer(np.arange(n), np.arange(n)) % n, offsets)
  while True:
    # Ten tries an edge; one that would make a loop or a double edge is void.
    tries = generator.integers([n, n, degree, degree], size=(5 * n * degree, 4))
    for a, c, i, j in tries.tolist():
      b, d = int(np.flatnonzero(linked[a])[i]), int(np.flatnonzero(linked[c])[j])
      if len({a, b, c, d}) == 4 and not linked[a, d] and not linked[c, b]:
        linked[[a, b, c, d], [b, a, d, c]] = False
        linked[[a, d, c, b], [d, a, b, c]] = True
    if len(_smallest_component(linked)) == n:
      return from_edges(n, np.argwhere(linked), name='random_regular')


def from_edges(n: int, edges: Iterable[Sequence[int]], *, name: str = 'from_edges') -> Topology:
  """Any connected undirected graph, with Metropolis weights 1 / (1 + max(degree_i, degree_j)).

  `edges` are pairs of different workers; one given again or reversed counts once. They get at most
  max degree + 1 colours, and each colour is a permutation that swaps the ends of its edges. A graph
  that is not connected is a ValueError. Messages a worker: its degree.
  Reference: Xiao, Boyd and Lall, A scheme for robust distributed sensor fusion based on average
  consensus, 2005; Misra and Gries, A constructive proof of Vizing's theorem, 1992.

  >>> from_edges(4, [(0, 1), (1, 2), (2, 3)]).rounds[0].destinations.tolist()
  [[1, 0, 3, 2], [0, 2, 1, 3]]
  """
  n = _integer(f'{name}: n', n)
  pairs = []
  for edge in edges:
    pair = sorted(_integer(f'{name}: the ends of edge {edge!r}', end, least=0) for end in edge)
    if len(pair) != 2 or pair[0] == pair[1] or pair[1] >= n:
      raise ValueError(f'{name}: an edge must be two different workers below {n}, not {edge!r}')
    pairs.append(pair)
  ends = np.unique(np.array(pairs, int).reshape(-1, 2), axis=0)
  linked = np.zeros((n, n), bool)
  linked[tuple(ends.T)] = True
  if len(lone := _smallest_component(linked)) < n:
    raise ValueError(f'{name}: the graph must be connected; no edge leaves {reprlib.repr(lone)}')
  partners = _edge_colouring(n, ends)
  degrees = np.bincount(ends.ravel(), minlength=n)
  weights = (partners != np.arange(n)) / (1 + np.maximum(degrees, degrees[partners]))
  return Topology(name, (Round(1 - weights.sum(axis=0), partners, weights),))


def from_matrix(matrix: npt.ArrayLike, *, name: str = 'from_matrix') -> Topology:
  """Any doubly stochastic matrix that mixes, as a weighted sum of permutations.

  W[i, j] is the weight of j's value at worker i, and W = c_0 I + sum_j c_j P_j: P_j is the heaviest
  permutation in what is left of W, c_j its smallest entry, and self-loops join the self weights.
  Entries and sums may be off by 1e-6, and the topology is doubly stochastic to rounding all the
  same; more is a ValueError, and so is a spectral gap of 0. Messages a worker: at most one for each
  permutation, of which a sparse W needs few, a dense one up to (n - 1)^2 + 1.
  Reference: Birkhoff, Tres observaciones sobre el algebra lineal, 1946.

  >>> from_matrix([[0.5, 0.5, 0], [0, 0.5, 0.5], [0.5, 0, 0.5]]).rounds[0].destinations.tolist()
  [[2, 0, 1]]
  """
  matrix = np.asarray(matrix, np.float64)
  if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
    raise ValueError(f'{name}: the matrix must be square, not of shape {matrix.shape}')
  _refuse(f'{name}: entry', matrix, ~(matrix >= -1e-6), 'be >= 0')
  for line, sums in (('row', matrix.sum(axis=1)), ('column', matrix.sum(axis=0))):
    _refuse(f'{name}: {line}', sums, np.abs(sums - 1) > 1e-6, 'sum to 1')
  topology = Topology(name, (_birkhoff(matrix),))
  gap = topology.spectral_gap()
  if gap < 1e-9:
    # Then some workers have no sender in common with any of the others.
    receivers = _smallest_component(matrix @ matrix.T > 1e-9)
    senders = np.flatnonzero(matrix[receivers].max(axis=0) > 1e-9).tolist()
    heard = f'only workers {reprlib.repr(receivers)} hear from {reprlib.repr(senders)}'
    raise ValueError(f'{name}: the matrix must mix, not have spectral gap {gap:.1g}: {heard}')
  return topology


def _integer(where: str, value: int, least: int = 1) -> int:
  if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
    raise ValueError(f'{where} must be an int >= {least}, not {value!r}')
  return int(value)


def _check_round(where: str, entry: Round, n: int) -> None:
  """Refuses a round that is not a table of full permutations with nonnegative weights."""
  shapes = entry.self_weights.shape, entry.destinations.shape, entry.weights.shape
  table = (*entry.weights.shape[:1], n)
  if not n or shapes != ((n,), table, table):
    raise ValueError(f'{where}: shapes must be [n], [k, n] and [k, n] with n = {n}, not {shapes}')
  if entry.destinations.dtype.kind not in 'iu':
    raise ValueError(f'{where}: destinations must be ints, not {entry.destinations.dtype}')
  for j, row in enumerate(entry.destinations):
    missed = np.setdiff1d(np.arange(n), row)
    if missed.size:
      listed = reprlib.repr(row.tolist())
      raise ValueError(f'{where}: permutation {j} must send to worker {missed[0]}, not {listed}')
  arrived = ('weight of permutation, worker', entry.weights)
  for field, values in (('self weight of worker', entry.self_weights), arrived):
    wrong = ~((values >= 0) & (values < np.inf))
    _refuse(f'{where}: {field}', values, wrong, 'be finite and >= 0')


def _refuse(where: str, values: np.ndarray, wrong: np.ndarray, rule: str) -> None:
  for index in np.argwhere(wrong).tolist():
    raise ValueError(f'{where} {str(index)[1:-1]} must {rule}, not {values[tuple(index)]}')


def _uniform(n: int, permutations: Sequence[np.ndarray]) -> Round:
  """The round of k permutations that share no arrow, with all weights 1/(k + 1)."""
  weights = np.full((len(permutations) + 1, n), 1 / (len(permutations) + 1))
  return Round(weights[0], np.array(permutations, int).reshape(-1, n), weights[1:])


def _circulant(n: int, shifts: Iterable[int]) -> Round:
  return _uniform(n, [(np.arange(n) + shift) % n for shift in shifts])


def _smallest_component(linked: np.ndarray) -> list[int]:
  """The workers of the smallest connected component: all of them in a connected graph."""
  labels = csgraph.connected_components(linked, directed=False)[1]
  return np.flatnonzero(labels == np.argmin(np.bincount(labels))).tolist()


def _edge_colouring(n: int, edges: np.ndarray) -> np.ndarray:
  """Colours edges [m, 2] as Misra and Gries do, k <= max degree + 1 colours: [k, n] partners."""
  # Where a colour is free the partner is oneself, so colours are swapped by swapping rows.
  table = np.tile(np.arange(n), (np.bincount(edges.ravel(), minlength=n).max() + 1, 1))
  for hub, spoke in edges.tolist():
    # In a fan the colour of each edge (hub, end) is free at the end before. It grows as long as it
    # can, or until a colour is free at both the hub and the last end.
    fan, grown = [], [spoke]
    while grown and hub not in grown:
      fan.append(grown[0])
      free = np.flatnonzero(table[:, fan[-1]] == fan[-1])
      grown = [end for end in table[free, hub].tolist() if end not in fan]
    colour, spare = free[np.argmax(table[free, hub] == hub)], np.argmax(table[:, hub] == hub)
    # Free the colour at the hub too, by a swap on the path of both colours from there.
    path, along = [hub], itertools.cycle((colour, spare))
    while (end := int(table[next(along), path[-1]])) != path[-1]:
      path.append(end)
    table[np.ix_([spare, colour], path)] = table[np.ix_([colour, spare], path)]
    # Vizing's argument: up to the first end where the colour is free now, the fan is still a fan.
    fan = fan[: next(i for i, end in enumerate(fan) if table[colour, end] == end) + 1]
    for end, after in itertools.pairwise(fan):
      shade = np.flatnonzero(table[:, hub] == after)[0]
      table[shade, [hub, end, after]] = end, hub, after
    table[colour, [hub, fan[-1]]] = fan[-1], hub
  return table[(table != np.arange(n)).any(axis=1)]


def _birkhoff(matrix: np.ndarray) -> Round:
  """Decomposes a doubly stochastic matrix into the identity and permutations."""
  n, workers = len(matrix), np.arange(len(matrix))
  # By Hall's theorem a permutation of larger entries is left while over 1e-10 of each row is.
  least = 1e-10 / n**2
  shares, sources = [max(matrix.diagonal().min(), 0.0)], [workers]
  rest = matrix - shares[0] * np.eye(n)
  while True:
    # One entry of -n outweighs all others, so it is taken only where no permutation avoids it.
    columns = optimize.linear_sum_assignment(np.where(rest > least, rest, -n), maximize=True)[1]
    share = rest[workers, columns].min()
    if share <= least:
      break
    rest[workers, columns] -= share
    shares.append(share)
    sources.append(columns)
  own = np.array(sources) == workers
  shares = np.array(shares)[:, None] / sum(shares)
  self_weights, weights = np.where(own, shares, 0.0).sum(axis=0), np.where(own, 0.0, shares)
  return Round(self_weights, np.argsort(sources, axis=1)[1:], weights[1:])
