"""What simulations refuse, and how they say it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def whole_number(where: str, value: Any, *, least: int = 1, most: int | None = None) -> int:
  whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
  if not whole or value < least or (most is not None and value > most):
    rule = f'>= {least}' if most is None else f'from {least} to {most}'
    raise ValueError(f'{where} must be an int {rule}, not {value!r}')
  return int(value)


def number(where: str, value: Any, *, least: float = 0.0, strict: bool = False) -> float:
  """A finite number that is at least `least`, or over it."""
  real = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
  if not real or not (least < value < math.inf or value == least and not strict):
    rule = f'{">" if strict else ">="} {least:g}'
    raise ValueError(f'{where} must be a finite number {rule}, not {value!r}')
  return float(value)


def refuse(where: str, values: np.ndarray, wrong: np.ndarray, rule: str) -> None:
  """Raises for the first entry of `values` that is wrong."""
  if wrong.any():
    index = tuple(np.argwhere(wrong)[0].tolist())
    raise ValueError(f'{where}{list(index)} must {rule}, not {values[index]}')
