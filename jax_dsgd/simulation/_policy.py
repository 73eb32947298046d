"""A policy: four hooks that decide, and the view of the run that they decide from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jax_dsgd import clusters


class View:
  """What a hook may look at. Its arrays are read-only, and the simulator keeps them up to date.

  Attributes:
    cluster: of the run.
    workers: W, the number of workers.
    batch: examples of a nominal batch.
    rng: the policy's own random stream; the machines have others.
    memory: what `Policy.memory` made for this run.
    time: seconds now: of the event, or of the end of the last round.
    round: number of the round; 0 in a simulation of events.
    counts: [W] int, contributions that each worker delivered.
    started: [W] float, when the work under way began.
    arrivals: [W] float, when it arrives; inf where none is under way.
    seconds: [W] float, compute time of the last work delivered; nan before.
    pace: [W] float, mean seconds of a nominal batch as measured; the law's mean before.
    up: [W] bool, who was up in the last round.
  """

  def __init__(self, cluster: clusters.Cluster, batch: int, rng: np.random.Generator):
    self.cluster, self.workers, self.batch, self.rng = cluster, cluster.size, batch, rng
    self.memory: Any = None
    self.time, self.round = 0.0, 0
    n = cluster.size
    self.hidden = {  # what the simulator writes, and hooks see through read-only views
      'counts': np.zeros(n, np.int64),
      'started': np.zeros(n),
      'arrivals': np.full(n, np.inf),
      'seconds': np.full(n, np.nan),
      'up': np.ones(n, bool),
    }
    for name, array in self.hidden.items():
      shown = array.view()
      shown.setflags(write=False)
      setattr(self, name, shown)
    self.busy, self.done = np.zeros(n), np.zeros(n)  # seconds and nominal batches so far
    self._means = np.array([law.mean for law in cluster.laws])

  counts: np.ndarray
  started: np.ndarray
  arrivals: np.ndarray
  seconds: np.ndarray
  up: np.ndarray

  @property
  def pace(self) -> np.ndarray:
    """Mean seconds of a nominal batch: [W]."""
    measured = self.done > 0
    return np.where(measured, self.busy / np.where(measured, self.done, 1), self._means)


class Task(NamedTuple):
  """What a worker is to do next.

  Attributes:
    steps: local steps.
    examples: batch size of a step; the nominal batch if None.
    shard: number of the data shard, below W; the worker's own if None.
  """

  steps: int = 1
  examples: int | None = None
  shard: int | None = None


class Meeting(NamedTuple):
  """Who meets whom in a round, and what becomes of the others.

  Attributes:
    group: [W] int, equal numbers meet; -1 meets nobody.
    ends: [W] float, when each is free again. Where `group` is -1, a finite time calls the work off,
      and inf lets it go on.
    staleness: [W] int, age of the contributions in rounds; by default since their work began.
  """

  group: np.ndarray
  ends: np.ndarray
  staleness: np.ndarray | None = None


_NOMINAL = Task()


def _nobody_waits(view: View, worker: int) -> list[int]:
  return [worker]


def _everyone(view: View) -> np.ndarray:
  return np.ones(view.workers, bool)


def _nominal(view: View, worker: int) -> Task:
  return _NOMINAL


def together(view: View) -> Meeting:
  """All who work meet when the last of them arrives."""
  working = np.isfinite(view.arrivals)
  return Meeting(np.where(working, 0, -1), np.full(view.workers, view.arrivals[working].max()))


class Policy(NamedTuple):
  """Who waits for whom, who is chosen, how much each does, and who meets whom.

  Hooks are functions of a `View`. `simulate_events` asks `resumes` and `amount`; `simulate_rounds`
  asks `choose`, `amount` and `meet`.

  Attributes:
    name: what errors and reports call it.
    resumes: (view, worker) -> the workers that pull and go on now that `worker` has pushed, in this
      order: itself, some that wait since a push before, or nobody. Who is not named waits.
    choose: view -> [W] bool, who begins new work this round, if it is idle and up.
    amount: (view, worker) -> the `Task` that this worker begins.
    meet: view -> `Meeting`, asked in every round in which somebody works.
    memory: view -> anything that the hooks remember in one run, as `view.memory`.
    central: whether rounds go through a server, one message each way, or groups average by a ring
      all-reduce: it decides what messages cost.
    plays: 'events' or 'rounds', where it says nothing of the other; '' for both.

  >>> Policy('everyone at once').central
  True
  """

  name: str
  resumes: Callable[[View, int], list[int]] = _nobody_waits
  choose: Callable[[View], np.ndarray] = _everyone
  amount: Callable[[View, int], Task] = _nominal
  meet: Callable[[View], Meeting] = together
  memory: Callable[[View], Any] = lambda view: None
  central: bool = True
  plays: str = ''


def check_plays(policy: Policy, what: str) -> None:
  """Refuses a policy of rounds for events, whose hooks would not be asked, and the reverse."""
  if policy.plays not in ('', what):
    raise ValueError(
      f'{policy.name}: a policy of {policy.plays} must be given to simulate_{policy.plays}, not to '
      f'simulate_{what}'
    )


def check_task(name: str, view: View, worker: int, task: Task) -> tuple[int, int, int]:
  """The steps, examples and shard of a task, which must be possible."""
  steps, examples, shard = task
  examples = view.batch if examples is None else examples
  shard = worker if shard is None else shard
  if steps < 1 or examples < 1 or not 0 <= shard < view.workers:
    raise ValueError(
      f'{name}: the task of worker {worker} must have steps and examples >= 1 and a shard below '
      f'{view.workers}, not {task}'
    )
  return int(steps), int(examples), int(shard)


def check_seconds(name: str, worker: int, start: float, seconds: float) -> float:
  """A compute time, after which the clock must show more than before."""
  if not start < start + seconds < np.inf:
    raise ValueError(
      f'{name}: the law of worker {worker} must give finite seconds that the clock at {start:g} s '
      f'can show, not {seconds!r}'
    )
  return seconds
