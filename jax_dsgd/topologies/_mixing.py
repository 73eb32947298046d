"""Whether rounds that are repeated lead to consensus, found on graphs and not on numbers."""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Sequence

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph


def require_paths(name: str, matrices: Sequence[sparse.csr_array]) -> None:
  """Refuses rounds that together do not lead from every worker to every other."""
  labels = _strong_components(functools.reduce(lambda a, b: a + b, matrices))
  if labels.max() > 0:
    raise ValueError(
      f'{name}: messages must lead from every worker to every other, not only inside the parts '
      f'{_parts(labels)}'
    )


def require_primitive(name: str, matrices: Sequence[sparse.csr_array], *, by_sender: bool) -> None:
  """Refuses rounds whose product of one period has powers that never mix.

  Consensus needs one set of workers to whom everyone listens in the end, and inside that set no
  period: the greatest common divisor of its cycles must be 1. Column-stochastic matrices are judged
  `by_sender`, transposed.
  """
  patterns = ((W.toarray() > 0).astype(np.float32) for W in reversed(matrices))
  product = functools.reduce(lambda a, b: (a @ b > 0).astype(np.float32), patterns)
  product = product.T if by_sender else product
  labels = _strong_components(product)
  listeners, heard = np.nonzero(product)
  leaving = labels[listeners] != labels[heard]
  closed = np.setdiff1d(labels, labels[listeners[leaving]])
  if closed.size > 1:
    kept = np.where(np.isin(labels, closed), labels, -1)
    raise ValueError(
      f'{name}: the rounds of one period together must mix, not only inside the parts '
      f'{_parts(kept)}'
    )
  levels = _levels(product, int(np.argmax(labels == closed[0])))
  inside = labels[listeners] == closed[0]
  period = np.gcd.reduce(levels[listeners[inside]] + 1 - levels[heard[inside]])
  if period != 1:
    parts = _parts(np.where(labels == closed[0], levels % period, -1))
    raise ValueError(
      f'{name}: the rounds must mix, not move values around between {parts} for ever'
    )


def _strong_components(graph: sparse.csr_array | np.ndarray) -> np.ndarray:
  return csgraph.connected_components(graph, directed=True, connection='strong')[1]


def _levels(graph: np.ndarray, root: int) -> np.ndarray:
  """How many arrows each worker is away from the root; 0 where none lead."""
  order, before = csgraph.breadth_first_order(graph, root)
  levels = np.zeros(len(graph), int)
  for worker in order[1:]:
    levels[worker] = levels[before[worker]] + 1
  return levels


def _parts(labels: np.ndarray) -> str:
  parts = [np.flatnonzero(labels == label).tolist() for label in np.unique(labels[labels >= 0])]
  return reprlib.repr(sorted(parts))
