"""The clock of a parameter server: workers push, wait where the policy says so, and pull."""

from __future__ import annotations

import heapq
import math

import numpy as np

from jax_dsgd import clusters
from jax_dsgd.simulation import _checks
from jax_dsgd.simulation._policy import Policy, View, check_plays, check_seconds, check_task
from jax_dsgd.simulation._trace import EventTrace


def simulate_events(
  cluster: clusters.Cluster,
  policy: Policy,
  *,
  events: int | None = None,
  until: float | None = None,
  seed: int = 0,
  up_bytes: float = 0.0,
  down_bytes: float = 0.0,
  batch: int = 1,
) -> EventTrace:
  """Plays workers at a parameter server, each at its own speed.

  Everyone pulls at time 0. A worker computes what `policy.amount` says and pushes it; it pulls
  again when `policy.resumes` names it: at once, or after a push of another. Events of the same time
  come in the order of workers. Availability is for rounds, and is not used.

  Args:
    cluster: whose laws give compute times, and whose server links give message times.
    policy: such as `asp()`.
    events: how many events to play, those at time 0 included; give this or `until`.
    until: play events up to this time in seconds.
    seed: of machines and policy. Machines are the same under every policy.
    up_bytes: of a push.
    down_bytes: of a pull.
    batch: examples of a nominal batch, in which laws count work.

  Returns:
    The trace of the events.

  Raises:
    ValueError: an argument or an answer of the policy is not possible, or the policy deadlocks.

  >>> simulate_events(clusters.with_stragglers(2, fraction=0.5), Policy('free'), until=10)
  EventTrace(events=14, workers=2, seconds=10)
  """
  check_plays(policy, 'events')
  most, end = _horizon('simulate_events', 'events', events, until)
  up_bytes = _checks.number('simulate_events: up_bytes', up_bytes)
  down_bytes = _checks.number('simulate_events: down_bytes', down_bytes)
  batch = _checks.whole_number('simulate_events: batch', batch)
  seeds = np.random.SeedSequence(_checks.whole_number('simulate_events: seed', seed, least=0))
  machines, decisions = seeds.spawn(2)
  view = View(cluster, batch, np.random.default_rng(decisions))
  view.memory = policy.memory(view)
  run = _Run(policy, view, cluster.samplers(machines))
  workers = range(cluster.size)
  run.up = [cluster.server_seconds(w, up_bytes) if up_bytes else 0.0 for w in workers]
  run.down = [cluster.server_seconds(w, down_bytes) if down_bytes else 0.0 for w in workers]
  return _as_trace(run.play(most, end), cluster.size)


def _horizon(where: str, unit: str, number: int | None, until: float | None) -> tuple[float, float]:
  """How many events or rounds to play, and until when; one of them is inf."""
  if (number is None) == (until is None):
    raise ValueError(f'{where}: give {unit} or until, not {unit}={number!r} and until={until!r}')
  if until is None:
    return _checks.whole_number(f'{where}: {unit}', number), math.inf
  return math.inf, _checks.number(f'{where}: until', until)


Row = tuple[float, int, bool, bool, int, int, int, int, float]


class _Run:
  """The state of one run."""

  up: list[float]
  down: list[float]

  def __init__(self, policy: Policy, view: View, samplers: list[clusters.Sampler]):
    self.policy, self.view, self.samplers = policy, view, samplers
    self.heap: list[tuple[float, int]] = []
    self.counts, self.seconds = view.hidden['counts'], view.hidden['seconds']
    self.starts, self.arrivals = view.hidden['started'], view.hidden['arrivals']
    self.tasks = [(0, 0, 0)] * view.workers
    self.started = [0.0] * view.workers
    self.compute = [0.0] * view.workers
    self.pulled = [0] * view.workers  # the updates applied when it pulled last
    self.updates = 0

  def begin(self, worker: int, now: float) -> None:
    """Pulls, and begins the next task."""
    view, name = self.view, self.policy.name
    self.pulled[worker] = self.updates
    task = check_task(name, view, worker, self.policy.amount(view, worker))
    start = now + self.down[worker]
    seconds = self.samplers[worker](start, task[0] * task[1] / view.batch)
    check_seconds(name, worker, start, seconds)
    arrival = start + seconds + self.up[worker]
    self.tasks[worker], self.started[worker], self.compute[worker] = task, start, seconds
    self.starts[worker] = start
    self.arrivals[worker] = arrival
    heapq.heappush(self.heap, (arrival, worker))

  def push(self, worker: int) -> tuple[int, int, int, int, float]:
    """Delivers the work: its staleness, steps, examples, shard and start."""
    view, task = self.view, self.tasks[worker]
    seconds = self.compute[worker]
    view.busy[worker] += seconds
    view.done[worker] += task[0] * task[1] / view.batch
    self.counts[worker] += 1
    self.seconds[worker] = seconds
    self.arrivals[worker] = math.inf
    staleness = self.updates - self.pulled[worker]
    self.updates += 1
    return staleness, *task, self.started[worker]

  def play(self, events: float, until: float) -> list[Row]:
    view, heap, resumes, workers = self.view, self.heap, self.policy.resumes, self.view.workers
    rows: list[Row] = []
    for worker in range(workers):
      rows.append((0.0, worker, False, True, 0, 0, 0, worker, 0.0))
      self.begin(worker, 0.0)
    while len(rows) < events:
      if not heap:
        raise ValueError(
          f'{self.policy.name}: deadlock at {view.time:g} s, nobody works: all {workers} wait'
        )
      now, worker = heapq.heappop(heap)
      if now > until:
        break
      view.time = now
      delivered = self.push(worker)
      going = resumes(view, worker)
      rows.append((now, worker, True, worker in going, *delivered))
      for other in going:
        if not 0 <= other < workers or self.arrivals[other] < math.inf:
          raise ValueError(f'{self.policy.name}: resumes must name workers that wait, not {other}')
        self.begin(other, now)
        if other != worker:
          rows.append((now, other, False, True, 0, 0, 0, other, now))
    return rows[: int(min(events, len(rows)))]


def _as_trace(rows: list[Row], workers: int) -> EventTrace:
  names = ('seconds', 'worker', 'pushes', 'pulls', 'staleness', 'steps', 'examples')
  dtypes = (float, np.int32, bool, bool, np.int32, np.int32, np.int32, np.int32, float)
  columns = [
    np.fromiter(column, dtype, len(rows))
    for column, dtype in zip(zip(*rows, strict=True), dtypes, strict=True)
  ]
  fields = dict(zip((*names, 'shard', 'started'), columns, strict=True))
  return EventTrace(**fields, workers=workers)
