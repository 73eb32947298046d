"""The planner of phases against brute force, an equal split and a greedy search."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_dsgd import algorithms, planning, runtime


def waited(plan, b, c, period):
  """Seconds that a round waits, by its events: one link, on which layers follow each other."""
  total = 0.0
  for step in range(period):
    clock, free = 0.0, 0.0
    for own, backward, communication in zip(plan, b, c, strict=True):
      clock += backward
      if step in own:
        free = max(free, clock) + communication
    total += max(0.0, free - clock)
  return total


def cut(sizes):
  """Each layer's one step, from the sizes of runs."""
  return [[step] for step, size in enumerate(sizes) for _ in range(size)]


def equal_split(layers, period):
  return cut([len(part) for part in np.array_split(range(layers), period)])


def greedy(b, c, period):
  """A run takes layers as long as it does not wait; the last takes what is left."""
  sizes = [0] * period
  step = 0
  for _ in range(len(b)):
    sizes[step] += 1
    done = cut(sizes)
    padded = done + [[-1]] * (len(b) - len(done))
    if step < period - 1 and waited([p if p == [step] else [-1] for p in padded], b, c, period) > 0:
      step += 1
  return cut(sizes)


def costs(seed):
  rng = np.random.default_rng(seed)
  layers, period = int(rng.integers(1, 13)), int(rng.integers(1, 6))
  b = rng.uniform(0, 1, layers)
  return b, rng.uniform(0, 1, layers) ** 2 * rng.choice([0.5, 2.0, 8.0]), period


@pytest.mark.parametrize('seed', range(25))
def test_no_cut_waits_less(seed):
  b, c, period = costs(seed)
  plan = planning.plan_phases(b, c, period, fill=False)
  assert [len(own) for own in plan] == [1] * len(b)
  assert plan == sorted(plan)  # consecutive runs
  ours = waited(plan, b, c, period)
  every = (
    np.diff([0, *where, len(b)])
    for where in itertools.combinations_with_replacement(range(len(b) + 1), period - 1)
  )
  best = min(waited(cut(sizes), b, c, period) for sizes in every)
  np.testing.assert_allclose(ours, best, rtol=1e-12, atol=1e-12)
  assert ours <= waited(equal_split(len(b), period), b, c, period) + 1e-12
  assert ours <= waited(greedy(b, c, period), b, c, period) + 1e-12


@pytest.mark.parametrize('seed', range(25))
def test_further_meetings_cost_nothing_and_fill_the_round(seed):
  b, c, period = costs(seed)
  bare = planning.plan_phases(b, c, period, fill=False)
  plan = planning.plan_phases(b, c, period)
  assert all(set(own) <= set(more) for own, more in zip(bare, plan, strict=True))
  assert all(own == sorted(set(own)) and 0 <= own[0] <= own[-1] < period for own in plan)
  wait = waited(plan, b, c, period)
  np.testing.assert_allclose(wait, waited(bare, b, c, period), rtol=1e-12, atol=1e-12)
  for layer, step in itertools.product(range(len(b)), range(period)):
    if step not in plan[layer]:  # one more would cost
      more = [own + [step] * (i == layer) for i, own in enumerate(plan)]
      assert waited(more, b, c, period) > wait


def test_a_large_model_waits_less_than_an_equal_split():
  """Layers of unequal size, with a network that hides about half of what a round sends."""
  rng = np.random.default_rng(0)
  b, c, period = rng.uniform(0.5, 1, 120), rng.lognormal(0, 1.5, 120), 5
  plan = planning.plan_phases(b, c, period, fill=False)
  ours, equal = waited(plan, b, c, period), waited(equal_split(120, period), b, c, period)
  assert 0 < ours < 0.95 * equal
  assert ours <= waited(greedy(b, c, period), b, c, period)


def test_a_round_of_one_step_sends_all_layers():
  assert planning.plan_phases([1, 2, 3], [1, 1, 1], 1) == [[0], [0], [0]]


def test_free_communication_takes_place_at_every_step():
  assert planning.plan_phases([1, 1], [0, 0], 3) == [[0, 1, 2], [0, 1, 2]]


def test_a_plan_is_what_a_method_takes():
  layers = ['head', 'body', 'stem']
  plan = dict(zip(layers, planning.plan_phases([1, 1, 1], [2, 2, 2], 3), strict=True))
  assert plan == {'head': [0, 2], 'body': [1], 'stem': [2]}
  tx = algorithms.dream_ddp(
    optax.sgd(0.1), 3, axis_name='workers', phases=lambda path, like: plan[path.split('/')[0]]
  )
  workers = runtime.simulate(2)
  x = {name: {'kernel': jnp.zeros(2)} for name in layers}
  apart = {name: {'kernel': jnp.array([-1.0, 1.0])} for name in layers}
  state, update = workers.spmd(tx.init)(x), workers.spmd(tx.update)
  met = []
  for step in range(6):
    updates, state = update(apart, state, x)
    x = jax.tree.map(jnp.add, x, updates)
    for name in layers:
      if step >= 3 and not np.allclose(updates[name]['kernel'], [0.1, -0.1]):
        met.append((name, step - 3))
  assert sorted(met) == sorted((name, step) for name, own in plan.items() for step in own)


@pytest.mark.parametrize(
  ('b', 'c', 'period', 'message'),
  [
    ([1.0], [1.0], 0, 'period=0; accepted are integers >= 1'),
    ([1.0], [1.0], True, 'period=True; accepted are integers >= 1'),
    ([1.0], [1.0], 1.5, 'period=1.5; accepted are integers >= 1'),
    ([], [], 2, r'backward_seconds=\[\]; accepted is one finite number >= 0 a layer'),
    ([1.0, -1.0], [1.0, 1.0], 2, r'backward_seconds=\[1.0, -1.0\]; accepted'),
    ([1.0], [float('nan')], 2, r'communication_seconds=\[nan\]; accepted'),
    ([1.0, 1.0], [1.0], 2, '2 backward_seconds and 1 communication_seconds; accepted'),
  ],
)
def test_refused_costs(b, c, period, message):
  with pytest.raises(ValueError, match=f'plan_phases got {message}'):
    planning.plan_phases(b, c, period)
