"""Selection: which few of many devices are asked in a round."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import numpy as np

from jax_dsgd.simulation import _checks
from jax_dsgd.simulation._policy import Policy, View

Score = Callable[[np.ndarray, np.ndarray, np.random.Generator], np.ndarray]


def availability_and_freshness(
  availability: np.ndarray, freshness: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
  """The score of AW-PSP: availability times rounds since last selected."""
  return availability * freshness


def availability_only(
  availability: np.ndarray, freshness: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
  """A control: prefers the most available, and so never asks those with rare data."""
  return availability


def inverse_availability(
  availability: np.ndarray, freshness: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
  """A control: draws without replacement with chances proportional to 1 / availability."""
  return rng.gumbel(size=availability.size) - np.log(availability)


def at_random(
  availability: np.ndarray, freshness: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
  """A control: all alike, which is PSP."""
  return rng.random(availability.size)


def availability_weighted(
  size: int,
  *,
  score: Score = availability_and_freshness,
  window: int = 5,
  returns: float = 0.5,
) -> Policy:
  """AW-PSP: in each round the devices of the highest score are asked; ties are random.

  The availability of a device is a + (1 - a) returns, with a the fraction of the last `window`
  rounds in which it was up, whether asked or not. Freshness counts the rounds since it was last
  selected. A selected device that is down does not contribute: fewer than `size` may be active.

  Args:
    size: devices asked in a round, >= 1.
    score: (availability [W], freshness [W], rng) -> [W], such as `availability_and_freshness`.
    window: rounds, >= 1.
    returns: chance that who is down comes back, from 0 to 1.

  Reference: Behfar, Mortier, Robust synchronisation for federated learning in the face of
  correlated device failure, 2026, arXiv 2604.16090 (the score that its public code runs; without
  its exclusion of pairs that fail together).
  """
  size = _checks.whole_number('availability_weighted: size', size)
  window = _checks.whole_number('availability_weighted: window', window)
  if not 0 <= returns <= 1:
    raise ValueError(f'availability_weighted: returns must be from 0 to 1, not {returns!r}')

  def memory(view: View) -> dict[str, Any]:
    _checks.whole_number('availability_weighted: size', size, most=view.workers)
    return {'seen': collections.deque(maxlen=window), 'selected': np.full(view.workers, -1)}

  def choose(view: View) -> np.ndarray:
    state = view.memory
    state['seen'].append(view.up.copy())
    a = np.mean(state['seen'], axis=0)
    freshness = view.round - state['selected']
    scores = score(a + (1 - a) * returns, freshness, view.rng)
    best = np.lexsort((view.rng.random(view.workers), -scores))[:size]
    state['selected'][best] = view.round
    chosen = np.zeros(view.workers, bool)
    chosen[best] = True
    return chosen

  return Policy(f'availability_weighted({size}, {score.__name__})', choose=choose, memory=memory)
