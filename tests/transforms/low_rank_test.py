"""PowerSGD's reduction: what it approximates, at any scale and shape, and what it sends."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_dsgd import algorithms, ledger, memories, runtime, transforms

W = 4
WORKERS = runtime.simulate(W)


def steps(tx, gradients, count=1, workers=WORKERS):
  """The updates of each of `count` steps on the same gradients, and the last state."""
  state = workers.spmd(tx.init)(gradients)
  update = workers.spmd(tx.update)
  history = []
  for _ in range(count):
    updates, state = update(gradients, state)
    history.append(jax.tree.map(np.asarray, updates))
  return history, state


def low_rank(rank, memory=None):
  memory = memories.none() if memory is None else memory
  return transforms.low_rank_mean(rank, axis_name='workers', memory=memory)


def normal(*shape, dtype=jnp.float32):
  return jnp.asarray(np.random.default_rng(0).normal(size=(W, *shape)), dtype)


def test_a_mean_of_low_rank_is_exact():
  rng = np.random.default_rng(1)
  left, right = rng.normal(size=(20, 3)), rng.normal(size=(3, 15))
  weights = rng.normal(size=(W, 3))  # every worker in the same three directions
  gradients = jnp.asarray(np.einsum('nr,wr,rm->wnm', left, weights, right), jnp.float32)
  (updates,), _ = steps(low_rank(3), gradients)
  np.testing.assert_allclose(updates[0], gradients.mean(0), atol=1e-5)


def test_the_warm_start_finds_the_best_approximation():
  gradients = normal(20, 15)
  history, _ = steps(low_rank(3), gradients, count=60)
  mean = np.asarray(gradients.mean(0))
  u, s, vt = np.linalg.svd(mean)
  best = (u[:, :3] * s[:3]) @ vt[:3]
  np.testing.assert_allclose(history[-1][0], best, atol=2e-2)
  assert np.linalg.norm(history[0][0] - mean) > np.linalg.norm(best - mean) * 1.02


@pytest.mark.parametrize('shape', [(2, 8), (8, 2), (1, 5), (5,), (), (3, 3, 4, 6)])
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_any_shape_and_dtype(shape, dtype):
  gradients = normal(*shape, dtype=dtype)
  (updates,), state = steps(low_rank(4), gradients)
  assert updates.shape == gradients.shape and updates.dtype == dtype
  n, m = (int(np.prod(shape[:-1])), shape[-1]) if len(shape) > 1 else (int(np.prod(shape)), 1)
  factored = 4 * (n + m) < n * m
  nbytes = 16 * (n + m) if factored else n * m * gradients.dtype.itemsize
  assert ledger.bytes_sent(state).tolist() == [nbytes] * W
  if not factored:
    tolerance = 1e-6 if dtype == jnp.float32 else 2e-2
    mean = np.asarray(gradients, np.float32).mean(0)
    np.testing.assert_allclose(updates[0].astype(np.float32), mean, atol=tolerance)


@pytest.mark.parametrize('scale', [1e-30, 1e-10, 1e8])
def test_scale_changes_nothing_else(scale):
  gradients = normal(12, 10)
  (plain,), _ = steps(low_rank(2), gradients)
  (scaled,), _ = steps(low_rank(2), scale * gradients)
  np.testing.assert_allclose(scaled / scale, plain, rtol=2e-4, atol=1e-6)


def test_how_a_batch_is_split_over_workers_changes_nothing():
  examples = np.random.default_rng(2).normal(size=(8, 12, 10)).astype(np.float32)
  results = []
  for count in (1, 2, 4):
    gradients = jnp.asarray(examples.reshape(count, -1, 12, 10).mean(1))
    history, _ = steps(low_rank(2), gradients, count=3, workers=runtime.simulate(count))
    results.append(history[-1][0])
  for result in results[1:]:
    np.testing.assert_allclose(result, results[0], atol=1e-5)


def test_zero_gradients_come_through_and_do_not_stick():
  tx = low_rank(2)
  state = WORKERS.spmd(tx.init)(jnp.zeros((W, 12, 10)))
  update = WORKERS.spmd(tx.update)
  for _ in range(2):
    updates, state = update(jnp.zeros((W, 12, 10)), state)
    assert (np.asarray(updates) == 0).all()
  gradients = normal(12, 10)
  for _ in range(20):
    updates, state = update(gradients, state)
  assert np.linalg.norm(updates[0]) > 0.5 * np.linalg.norm(gradients.mean(0))


def test_the_residual_loses_nothing():
  gradients = normal(12, 10)
  history, state = steps(low_rank(2, memories.residual()), gradients, count=7)
  kept = np.asarray(state.memory.residual).mean(0)
  np.testing.assert_allclose(
    sum(u[0] for u in history) + kept, 7 * gradients.mean(0), rtol=1e-4, atol=1e-4
  )


def test_two_all_reduces_whatever_the_leaves():
  workers = runtime.on_mesh(runtime.make_mesh(workers=8), 'workers')
  tx = low_rank(2)
  gradients = {f'{i:02d}': jnp.ones((8, 12, 10)) for i in range(20)} | {'bias': jnp.ones((8, 10))}
  state = jax.eval_shape(workers.spmd(tx.init), gradients)
  compiled = jax.jit(workers.spmd(tx.update)).lower(workers.place(gradients), state).compile()
  found = ledger.collectives(compiled.as_text())
  assert [c.kind for c in found] == ['all-reduce'] * 2
  assert sum(c.nbytes for c in found) == 20 * 4 * 2 * (12 + 10) + 4 * 10


def test_power_sgd_comes_near_what_dense_sgd_reaches():
  targets = normal(12, 10)

  def train(tx):
    def step(carry, _):
      x, state = carry
      updates, state = tx.update(jax.tree.map(jnp.subtract, x, target), state, x)
      return (optax.apply_updates(x, updates), state), None

    def worker(target_):
      nonlocal target
      target = target_
      x = jnp.zeros((12, 10))
      return jax.lax.scan(step, (x, tx.init(x)), length=300)[0][0]

    target = None
    return np.asarray(WORKERS.spmd(worker)(targets))[0]

  x = train(algorithms.power_sgd(0.05, 2, axis_name='workers', momentum=0.5))
  assert np.abs(x - targets.mean(0)).max() < 1e-2


@pytest.mark.parametrize('rank', [0, -1, 1.5, True, 'a'])
def test_a_bad_rank_is_refused(rank):
  with pytest.raises(ValueError, match=r'rank=.*integers >= 1'):
    low_rank(rank)


def test_each_leaf_may_have_a_rank_of_its_own():
  ranks = {'narrow': 1, 'wide': 3, 'whole': 0}
  tx = low_rank(lambda path, like: ranks[path])
  gradients = {name: normal(12, 10) for name in ranks}
  (updates,), state = steps(tx, gradients)
  found = {name: np.linalg.matrix_rank(updates[name][0], tol=1e-4) for name in ranks}
  assert found == {'narrow': 1, 'wide': 3, 'whole': 10}
  assert ledger.bytes_sent(state).tolist() == [4 * (22 + 3 * 22 + 120)] * W
