"""The clock of rounds: who is chosen works, and meets whom the policy says."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_dsgd import clusters
from jax_dsgd.simulation import _checks
from jax_dsgd.simulation._policy import (
  Meeting,
  Policy,
  View,
  check_plays,
  check_seconds,
  check_task,
)
from jax_dsgd.simulation._trace import RoundTrace, members_of

_PATIENCE = 10_000  # rounds in which nothing may happen while workers come and go


def simulate_rounds(
  cluster: clusters.Cluster,
  policy: Policy,
  *,
  rounds: int | None = None,
  until: float | None = None,
  seed: int = 0,
  message_bytes: float = 0.0,
  batch: int = 1,
) -> RoundTrace:
  """Plays rounds. Each worker has its own clock: it begins as soon as it is free and chosen.

  In a round those who are chosen, idle and up begin their `policy.amount` of work; `policy.meet`
  then says who meets, when, and whose work goes on into the next round or is called off. A round
  ends when all who met are free again. Workers that neither work nor meet wait for its end.

  Args:
    cluster: whose laws give compute times, whose links give message times, and whose availability
      says who may begin in which round.
    policy: such as `bulk()`.
    rounds: how many rounds to play; give this or `until`.
    until: play the rounds that end up to this time in seconds.
    seed: of machines, availability and policy. The first two are the same under every policy.
    message_bytes: of a message. A central policy pays one from the server before work and one to it
      after; groups pay a ring all-reduce when they meet.
    batch: examples of a nominal batch, in which laws count work.

  Returns:
    The trace of the rounds.

  Raises:
    ValueError: an argument or an answer of the policy is not possible, or no round can end.

  >>> simulate_rounds(clusters.with_stragglers(4, fraction=0.25), Policy('all'), rounds=2).seconds
  array([ 5., 10.])
  """
  check_plays(policy, 'rounds')
  if (rounds is None) == (until is None):
    raise ValueError(
      f'simulate_rounds: give rounds or until, not rounds={rounds!r} and until={until!r}'
    )
  last = None if rounds is None else _checks.whole_number('simulate_rounds: rounds', rounds)
  end = np.inf if until is None else _checks.number('simulate_rounds: until', until)
  nbytes = _checks.number('simulate_rounds: message_bytes', message_bytes)
  batch = _checks.whole_number('simulate_rounds: batch', batch)
  seeds = np.random.SeedSequence(_checks.whole_number('simulate_rounds: seed', seed, least=0))
  machines, decisions, chains = seeds.spawn(3)
  view = View(cluster, batch, np.random.default_rng(decisions))
  view.memory = policy.memory(view)
  run = _Run(policy, view, cluster.samplers(machines), nbytes)
  up_rows = None
  if cluster.availability is not None:
    up_rows = cluster.availability.rows(np.random.default_rng(chains), cluster.size)
  rows = []
  while view.round != last:
    up = np.ones(cluster.size, bool) if up_rows is None else next(up_rows)
    row = run.play(up)
    if row['seconds'] > end:
      break
    rows.append(row)
    view.round += 1
  shape = (len(rows), cluster.size)
  columns = {name: np.array([row[name] for row in rows]) for name in rows[0]} if rows else {}
  empty = {name: np.zeros(shape[: 1 if name == 'seconds' else 2]) for name in RoundTrace._dtypes}
  return RoundTrace(**(columns or empty))


class _Run:
  """The state of one run."""

  def __init__(
    self, policy: Policy, view: View, samplers: list[clusters.Sampler], message_bytes: float
  ):
    self.policy, self.view, self.samplers = policy, view, samplers
    self.nbytes, n = message_bytes, view.workers
    central = policy.central and message_bytes > 0
    seconds = view.cluster.server_seconds
    self.message = np.array([seconds(w, message_bytes) if central else 0.0 for w in range(n)])
    self.free, self.compute = np.zeros(n), np.zeros(n)
    self.work, self.born = np.zeros((n, 2), int), np.zeros(n, int)
    self.stalled = 0

  def play(self, up: np.ndarray) -> dict[str, Any]:
    """One round: the row of the trace."""
    view, n = self.view, self.view.workers
    chosen = np.asarray(self.policy.choose(view))
    if chosen.shape != (n,) or chosen.dtype != bool:
      raise ValueError(
        f'{self.policy.name}: choose must give bool [{n}], not {chosen.dtype} {list(chosen.shape)}'
      )
    begins = chosen & up & ~np.isfinite(view.arrivals)
    for worker in np.flatnonzero(begins).tolist():
      self.begin(worker)
    view.hidden['up'][:] = up
    working = np.isfinite(view.arrivals)
    if working.any():
      meeting = self.checked(self.policy.meet(view), working)
    else:
      meeting = Meeting(np.full(n, -1), np.full(n, np.inf))
    row = self.settle(meeting, working)
    self.stalled = 0 if np.isfinite(row['started']).any() else self.stalled + 1
    # Only the coming of workers that are down now can change anything.
    if self.stalled > (0 if up.all() else _PATIENCE):
      met = ', '.join(map(str, np.flatnonzero(working)[:8])) or 'nobody'
      raise ValueError(
        f'{self.policy.name}: deadlock at {view.time:g} s in round {view.round}: no one meets; '
        f'workers that wait for others: {met}'
      )
    return row

  def begin(self, worker: int) -> None:
    view, name = self.view, self.policy.name
    steps, examples, _ = check_task(name, view, worker, self.policy.amount(view, worker))
    start = self.free[worker] + self.message[worker]
    seconds = self.samplers[worker](float(start), steps * examples / view.batch)
    self.compute[worker] = check_seconds(name, worker, start, seconds)
    self.work[worker], self.born[worker] = (steps, examples), view.round
    view.hidden['started'][worker] = start
    view.hidden['arrivals'][worker] = start + seconds + self.message[worker]

  def checked(self, meeting: Meeting, working: np.ndarray) -> Meeting:
    """The meeting, if only those meet who work, and nobody before it arrived."""
    group, ends = np.asarray(meeting.group), np.asarray(meeting.ends, float)
    met, arrivals, name = group >= 0, self.view.arrivals, self.policy.name
    most = self.view.workers
    _checks.refuse(f'{name}: the group of worker ', group, group >= most, f'be below {most}')
    wrong = met & ~working
    _checks.refuse(f'{name}: the group of worker ', group, wrong, 'be -1, for it does not work')
    early = met & ~((ends >= arrivals) & (ends < np.inf)) | np.isnan(ends)
    _checks.refuse(f'{name}: the end of worker ', ends, early, 'be finite and after it arrived')
    return Meeting(group, ends, meeting.staleness)

  def settle(self, meeting: Meeting, working: np.ndarray) -> dict[str, Any]:
    """Writes the row, frees who met or was called off, and lets the idle wait for the end."""
    view, group, met = self.view, meeting.group, meeting.group >= 0
    over = working & np.isfinite(meeting.ends)
    free = np.where(over, meeting.ends, self.free)
    if not self.policy.central and self.nbytes:
      for members in members_of(group):
        free[members] += ring_seconds(view.cluster, members, self.nbytes)
    steps, examples = np.where(met[:, None], self.work, 0).T
    totals = np.bincount(group[met], weights=examples[met], minlength=1)
    weight = np.where(met, examples / np.where(met, totals[np.where(met, group, 0)], 1), 0.0)
    age = view.round - self.born if meeting.staleness is None else meeting.staleness
    done = np.maximum(view.started, np.minimum(view.arrivals - self.message, meeting.ends))
    row: dict[str, Any] = dict(
      active=met,
      steps=steps,
      weight=weight,
      staleness=np.where(met, age, 0),
      group=np.where(met, group, -1),
      started=np.where(over, view.started, np.nan),
      finished=np.where(over, done, np.nan),
    )
    view.time = max(view.time, free[met].max(initial=0.0))
    row['seconds'] = view.time
    view.hidden['counts'][met] += 1
    view.hidden['seconds'][met] = self.compute[met]
    view.busy[met] += self.compute[met]
    view.done[met] += (steps * examples)[met] / view.batch
    view.hidden['arrivals'][over] = np.inf
    self.free = np.where(working, free, np.maximum(free, view.time))
    return row


def ring_seconds(cluster: clusters.Cluster, members: np.ndarray, nbytes: float) -> float:
  """Seconds of a ring all-reduce: 2 (g - 1) times the slowest link, with a g-th of the bytes."""
  g = members.size
  pairs = zip(members.tolist(), np.roll(members, -1).tolist(), strict=True)
  slowest = max(cluster.message_seconds(i, j, nbytes / g) for i, j in pairs)
  return 2 * (g - 1) * slowest
