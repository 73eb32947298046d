"""At which steps of a round layers meet, so that backward passes hide what they send."""

from __future__ import annotations

import numbers
from collections.abc import Sequence

import numpy as np


def plan_phases(
  backward_seconds: Sequence[float],
  communication_seconds: Sequence[float],
  period: int,
  *,
  fill: bool = True,
) -> list[list[int]]:
  """Cuts layers into consecutive runs, one a step of a round, that wait as little as possible.

      layer l of the backward pass is ready at b_0 + ... + b_l, and its mean takes c_l
      means of a step follow one another, each from when its layer is ready
      a step waits for   max(0, end of its last mean - end of its backward pass)

  The sum over a round of what steps wait is least among all cuts into runs, by dynamic programming
  in O(period L^2); of cuts that wait as little, the most even is taken. Then each step takes in
  further layers, those that meet least first, as long as it waits no longer for them.

  Args:
    backward_seconds: b_l of each layer, in the order in which the backward pass reaches them.
    communication_seconds: c_l of each layer, alike.
    period: steps a round.
    fill: whether layers may meet more than once.

  Returns:
    For each layer the steps of the round at which it meets, for `phases` of `dream_ddp` or of
    `local_steps`.

  Raises:
    ValueError: no layers, lists of unequal length, seconds that are negative or not finite, a
      period that is not an integer >= 1.

  >>> plan_phases([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], 3, fill=False)
  [[0], [1], [2]]
  >>> plan_phases([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], 3)
  [[0, 2], [1], [2]]
  >>> plan = dict(zip(['head', 'body', 'stem'], plan_phases([1.0] * 3, [2.0] * 3, 3)))
  >>> phases = lambda path, like: plan[path.split('/')[0]]
  >>> phases('body/kernel', None)
  [1]

  Reference: Tang et al., "DreamDDP: Accelerating Data Parallel Distributed LLM Training with
    Layer-wise Scheduled Partial Synchronization", arXiv 2502.11058, whose search is depth first.
  """
  backward, communication = _checked(backward_seconds, communication_seconds, period)
  ready = np.cumsum(backward)
  cuts = _least_wait(_waits(ready, communication), period)
  phases = [[step] for step in range(period) for _ in range(cuts[step], cuts[step + 1])]
  if fill:
    _fill(phases, ready, communication, period)
  return [sorted(own) for own in phases]


def _waits(ready: np.ndarray, communication: np.ndarray) -> np.ndarray:
  """What a step waits for layers i to j - 1, at [i, j]; infinite where j < i."""
  layers = ready.size
  waits = np.full((layers + 1, layers + 1), np.inf)
  for i in range(layers + 1):
    waits[i, i], end = 0, 0.0
    for j in range(i, layers):
      end = max(end, ready[j]) + communication[j]
      waits[i, j + 1] = max(0.0, end - ready[-1])
  return waits


def _least_wait(waits: np.ndarray, period: int) -> list[int]:
  """Where to cut layers into runs, one a step: period + 1 numbers, from 0.

  Of all cuts that wait as little, one with runs of equal length, or as near to it as can be.
  """
  place = np.arange(waits.shape[0], dtype=np.float64)
  squares = (place[:, None] - place) ** 2
  total, spread, choices = waits[0], squares[0], []
  for _ in range(period - 1):
    through = total[:, None] + waits
    total = through.min(0)
    evenly = np.where(through == total, spread[:, None] + squares, np.inf)
    choices.append(evenly.argmin(0))
    spread = evenly.min(0)
  cuts = [waits.shape[0] - 1]
  for choice in reversed(choices):
    cuts.append(int(choice[cuts[-1]]))
  return [0, *reversed(cuts)]


def _fill(
  phases: list[list[int]], ready: np.ndarray, communication: np.ndarray, period: int
) -> None:
  """Adds steps to layers, where the step waits no longer for it."""

  def wait(layers: list[int]) -> float:
    end = 0.0
    for layer in layers:
      end = max(end, ready[layer]) + communication[layer]
    return max(0.0, end - ready[-1])

  for step in range(period):
    members = [layer for layer, own in enumerate(phases) if step in own]
    least = wait(members)
    others = [layer for layer in range(len(phases)) if layer not in members]
    for layer in sorted(others, key=lambda layer: len(phases[layer])):
      more = sorted([*members, layer])
      if wait(more) <= least:
        members = more
        phases[layer].append(step)


def _checked(
  backward_seconds: Sequence[float], communication_seconds: Sequence[float], period: int
) -> tuple[np.ndarray, np.ndarray]:
  if isinstance(period, bool) or not isinstance(period, numbers.Integral) or period < 1:
    raise ValueError(f'plan_phases got period={period!r}; accepted are integers >= 1')
  given = {
    'backward_seconds': np.asarray(backward_seconds, np.float64),
    'communication_seconds': np.asarray(communication_seconds, np.float64),
  }
  for name, seconds in given.items():
    if seconds.ndim != 1 or not seconds.size or not np.isfinite(seconds).all() or seconds.min() < 0:
      raise ValueError(
        f'plan_phases got {name}={seconds.tolist()!r}; accepted is one finite number >= 0 a layer'
      )
  backward, communication = given.values()
  if backward.size != communication.size:
    raise ValueError(
      f'plan_phases got {backward.size} backward_seconds and {communication.size} '
      'communication_seconds; accepted is one of each a layer'
    )
  return backward, communication
