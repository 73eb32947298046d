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
  neighbors: int = 0,
  correlation: float = 0.35,
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
    neighbors: of each device, its nearest in latency, those it is compared with: of two that fail
      together only the one of higher score is asked. 0 compares none; the public code has 4.
    correlation: from which two fail together: of their traces so far, or the part of all rounds in
      which both were down. The latter also parts devices that are down often, each by itself.

  Reference: Behfar, Mortier, Robust synchronisation for federated learning in the face of
  correlated device failure, 2026, arXiv 2604.16090 (the score that its public code runs; what
  becomes of a pair that fails together is our reading).
  """
  size = _checks.whole_number('availability_weighted: size', size)
  window = _checks.whole_number('availability_weighted: window', window)
  if not 0 <= returns <= 1:
    raise ValueError(f'availability_weighted: returns must be from 0 to 1, not {returns!r}')

  neighbors = _checks.whole_number('availability_weighted: neighbors', neighbors, least=0)
  correlation = _checks.number('availability_weighted: correlation', correlation, strict=True)

  def memory(view: View) -> dict[str, Any]:
    n = view.workers
    _checks.whole_number('availability_weighted: size', size, most=n)
    near = np.argsort(view.cluster.latency + np.diag(np.full(n, np.inf)), axis=1, kind='stable')
    return {
      'seen': collections.deque(maxlen=window),
      'selected': np.full(n, -1),
      'near': near[:, : min(neighbors, n - 1)],
      'up': np.zeros(n),
      'both': np.zeros((n, min(neighbors, n - 1))),
    }

  def choose(view: View) -> np.ndarray:
    state = view.memory
    state['seen'].append(view.up.copy())
    a = np.mean(state['seen'], axis=0)
    freshness = view.round - state['selected']
    scores = score(a + (1 - a) * returns, freshness, view.rng)
    best = np.lexsort((view.rng.random(view.workers), -scores))
    if neighbors:
      best = _apart(best, _fail_together(state, view.up, view.round + 1, correlation), size)
    best = best[:size]
    state['selected'][best] = view.round
    chosen = np.zeros(view.workers, bool)
    chosen[best] = True
    return chosen

  return Policy(
    f'availability_weighted({size}, {score.__name__})', choose=choose, memory=memory, plays='rounds'
  )


def _fail_together(
  state: dict[str, Any], up: np.ndarray, rounds: int, correlation: float
) -> np.ndarray:
  """Which pairs [W, W] of neighbours were up and down together in the rounds so far."""
  near = state['near']
  state['up'] += up
  state['both'] += up[:, None] & up[near]
  share, both = state['up'] / rounds, state['both'] / rounds
  spread = np.sqrt(share * (1 - share))
  apart = share[:, None] * share[near]
  alike = both - apart >= correlation * np.maximum(spread[:, None] * spread[near], 1e-12)
  down = 1 - share[:, None] - share[near] + both
  pairs = np.zeros((up.size, up.size), bool)
  np.put_along_axis(pairs, near, alike | (down >= correlation), axis=1)
  return pairs | pairs.T


def _apart(order: np.ndarray, pairs: np.ndarray, size: int) -> np.ndarray:
  """The first `size` in order of which no two are a pair."""
  chosen: list[int] = []
  for worker in order.tolist():
    if len(chosen) == size:
      break
    if not pairs[worker, chosen].any():
      chosen.append(worker)
  return np.array(chosen, int)
