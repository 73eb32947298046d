"""Rounds in which some are missing: partial groups, late contributions, gradient codes."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_dsgd import codes, collectives, ledger, runtime, transforms

AXIS = 'workers'
RNG = np.random.default_rng(0)
Control = transforms.Control


@pytest.mark.parametrize('on_mesh', [False, True], ids=['vmap', 'shard_map'])
def test_mixing_by_a_matrix_is_the_dense_product(on_mesh):
  """Any matrix, leaves of any size: seven entries are no multiple of eight workers."""
  matrix = RNG.normal(size=(8, 8)).astype(np.float32)
  shapes = ((7,), (), (2, 3), (16,))
  rows = [RNG.normal(size=(8, *shape)).astype(np.float32) for shape in shapes]
  workers = runtime.simulate(8)
  if on_mesh:
    workers = runtime.on_mesh(runtime.make_mesh(workers=8), AXIS)
  mix = lambda tree: collectives.mix_by_matrix(tree, jnp.asarray(matrix), AXIS)  # noqa: E731
  mixed = workers.spmd(mix)(rows)
  for got, x in zip(mixed, rows, strict=True):
    assert got.dtype == np.float32 and got.shape == x.shape
    right = (matrix.astype(float) @ x.reshape(8, -1)).reshape(x.shape)
    np.testing.assert_allclose(got, right, atol=1e-5)


def mixing(group, weight):
  """The rows of the matrix that groups make, by hand."""
  matrix = np.zeros((8, 8))
  for i in range(8):
    members = [i] if group[i] < 0 else [j for j in range(8) if group[j] == group[i]]
    total = sum(weight[j] for j in members)
    for j in members:
      matrix[i, j] = weight[j] / total if total and group[i] >= 0 else 1 / len(members)
  return matrix


def test_groups_of_any_size_by_hand(walk):
  steps = 4
  groups = np.array([[0] * 3 + [1] * 5, [-1] * 8, [2, 0, 2, 0, -1, 7, 7, 7], [3] * 8], np.int32)
  weight = RNG.integers(0, 4, (steps, 8)).astype(np.float32)
  weight[3] = 0  # nobody counts: all alike
  rows = RNG.normal(size=(8, 5)).astype(np.float32)
  updates = RNG.normal(size=(steps, 8, 5)).astype(np.float32)
  control = Control(group=groups, weight=weight)
  tx = transforms.mix_groups(axis_name=AXIS)
  history, state = walk(tx, rows, steps, updates=updates, control=control)
  x, sent = rows.astype(float), np.zeros(8)
  for t in range(steps):
    x = mixing(groups[t], weight[t]) @ (x + updates[t])
    np.testing.assert_allclose(history[t], x, atol=1e-5)
    for i in range(8):
      g = (groups[t] == groups[t][i]).sum() if groups[t][i] >= 0 else 1
      sent[i] += 2 * (g - 1) * 20 // g
  assert ledger.bytes_sent(state).tolist() == sent.tolist()


def test_who_rests_keeps_parameters_and_momentum(walk):
  active = np.array([[True, False], [False, True], [True, True]])
  updates = np.ones((3, 2, 1), np.float32)
  tx = transforms.only_when_active(optax.sgd(1.0, momentum=0.5))
  history, _ = walk(tx, np.zeros((2, 1)), 3, updates=updates, control=Control(active=active))
  assert history[:, :, 0].tolist() == [[-1, 0], [-1, -1], [-2.5, -2.5]]
  free, _ = walk(tx, np.zeros((2, 1)), 2, updates=updates[:2])
  assert free[:, :, 0].tolist() == [[-1, -1], [-2.5, -2.5]]


LATE = RNG.random((6, 4)) < 0.4
LATE[-1] = False
UPDATES = RNG.normal(size=(6, 4, 3)).astype(np.float32)


def test_late_updates_are_folded_into_the_next_step(walk):
  tx = transforms.fold_late(axis_name=AXIS)
  rows = np.zeros((4, 3), np.float32)
  history, _ = walk(tx, rows, 6, updates=UPDATES, control=Control(active=~LATE))
  x, late = np.zeros(3), np.zeros(3)
  for t in range(6):
    x = x + UPDATES[t][~LATE[t]].sum(axis=0) / 4 + late
    late = UPDATES[t][LATE[t]].sum(axis=0) / 4
    np.testing.assert_allclose(history[t], np.tile(x, (4, 1)), atol=1e-5)
  # Nothing is lost: with nobody late at the end it is the sum of all means.
  np.testing.assert_allclose(history[-1, 0], UPDATES.mean(axis=1).sum(axis=0), atol=1e-5)


def test_missing_updates_are_substituted_and_put_right(walk):
  tx = transforms.substitute_missing(axis_name=AXIS)
  rows = np.zeros((4, 3), np.float32)
  history, _ = walk(tx, rows, 6, updates=UPDATES, control=Control(active=~LATE))
  x, correction = np.zeros((4, 3)), np.zeros((4, 3))
  for t, (u, late) in enumerate(zip(UPDATES.astype(float), LATE, strict=True)):
    given = [(u[~late].sum(axis=0) + late.sum() * u[i]) / 4 + correction[i] for i in range(4)]
    x = x + np.array(given)
    correction = np.array([(u[late] - u[i]).sum(axis=0) / 4 for i in range(4)])
    np.testing.assert_allclose(history[t], x, atol=1e-5)
    assert (np.ptp(history[t], axis=0).max() > 1e-3) == late.any()
  total = UPDATES.mean(axis=1).sum(axis=0)
  np.testing.assert_allclose(history[-1], np.tile(total, (4, 1)), atol=1e-5)


@pytest.mark.parametrize('build', [transforms.fold_late, transforms.substitute_missing])
def test_with_nobody_late_it_is_the_mean(walk, build):
  everybody = Control(active=np.ones((6, 4), bool))
  rows = np.zeros((4, 3), np.float32)
  one, other = (
    walk(tx, rows, 6, updates=UPDATES, control=everybody)[0]
    for tx in (build(axis_name=AXIS), transforms.mean_over(AXIS))
  )
  np.testing.assert_array_equal(one, other)


PARTS = RNG.normal(size=(6, 3))


def patterns(n, most):
  """Who is alive, for every set of at most `most` who are not."""
  for size in range(most + 1):
    for lost in itertools.combinations(range(n), size):
      yield [i not in lost for i in range(n)]


def test_a_code_gives_the_whole_sum_for_every_pattern_and_refuses_the_rest(walk):
  code = codes.gradient_code(6, 2, seed=0)
  alive = np.array(list(patterns(6, 3)))
  coded = (code.matrix @ PARTS).astype(np.float32)
  updates = np.repeat(coded[None], len(alive), axis=0)
  updates[~alive] = np.nan  # whatever a straggler holds
  tx = optax.chain(
    transforms.coded_sum(code, axis_name=AXIS),
    transforms.skip_nonfinite(optax.identity(), axis_name=AXIS),
  )
  history, state = walk(
    tx, np.zeros((6, 3), np.float32), len(alive), updates=updates, control=Control(active=alive)
  )
  steps = np.diff(history, axis=0, prepend=0)
  borne = alive.sum(axis=1) >= 4
  assert borne.sum() == 1 + 6 + 15 and (~borne).sum() == 20
  right = np.broadcast_to(PARTS.sum(axis=0), steps[borne].shape)
  np.testing.assert_allclose(steps[borne], right, atol=3e-4)
  # With a third one missing: counted, and parameters stay.
  assert not steps[~borne].any()
  assert optax.tree.get(state, 'failures').tolist() == [20] * 6
  assert optax.tree.get(state, 'skipped').tolist() == [20] * 6


def test_beyond_the_code_updates_are_nan_not_wrong(walk):
  code = codes.gradient_code(6, 1, seed=0)
  alive = np.array([[True] * 6, [False, False] + [True] * 4])
  updates = np.repeat((code.matrix @ PARTS).astype(np.float32)[None], 2, axis=0)
  history, _ = walk(
    transforms.coded_sum(code, axis_name=AXIS),
    np.zeros((6, 3), np.float32),
    2,
    updates=updates,
    control=Control(active=alive),
  )
  assert np.isfinite(history[0]).all() and np.isnan(history[1]).all()


def test_a_tree_gives_the_whole_sum_for_every_pattern_of_the_root(walk):
  tree = codes.tree_code(4, 2, 1, seed=0)
  atoms = RNG.normal(size=(tree.weights.shape[1], 3))
  alive = []
  for top in patterns(4, 1):
    rows = [[True] * 4 for _ in range(4)]
    for children in rows:
      children[RNG.integers(4)] = False  # one below each
    alive.append(top + sum(rows, []))
  weight = np.stack([codes.tree_weights(tree, row).in_total for row in alive]).astype(np.float32)
  assert (weight < 0).any()
  updates = np.repeat((tree.weights @ atoms).astype(np.float32)[None], len(alive), axis=0)
  updates[weight == 0] = np.nan
  history, _ = walk(
    transforms.weighted_sum(axis_name=AXIS),
    np.zeros((20, 3), np.float32),
    len(alive),
    updates=updates,
    control=Control(weight=weight),
  )
  steps = np.diff(history, axis=0, prepend=0)
  np.testing.assert_allclose(steps, np.broadcast_to(atoms.sum(axis=0), steps.shape), atol=1e-4)
  assert tree.load == pytest.approx(1 / 6)  # against 1/2 of one code


@pytest.mark.parametrize(
  ('tx', 'message'),
  [
    (transforms.mix_groups(axis_name=AXIS), 'mix_groups follows a trace: .* its group'),
    (transforms.fold_late(axis_name=AXIS), 'fold_late follows a trace: .* its active'),
    (transforms.substitute_missing(axis_name=AXIS), 'substitute_missing .* its active'),
    (transforms.weighted_sum(axis_name=AXIS), 'weighted_sum follows a trace: .* its weight'),
  ],
)
def test_a_trace_is_asked_for(walk, tx, message):
  with pytest.raises(ValueError, match=message):
    walk(tx, np.zeros((2, 3), np.float32), 1)


def test_groups_move_parameters():
  tx = transforms.mix_groups(axis_name=AXIS)
  with pytest.raises(ValueError, match='mix_groups averages parameters'):
    tx.update(jnp.zeros(2), tx.init(jnp.zeros(2)), control=Control(group=jnp.int32(0)))


def test_one_worker_sends_nothing():
  code = codes.gradient_code(1, 0, seed=0)
  tx = transforms.coded_sum(code, axis_name=AXIS)
  step = runtime.simulate(1).spmd(lambda u: tx.update(u, tx.init(u)))
  updates, state = step(jnp.ones((1, 3)))
  assert updates.tolist() == [[1, 1, 1]]
  assert ledger.bytes_sent(jax.device_get(state)).tolist() == [0]


def test_codes_nest_on_the_axes_of_a_tree():
  """Levels of axes: a straggler in each row and column of a grid, and the sum over all parts."""
  code, rng = codes.gradient_code(4, 1, seed=0), np.random.default_rng(0)
  parts = rng.normal(size=(4, 4, 3))
  coded = np.einsum('ip,jq,pqd->ijd', code.matrix, code.matrix, parts).astype(np.float32)
  alive = ~np.eye(4, dtype=bool)[rng.permutation(4)]
  coded[~alive] = np.nan
  tx = optax.chain(
    transforms.coded_sum(code, axis_name='children'), transforms.coded_sum(code, axis_name='nodes')
  )

  def worker(update, active):
    control = transforms.Control(active=active)
    return tx.update(update, tx.init(update), control=control)[0]

  levels = jax.vmap(jax.vmap(worker, axis_name='children'), axis_name='nodes')
  total = levels(jnp.asarray(coded), jnp.asarray(alive))
  np.testing.assert_allclose(total, np.tile(parts.sum((0, 1)), (4, 4, 1)), rtol=2e-5, atol=2e-5)
