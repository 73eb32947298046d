"""Topologies of a graph, of arrows or of a matrix that is given."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence

import numpy as np
from numpy import typing as npt

from jax_dsgd.topologies import _checks, _colouring
from jax_dsgd.topologies._topology import Round, Topology


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
  n = _checks.whole_number(f'{name}: n', n)
  pairs = [sorted(_pair(name, n, edge, 'an edge')) for edge in edges]
  ends = np.unique(np.array(pairs, int).reshape(-1, 2), axis=0)
  linked = np.zeros((n, n), bool)
  linked[tuple(ends.T)] = True
  if len(lone := _checks.smallest_component(linked)) < n:
    raise ValueError(f'{name}: the graph must be connected; no edge leaves {reprlib.repr(lone)}')
  partners = _colouring.edge_colours(n, ends)
  degrees = np.bincount(ends.ravel(), minlength=n)
  weights = (partners != np.arange(n)) / (1 + np.maximum(degrees, degrees[partners]))
  return Topology(name, (Round(1 - weights.sum(axis=0), partners, weights),))


def from_arrows(n: int, arrows: Iterable[Sequence[int]], *, name: str = 'from_arrows') -> Topology:
  """Any strongly connected directed graph, for push-sum: column-stochastic, seldom row-stochastic.

  An arrow (i, j) lets i send to j. Worker i hands its value out in equal parts 1/(1 + out-degree),
  to itself and along each of its arrows; so the sum over workers stays as it is, and x/w tends to
  the mean where w starts at 1 and is mixed alike. A graph that is not strongly connected is a
  ValueError. Messages a worker: its out-degree, in max(in-degree, out-degree) permutations; where
  those need further arrows to be full, these have weight 0.
  Reference: Kempe, Dobra and Gehrke, Gossip-based computation of aggregate information, 2003;
  Assran et al., Stochastic gradient push for distributed deep learning, 2019, arXiv 1811.10792.

  Args:
    n: the number of workers.
    arrows: pairs (sender, receiver) of different workers; one given again counts once.
    name: what errors and reports call it.

  >>> from_arrows(3, [(0, 1), (1, 2), (2, 0), (0, 2)]).matrix().round(2).tolist()
  [[0.33, 0.0, 0.5], [0.33, 0.5, 0.0], [0.33, 0.5, 0.5]]
  """
  n = _checks.whole_number(f'{name}: n', n)
  pairs = [_pair(name, n, arrow, 'an arrow') for arrow in arrows]
  matrix = np.eye(n)
  for sender, receiver in pairs:
    matrix[receiver, sender] = 1
  topology = Topology(name, (_covering(matrix / matrix.sum(axis=0)),))
  topology.require_mixing()
  return topology


def from_matrix(matrix: npt.ArrayLike, *, name: str = 'from_matrix') -> Topology:
  """Any row- or column-stochastic matrix that mixes.

  W[i, j] is the weight of j's value at worker i. As receivers have weights of their own, any
  permutations will do that cover what is not 0 off the diagonal. Entries and sums may be off by
  1e-6, those below 1e-9 count as 0, and the sums of the topology are 1 to rounding all the same:
  rows, columns or both, as in the matrix. What is off by more is a ValueError, and so is a matrix
  whose powers never mix. Messages a worker: what is not 0 in its column, in as many permutations as
  the fullest row or column has of them.
  Reference: Koenig, Graphok es matrixok, 1931.

  Args:
    matrix: [n, n].
    name: what errors and reports call it.

  >>> from_matrix([[0.5, 0.5, 0], [0, 0.5, 0.5], [0.5, 0, 0.5]]).rounds[0].destinations.tolist()
  [[2, 0, 1]]
  """
  given = np.asarray(matrix, np.float64)
  if given.ndim != 2 or given.shape[0] != given.shape[1] or not given.size:
    raise ValueError(f'{name}: the matrix must be square, not of shape {given.shape}')
  _checks.refuse(f'{name}: entry', given, ~(given >= -1e-6), 'be >= 0')
  rows, columns = (np.abs(given.sum(axis=axis) - 1) <= 1e-6 for axis in (1, 0))
  if not rows.all() and not columns.all():
    sums = given.sum(axis=1)
    _checks.refuse(f'{name}: row', sums, ~rows, 'sum to 1 (or else every column)')
  given = np.where(given > 1e-9, given, 0.0)
  if rows.all() and columns.all():
    given = _balanced(given)
  else:
    given /= given.sum(axis=1, keepdims=True) if rows.all() else given.sum(axis=0)
  topology = Topology(name, (_covering(given),))
  topology.require_mixing()
  return topology


def _pair(name: str, n: int, pair: Sequence[int], what: str) -> list[int]:
  ends = [
    _checks.whole_number(f'{name}: the ends of {what[3:]} {pair!r}', e, least=0) for e in pair
  ]
  if len(ends) != 2 or ends[0] == ends[1] or max(ends) >= n:
    raise ValueError(f'{name}: {what} must be two different workers below {n}, not {pair!r}')
  return ends


def _covering(matrix: np.ndarray) -> Round:
  """The round with this matrix."""
  n = len(matrix)
  receivers, senders = np.nonzero(matrix * (1 - np.eye(n)))
  destinations = _colouring.cover(n, np.stack([senders, receivers], axis=1))
  sources = np.argsort(destinations, axis=1)
  weights = np.where(sources == np.arange(n), 0.0, matrix[np.arange(n), sources])
  # A closing arrow may repeat another: every arrow carries its weight where it comes first.
  seen = np.zeros((n, n), bool)
  for row, givers in zip(weights, sources, strict=True):
    row[seen[np.arange(n), givers]] = 0
    seen[np.arange(n), givers] = True
  return Round(matrix.diagonal(), destinations, weights)


def _balanced(matrix: np.ndarray) -> np.ndarray:
  """Scales rows and columns, that sum to nearly 1, until they do to rounding.

  Newton's steps for the factors 1 + u_i + v_j: twice is enough where sums are off by 1e-6.
  """
  for _ in range(3):
    rows, columns = matrix.sum(axis=1), matrix.sum(axis=0)
    if max(np.abs(rows - 1).max(), np.abs(columns - 1).max()) < 1e-13:
      break
    rest = np.diag(columns) - matrix.T @ (matrix / rows[:, None])
    v = np.linalg.lstsq(rest, 1 - columns - matrix.T @ ((1 - rows) / rows))[0]
    u = (1 - rows - matrix @ v) / rows
    matrix = matrix * np.maximum(1 + u[:, None] + v, 0)
  return matrix
