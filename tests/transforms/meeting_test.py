"""What becomes of batch statistics and moments when workers meet: kept, averaged, reset."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_dsgd import runtime, topologies, transforms

nnx = pytest.importorskip('flax.nnx')  # of the experiments, not of the library alone

AXIS, TWO = 'workers', runtime.simulate(2)


class Normed(nnx.Module):
  """A layer between a normalization and its data."""

  def __init__(self, rngs):
    self.norm = nnx.BatchNorm(3, momentum=0.0, rngs=rngs)  # the statistics of the last batch
    self.layer = nnx.Linear(3, 1, rngs=rngs)

  def __call__(self, x):
    return self.layer(self.norm(x))


def trained(at_meeting, mix, steps=3):
  """Two workers whose data have means 0 and 10: their parameters and batch statistics."""
  graph, params, statistics = nnx.split(Normed(nnx.Rngs(0)), nnx.Param, nnx.BatchStat)
  params, statistics = nnx.to_pure_dict(params), nnx.to_pure_dict(statistics)
  data = np.random.default_rng(0).normal(size=(2, 64, 3)).astype(np.float32)
  data = data - data.mean(1, keepdims=True) + np.array([0, 10], np.float32)[:, None, None]
  tx = optax.chain(optax.sgd(0.1), mix)

  def step(params, statistics, state, x):
    def loss(params):
      model = nnx.merge(graph, nnx.State(params), nnx.State(statistics), copy=True)
      value = jnp.mean(model(x) ** 2)
      return value, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

    gradients, statistics = jax.grad(loss, has_aux=True)(params)
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), at_meeting(statistics, None), state

  rows = TWO.replicate(params), TWO.replicate(statistics)
  state = TWO.spmd(tx.init)(rows[0])
  for _ in range(steps):
    *rows, state = TWO.spmd(step)(*rows, state, data)
  return rows, data


@pytest.mark.parametrize(
  'mix',
  [
    transforms.mix_neighbors(topologies.ring(2), axis_name=AXIS),
    transforms.mean_over(AXIS),
    optax.chain(transforms.mean_over(AXIS), optax.adam(0.1)),  # a server's optimizer
  ],
  ids=['gossip', 'mean', 'server adam'],
)
def test_batch_statistics_are_averaged_or_each_workers_own(mix):
  """An optimizer of parameters never sees them: their mean is 5 under 'average', or 0 and 10."""
  (params, averaged), data = trained(transforms.average_state(AXIS), mix)
  np.testing.assert_allclose(averaged['norm']['mean'], np.full((2, 3), 5.0), atol=1e-4)
  right = data.var(1).mean(0)
  np.testing.assert_allclose(averaged['norm']['var'], np.stack([right] * 2), rtol=1e-4)
  assert np.isfinite(jax.tree.leaves(params)[0]).all()
  (_, own), _ = trained(transforms.keep, mix)
  np.testing.assert_allclose(own['norm']['mean'], [[0.0] * 3, [10.0] * 3], atol=1e-4)
  np.testing.assert_allclose(own['norm']['var'], data.var(1), rtol=1e-4)
  for statistics in (averaged, own):
    assert (statistics['norm']['var'] >= 0).all()


def adam_state():
  """Of two workers after one and two steps on different gradients."""
  adam = optax.adam(0.1)
  params = {'x': jnp.zeros(3), 'n': jnp.zeros(())}
  gradients = {'x': jnp.array([1.0, -2.0, 3.0]), 'n': jnp.ones(())}
  _, first = adam.update(gradients, adam.init(params), params)
  _, second = adam.update(jax.tree.map(lambda g: 3 * g, gradients), first, params)
  stack = lambda *xs: jnp.stack(xs)  # noqa: E731
  return adam, TWO.replicate(params), jax.tree.map(stack, first, second)


def meet(at_meeting):
  adam, params, state = adam_state()
  made = at_meeting(adam)
  return state, TWO.spmd(lambda state, params: made(state, params))(state, params)


def test_moments_are_averaged_and_counters_stay_integers():
  """A mean of the counters 1 and 2 would be a float, 1.5."""
  before, after = meet(lambda adam: transforms.average_state(AXIS))
  assert before[0].count.tolist() == after[0].count.tolist() == [1, 2]
  assert after[0].count.dtype == jnp.int32
  for moment in ('mu', 'nu'):
    old, new = getattr(before[0], moment), getattr(after[0], moment)
    for leaf in ('x', 'n'):
      right = np.stack([np.mean(old[leaf], axis=0)] * 2)
      np.testing.assert_allclose(new[leaf], right, rtol=1e-6)
      assert new[leaf].shape == old[leaf].shape
  assert (after[0].nu['x'] > 0).all()


def test_moments_are_reset_and_counters_go_on():
  before, after = meet(transforms.reset_state)
  assert before[0].count.tolist() == after[0].count.tolist() == [1, 2]
  assert after[0].count.dtype == jnp.int32
  assert not np.any(after[0].mu['x']) and not np.any(after[0].nu['x'])
  assert np.any(before[0].mu['x'])


def test_moments_are_kept():
  before, after = meet(lambda adam: transforms.keep)
  assert all(map(np.array_equal, jax.tree.leaves(before), jax.tree.leaves(after)))


def test_local_steps_do_it_where_rounds_end():
  """Two rounds of two steps of Adam: its moments agree after a round, and not in one."""
  adam = optax.adam(0.1)
  outer = optax.chain(transforms.mean_over(AXIS), optax.sgd(1.0))
  target = jnp.array([[1.0, -1.0], [4.0, 2.0]])

  def moments(at_meeting):
    tx = transforms.local_steps(adam, outer, 2, at_meeting=at_meeting)
    step = TWO.spmd(lambda x, state, c: tx.update(x - c, state, x))
    x, found = jnp.zeros((2, 2)), []
    state = TWO.spmd(tx.init)(x)
    for _ in range(4):
      updates, state = step(x, state, target)
      x = x + updates
      found.append(np.asarray(optax.tree.get(state, 'nu')))
    counts = np.asarray(optax.tree.get(state.inner, 'count'))
    assert counts.tolist() == [4, 4]
    return found

  averaged, kept = moments(transforms.average_state(AXIS)), moments(transforms.keep)
  apart = lambda rows: np.abs(rows[0] - rows[1]).max()  # noqa: E731
  assert apart(averaged[0]) > 0 and apart(averaged[1]) < 1e-9 < apart(averaged[2])
  assert apart(averaged[3]) < 1e-9 < apart(kept[3])
  fresh = moments(transforms.reset_state(adam))
  assert not fresh[1].any() and fresh[2].any() and not fresh[3].any()
