"""A round of messages, and a topology: a cycle of rounds."""

from __future__ import annotations

import dataclasses
import functools
import reprlib
from collections.abc import Iterable, Sequence

import numpy as np
from scipy import sparse

from jax_dsgd.topologies import _checks, _mixing


@dataclasses.dataclass(frozen=True, eq=False)
class Round:
  """One round of messages between n workers through k permutations; arrays become read-only.

  Attributes:
    self_weights: [n] float64, the weight that worker i gives to its own value.
    destinations: [k, n] int, in permutation j worker i sends to `destinations[j, i]`; i itself is a
      self-loop, and nothing crosses.
    weights: [k, n] float64, the weight that the receiver i gives to what permutation j brings; 0
      where an arrow only completes the permutation.
  """

  self_weights: np.ndarray
  destinations: np.ndarray
  weights: np.ndarray

  def __post_init__(self):
    for name, dtype in (('self_weights', float), ('destinations', None), ('weights', float)):
      array = np.array(getattr(self, name), dtype)
      array.setflags(write=False)
      object.__setattr__(self, name, array)

  @functools.cached_property
  def given(self) -> np.ndarray:
    """The weight that what worker i sends in permutation j gets, by sender, [k, n] float64."""
    return np.take_along_axis(self.weights, self.destinations, axis=1)


@dataclasses.dataclass(frozen=True, eq=False)
class Topology:
  """A cycle of rounds: step t uses `rounds[t % period]`.

  All its rounds are row-stochastic, that is everyone takes a mean of what it hears, or all are
  column-stochastic, that is everyone hands its value out in parts, as in push-sum.

  Attributes:
    name: what errors and reports call it.
    rounds: the rounds of one period, all between the same workers.

  Raises:
    ValueError: a row of destinations is not a permutation, shapes disagree, a weight is negative or
      not finite, or the mixing matrices are not of one of the two kinds.

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
    if not self.row_stochastic and not self.column_stochastic:
      (t, i), (u, j) = (np.argwhere(_off(sums))[0].tolist() for sums in self._sums)
      heard, given = self._sums[0][t, i], self._sums[1][u, j]
      raise ValueError(
        f'{self.name}: round {t}: the weights of worker {i} must sum to 1, not {heard:.10g}, or '
        f'else those given by each sender, not {given:.10g} as by {j} in round {u}'
      )

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

  @functools.cached_property
  def row_stochastic(self) -> bool:
    """Whether every row of every W sums to 1: equal values stay as they are."""
    return not _off(self._sums[0]).any()

  @functools.cached_property
  def column_stochastic(self) -> bool:
    """Whether every column of every W sums to 1: the sum over workers stays as it is."""
    return not _off(self._sums[1]).any()

  @property
  def doubly_stochastic(self) -> bool:
    """Whether the rows and the columns of every W sum to 1: mixing leads to the mean."""
    return self.row_stochastic and self.column_stochastic

  @functools.cached_property
  def symmetric(self) -> bool:
    """Whether every W is symmetric: what i gives to j, j gives to i."""
    return all(abs(W - W.T).max() <= 1e-9 for W in map(self._sparse, range(self.period)))

  @functools.cached_property
  def sends(self) -> np.ndarray:
    """How many messages each worker sends to others in each round, [period, n] int.

    A message of weight 0 does not count: a device moves it, as one permutation is one program for
    all workers, and a network need not.
    """
    workers = np.arange(self.size)
    counted = [(entry.destinations != workers) & (entry.given > 0) for entry in self.rounds]
    return np.stack([entry.sum(axis=0) for entry in counted])

  def matrix(self, t: int = 0) -> np.ndarray:
    """Returns W of round t, [n, n] float64: W[i, j] is the weight that i gives to j's value."""
    return self._sparse(t).toarray()

  def spectral_gap(self) -> float:
    """Returns 1 - sigma^(1/period), the rate of consensus a round.

    P = W_{period-1} ... W_0 is the product of one period. If P is doubly stochastic, sigma is the
    2-norm of P - 11^T/n, the second singular value, |lambda_2| of one symmetric W. Over t rounds, a
    multiple of the period, the distance to the mean shrinks at least by (1 - gap)^t: a gap of 1 is
    the exact mean once a period (one worker has it always), a gap of 0 is no progress.

    Of a P that is only row- or only column-stochastic no norm says as much, and sigma is
    |lambda_2|: the rate in the long run of the consensus, or of push-sum's ratios.
    """
    product = functools.reduce(np.matmul, map(self.matrix, reversed(range(self.period))))
    if self.doubly_stochastic:
      sigma = float(np.linalg.norm(product - 1 / self.size, 2))
    else:
      # A second 0 stands for the eigenvalue that a single worker has not.
      sigma = float(np.sort([0.0, *np.abs(np.linalg.eigvals(product))])[-2])
    # The root would make a visible rate of the rounding noise that an exact mean leaves.
    noise = self.size * self.period * np.finfo(np.float64).eps
    return 1.0 - min(sigma, 1.0) ** (1 / self.period) if sigma > noise else 1.0

  def require_mixing(self) -> None:
    """Refuses rounds that never lead to consensus, however often they are repeated.

    Raises:
      ValueError: naming the workers that no messages join, or that only swap values.

    >>> Topology('swap', (Round([0, 0], [[1, 0]], [[1, 1]]),)).require_mixing()
    Traceback (most recent call last):
      ...
    ValueError: swap: the rounds must mix, not move values around between [[0], [1]] for ever
    """
    matrices = [self._sparse(t) for t in range(self.period)]
    _mixing.require_paths(self.name, matrices)
    # With a share of its own in every round, nobody forgets, and the paths are enough.
    if any((W.diagonal() == 0).any() for W in matrices):
      _mixing.require_primitive(self.name, matrices, by_sender=not self.row_stochastic)

  @functools.cached_property
  def _sums(self) -> tuple[np.ndarray, np.ndarray]:
    """The sums of rows and of columns, each [period, n]."""
    rows = [entry.self_weights + entry.weights.sum(axis=0) for entry in self.rounds]
    columns = [entry.self_weights + entry.given.sum(axis=0) for entry in self.rounds]
    return np.stack(rows), np.stack(columns)

  def _sparse(self, t: int) -> sparse.csr_array:
    entry, workers = self.rounds[t % self.period], np.arange(self.size)
    receivers = np.concatenate([workers, entry.destinations.ravel()])
    senders = np.tile(workers, len(entry.destinations) + 1)
    weights = np.concatenate([entry.self_weights, entry.given.ravel()])
    used = weights > 0
    places = receivers[used], senders[used]
    return sparse.csr_array((weights[used], places), shape=(self.size, self.size))


def _off(sums: np.ndarray) -> np.ndarray:
  return np.abs(sums - 1) > 1e-9


def uniform(n: int, permutations: Sequence[np.ndarray]) -> Round:
  """The round of k permutations that share no arrow, with all weights 1/(k + 1)."""
  weights = np.full((len(permutations) + 1, n), 1 / (len(permutations) + 1))
  return Round(weights[0], np.array(permutations, int).reshape(-1, n), weights[1:])


def circulant(n: int, shifts: Iterable[int]) -> Round:
  """The round in which i sends to i + shift mod n for every shift, all weights alike."""
  return uniform(n, [(np.arange(n) + shift) % n for shift in shifts])


def meeting(n: int, groups: Iterable[np.ndarray]) -> Round:
  """The round in which each group of workers takes its exact mean, by cyclic shifts inside it.

  Who is in no group keeps its value.
  """
  groups = list(groups)
  most = max((group.size for group in groups), default=1)
  destinations, weights = np.tile(np.arange(n), (most - 1, 1)), np.zeros((most - 1, n))
  for group in groups:
    for shift in range(1, group.size):
      destinations[shift - 1, group] = np.roll(group, -shift)
      weights[shift - 1, group] = 1 / group.size
  return Round(1 - weights.sum(axis=0), destinations, weights)


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
    _checks.refuse(f'{where}: {field}', values, wrong, 'be finite and >= 0')
