"""Orthogonalized sums of gradients, against Gram-Schmidt in float64 by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_dsgd import ledger, runtime, transforms

orthogonalize = transforms.orthogonalize()


def combined(rows):
  return jax.jit(lambda rows: orthogonalize.update(rows, orthogonalize.init(rows))[0])(rows)


def by_hand(rows):
  """The sum of Gram-Schmidt's directions of the rows of [n, ...], in float64."""
  g = np.asarray(rows, np.float64).reshape(len(rows), -1)
  kept = []
  for row in g:
    kept.append(row - sum((row @ h) / (h @ h) * h for h in kept))
  return sum(kept).reshape(rows.shape[1:])


def adversarial(count, n=3, size=20):
  """Draws of n gradients of which the later ones oppose the first: float32 [count, n, size]."""
  rng = np.random.default_rng(0)
  rows = rng.normal(size=(count, n, size))
  rows[:, 1:] -= 1.5 * rows[:, :1]
  return rows.astype(np.float32)


def test_is_gram_schmidt_leaf_by_leaf():
  rng = np.random.default_rng(0)
  shapes = {'kernel': (4, 5), 'bias': (7,), 'one': (1,), 'last': (2, 3, 4)}
  rows = {k: rng.normal(size=(1 if k == 'one' else 4, *s)) for k, s in shapes.items()}
  one = rows.pop('one')
  rows = jax.tree.map(np.float32, rows)
  for name, result in combined(rows).items():
    assert result.shape == shapes[name]
    np.testing.assert_allclose(result, by_hand(rows[name]), rtol=1e-4, atol=1e-5)
  np.testing.assert_array_equal(combined(np.float32(one)), np.float32(one)[0])


def test_the_first_loss_falls_as_if_it_were_alone():
  rows = adversarial(500)
  first = rows[:, 0].astype(np.float64)
  along = lambda u: (np.asarray(u, np.float64) * first).sum(1)  # noqa: E731
  squares = (first**2).sum(1)
  assert (along(rows.sum(1)) < 0).mean() > 0.9  # the plain sum would raise it
  np.testing.assert_allclose(along(jax.vmap(combined)(rows)), squares, rtol=2e-6)


def test_a_linear_first_loss_is_not_undone_by_its_opposite():
  g = np.float32([3, -4])
  np.testing.assert_array_equal(combined(np.stack([g, -10 * g])), g)


def test_one_loss_and_orthogonal_losses_give_the_plain_sum():
  rows = np.linalg.qr(np.random.default_rng(0).normal(size=(6, 6)))[0].astype(np.float32)
  rows *= np.float32([[1], [5], [0.1], [3], [2], [1]])
  np.testing.assert_allclose(combined(rows), rows.sum(0), rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(combined(rows[:1]), rows[0])


@pytest.mark.parametrize('zero', [0, 1, 2])
def test_a_zero_gradient_adds_nothing_and_decides_nothing(zero):
  rows = adversarial(1)[0]
  rows[zero] = 0
  np.testing.assert_allclose(
    combined(rows), by_hand(np.delete(rows, zero, 0)), rtol=1e-4, atol=1e-5
  )
  assert not np.asarray(combined(np.zeros_like(rows))).any()


@pytest.mark.parametrize('scale', [1e-30, 1e30])
def test_any_scale(scale):
  rows = adversarial(1)[0]
  np.testing.assert_allclose(
    np.asarray(combined(rows * np.float32(scale)), np.float64) / scale,
    by_hand(rows),
    rtol=1e-4,
    atol=1e-5,
  )


def test_a_repeated_gradient_leaves_no_direction_of_rounding():
  """The second is the first but for rounding; what it leaves must not bend the third."""
  rng = np.random.default_rng(0)
  a, c = rng.normal(size=(2, 1000))
  rows = np.float32([a, a / 3, c])
  np.testing.assert_allclose(combined(rows), by_hand(rows[[0, 2]]), rtol=1e-4, atol=1e-5)


def test_nearly_parallel_gradients():
  """A second pass keeps the third orthogonal to the first."""
  rng = np.random.default_rng(0)
  a, b, c = rng.normal(size=(3, 1000))
  rows = np.float32([a, a + 1e-4 * b, 1e3 * c])
  along = np.asarray(combined(rows), np.float64) @ rows[0].astype(np.float64)
  assert along == pytest.approx(float(rows[0].astype(np.float64) @ rows[0]), rel=1e-3)


def test_types_are_kept_and_sums_are_float32():
  rows = adversarial(1)[0].astype(jnp.bfloat16)
  result = combined(rows)
  assert result.dtype == jnp.bfloat16
  np.testing.assert_allclose(
    result.astype(np.float32), by_hand(rows.astype(np.float32)), rtol=0.01, atol=0.01
  )
  whole = combined({'i': np.int32([[3, 4], [5, 6]]), 'empty': np.zeros((2, 0), np.float32)})
  assert whole['i'].tolist() == [3, 4] and whole['empty'].shape == (0,)


@pytest.mark.parametrize(
  ('rows', 'message'),
  [
    ({'a': np.zeros((2, 3)), 'b': np.zeros((3, 3))}, r"leaf 'b' of shape \(3, 3\).*here 2"),
    ({'a': np.zeros(())}, r"leaf 'a' of shape \(\)"),
    ({'a': np.zeros((0, 3))}, r"leaf 'a' of shape \(0, 3\)"),
  ],
)
def test_leaves_without_a_row_a_loss_are_refused(rows, message):
  with pytest.raises(ValueError, match=message) as error:
    jax.eval_shape(combined, rows)
  assert '\n' not in str(error.value)


def test_after_the_mean_all_losses_cross_at_once_and_workers_agree():
  """mean_over, orthogonalize, sgd: in simulation and on a mesh, against NumPy."""
  count, n, size, steps = 4, 3, 6, 5
  rows = adversarial(steps * count, n, size).reshape(steps, count, n, size)
  tx = optax.chain(transforms.mean_over('workers'), transforms.orthogonalize(), optax.sgd(0.1))

  def worker(gradients):
    def step(carry, gradient):
      x, state = carry
      updates, state = tx.update(gradient, state, x)
      return (x + updates, state), None

    x = jnp.zeros_like(gradients[0, 0])
    return jax.lax.scan(step, (x, tx.init(x)), gradients)[0]

  expected = -0.1 * sum(by_hand(g.mean(0)) for g in rows)
  simulated = runtime.simulate(count)
  on_mesh = runtime.on_mesh(runtime.make_mesh(workers=count), 'workers')
  for workers in (simulated, on_mesh):
    x, state = jax.jit(workers.spmd(worker))(rows.swapaxes(0, 1))
    np.testing.assert_allclose(x, np.tile(expected, (count, 1)), rtol=1e-4, atol=1e-5)
    assert ledger.bytes_sent(state).tolist() == [steps * 4 * n * size] * count
  program = jax.jit(on_mesh.spmd(worker)).lower(rows.swapaxes(0, 1)).compile().as_text()
  (crossing,) = ledger.collectives(program)
  assert (crossing.kind, crossing.nbytes) == ('all-reduce', 4 * n * size)
