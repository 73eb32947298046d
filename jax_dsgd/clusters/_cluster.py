"""A machine room: who computes how fast, and what the links carry."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from jax_dsgd.clusters import _checks
from jax_dsgd.clusters._laws import Law, Sampler

_RESTARTS = 10_000


@dataclasses.dataclass(frozen=True, eq=False)
class Availability:
  """Markov chains over rounds: worker i stays up `up[i]` rounds in the mean, down `down[i]`.

  Workers of one group fail together: a worker is up while its own chain and its group's are up.
  Chains begin in their stationary law, up with probability up / (up + down).

  Attributes:
    up: [n] mean rounds, each >= 1; scalars are broadcast once a cluster takes them.
    down: [n] mean rounds, each >= 1.
    groups: [n] ints, equal numbers fail together; None without groups.
    group_up: mean rounds that a group stays up, >= 1.
    group_down: mean rounds that it stays down, >= 1.
  """

  up: Any
  down: Any
  groups: Any = None
  group_up: float = 20.0
  group_down: float = 2.0

  def rows(self, rng: np.random.Generator, n: int) -> Iterator[np.ndarray]:
    """Yields, round by round, who is up: bool [n]."""
    own = _chains(rng, np.broadcast_to(self.up, n), np.broadcast_to(self.down, n))
    if self.groups is None:
      yield from own
    else:
      _, member = np.unique(self.groups, return_inverse=True)
      count = member.max() + 1
      shared = _chains(rng, np.full(count, self.group_up), np.full(count, self.group_down))
      for mine, ours in zip(own, shared, strict=True):
        yield mine & ours[member]


def _chains(rng: np.random.Generator, up: np.ndarray, down: np.ndarray) -> Iterator[np.ndarray]:
  state = rng.random(up.size) < up / (up + down)
  while True:
    yield state
    state = state ^ (rng.random(up.size) < np.where(state, 1 / up, 1 / down))


@dataclasses.dataclass(frozen=True, eq=False)
class Cluster:
  """The described machine room of n workers; scalars are broadcast, arrays become read-only.

  Attributes:
    name: what errors and reports call it.
    laws: n laws of compute time.
    latency: [n, n] seconds before a message from i to j starts to arrive, >= 0.
    bandwidth: [n, n] bytes a second from i to j, > 0; the diagonal is not used.
    server_latency: [n] seconds between worker i and a server, >= 0.
    server_bandwidth: [n] bytes a second between them, > 0.
    memory: [n] bytes, > 0.
    availability: who is up in which round; None if all are.
    failures_per_hour: of each worker; a failure loses the computation under way, which then starts
      again. None if nobody fails.

  Raises:
    ValueError: a field is of another shape, a speed is not > 0, or a number is not finite.

  >>> from jax_dsgd.clusters import constant
  >>> Cluster('pair', (constant(1.0),) * 2, bandwidth=1e9).message_seconds(0, 1, 5e8)
  0.5
  """

  name: str
  laws: tuple[Law, ...]
  latency: Any = 0.0
  bandwidth: Any = 1e9
  server_latency: Any = 0.0
  server_bandwidth: Any = 1e9
  memory: Any = 16e9
  availability: Availability | None = None
  failures_per_hour: float | None = None

  def __post_init__(self):
    laws = tuple(self.laws)
    if not laws or not all(isinstance(law, Law) for law in laws):
      raise ValueError(f'{self.name}: laws must be a Law for each worker, not {self.laws!r}')
    n = len(laws)
    object.__setattr__(self, 'laws', laws)
    for field, shape, strict in (
      ('latency', (n, n), False),
      ('bandwidth', (n, n), True),
      ('server_latency', (n,), False),
      ('server_bandwidth', (n,), True),
      ('memory', (n,), True),
    ):
      array = _checks.numbers(f'{self.name}: {field}', getattr(self, field), shape, strict=strict)
      object.__setattr__(self, field, array)
    if self.failures_per_hour is not None:
      _checks.number(f'{self.name}: failures_per_hour', self.failures_per_hour)
    if self.availability is not None:
      object.__setattr__(self, 'availability', _checked(self.name, self.availability, n))

  def __repr__(self) -> str:
    return f'Cluster({self.name!r}, size={self.size})'

  @property
  def size(self) -> int:
    """The number of workers n."""
    return len(self.laws)

  def message_seconds(self, source: int, target: int, nbytes: float) -> float:
    """Seconds until `nbytes` of worker `source` are at worker `target`; 0 to itself."""
    if source == target:
      return 0.0
    return float(self.latency[source, target] + nbytes / self.bandwidth[source, target])

  def server_seconds(self, worker: int, nbytes: float) -> float:
    """Seconds that `nbytes` take between a worker and the server, in either direction."""
    return float(self.server_latency[worker] + nbytes / self.server_bandwidth[worker])

  def samplers(self, seed: int | np.random.SeedSequence) -> list[Sampler]:
    """The n machines of one run, each with a random stream of its own: (start, work) -> seconds.

    The j-th computation of a worker meets the same luck whatever the others do.
    """
    seeds = seed if isinstance(seed, np.random.SeedSequence) else np.random.SeedSequence(seed)
    streams = [np.random.default_rng(child) for child in seeds.spawn(2 * self.size)]
    samplers = [law.sampler(rng) for law, rng in zip(self.laws, streams[::2], strict=True)]
    if self.failures_per_hour:
      scale = 3600 / self.failures_per_hour
      pairs = zip(samplers, streams[1::2], strict=True)
      return [_failing(f'{self.name}: failures_per_hour', s, rng, scale) for s, rng in pairs]
    return samplers

  def available(self, rng: np.random.Generator, rounds: int) -> np.ndarray:
    """Who is up in each round: bool [rounds, n]."""
    rounds = _checks.whole_number('available: rounds', rounds, least=0)
    if self.availability is None:
      return np.ones((rounds, self.size), bool)
    rows = itertools.islice(self.availability.rows(rng, self.size), rounds)
    return np.array(list(rows), bool).reshape(rounds, self.size)


def _checked(name: str, given: Availability, n: int) -> Availability:
  """The availability with arrays of n workers."""
  arrays = {}
  for field, shape in (('up', (n,)), ('down', (n,)), ('group_up', ()), ('group_down', ())):
    where = f'{name}: availability: {field}'
    arrays[field] = _checks.numbers(where, getattr(given, field), shape)
    if (arrays[field] < 1).any():
      raise ValueError(f'{where} must be >= 1 round, not {arrays[field].min()}')
  if given.groups is not None:
    groups = np.array(given.groups)
    if groups.shape != (n,) or groups.dtype.kind not in 'iu':
      raise ValueError(f'{name}: availability: groups must be {n} ints, not {given.groups!r}')
    arrays['groups'] = groups
  return Availability(**arrays)


def _failing(where: str, sampler: Sampler, rng: np.random.Generator, scale: float) -> Sampler:
  """A machine whose computation starts again after a failure, at a mean distance of `scale`."""

  def sample(start: float, work: float) -> float:
    lost = 0.0
    for _ in range(_RESTARTS):
      seconds = sampler(start + lost, work)
      failure = scale * rng.standard_exponential()
      if failure >= seconds:
        return lost + seconds
      lost += failure
    raise ValueError(
      f'{where} must let {seconds:g} s of work succeed in {_RESTARTS} tries, not {3600 / scale:g}'
    )

  return sample
