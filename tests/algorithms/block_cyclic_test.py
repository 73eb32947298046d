"""Data in blocks, again and again: one model a block, against the last model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_dsgd import algorithms, runtime, transforms

AXIS, W, D = 'workers', 4, 10
PERIOD, RATE = 5, 0.05


class Blocks:
  """Losses of clients `(x - m)^T A (x - m) / 2` in two blocks, whose minima lie far apart."""

  def __init__(self):
    rng = np.random.default_rng(0)
    self.A = rng.uniform(0.5, 2, size=(2, W, D))  # diagonals
    apart = np.array([-1.0, 1.0])[:, None, None]
    self.m = 0.3 * rng.normal(size=(2, 1, D)) + apart + 0.2 * rng.normal(size=(2, W, D))
    self.best = (self.A * self.m).sum(1) / self.A.sum(1)

  def gradients(self, b, x):
    return self.A[b] * (x - self.m[b])

  def loss(self, b, x):
    return (self.A[b] * (x - self.m[b]) ** 2).sum() / 2 / W

  def excess(self, x):
    return [self.loss(b, x) - self.loss(b, self.best[b]) for b in range(2)]

  def solve(self, tx, block, rounds, *, noise=0.0, dtype=np.float32):
    """The mean models after each round, and the models of blocks."""

    def worker(A, m, key):
      def step(carry, t):
        x, state = carry
        b = block(t // PERIOD)
        drawn = noise * jax.random.normal(jax.random.fold_in(key, t), (D,), dtype)
        grad_fn = lambda x: A[b] * (x - m[b]) + drawn  # noqa: E731
        updates, state = tx.update(grad_fn(x), state, x, grad_fn=grad_fn)
        return (x + updates, state), x + updates

      x = jnp.zeros(D, dtype)
      (_, state), history = jax.lax.scan(step, (x, tx.init(x)), jnp.arange(rounds * PERIOD))
      return history, state.models

    with jax.enable_x64(dtype == np.float64):
      rows = (jnp.asarray(rows.swapaxes(0, 1), dtype) for rows in (self.A, self.m))
      keys = jax.random.split(jax.random.key(0), W)
      history, models = runtime.simulate(W).spmd(worker)(*rows, keys)
    assert np.ptp(models, axis=0).max() < 1e-5
    return np.asarray(history)[:, PERIOD - 1 :: PERIOD].mean(0), np.asarray(models)[0]


@pytest.fixture(scope='module')
def blocks():
  return Blocks()


@pytest.mark.parametrize('make', [algorithms.mm_psgd, algorithms.mc_psgd])
def test_one_block_is_the_mean_of_all_models(blocks, make):
  """Polyak's average of local SGD: with one block both chains of MC are one."""
  one = lambda round_: 0 * round_  # noqa: E731
  tx = make(RATE, PERIOD, axis_name=AXIS, block=one, blocks=1)
  history, models = blocks.solve(tx, one, 12, dtype=np.float64)
  np.testing.assert_allclose(models[0], history.mean(0), rtol=0, atol=1e-14)


def test_what_blocks_lose_with_each_model(blocks):
  """20 cycles of 10 rounds a block, of which the second is trained last.

  The last model is far off in the other block. The means of MM are much better there, and worse in
  the block just trained. Those of MC are better everywhere, for twice the work.
  """
  block = lambda round_: round_ // 10 % 2  # noqa: E731
  excess = {}
  for name, make in (('mm', algorithms.mm_psgd), ('mc', algorithms.mc_psgd)):
    tx = make(RATE, PERIOD, axis_name=AXIS, block=block, blocks=2)
    history, models = blocks.solve(tx, block, 20 * 2 * 10, noise=1.0)
    excess['last'] = blocks.excess(history[-1])
    excess[name] = [blocks.excess(model)[b] for b, model in enumerate(models)]
  assert excess['mm'][0] < excess['last'][0] / 5
  assert excess['mm'][1] > excess['last'][1] * 4
  for b in range(2):
    assert excess['mc'][b] < min(excess['last'][b], excess['mm'][b]) / 4


def test_two_chains_by_hand(blocks):
  """The chain of lower loss counts; a block's own chain waits while others train."""
  block = lambda round_: round_ % 2  # noqa: E731
  tx = algorithms.mc_psgd(RATE, PERIOD, axis_name=AXIS, block=block, blocks=2)
  history, models = blocks.solve(tx, block, 7, dtype=np.float64)
  x, own, hand, counts = np.zeros(D), np.zeros((2, D)), np.zeros((2, D)), [0, 0]
  kept = []
  for r in range(7):
    b = r % 2
    chains = [np.tile(x, (W, 1)), np.tile(own[b], (W, 1))]
    for _ in range(PERIOD):
      chains = [y - RATE * blocks.gradients(b, y) for y in chains]
    x, own[b] = (y.mean(0) for y in chains)
    np.testing.assert_allclose(history[r], x, rtol=0, atol=1e-13)
    kept.append(min((blocks.loss(b, y), i) for i, y in enumerate((x, own[b])))[1])
    better = (x, own[b])[kept[-1]]
    hand[b] += (better - hand[b]) / (counts[b] + 1)
    counts[b] += 1
  assert set(kept[1:]) == {1}  # after the first round, which both chains begin at one point
  np.testing.assert_allclose(models, hand, rtol=0, atol=1e-13)


@pytest.mark.parametrize('blocks', [0, -1, True, 1.5, None], ids=repr)
@pytest.mark.parametrize('make', [algorithms.mm_psgd, algorithms.mc_psgd])
def test_refused_numbers_of_blocks(make, blocks):
  with pytest.raises(ValueError, match=f'blocks={blocks!r}; accepted are integers >= 1'):
    make(RATE, PERIOD, axis_name=AXIS, block=lambda round_: 0 * round_, blocks=blocks)


def test_only_local_steps_have_rounds():
  one = lambda round_: 0 * round_  # noqa: E731
  for tx in (
    transforms.average_by_block(optax.sgd(1.0), one, blocks=1),
    transforms.choose_chain_by_block(optax.sgd(1.0), one, blocks=1, axis_name=AXIS),
  ):
    with pytest.raises(ValueError, match='accepted are local_steps transforms'):
      tx.init(jnp.zeros(2))


def test_a_second_chain_needs_gradients():
  tx = algorithms.mc_psgd(RATE, 1, axis_name=AXIS, block=lambda round_: 0 * round_, blocks=1)
  with pytest.raises(ValueError, match='call update.updates, state, params, grad_fn=grad_fn'):
    tx.update(jnp.zeros(2), tx.init(jnp.zeros(2)), jnp.zeros(2))
