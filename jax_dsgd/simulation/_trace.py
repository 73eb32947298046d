"""Traces: what happened when, as arrays that a run replays."""

from __future__ import annotations

import dataclasses
import os
import zipfile
from typing import Any, Self

import numpy as np

from jax_dsgd.simulation import _checks


class _Saved:
  """What both traces share: exact dtypes, and one .npz file."""

  _dtypes: Any = None  # a class attribute of each trace: column -> dtype

  def _freeze(self) -> None:
    """Turns the columns into read-only arrays of their dtypes, where no value is lost."""
    for name, dtype in self._dtypes.items():
      given = np.asarray(getattr(self, name))
      if given.dtype.kind not in 'biuf':
        raise ValueError(f'{type(self).__name__}: {name} must be {dtype}, not {given.dtype}')
      with np.errstate(invalid='ignore'):  # nan as an int: refused below
        array = given.astype(dtype)
      # Weights may be rounded to float32; nothing else may change.
      lossless = dtype == 'float32' or np.array_equal(array, given, equal_nan=True)
      if not lossless:
        raise ValueError(f'{type(self).__name__}: {name} must be {dtype}, not {given.dtype}')
      array.setflags(write=False)
      object.__setattr__(self, name, array)

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes the trace to one .npz file of exactly this name."""
    names = [field.name for field in dataclasses.fields(self)]  # pyright: ignore
    fields = {name: getattr(self, name) for name in names}
    with open(path, 'wb') as file:
      np.savez_compressed(file, kind=np.array(type(self).__name__), **fields)

  @classmethod
  def load(cls, path: str | os.PathLike[str], *, workers: int | None = None) -> Self:
    """Reads a trace that `save` wrote.

    Args:
      path: of the file.
      workers: how many workers the trace must have; any number if None.

    Raises:
      ValueError: the file is no trace, of another kind, dtype or number of workers, or not valid.
    """
    try:
      with np.load(path, allow_pickle=False) as file:
        read = {name: file[name] for name in file.files}
    except (zipfile.BadZipFile, ValueError, EOFError, AttributeError):
      raise ValueError(f'{path} must be a file of {cls.__name__}.save, not another file') from None
    kind = str(read.pop('kind', 'a file without a kind'))
    if kind != cls.__name__:
      raise ValueError(f'{path} must hold a {cls.__name__}, not {kind}')
    names = [field.name for field in dataclasses.fields(cls)]  # pyright: ignore
    if sorted(read) != sorted(names):
      raise ValueError(f'{path} must hold {", ".join(names)}, not {", ".join(sorted(read))}')
    for name, dtype in cls._dtypes.items():
      if read[name].dtype != dtype:
        raise ValueError(f'{path}: {name} must be {dtype}, not {read[name].dtype}')
    trace: Any = cls(
      **{name: array if array.ndim else array.item() for name, array in read.items()}
    )
    if workers is not None and trace.workers != workers:
      raise ValueError(f'{path} must be of {workers} workers, not {trace.workers}')
    return trace


@dataclasses.dataclass(frozen=True, eq=False)
class RoundTrace(_Saved):
  """T rounds of W workers; arrays become read-only.

  Attributes:
    seconds: [T] float64, when each round ends; never decreases.
    active: [T, W] bool, who contributes to the round.
    steps: [T, W] int32, local steps behind the contribution; 0 where not active.
    weight: [T, W] float32, share in the mean of its group, >= 0; 0 where not active.
    staleness: [T, W] int32, age in rounds of the contribution, 0 if it began in this round.
    group: [T, W] int32, equal numbers meet; -1 meets nobody, as everyone does who is not active.
    started: [T, W] float64, when the work began that ended in this round; nan if none did.
    finished: [T, W] float64, when it ended, by being done or by being called off.

  Raises:
    ValueError: shapes or dtypes disagree, or a value breaks a rule above.

  >>> row = np.ones((1, 2))
  >>> RoundTrace(np.ones(1), row > 0, row, row / 2, 0 * row, 0 * row, 0 * row, row)
  RoundTrace(rounds=1, workers=2, seconds=1)
  """

  seconds: np.ndarray
  active: np.ndarray
  steps: np.ndarray
  weight: np.ndarray
  staleness: np.ndarray
  group: np.ndarray
  started: np.ndarray
  finished: np.ndarray

  _dtypes = dict(
    seconds='float64',
    active='bool',
    steps='int32',
    weight='float32',
    staleness='int32',
    group='int32',
    started='float64',
    finished='float64',
  )

  def __post_init__(self):
    self._freeze()
    shape = self.active.shape
    for name in self._dtypes:
      expected, own = (shape[:1] if name == 'seconds' else shape), getattr(self, name).shape
      if len(shape) != 2 or not shape[1] or own != expected:
        raise ValueError(f'RoundTrace: {name} must be of shape [T, W], or [T], not {list(own)}')
    _checks.refuse('RoundTrace: seconds', self.seconds, _not_times(self.seconds), 'not decrease')
    idle, weight = ~self.active, self.weight
    wrong = ~((weight >= 0) & (weight < np.inf))
    _checks.refuse('RoundTrace: weight', weight, wrong, 'be finite and >= 0')
    _checks.refuse('RoundTrace: weight', weight, idle & (weight > 0), 'be 0 where not active')
    _checks.refuse('RoundTrace: staleness', self.staleness, self.staleness < 0, 'be >= 0')
    for name, least in (('steps', 1), ('group', 0)):
      values, nothing = getattr(self, name), 0 if name == 'steps' else -1
      wrong = np.where(idle, values != nothing, values < least)
      rule = f'be >= {least} where active and {nothing} elsewhere'
      _checks.refuse(f'RoundTrace: {name}', values, wrong, rule)
    whole = np.isfinite(self.started) & (self.finished >= self.started) & (self.finished < np.inf)
    wrong = ~whole & ~(np.isnan(self.started) & np.isnan(self.finished)) | (self.active & ~whole)
    _checks.refuse('RoundTrace: finished', self.finished, wrong, 'be >= started, or both be nan')

  def __repr__(self) -> str:
    return _shown(self, 'rounds', self.seconds)

  @property
  def workers(self) -> int:
    """The number of workers W."""
    return self.active.shape[1]

  def server_bytes(self, up: float, down: float) -> np.ndarray:
    """Bytes between each worker and a server, [W]: `down` as work begins, `up` as it is delivered.

    Args:
      up: bytes of a contribution.
      down: bytes that a worker receives before it begins.
    """
    return up * self.active.sum(axis=0) + down * np.isfinite(self.started).sum(axis=0)

  def pair_bytes(self, nbytes: float) -> np.ndarray:
    """Bytes from each worker to each other, [W, W], if groups average by a ring all-reduce.

    In a group of g, in the order of its members, each sends `2 (g - 1) / g nbytes` to the next.

    Args:
      nbytes: of what is averaged.
    """
    total = np.zeros((self.workers, self.workers))
    for row in self.group:
      for members in members_of(row):
        g = members.size
        total[members, np.roll(members, -1)] += 2 * (g - 1) / g * nbytes
    return total


@dataclasses.dataclass(frozen=True, eq=False)
class EventTrace(_Saved):
  """E events of W workers at a parameter server, as it sees them; arrays become read-only.

  At an event a worker pushes its work, pulls the parameters, or pushes and then pulls. It pulls
  before each push; to begin with, everyone pulls at time 0.

  Attributes:
    seconds: [E] float64, when; never decreases.
    worker: [E] int32, who.
    pushes: [E] bool.
    pulls: [E] bool.
    staleness: [E] int32, updates that the server applied between the pull of the work and its push;
      0 where nothing is pushed.
    steps: [E] int32, local steps of the work pushed; 0 where nothing is pushed.
    examples: [E] int32, batch size of each of these steps; 0 where nothing is pushed.
    started: [E] float64, when the work pushed began; `seconds` where nothing is pushed.
    workers: W.
    shard: [E] int32, which of W data shards the work pushed used; the worker's own by default.

  Raises:
    ValueError: shapes or dtypes disagree, or a value breaks a rule above.

  >>> EventTrace([0, 1.5], [0, 0], [False, True], [True, True], [0, 0], [0, 1], [0, 8], [0, 0], 1)
  EventTrace(events=2, workers=1, seconds=1.5)
  """

  seconds: np.ndarray
  worker: np.ndarray
  pushes: np.ndarray
  pulls: np.ndarray
  staleness: np.ndarray
  steps: np.ndarray
  examples: np.ndarray
  started: np.ndarray
  workers: int
  shard: np.ndarray = None  # pyright: ignore[reportAssignmentType]

  _dtypes = dict(
    seconds='float64',
    worker='int32',
    pushes='bool',
    pulls='bool',
    staleness='int32',
    steps='int32',
    examples='int32',
    started='float64',
    shard='int32',
  )

  def __post_init__(self):
    object.__setattr__(self, 'workers', _checks.whole_number('EventTrace: workers', self.workers))
    if self.shard is None:
      object.__setattr__(self, 'shard', self.worker)
    self._freeze()
    for name in self._dtypes:
      shape = getattr(self, name).shape
      if len(shape) != 1 or shape != self.seconds.shape:
        raise ValueError(f'EventTrace: {name} must be of shape [E], not {list(shape)}')
    _checks.refuse('EventTrace: seconds', self.seconds, _not_times(self.seconds), 'not decrease')
    for name in ('worker', 'shard'):
      values = getattr(self, name)
      wrong = (values < 0) | (values >= self.workers)
      _checks.refuse(f'EventTrace: {name}', values, wrong, f'be from 0 to {self.workers - 1}')
    both = self.pushes | self.pulls
    _checks.refuse('EventTrace: pushes', self.pushes, ~both, 'be true where pulls is not')
    for name in ('steps', 'examples'):
      values = getattr(self, name)
      wrong = np.where(self.pushes, values < 1, values != 0)
      _checks.refuse(f'EventTrace: {name}', values, wrong, 'be >= 1 where pushes, 0 elsewhere')
    wrong = ~((self.started >= 0) & (self.started <= self.seconds))
    _checks.refuse('EventTrace: started', self.started, wrong, 'be from 0 to seconds')
    self._check_staleness()

  def __repr__(self) -> str:
    return _shown(self, 'events', self.seconds)

  def link_bytes(self, up: float, down: float) -> np.ndarray:
    """Bytes on the link between each worker and the server, [W].

    Args:
      up: bytes of a push.
      down: bytes of a pull.
    """
    sent = up * self.pushes + down * self.pulls
    return np.bincount(self.worker, weights=sent, minlength=self.workers)

  def _check_staleness(self) -> None:
    """Recomputes staleness from pushes and pulls, with the events of each worker side by side."""
    order = np.argsort(self.worker, kind='stable')
    first = np.ones(order.size, bool)
    first[1:] = np.diff(self.worker[order]) != 0
    wrong = np.zeros(order.size, bool)
    wrong[order] = first & (self.pushes[order] | (self.seconds[order] > 0))
    _checks.refuse('EventTrace: pushes', self.pushes, wrong, 'begin with a pull at time 0')
    pulled = np.roll(self.pulls[order], 1)  # whether the worker pulled at its event before
    wrong[order] = ~first & (self.pushes[order] != pulled)
    _checks.refuse('EventTrace: pushes', self.pushes, wrong, 'follow a pull, and a pull a push')
    updates = np.cumsum(self.pushes)
    expected = np.zeros(order.size, int)
    expected[order] = (updates - 1)[order] - np.roll(updates[order], 1)
    expected[~self.pushes] = 0
    for e in np.flatnonzero(expected != self.staleness)[:1]:
      raise ValueError(
        f'EventTrace: staleness[{e}] must be {expected[e]}, the updates since worker '
        f'{self.worker[e]} pulled, not {self.staleness[e]}'
      )


def members_of(group: np.ndarray) -> list[np.ndarray]:
  """The members of each group of one row, in ascending order."""
  return [np.flatnonzero(group == number) for number in np.unique(group[group >= 0])]


def _not_times(seconds: np.ndarray) -> np.ndarray:
  return ~np.isfinite(seconds) | (np.diff(seconds, prepend=0.0) < 0)


def _shown(trace: RoundTrace | EventTrace, name: str, seconds: np.ndarray) -> str:
  end = seconds[-1] if seconds.size else 0
  kind = type(trace).__name__
  return f'{kind}({name}={seconds.size}, workers={trace.workers}, seconds={end:g})'
