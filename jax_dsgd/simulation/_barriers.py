"""Barriers at a parameter server: who waits for whom."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

import numpy as np

from jax_dsgd.simulation import _checks
from jax_dsgd.simulation._policy import Policy, View


def asp() -> Policy:
  """Asynchronous parallel: nobody waits.

  >>> asp().resumes(None, 0)
  [0]
  """
  return Policy('asp', plays='events')


def bsp() -> Policy:
  """Bulk synchronous parallel: nobody begins a step before all have pushed the one before."""
  return ssp(0)._replace(name='bsp')


def ssp(slack: int) -> Policy:
  """Stale synchronous parallel: who is more than `slack` steps ahead of the slowest waits.

  Args:
    slack: steps, >= 0; 0 is BSP.

  Reference: Ho et al., More effective distributed ML via a stale synchronous parallel parameter
  server, NeurIPS 2013.
  """
  slack = _checks.whole_number('ssp: slack', slack, least=0)

  def memory(view: View) -> _Sampled:
    return _Sampled(view.rng, view.workers, view.workers - 1, slack)

  return Policy(f'ssp({slack})', _sampled, memory=memory, plays='events')


def psp(sample: int, slack: int = 0) -> Policy:
  """Probabilistic synchronous parallel: a worker looks at a few others, drawn without replacement.

  It waits if any of them is more than `slack` steps behind it, and draws again at every push of
  anyone. `sample = 0` is ASP, and `sample = W - 1` is BSP, or SSP with this slack. Workers that
  draw by a clock of their own instead pass sooner where nearly all wait, so that large samples keep
  less in step than here.

  Args:
    sample: how many others, from 0 to W - 1.
    slack: steps, >= 0.

  Reference: Wang, Catterall, Mortier, Probabilistic synchronous parallel, 2017, arXiv 1709.07772.
  """
  sample = _checks.whole_number('psp: sample', sample, least=0)
  slack = _checks.whole_number('psp: slack', slack, least=0)

  def memory(view: View) -> _Sampled:
    most = view.workers - 1
    return _Sampled(
      view.rng, view.workers, _checks.whole_number('psp: sample', sample, least=0, most=most), slack
    )

  return Policy(f'psp({sample}, {slack})', _sampled, memory=memory, plays='events')


def _sampled(view: View, worker: int) -> list[int]:
  return view.memory.pushed(worker, view.counts.item(worker))


class _Level:
  """Those who wait with one number of steps. All pass a push with the same chance 1 - exp(-hazard).

  So each of them has an exponential time to wait, in hazard, and the level a clock of hazard.
  """

  def __init__(self, hazard: float, push: int):
    self.hazard, self.push, self.clock = hazard, push, 0.0
    self.due = math.inf  # the push at which the first of them passes, as it was scheduled last
    self.waiting: list[tuple[float, int]] = []  # a heap of (hazard at which it passes, worker)

  def advance(self, push: int) -> None:
    if push > self.push:  # not 0 times an infinite hazard
      self.clock += self.hazard * (push - self.push)
      self.push = push

  def next_push(self) -> float:
    """The push at which the first of them passes."""
    left = self.waiting[0][0] - self.clock
    return self.push + max(1, math.ceil(left / self.hazard)) if self.hazard else math.inf


class _Sampled:
  """Draws of all who wait at every push, exact in law without drawing them one by one.

  With b workers behind, a sample of s of the n others has none of them with the chance
  C(n - b, s) / C(n, s). A push changes b for one number of steps only, so that the push at which
  somebody passes is known in advance until then.
  """

  def __init__(self, rng: np.random.Generator, workers: int, sample: int, slack: int):
    self.slack, self.pushes = slack, 0
    self.workers = workers
    self.behind = [0]  # behind[c]: workers with less than c steps, those not listed are all
    self.levels: dict[int, _Level] = {}
    self.due: list[tuple[float, int]] = []  # a heap of (push, steps), with entries out of date
    self.hazards = _hazards(workers - 1, sample)
    self.draws = _exponentials(rng)

  def pushed(self, worker: int, steps: int) -> list[int]:
    """Those who pass when `worker` has made its push number `steps`."""
    self.pushes += 1
    if steps == len(self.behind):
      self.behind.append(self.workers)
    self.behind[steps] -= 1
    level = self.levels.get(steps + self.slack)
    if level is not None:
      level.advance(self.pushes - 1)
      level.hazard = self.hazard(steps + self.slack)
      self.schedule(steps + self.slack)
    passing = [worker] if self.passes(worker, steps) else []
    return passing + self.released() if self.due else passing

  def hazard(self, steps: int) -> float:
    return self.hazards[self.behind[max(steps - self.slack, 0)]]

  def passes(self, worker: int, steps: int) -> bool:
    """The first draw; who does not pass joins those who wait."""
    hazard = self.hazard(steps)
    if hazard == math.inf:
      return True
    left = next(self.draws) - hazard
    if left <= 0:
      return True
    level = self.levels.get(steps)
    if level is None:
      level = self.levels[steps] = _Level(hazard, self.pushes)
    # The level's own clock is at this push, or it is before: then the draws between are its too.
    behind = level.hazard * (self.pushes - level.push) if level.push < self.pushes else 0.0
    heapq.heappush(level.waiting, (level.clock + behind + left, worker))
    if level.waiting[0][1] == worker:
      self.schedule(steps)
    return False

  def schedule(self, steps: int) -> None:
    level = self.levels[steps]
    push = level.next_push()
    if push != level.due and push < math.inf:
      heapq.heappush(self.due, (push, steps))
    level.due = push

  def released(self) -> list[int]:
    """Those who waited and pass at this push."""
    passing = []
    while self.due and self.due[0][0] <= self.pushes:
      push, steps = heapq.heappop(self.due)
      level = self.levels.get(steps)
      if level is None or level.due != push:
        continue
      while level.waiting and level.next_push() <= self.pushes:
        passing.append(heapq.heappop(level.waiting)[1])
      if level.waiting:
        self.schedule(steps)
      else:
        del self.levels[steps]
    return sorted(passing)


def _hazards(others: int, sample: int) -> list[float]:
  """-log(1 - p), p the chance that none of b = 0, 1, ..., others workers is in a sample."""
  chance, hazards = 1.0, []
  for behind in range(others + 1):
    hazards.append(-math.log1p(-chance) if chance < 1 else math.inf)
    left = others - behind
    chance = chance * max(left - sample, 0) / left if left else 0.0
  return hazards


def _exponentials(rng: np.random.Generator) -> Iterator[float]:
  while True:
    yield from rng.standard_exponential(1024).tolist()
