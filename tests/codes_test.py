"""Gradient codes recover the sum of all gradients, and say when they cannot."""

import itertools

import numpy as np
import pytest

from jax_dsgd import codes

CASES = [(1, 0), (3, 0), (2, 1), (4, 1), (4, 2), (4, 3), (7, 2), (10, 3)]


@pytest.mark.parametrize(('n', 'stragglers'), CASES)
def test_every_pattern_gives_the_sum(n, stragglers):
  code = codes.gradient_code(n, stragglers, seed=0)
  parts = np.random.default_rng(1).normal(size=(n, 5))
  messages = code.matrix @ parts
  table, rows = codes.decode_table(code), 0
  for lost in itertools.chain(
    *(itertools.combinations(range(n), size) for size in range(stragglers + 1))
  ):
    alive = ~np.isin(np.arange(n), lost)
    weights = codes.decode_weights(code, alive)
    assert not weights[list(lost)].any()
    came = np.where(alive[:, None], messages, np.nan)[alive]
    np.testing.assert_allclose(weights[alive] @ came, parts.sum(axis=0), atol=1e-9)
    (row,) = np.flatnonzero((table.alive == alive).all(axis=1))
    np.testing.assert_array_equal(table.weights[row], weights)
    rows += 1
  assert rows == len(table.alive) == len(table.weights)


@pytest.mark.parametrize(('n', 'stragglers'), CASES)
def test_the_support_is_cyclic(n, stragglers):
  matrix = codes.gradient_code(n, stragglers, seed=3).matrix
  for i, row in enumerate(matrix):
    assert set(np.flatnonzero(row)) == {(i + k) % n for k in range(stragglers + 1)}
    assert row[i] == 1
  np.testing.assert_array_equal(matrix, codes.gradient_code(n, stragglers, seed=3).matrix)


def test_weights_are_signed():
  """An H whose rows sum to 0 has both signs, and so have the weights of some pattern."""
  tables = [codes.decode_table(codes.gradient_code(5, 2, seed=seed)) for seed in range(3)]
  assert any((table.weights < 0).any() for table in tables)


def send_up(code, gradients, alive):
  """Plays a tree message by message with the weights at each parent."""
  n = len(code.code.matrix)
  weights = codes.tree_weights(code, alive).at_parent
  own = code.weights @ gradients
  sums = np.zeros_like(own)
  for worker in reversed(range(n, len(own))):
    if alive[worker]:
      sums[worker // n - 1] += weights[worker] * (own[worker] + sums[worker])
  return weights[:n] @ (own[:n] + sums[:n])


def patterns_of_the_tree(n, depth, stragglers, count, seed):
  """Random patterns with exactly s stragglers among the children of every parent."""
  generator = np.random.default_rng(seed)
  parents = sum(n**level for level in range(depth))
  for _ in range(count):
    alive = np.ones((parents, n), bool)
    for row in alive:
      row[generator.permutation(n)[:stragglers]] = False
    yield alive.ravel()


TREES = [(4, 2, 1), (3, 3, 1), (5, 2, 2), (2, 4, 0), (3, 2, 0), (4, 1, 1), (1, 3, 0), (3, 2, 2)]


@pytest.mark.parametrize(('n', 'depth', 'stragglers'), TREES)
def test_trees_give_the_sum(n, depth, stragglers):
  code = codes.tree_code(n, depth, stragglers, seed=0)
  gradients = np.random.default_rng(1).normal(size=(code.weights.shape[1], 3))
  total = gradients.sum(axis=0)
  for alive in patterns_of_the_tree(n, depth, stragglers, 60, seed=2):
    np.testing.assert_allclose(send_up(code, gradients, alive), total, atol=1e-9)
    weights = codes.tree_weights(code, alive).in_total
    np.testing.assert_allclose(weights @ code.weights @ gradients, total, atol=1e-9)


def test_one_tree_by_the_numbers_of_the_paper():
  """4 children, 1 straggler, 2 levels: 20 workers, a load of 1/6 where one code needs 1/2."""
  code, plain = codes.tree_code(4, 2, 1, seed=0), codes.gradient_code(4, 1, seed=0)
  gradients = np.random.default_rng(0).normal(size=(code.weights.shape[1], 3))
  errors = []
  # All patterns of the root and of two parents, with a random rest.
  for lost in itertools.product(range(-1, 4), repeat=3):
    (alive,) = patterns_of_the_tree(4, 2, 1, 1, seed=3 + sum(lost))
    for parent, child in enumerate(lost):
      alive[4 * parent : 4 * parent + 4] = np.arange(4) != child
    errors.append(np.abs(send_up(code, gradients, alive) - gradients.sum(axis=0)).max())
  assert max(errors) < 6e-14
  loads = (code.weights != 0) @ np.diff(code.bounds)
  np.testing.assert_allclose(loads, 1 / 6, atol=1e-15)
  assert code.load == 1 / 6
  assert (plain.matrix != 0).mean(axis=1).tolist() == [0.5] * 4


@pytest.mark.parametrize(('n', 'depth', 'stragglers'), TREES)
def test_the_load_is_that_of_the_theory(n, depth, stragglers):
  code = codes.tree_code(n, depth, stragglers, seed=0)
  load = 1 / sum((n / (stragglers + 1)) ** level for level in range(1, depth + 1))
  assert code.load == pytest.approx(load)
  np.testing.assert_allclose((code.weights != 0) @ np.diff(code.bounds), load, atol=1e-12)
  assert len(code.weights) == sum(n**level for level in range(1, depth + 1))
  assert code.bounds[0] == 0 and code.bounds[-1] == 1


def test_degenerate_trees():
  plain = codes.tree_code(3, 2, 0, seed=0)
  assert set(plain.weights.ravel()) == {0, 1}
  np.testing.assert_array_equal(plain.weights.sum(axis=0), 1)
  flat, code = codes.tree_code(4, 1, 1, seed=5), codes.gradient_code(4, 1, seed=5)
  np.testing.assert_array_equal(flat.weights, code.matrix)
  np.testing.assert_array_equal(flat.bounds, [0, 0.25, 0.5, 0.75, 1])


def test_below_a_straggler_nothing_matters():
  code = codes.tree_code(3, 2, 1, seed=0)
  alive = np.ones(12, bool)
  alive[[0, 3, 4, 5]] = False
  gradients = np.random.default_rng(0).normal(size=(code.weights.shape[1], 2))
  np.testing.assert_allclose(send_up(code, gradients, alive), gradients.sum(axis=0), atol=1e-12)


def lacking(workers, *lost):
  return ~np.isin(np.arange(workers), lost)


@pytest.mark.parametrize(
  ('call', 'message'),
  [
    (lambda: codes.gradient_code(0, 0, seed=0), 'gradient_code: n must be an int >= 1, not 0'),
    (lambda: codes.gradient_code(4, -1, seed=0), 'stragglers must be an int >= 0, not -1'),
    (lambda: codes.gradient_code(4, 4, seed=0), 'stragglers must be less than n = 4, not 4'),
    (lambda: codes.gradient_code(4, True, seed=0), 'stragglers must be an int >= 0, not True'),
    (lambda: codes.gradient_code(4, 1, seed=0.5), 'seed must be an int >= 0, not 0.5'),
    (
      lambda: codes.decode_weights(codes.gradient_code(4, 1, seed=0), lacking(4, 1, 3)),
      r'the stragglers must be at most 1, not 2: \[1, 3\]',
    ),
    (
      lambda: codes.decode_weights(codes.gradient_code(4, 1, seed=0), [True] * 3),
      r'alive must be bool of shape \(4,\), not bool of shape \(3,\)',
    ),
    (
      lambda: codes.decode_weights(codes.gradient_code(4, 1, seed=0), [1, 1, 1, 0]),
      r'alive must be bool of shape \(4,\), not int64 of shape \(4,\)',
    ),
    (
      lambda: codes.decode_table(codes.gradient_code(40, 6, seed=0)),
      'n = 40 and 6 stragglers must have at most 200000 patterns, not 4598479',
    ),
    (lambda: codes.tree_code(0, 1, 0, seed=0), 'branching must be an int >= 1, not 0'),
    (lambda: codes.tree_code(2, 0, 0, seed=0), 'depth must be an int >= 1, not 0'),
    (lambda: codes.tree_code(2, 1, 2, seed=0), 'less than branching = 2, not 2'),
    (
      lambda: codes.tree_weights(codes.tree_code(4, 2, 1, seed=0), lacking(20, 8, 11)),
      r'the children of worker 1 must be at most 1, not 2: \[8, 11\]',
    ),
    (
      lambda: codes.tree_weights(codes.tree_code(4, 2, 1, seed=0), lacking(20, 0, 2)),
      r'the children of the root must be at most 1, not 2: \[0, 2\]',
    ),
  ],
)
def test_arguments_are_refused(call, message):
  with pytest.raises(ValueError, match=message) as error:
    call()
  assert '\n' not in str(error.value)


def test_an_ill_conditioned_code_is_refused_and_not_decoded_wrongly():
  matrix = np.array([[1, 1e-9, 0], [0, 1, 1e-9], [1e-9, 0, 1]])
  with pytest.raises(ValueError, match='too ill-conditioned'):
    codes.decode_weights(codes.GradientCode(matrix, 1), [True, True, False])
