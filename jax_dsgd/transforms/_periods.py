"""When workers meet: schedules from a round to its number of local steps."""

from __future__ import annotations

import fractions
import numbers
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

_NEVER = 2**31 - 1  # steps of a round that does not end


def growing_period(growth: float) -> Callable[[jax.Array], jax.Array]:
  """Rounds that grow linearly: the i-th meeting comes after `ceil(a i (i + 1) / 2)` steps, i >= 1.

  T steps hold about `sqrt(2 T / a)` meetings, so R meetings need `a = 2 T / R^2`. Where a is so
  small that two meetings would fall on one step, the later one comes a step later.

  Args:
    growth: a > 0, rounded to a fraction of a denominator up to 64; a round is a steps longer than
      the one before.

  Returns:
    A schedule from the round (from 0) to its steps, in exact integers up to 2^31 steps.

  Raises:
    ValueError: a growth that is not a positive number, or rounds to 0.

  >>> [int(growing_period(1.5)(i)) for i in range(4)]  # meetings after 2, 5, 9, 15 steps
  [2, 3, 4, 6]

  Reference: Spiridonoff, Olshevsky, Paschalidis, "Communication-efficient SGD: From Local SGD to
    One-Shot Averaging", arXiv 2106.04759.
  """
  number = isinstance(growth, numbers.Real) and not isinstance(growth, bool)
  ratio = fractions.Fraction(growth).limit_denominator(64) if number and 0 < growth < _NEVER else 0
  if not ratio:
    raise ValueError(f'growing_period got growth={growth!r}; accepted are numbers > 1/128')
  whole, rest = divmod(ratio.numerator, ratio.denominator)
  # ceil(rest i (i + 1) / (2 q)) without the square: i = 2 q m + j has the same remainder as j.
  cycle = 2 * ratio.denominator
  i = np.arange(cycle + 1)
  steps = np.diff(-(-rest * i * (i + 1) // cycle))

  def period(round_: jax.Array) -> jax.Array:
    laps = jnp.asarray(round_, jnp.int32) // cycle
    extra = jnp.asarray(steps, jnp.int32)[round_ % cycle] + laps * (rest * 2)
    return whole * (round_ + 1) + extra

  return period


def listed_period(times: Sequence[int]) -> Callable[[jax.Array], jax.Array]:
  """Meetings after the listed numbers of steps, and none after the last.

  One number is one-shot averaging.

  Args:
    times: numbers of steps since the start, ascending.

  Returns:
    A schedule from the round (from 0) to its steps.

  Raises:
    ValueError: times that are not ascending integers >= 1.

  >>> [int(listed_period([3, 4, 10])(i)) for i in range(3)]
  [3, 1, 6]
  """
  table = np.asarray(times)
  steps = np.diff(table, prepend=0) if table.ndim == 1 else table
  if table.ndim != 1 or table.dtype.kind not in 'iu' or not table.size or (steps < 1).any():
    raise ValueError(f'listed_period got times={times!r}; accepted are ascending integers >= 1')
  rounds = np.append(steps, _NEVER)
  return lambda round_: jnp.asarray(rounds, jnp.int32)[jnp.minimum(round_, rounds.size - 1)]


def post_local_period(start: int, period: int) -> Callable[[jax.Array], jax.Array]:
  """Post-local SGD: a meeting at each of the first `start` steps, then one every `period` steps.

  Args:
    start: steps of synchronous training.
    period: steps a round after that.

  Returns:
    A schedule from the round (from 0) to its steps.

  Raises:
    ValueError: a start below 0, a period below 1, or one that is not an integer.

  >>> [int(post_local_period(2, 8)(i)) for i in range(4)]
  [1, 1, 8, 8]

  Reference: Lin, Stich, Patel, Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", arXiv
    1808.07217.
  """
  for name, steps, least in (('start', start, 0), ('period', period, 1)):
    if isinstance(steps, bool) or not isinstance(steps, numbers.Integral) or steps < least:
      raise ValueError(f'post_local_period got {name}={steps!r}; accepted are integers >= {least}')
  return lambda round_: jnp.where(round_ < start, 1, period)
