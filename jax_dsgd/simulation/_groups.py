"""Groups of workers that meet without a server, each worker on its own clock."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
from numpy import typing as npt

from jax_dsgd.simulation import _checks
from jax_dsgd.simulation._policy import Meeting, Policy, View


def static_groups(table: npt.ArrayLike) -> Policy:
  """Round t meets in the groups of row `t % period`; a group waits for its last member only.

  Args:
    table: [period, W] ints below W, equal numbers of a row meet; -1 meets nobody in that round,
      and waits for its end.

  >>> static_groups([[0, 0, 1, 1], [0, 1, 1, 0]]).central
  False
  """
  table = np.array(table)
  if table.ndim != 2 or not table.size or table.dtype.kind not in 'iu':
    raise ValueError(
      f'static_groups: table must be ints [period, W], not {table.dtype} {list(table.shape)}'
    )
  wrong = (table < -1) | (table >= table.shape[1])
  _checks.refuse('static_groups: table', table, wrong, f'be from -1 to {table.shape[1] - 1}')

  def choose(view: View) -> np.ndarray:
    if table.shape[1] != view.workers:
      raise ValueError(
        f'static_groups: table must be of {view.workers} workers, not {table.shape[1]}'
      )
    return table[view.round % len(table)] >= 0

  def meet(view: View) -> Meeting:
    group = np.where(np.isfinite(view.arrivals), table[view.round % len(table)], -1)
    return Meeting(group, _over_groups(np.maximum, view.arrivals, group))

  return Policy('static_groups', choose=choose, meet=meet, central=False, plays='rounds')


def _over_groups(reduce: np.ufunc, values: np.ndarray, group: np.ndarray) -> np.ndarray:
  """The largest, or the least, value of each one's group; inf where it meets nobody."""
  met = group >= 0
  size = group.max(initial=-1) + 1
  result = np.full(size + 1, -np.inf if reduce is np.maximum else np.inf)
  reduce.at(result, group[met], values[met])
  return np.where(met, result[group], np.inf)


def wait_avoiding_groups(size: int, period: int, *, grace: float = 0.0) -> Policy:
  """WAGMA: butterfly groups that nobody waits for, and a global mean every `period` rounds.

  In round t worker i meets those whose number differs in `log2(size)` bits, from bit
  `t log2(size) mod log2(W)` on, so that `log2(W) / log2(size)` rounds mix everyone. The first to
  arrive triggers the group. A late member gives what it had last, `staleness` rounds old and less
  than `period`, does its own step all the same, and then takes the result: the round's `finished`
  is when. Every `period`-th round all wait for all.

  Args:
    size: of a group, a power of 2 up to W, which is one too.
    period: rounds from one global mean to the next, >= 1; 1 is bulk.
    grace: seconds that a group waits after its first arrival. With 0 only the first is on time
      where no two machines take equally long.

  Reference: Li et al., Breaking (global) barriers in parallel stochastic optimization with
  wait-avoiding group averaging, 2020, arXiv 2005.00124.
  """
  _checks.whole_number('wait_avoiding_groups: size', size)
  period = _checks.whole_number('wait_avoiding_groups: period', period)
  grace = _checks.number('wait_avoiding_groups: grace', grace)
  if size & (size - 1):
    raise ValueError(f'wait_avoiding_groups: size must be a power of 2, not {size}')

  def memory(view: View) -> list[np.ndarray]:
    _checks.whole_number('wait_avoiding_groups: size', size, most=view.workers)
    if view.workers & (view.workers - 1):
      raise ValueError(
        f'wait_avoiding_groups: the workers must be a power of 2, not {view.workers}'
      )
    return []  # arrivals of the rounds since the last global mean

  def meet(view: View) -> Meeting:
    arrivals, since = view.arrivals, view.memory
    working = np.isfinite(arrivals)
    if (view.round + 1) % period == 0:
      since.clear()
      return Meeting(np.where(working, 0, -1), np.full(working.size, arrivals[working].max()))
    group = np.where(working, _butterfly(view.round, size, view.workers), -1)
    since.append(arrivals.copy())
    trigger = _over_groups(np.minimum, arrivals, group) + grace
    had = np.array(since)[::-1] <= trigger  # whose step of this round, the one before, ... was done
    staleness = np.where(had.any(axis=0), had.argmax(axis=0), len(since))
    meets = np.minimum(trigger, _over_groups(np.maximum, arrivals, group))
    return Meeting(group, np.maximum(arrivals, meets), staleness)

  name = f'wait_avoiding_groups({size}, {period})'
  return Policy(name, meet=meet, memory=memory, central=False, plays='rounds')


def _butterfly(t: int, size: int, workers: int) -> np.ndarray:
  """The smallest member of each worker's group in round t."""
  bits, all_bits = size.bit_length() - 1, workers.bit_length() - 1
  mask = sum({1 << ((t * bits + r) % all_bits) for r in range(bits)})
  return np.arange(workers) & ~mask


def group_generator(size: int, *, threshold: int | None = None) -> Policy:
  """Prague: groups are made on demand, and each worker waits for its own groups only.

  A worker that asks takes the oldest group made with it. If there is none, all workers without a
  group, and less than `threshold` steps behind it, are divided at random into groups of `size` (the
  last may be smaller). A group meets when it is the oldest of all its members and all have asked. A
  round of the trace is one meeting, and meetings come in the order of time.

  Args:
    size: of a group, >= 1.
    threshold: steps behind from which a worker is left out of the groups that others make; None
      leaves out nobody, and a slow worker then slows all.

  Reference: Luo, He, Zhuo, Qian, Heterogeneity-aware asynchronous decentralized training, 2019,
  arXiv 1909.08029 (group buffers, global division and slowdown filter; details common knowledge).
  """
  size = _checks.whole_number('group_generator: size', size)
  if threshold is not None:
    _checks.whole_number('group_generator: threshold', threshold)

  def memory(view: View) -> dict[str, Any]:
    n = view.workers
    buffers = [collections.deque() for _ in range(n)]
    return {'buffers': buffers, 'asked': np.zeros(n, bool), 'requests': np.zeros(n, int)}

  def divide(view: View, worker: int) -> None:
    buffers, requests = view.memory['buffers'], view.memory['requests']
    near = requests[worker] - requests < (threshold or np.inf)
    idle = np.flatnonzero(near & [not buffer for buffer in buffers])
    for members in np.split(view.rng.permutation(idle), range(size, idle.size, size)):
      for member in members:
        buffers[member].append(members)

  def meet(view: View) -> Meeting:
    buffers, asked = view.memory['buffers'], view.memory['asked']
    group, ends = np.full(view.workers, -1), np.full(view.workers, np.inf)
    waiting = np.flatnonzero(~asked & np.isfinite(view.arrivals))
    for worker in waiting[np.argsort(view.arrivals[waiting], kind='stable')]:
      asked[worker] = True
      view.memory['requests'][worker] += 1
      if not buffers[worker]:
        divide(view, worker)
      members = buffers[worker][0]
      if asked[members].all() and all(buffers[member][0] is members for member in members):
        for member in members:
          buffers[member].popleft()
        asked[members] = False
        group[members], ends[members] = 0, view.arrivals[members].max()
        break
    return Meeting(group, ends)

  name = f'group_generator({size}, {threshold})'
  return Policy(name, meet=meet, memory=memory, central=False, plays='rounds')
