"""What the constructors of topologies refuse, and how they say it."""

from __future__ import annotations

import numpy as np
from scipy.sparse import csgraph


def whole_number(where: str, value: int, least: int = 1) -> int:
  if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
    raise ValueError(f'{where} must be an int >= {least}, not {value!r}')
  return int(value)


def refuse(where: str, values: np.ndarray, wrong: np.ndarray, rule: str) -> None:
  for index in np.argwhere(wrong).tolist():
    raise ValueError(f'{where} {str(index)[1:-1]} must {rule}, not {values[tuple(index)]}')


def smallest_component(linked: np.ndarray) -> list[int]:
  """The workers of the smallest connected component: all of them in a connected graph."""
  labels = csgraph.connected_components(linked, directed=False)[1]
  return np.flatnonzero(labels == np.argmin(np.bincount(labels))).tolist()
