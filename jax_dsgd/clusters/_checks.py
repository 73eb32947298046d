"""What clusters refuse, and how they say it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any

import numpy as np


def positive(where: str, value: Any) -> float:
  return number(where, value, least=0.0, strict=True)


def number(where: str, value: Any, *, least: float = 0.0, strict: bool = False) -> float:
  """A finite float that is at least `least`, or over it; YAML reads 1e9 as text, which is taken."""
  try:
    result = math.nan if isinstance(value, bool) else float(value)
  except (TypeError, ValueError):
    result = math.nan
  if not (least < result < math.inf or result == least and not strict):
    raise ValueError(
      f'{where} must be a finite number {">" if strict else ">="} {least:g}, not {value!r}'
    )
  return result


def whole_number(where: str, value: Any, *, least: int = 1) -> int:
  if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
    raise ValueError(f'{where} must be an int >= {least}, not {value!r}')
  return int(value)


def numbers(where: str, value: Any, shape: tuple[int, ...], *, strict: bool = True) -> np.ndarray:
  """A read-only float64 array of finite numbers > 0, or >= 0; scalars are broadcast."""
  try:
    result = np.array(np.broadcast_to(np.asarray(value, np.float64), shape))
  except (TypeError, ValueError):
    raise ValueError(f'{where} must be numbers of shape {list(shape)}, not {value!r}') from None
  wrong = ~np.isfinite(result) | ((result <= 0) if strict else (result < 0))
  for index in np.argwhere(wrong).tolist():
    rule = f'finite and {">" if strict else ">="} 0'
    raise ValueError(f'{where}{index} must be {rule}, not {result[tuple(index)]}')
  result.setflags(write=False)
  return result


def known(where: str, name: Any, names: Iterable[str]) -> None:
  names = list(names)
  if name not in names:
    near = difflib.get_close_matches(str(name), names, 1)
    hint = f' (did you mean {near[0]!r}?)' if near else ''
    raise ValueError(f'{where} must be one of {", ".join(names)}, not {name!r}{hint}')
