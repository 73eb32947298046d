"""Laws of compute time: how long a worker takes for its work."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy import typing as npt

from jax_dsgd.clusters import _checks

Sampler = Callable[[float, float], float]
_BLOCK = 256  # random numbers drawn at once: one draw costs as much as a hundred


class Law(NamedTuple):
  """How long a worker computes.

  Attributes:
    name: what errors and reports call it.
    mean: seconds that one nominal batch takes in the long run.
    sampler: makes, from the worker's own random stream, the function (start, work) -> seconds of
      one run: the time that `work` nominal batches take when they begin at time `start`. What a
      machine remembers, such as when it is slow, lives in that function.

  >>> law = constant(2.0)
  >>> law.sampler(np.random.default_rng(0))(0.0, 3.0), law.slowed(5).mean
  (6.0, 10.0)
  """

  name: str
  mean: float
  sampler: Callable[[np.random.Generator], Sampler]

  def slowed(self, factor: float) -> Law:
    """The same machine, `factor` times slower (> 0): its times are those of this law, scaled."""
    factor = _checks.positive(f'{self.name}: factor', factor)

    def sampler(rng: np.random.Generator) -> Sampler:
      seconds = self.sampler(rng)
      return lambda start, work: factor * seconds(start, work)

    return Law(f'{factor:g} * {self.name}', factor * self.mean, sampler)


def _blocks(draw: Callable[[int], np.ndarray]) -> Iterator[float]:
  while True:
    yield from draw(_BLOCK).tolist()


def constant(seconds: float, *, overhead: float = 0.0) -> Law:
  """Always `overhead + work * seconds`.

  Args:
    seconds: of a nominal batch, > 0.
    overhead: seconds of each computation, however much its work is.

  >>> constant(1.0, overhead=0.5).sampler(np.random.default_rng(0))(0.0, 4.0)
  4.5
  """
  seconds = _checks.positive('constant: seconds', seconds)
  overhead = _checks.number('constant: overhead', overhead)
  return Law(
    f'constant({seconds:g})',
    seconds + overhead,
    lambda rng: lambda s, work: overhead + work * seconds,
  )


def shifted_exponential(least: float, extra: float, *, delay: float = 0.0) -> Law:
  """`delay * E' + work * (least + extra * E)`, where E and E' are exponential with mean 1.

  Args:
    least: seconds of a nominal batch at best, >= 0.
    extra: mean seconds on top of it, >= 0; the two may not both be 0.
    delay: mean seconds of each computation whatever its work, such as a random response time.

  >>> shifted_exponential(1.0, 0.5).mean
  1.5
  """
  least = _checks.number('shifted_exponential: least', least)
  extra = _checks.number('shifted_exponential: extra', extra)
  delay = _checks.number('shifted_exponential: delay', delay)
  mean = _checks.positive('shifted_exponential: least + extra', least + extra) + delay

  def sampler(rng: np.random.Generator) -> Sampler:
    times, delays = _blocks(rng.standard_exponential), _blocks(rng.standard_exponential)
    if not delay:
      return lambda start, work: work * (least + extra * next(times))
    return lambda start, work: delay * next(delays) + work * (least + extra * next(times))

  return Law(f'shifted_exponential({least:g}, {extra:g})', mean, sampler)


def log_normal(seconds: float, sigma: float) -> Law:
  """`work * seconds * exp(sigma N - sigma^2 / 2)`: mean `seconds`, with a heavy tail.

  Args:
    seconds: mean of a nominal batch, > 0.
    sigma: standard deviation of the logarithm, >= 0.

  >>> log_normal(2.0, 0.3).mean
  2.0
  """
  seconds = _checks.positive('log_normal: seconds', seconds)
  sigma = _checks.number('log_normal: sigma', sigma)

  def sampler(rng: np.random.Generator) -> Sampler:
    factors = _blocks(lambda n: seconds * np.exp(sigma * rng.standard_normal(n) - sigma**2 / 2))
    return lambda start, work: work * next(factors)

  return Law(f'log_normal({seconds:g}, {sigma:g})', seconds, sampler)


def markov_slowdown(seconds: float, factor: float, *, fast: float, slow: float) -> Law:
  """A machine that now and then is `factor` times slower, such as one with other tenants.

  It is fast at time 0, and switches after exponential times. The times of the switches come from
  the worker's stream alone, so that a machine is slow at the same times under every policy.

  Args:
    seconds: of a nominal batch while fast, > 0.
    factor: how many times longer while slow, >= 1.
    fast: mean seconds that it stays fast, > 0.
    slow: mean seconds that it stays slow, > 0.

  >>> round(markov_slowdown(1.0, 5.0, fast=30.0, slow=10.0).mean, 3)
  1.25
  """
  name = 'markov_slowdown'
  seconds = _checks.positive(f'{name}: seconds', seconds)
  factor = _checks.number(f'{name}: factor', factor, least=1.0)
  fast, slow = _checks.positive(f'{name}: fast', fast), _checks.positive(f'{name}: slow', slow)
  rate = (fast + slow / factor) / (fast + slow)

  def sampler(rng: np.random.Generator) -> Sampler:
    exponentials = _blocks(rng.standard_exponential)
    switches = [0.0]

    def until(k: int) -> float:
      while len(switches) <= k:
        stay = slow if len(switches) % 2 == 0 else fast
        switches.append(switches[-1] + stay * next(exponentials))
      return switches[k]

    return _switching(seconds, factor, until, switches)

  return Law(f'{name}({seconds:g}, {factor:g})', seconds / rate, sampler)


def _switching(
  seconds: float, factor: float, until: Callable[[int], float], known: list[float]
) -> Sampler:
  """Fast from switch 0 to 1, slow from 1 to 2, and so on; `known` holds the switches made yet."""

  def sample(start: float, work: float) -> float:
    while known[-1] <= start:
      until(len(known))
    k = bisect.bisect_right(known, start)  # the next switch
    now, left = start, work * seconds
    while True:
      pace = 1.0 if k % 2 else factor
      end = until(k)
      if now + left * pace <= end:
        return now + left * pace - start
      left -= (end - now) / pace
      now, k = end, k + 1

  return sample


def periodic(seconds: float, factor: float, *, period: float, slow: float) -> Law:
  """A machine that is `factor` times slower in the last `slow` seconds of every period.

  Args:
    seconds: of a nominal batch while fast, > 0.
    factor: how many times longer while slow, >= 1.
    period: seconds, > 0.
    slow: seconds of a period, between 0 and `period`, both excluded.

  >>> periodic(1.0, 2.0, period=10.0, slow=4.0).sampler(np.random.default_rng(0))(5.0, 2.0)
  3.0
  """
  seconds = _checks.positive('periodic: seconds', seconds)
  factor = _checks.number('periodic: factor', factor, least=1.0)
  period, slow = (
    _checks.positive('periodic: period', period),
    _checks.positive('periodic: slow', slow),
  )
  if slow >= period:
    raise ValueError(f'periodic: slow must be shorter than period = {period:g}, not {slow:g}')
  fast = period - slow
  whole = fast + slow / factor  # fast seconds of work that one period does

  def sample(start: float, work: float) -> float:
    cycle, phase = divmod(start, period)
    done = min(phase, fast) + max(phase - fast, 0.0) / factor
    cycles, rest = divmod(done + work * seconds, whole)
    end = rest if rest <= fast else fast + (rest - fast) * factor
    return (cycle + cycles) * period + end - start

  return Law(f'periodic({seconds:g}, {factor:g})', seconds * period / whole, lambda rng: sample)


def recorded(seconds: npt.ArrayLike) -> Law:
  """Measured times: computation j takes `work * seconds[j % len(seconds)]`.

  Args:
    seconds: [m] of a nominal batch, each > 0, m >= 1.

  >>> sample = recorded([1.0, 4.0]).sampler(np.random.default_rng(0))
  >>> [sample(0.0, 1.0) for _ in range(3)]
  [1.0, 4.0, 1.0]
  """
  if np.ndim(seconds) != 1 or not np.size(seconds):
    raise ValueError(
      f'recorded: seconds must be of shape [m], m >= 1, not {list(np.shape(seconds))}'
    )
  times = _checks.numbers('recorded: seconds', seconds, np.shape(seconds))

  def sampler(rng: np.random.Generator) -> Sampler:
    cycle = _blocks(lambda _: times)
    return lambda start, work: work * next(cycle)

  return Law(f'recorded({times.size} times)', float(times.mean()), sampler)
