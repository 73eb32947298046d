"""What each transform computes, against values by hand: no code under test makes a right value."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_dsgd import algorithms, compressors, memories, runtime, topologies, transforms


def mean_of(values, weights, **arguments):
  """Every worker's result of a weighted mean of scalars."""
  tx = transforms.mean_over('workers', weights=weights, **arguments)
  workers = runtime.simulate(len(values))
  rows = jnp.asarray(values, jnp.float32)
  update = lambda u: tx.update(u, tx.init(u))[0]  # noqa: E731
  return np.asarray(jax.jit(workers.spmd(update))(rows)).tolist()


def mean_and_step():
  return optax.chain(transforms.mean_over('workers'), optax.sgd(1.0))


def test_weighted_means():
  assert mean_of([1, 5], (1, 3)) == [4, 4]
  assert mean_of([5, 1], (3, 1)) == [4, 4]  # the order of clients does not matter
  assert mean_of([1, 5], None) == [3, 3]
  assert mean_of([1, 5, 9], np.array([0, 1, 0])) == [5, 5, 5]
  assert mean_of([1, 5, 9], lambda count: jnp.array([0.0, 0.0, 0.0])) == [1, 5, 9]
  assert mean_of([1, 5, 9], (0, 0, 0)) == [1, 5, 9]
  assert mean_of([np.nan, 5, 9], (0, 1, 3)) == [8, 8, 8]
  assert mean_of([np.inf, 5, 9], lambda count: jnp.array([0.0, 1.0, 3.0])) == [8, 8, 8]


def test_one_of_four_workers_is_masked_each_round(run):
  weights = lambda count: jnp.where(jnp.arange(4) == count % 4, 0.0, 1.0)  # noqa: E731
  tx = transforms.mean_over('workers', weights=weights)
  gradients = np.tile(np.float32([0, 3, 6, 9]), (4, 1))
  _, _, updates = run(tx, runtime.simulate(4), np.zeros(4, np.float32), gradients)
  np.testing.assert_allclose(updates, np.float32([[6], [5], [4], [3]]).repeat(4, 1))


@pytest.mark.parametrize('weights', [(1, -1), (1, np.nan), (1, np.inf), 3, ((1, 2),)], ids=str)
def test_refused_weights(weights):
  with pytest.raises(ValueError, match='weights=.*one finite number >= 0 a worker'):
    transforms.mean_over('workers', weights=weights)


def test_refused_number_of_weights():
  with pytest.raises(ValueError, match=r'\(2,\).*3 workers'):
    mean_of([1, 2, 3], (1, 2))


@pytest.mark.filterwarnings('ignore:.* is biased')
def test_every_compressor_takes_the_step_of_the_mean(compressor, run):
  """All gradients 1.0 on 4 workers: -lr, not -4 lr nor -lr / 4, in all that was sent in time."""
  amplifies = compressor.omega is not None and compressor.delta is None
  memory = memories.none() if amplifies else memories.residual()
  mean = transforms.compressed_mean(compressor, axis_name='workers', memory=memory)
  tx = optax.chain(mean, optax.sgd(0.1))
  steps, four = 300, runtime.simulate(4)
  shapes = {'one': (1,), 'many': (7,)}
  zeros = {name: np.zeros((4, *shape), np.float32) for name, shape in shapes.items()}
  ones = {name: np.ones((steps, 4, *shape), np.float32) for name, shape in shapes.items()}
  _, _, updates = run(tx, four, zeros, ones)
  np.testing.assert_allclose(updates['one'], -0.1, rtol=1e-6)
  # A residual holds back 7 entries' worth at most; unbiased noise averages out over the steps.
  np.testing.assert_allclose(updates['many'].mean((0, 1, 2)), -0.1, rtol=0.05)


def scalars(tx, gradients, count=1):
  """Updates [T, W] and states after each step, of scalar parameters that stay at 0."""
  workers = runtime.simulate(count)
  state = workers.spmd(tx.init)(jnp.zeros(count))
  update = jax.jit(workers.spmd(tx.update))
  updates, states = [], [state]
  for gradient in gradients:
    u, state = update(jnp.asarray(gradient, jnp.float32), state, jnp.zeros(count))
    updates.append(np.asarray(u).tolist())
    states.append(state)
  return updates, states


def test_nonfinite_steps_are_skipped_by_all_and_leave_the_state():
  inner = optax.chain(
    transforms.mean_over('workers'), optax.sgd(lambda count: 1.0 + count, momentum=0.5)
  )
  tx = transforms.skip_nonfinite(inner, axis_name='workers')
  bad, good = [np.nan, 1.0], [1.0, 3.0]
  updates, states = scalars(tx, [bad, [np.inf, 0], bad, good, [2.0, -np.inf], good], count=2)
  # Counts of the schedule are good steps, from 0: rates 1 and 2, momenta 2 and 2 + 1.
  assert updates == [[0, 0], [0, 0], [0, 0], [-2, -2], [0, 0], [-6, -6]]
  assert [s.skipped.tolist() for s in states] == [[k, k] for k in (0, 1, 2, 3, 3, 4, 4)]
  assert [s.consecutive.tolist() for s in states] == [[k, k] for k in (0, 1, 2, 3, 0, 1, 0)]
  for before, after in ((0, 1), (1, 2), (2, 3), (4, 5)):
    jax.tree.map(np.testing.assert_array_equal, states[after].inner, states[before].inner)


def test_a_skipped_step_keeps_a_nan_out_of_the_memory():
  """After a skipped step, everything goes on as if it had not been."""
  mean = transforms.compressed_mean(
    compressors.qsgd(3), axis_name='workers', memory=memories.reference(step=0.5)
  )
  tx = transforms.skip_nonfinite(mean, axis_name='workers')
  good = [[1.0, 3.0], [-2.0, 5.0]]
  with_bad, states = scalars(tx, [good[0], [np.nan, 0.0], good[1]], count=2)
  without, clean = scalars(tx, good, count=2)
  assert [with_bad[0], with_bad[2]] == without
  jax.tree.map(np.testing.assert_array_equal, states[-1].inner.memory, clean[-1].inner.memory)


def walk(tx, steps, start, centers):
  """Parameters after each step [T, W] where worker w minimises (x - center_w)^2 / 2; the state."""
  workers = runtime.simulate(len(centers))
  x = jnp.full(len(centers), start, jnp.float32)
  state = workers.spmd(tx.init)(x)
  update = jax.jit(workers.spmd(tx.update))
  places, states = [], []
  for _ in range(steps):
    updates, state = update(x - jnp.asarray(centers, jnp.float32), state, x)
    x = x + updates
    places.append(np.asarray(x).tolist())
    states.append(state)
  return places, states


def test_local_steps_move_locally():
  """f = x^2 / 2, rate 0.5: two local steps give 0.25 where accumulating two gives 0.5."""
  tx = transforms.local_steps(optax.sgd(0.5), mean_and_step(), 2)
  places, _ = walk(tx, 2, 1.0, [0.0])
  assert places == [[0.5], [0.25]]


def test_local_steps_end_in_the_mean_and_keep_the_anchor_until_then():
  # From 0 with rate 0.5 to the centers 4/3 and 4: 2/3 and 2, then 1 and 3, and the mean is 2.
  tx = transforms.local_steps(optax.sgd(0.5), mean_and_step(), 2)
  places, states = walk(tx, 3, 0.0, [4 / 3, 4.0])
  np.testing.assert_allclose(places[:2], [[2 / 3, 2], [2, 2]], rtol=1e-6)
  np.testing.assert_allclose(
    [s.anchor.tolist() for s in states], [[0, 0], [2, 2], [2, 2]], rtol=1e-6
  )
  assert [s.step.tolist() for s in states] == [[1, 1], [0, 0], [1, 1]]
  assert [s.round.tolist() for s in states] == [[0, 0], [1, 1], [1, 1]]


def test_a_growing_period_meets_at_the_right_steps():
  tx = transforms.local_steps(optax.sgd(0.5), mean_and_step(), lambda round_: round_ + 1)
  places, states = walk(tx, 10, 0.0, [-1.0, 3.0])
  together = [t for t, (a, b) in enumerate(places, start=1) if a == b]
  assert together == [1, 3, 6, 10]
  assert [int(s.round[0]) for s in states] == [1, 1, 2, 2, 2, 3, 3, 3, 3, 4]
  assert [int(s.step[0]) for s in states] == [0, 1, 0, 1, 2, 0, 1, 2, 3, 0]


def test_a_period_below_one_counts_as_one():
  tx = transforms.local_steps(optax.sgd(0.5), mean_and_step(), lambda round_: 0 * round_)
  places, _ = walk(tx, 2, 0.0, [-1.0, 3.0])
  assert [a == b for a, b in places] == [True, True]


def test_schedules_count_steps_inside_and_rounds_outside():
  scale = optax.scale_by_schedule(lambda count: -0.1 * count)
  tx = transforms.local_steps(scale, scale, 2)
  _, states = walk(tx, 6, 0.0, [0.0])
  assert [int(s.inner.count[0]) for s in states] == [1, 2, 3, 4, 5, 6]
  assert [int(s.outer.count[0]) for s in states] == [0, 1, 1, 2, 2, 3]


def test_wrappers_show_schedules_the_count_zero_first():
  # The rate is the count: with gradients 1 the updates are 0, -1, -2 and so on.
  sgd = optax.sgd(lambda count: 1.0 * count)
  for tx in (
    transforms.skip_nonfinite(sgd, axis_name='workers'),
    transforms.local_steps(sgd, optax.identity(), 100),
  ):
    assert scalars(tx, [[1.0]] * 3)[0] == [[0], [-1], [-2]]


def test_outer_momentum_is_that_of_the_paper():
  """DiLoCo with one step a round on one worker: Nesterov on the way gone, by hand."""
  tx = transforms.local_steps(
    optax.sgd(1.0),
    optax.chain(transforms.mean_over('workers'), optax.sgd(0.5, momentum=0.5, nesterov=True)),
    1,
  )
  # Gradients are x; delta = x. m = x + m / 2, v = -(x + m / 2) / 2.
  x, m, expected = 1.0, 0.0, []
  for _ in range(4):
    m = x + 0.5 * m
    x = x - 0.5 * (x + 0.5 * m)
    expected.append([x])
  np.testing.assert_allclose(walk(tx, 4, 1.0, [0.0])[0], expected, rtol=1e-6)


def test_parameters_may_be_donated_right_after_init():
  tx = transforms.local_steps(optax.sgd(0.5), mean_and_step(), 2)
  params = {'x': jnp.ones(3)}
  state = tx.init(params)
  jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)(params)
  assert params['x'].is_deleted()
  assert state.anchor['x'].tolist() == [1, 1, 1]


@pytest.mark.parametrize('period', [0, -1, 1.5, 2.0, True, 'a', None], ids=repr)
def test_refused_periods(period):
  with pytest.raises(ValueError, match=f'period={period!r}'):
    transforms.local_steps(optax.sgd(1.0), mean_and_step(), period)


def vote(rows):
  tx = transforms.vote_majority(axis_name='workers')
  rows = jnp.asarray(rows, jnp.float32)
  update = lambda u: tx.update(u, tx.init(u))[0]  # noqa: E731
  return np.asarray(jax.jit(runtime.simulate(len(rows)).spmd(update))(rows))


def test_majority_votes():
  # Columns: a tie, a majority against one large entry, unanimous, and two zeros that count as +1.
  rows = [[1, 9, -2, 0.0], [-1, -1, -3, -0.0], [1, -1, -1, -1], [-1, -1, -9, 1]]
  assert vote(rows)[0].tolist() == [0, -1, -1, 1]
  assert (vote(rows) == vote(rows)[:1]).all()
  # A leaf of zeros does not vote, and nobody moves one that is zero everywhere.
  assert vote([[0, 0], [0, 0], [-1, 1]])[0].tolist() == [-1, 1]
  assert not vote(np.zeros((3, 5))).any()


def test_wide_votes_do_not_wrap():
  rows = np.where(np.arange(200)[:, None] < [200, 131, 99, 100, 0], 1.0, -1.0)
  assert vote(rows)[0].tolist() == [1, 1, -1, 0, -1]


def test_a_frozen_leaf_does_not_move(run):
  """Signs of a zero gradient have no magnitude when the scale is the leaf's own."""
  gradients = {
    'a': np.tile(np.float32([1, -2]), (10, 2, 1)),
    'frozen': np.zeros((10, 2, 3), np.float32),
  }
  params = jax.tree.map(lambda g: g[0] * 0 + 1, gradients)
  for tx in (
    algorithms.ef_sign_sgd(0.1, axis_name='workers'),
    algorithms.signum(0.1, axis_name='workers'),
  ):
    after, _, _ = run(tx, runtime.simulate(2), params, gradients)
    assert (np.asarray(after['frozen']) == 1).all()
    assert (np.asarray(after['a']) != 1).all()


def test_sign_momentum_by_hand():
  tx = transforms.sign_momentum(b1=0.5, b2=0.5)
  # m: 0, 0.5, -0.25; signed: 0.5 * 1, 0.25 - 0.5, -0.125 + 0.5.
  assert [u[0] for u in scalars(tx, [[1.0], [-1.0], [1.0]])[0]] == [1, -1, 1]
  # b1 = 1 shows the momentum before this gradient: 0, 1, -1.
  tx = transforms.sign_momentum(b1=1.0, b2=0.1)
  assert [u[0] for u in scalars(tx, [[1.0], [-1.0], [1.0]])[0]] == [0, 1, -1]
  for weights in ({'b1': -0.1}, {'b1': 1.1}, {'b2': 1.0}, {'b2': -0.1}):
    with pytest.raises(ValueError, match='sign_momentum got'):
      transforms.sign_momentum(**weights)


def test_bfloat16_mixing_keeps_the_mean_and_sums_in_float32(run):
  tx = transforms.mix_neighbors(topologies.complete(8), axis_name='workers')
  params = jnp.asarray(np.arange(8.0)[:, None] + np.zeros((8, 3)), jnp.bfloat16)
  after, _, _ = run(tx, runtime.simulate(8), params, np.zeros((1, 8, 3), jnp.bfloat16))
  assert (np.asarray(after, np.float32) == 3.5).all()


@pytest.mark.parametrize('name', ['local_steps', 'mix_neighbors'])
def test_narrow_updates_lead_wide_parameters_to_one_place(name):
  """With bfloat16 updates, float32 parameters still agree to float32 where all meet."""
  sgd = optax.sgd(1.0)
  if name == 'local_steps':
    outer = optax.chain(transforms.mean_over('workers'), optax.sgd(1.0))
    tx = transforms.local_steps(sgd, outer, 1)
  else:
    meet = transforms.mix_neighbors(topologies.complete(4), axis_name='workers')
    tx = optax.chain(sgd, meet)
  gradients = jnp.asarray(np.random.default_rng(0).normal(size=(4, 9)), jnp.bfloat16)
  params = jnp.ones((4, 9))

  def worker(gradients, params):
    updates, _ = tx.update(gradients, tx.init(params), params)
    return optax.apply_updates(params, updates)

  after = np.asarray(runtime.simulate(4).spmd(worker)(gradients, params))
  expected = 1 - np.asarray(gradients, np.float32).mean(0)
  np.testing.assert_allclose(after, np.broadcast_to(expected, after.shape), atol=1e-6)
