"""Schedules of meetings, against exact fractions."""

from __future__ import annotations

import fractions
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_dsgd import transforms

AXIS = 'workers'


def meetings(schedule, steps):
  """Numbers of steps after which two workers that move apart are together, by `local_steps`."""
  outer = optax.chain(transforms.mean_over(AXIS), optax.sgd(1.0))
  tx = transforms.local_steps(optax.sgd(1.0), outer, schedule)

  def worker(gradient):
    def step(carry, _):
      x, state = carry
      updates, state = tx.update(gradient, state, x)
      return (x + updates, state), x + updates

    x = jnp.zeros(())
    return jax.lax.scan(step, (x, tx.init(x)), length=steps)[1]

  places = jax.jit(jax.vmap(worker, axis_name=AXIS))(jnp.array([-1.0, 1.0]))
  return (np.flatnonzero(places[0] == places[1]) + 1).tolist()


@pytest.mark.parametrize('growth', [0.5, 1, 1.5, 2, 7 / 3, 5 + 1 / 64, 40.25])
def test_growing_rounds_end_where_they_should(growth):
  """The i-th after ceil(a i (i + 1) / 2), up to 2^31 steps."""
  a = fractions.Fraction(growth).limit_denominator(64)
  rounds = math.isqrt(int(2 * (2**31 - 1) / a)) - 1
  steps = np.asarray(transforms.growing_period(growth)(jnp.arange(rounds)), np.int64)
  i = np.arange(1, rounds + 1)
  times = [-(-int(a.numerator) * n * (n + 1) // (2 * a.denominator)) for n in map(int, i)]
  np.testing.assert_array_equal(np.cumsum(steps), times)
  assert times[-1] < 2**31


def test_meetings_take_place_at_their_times():
  growing = [math.ceil(fractions.Fraction(3, 2) * i * (i + 1) / 2) for i in range(1, 6)]
  assert growing == [2, 5, 9, 15, 23]
  assert meetings(transforms.growing_period(1.5), 30) == growing
  assert meetings(transforms.listed_period([3, 4, 10]), 30) == [3, 4, 10]
  assert meetings(transforms.listed_period([30]), 30) == [30]  # one-shot
  assert meetings(transforms.post_local_period(4, 6), 30) == [1, 2, 3, 4, 10, 16, 22, 28]
  assert meetings(transforms.post_local_period(0, 10), 30) == [10, 20, 30]


def test_meetings_that_would_fall_together_come_a_step_later():
  steps = [int(transforms.growing_period(1 / 8)(i)) for i in range(12)]
  times = list(itertools.accumulate(max(n, 1) for n in steps))
  assert times[:6] == [1, 2, 3, 4, 5, 6]
  assert meetings(transforms.growing_period(1 / 8), 12) == [t for t in times if t <= 12]


@pytest.mark.parametrize('growth', [0, -1.0, True, 'a', None, 1e-3, math.nan, math.inf], ids=repr)
def test_refused_growths(growth):
  with pytest.raises(ValueError, match=f'growing_period got growth={growth!r}; accepted are'):
    transforms.growing_period(growth)


@pytest.mark.parametrize('times', [[], [0, 3], [3, 3], [4, 2], [1.0, 2.0], 5, [[1, 2]]], ids=repr)
def test_refused_times(times):
  with pytest.raises(ValueError, match='accepted are ascending integers >= 1'):
    transforms.listed_period(times)


@pytest.mark.parametrize(
  ('start', 'period', 'message'),
  [(-1, 2, 'start=-1'), (True, 2, 'start=True'), (2, 0, 'period=0'), (2, 1.5, 'period=1.5')],
)
def test_refused_switches(start, period, message):
  with pytest.raises(ValueError, match=f'post_local_period got {message}; accepted are integers'):
    transforms.post_local_period(start, period)
