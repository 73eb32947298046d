"""Amounts: how much each worker does, so that the slow do not hold up the fast."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import typing as npt

from jax_dsgd.simulation import _checks
from jax_dsgd.simulation._policy import Policy, Task, View


def dynamic_local_updates(
  steps: int, *, least: int = 5, grace: float = 0.0, pinned: bool = False
) -> Policy:
  """Asynchronous local SGD in which slow workers do fewer steps before they push.

  Worker w does `max(int(steps * min_j s_j / s_w), least)` steps, s the measured seconds of a step.
  A new task takes the data shard that was visited least, at random among ties.

  Args:
    steps: of the fastest worker, >= 1.
    least: steps of any worker, >= 1.
    grace: seconds after a push in which whoever arrives joins, before any of them goes on.
    pinned: whether each worker keeps its own shard. It biases the result towards the shards of the
      fast, and is here to be compared with.

  Reference: Liu et al., Asynchronous Local-SGD training for language modeling, 2024, arXiv
  2401.09135 (DyLU, shard sampling and grace period as in its public toy code).
  """
  steps = _checks.whole_number('dynamic_local_updates: steps', steps)
  least = _checks.whole_number('dynamic_local_updates: least', least)
  grace = _checks.number('dynamic_local_updates: grace', grace)

  def resumes(view: View, worker: int) -> list[int]:
    window = view.memory
    if view.time > window['ends']:
      window.update(opened=view.time, ends=view.time + grace)
    window['waiting'].append(worker)
    # Tasks begun before that arrive in time: the server would see them by waiting.
    joins = (view.arrivals <= window['ends']) & (view.started <= window['opened'])
    if (joins & (view.arrivals > view.time)).any():
      return []
    waited, window['waiting'] = sorted(window['waiting'][:-1]), []
    return [worker, *waited]

  def amount(view: View, worker: int) -> Task:
    pace = view.pace
    # A speed measured over steps is rounded: 50 times 1 is not to become 49.
    number = max(int(steps * pace.min() / pace[worker] + 1e-9), least)
    if pinned:
      return Task(number)
    visits = view.memory['visits']
    shard = int(view.rng.choice(np.flatnonzero(visits == visits.min())))
    visits[shard] += 1
    return Task(number, shard=shard)

  def memory(view: View) -> dict[str, Any]:
    visits = np.zeros(view.workers, int)
    return {'opened': 0.0, 'ends': -1.0, 'waiting': [], 'visits': visits}

  policy = Policy(f'dynamic_local_updates({steps})', amount=amount, memory=memory, plays='events')
  return policy._replace(resumes=resumes) if grace else policy


def adaptive_hogbatch(
  batches: npt.ArrayLike, *, least: npt.ArrayLike, most: npt.ArrayLike, alpha: float = 2.0
) -> Policy:
  """Asynchronous SGD whose workers change their batches until all push equally often.

  Who has pushed less often than all others divides its batch by alpha; who has pushed more often
  than all others multiplies it; both within bounds.

  Args:
    batches: [W] examples to begin with.
    least: [W] smallest batches, >= 1.
    most: [W] largest batches.
    alpha: factor, >= 1; 1 keeps the batches, which is static Hogbatch.

  Reference: Ma, Rusu, Heterogeneous CPU+GPU stochastic gradient descent algorithms, 2020, arXiv
  2004.08771; alpha = 2 is common knowledge of the paper.
  """
  alpha = _checks.number('adaptive_hogbatch: alpha', alpha, least=1.0)
  first, low, high = (np.asarray(each, np.int64) for each in (batches, least, most))
  shapes = [first.shape, low.shape, high.shape]
  if first.ndim != 1 or len(set(shapes)) > 1:
    raise ValueError(f'adaptive_hogbatch: batches, least and most must be [W], not {shapes}')
  wrong = (low < 1) | (low > first) | (first > high)
  _checks.refuse('adaptive_hogbatch: batches', first, wrong, 'be from least >= 1 to most')

  def amount(view: View, worker: int) -> Task:
    batch, counts = view.memory, view.counts
    others = np.delete(counts, worker)
    if others.size and counts[worker] < others.min():
      batch[worker] = max(batch[worker] / alpha, low[worker])
    elif others.size and counts[worker] > others.max():
      batch[worker] = min(batch[worker] * alpha, high[worker])
    return Task(examples=int(batch[worker]))

  def memory(view: View) -> np.ndarray:
    if first.size != view.workers:
      raise ValueError(
        f'adaptive_hogbatch: batches must be of {view.workers} workers, not {first.size}'
      )
    return first.astype(float)

  return Policy('adaptive_hogbatch', amount=amount, memory=memory, plays='events')


def dynamic_batching(
  total: int,
  *,
  least: int = 16,
  most: int = 96,
  deadband: float = 0.2,
  smoothing: float = 1.0,
) -> Policy:
  """Rounds in which each worker's share of the batch follows its speed, by proportional control.

  With b the batch, t the measured seconds and X = b / t, worker k aims at `b - X (t - mean(t))`,
  if that changes b by `deadband` or more. Then all are scaled to the sum `total`, within bounds.
  The weight of a contribution is its share of the batch.

  Args:
    total: examples of all workers together, in every round.
    least: smallest batch of a worker.
    most: largest.
    deadband: relative change below which a batch stays; it keeps noise from moving batches.
    smoothing: weight of the newest time in a running mean of t, over 0 and up to 1.

  Reference: Tyagi, Sharma, Taming resource heterogeneity in distributed ML training with dynamic
  batching, 2020, arXiv 2305.12213. Here batches are scaled to the sum, where the public code
  shifts them: so one step is enough where times are proportional to batches.
  """
  total = _checks.whole_number('dynamic_batching: total', total)
  least = _checks.whole_number('dynamic_batching: least', least)
  most = _checks.whole_number('dynamic_batching: most', most, least=least)
  deadband = _checks.number('dynamic_batching: deadband', deadband)
  if not 0 < smoothing <= 1:
    raise ValueError(f'dynamic_batching: smoothing must be over 0 and up to 1, not {smoothing!r}')

  def amount(view: View, worker: int) -> Task:
    state = view.memory
    if state['round'] < view.round:
      state['round'] = view.round
      known, old = np.isfinite(view.seconds), state['seconds']
      moved = np.where(np.isfinite(old), old + smoothing * (view.seconds - old), view.seconds)
      state['seconds'] = seconds = np.where(known, moved, np.nan)
      if known.all():
        batch = state['batch']
        aims = batch - batch / seconds * (seconds - seconds.mean())
        moves = np.abs(aims - batch) >= deadband * aims
        if moves.any():
          state['batch'] = _to_sum(np.where(moves, aims, batch), total, least, most)
    return Task(examples=int(state['batch'][worker]))

  def memory(view: View) -> dict[str, Any]:
    n = view.workers
    _checks.whole_number('dynamic_batching: total', total, least=n * least, most=n * most)
    even = _to_sum(np.ones(n), total, least, most)
    return {'round': 0, 'seconds': np.full(n, np.nan), 'batch': even}

  return Policy(f'dynamic_batching({total})', amount=amount, memory=memory, plays='rounds')


def _to_sum(aims: np.ndarray, total: int, least: int, most: int) -> np.ndarray:
  """Ints from `least` to `most` that sum to `total`, in proportion to `aims` where not clipped."""
  low, high = 0.0, total * most / aims.min()
  for _ in range(200):
    scale = (low + high) / 2
    if np.clip(scale * aims, least, most).sum() < total:
      low = scale
    else:
      high = scale
  exact = np.clip(high * aims, least, most)
  whole = np.floor(exact + 1e-6).astype(int)
  largest = np.argsort(whole - exact, kind='stable')  # remainders, in descending order
  whole[largest[: total - int(whole.sum())]] += 1
  return whole
