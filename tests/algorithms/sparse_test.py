"""SASG's trigger and slots, and the velocities of DGS and DGC, by hand."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

from jax_dsgd import algorithms, compressors, ledger, runtime, transforms

AXIS, D, W = 'workers', 20, 8
# Toy leaves: gathering them from eight workers costs more than a dense mean, and is flagged.
pytestmark = pytest.mark.filterwarnings('ignore:gathering:UserWarning')
PAYLOAD = 2 * 6  # of a tenth of D: two values of 4 bytes and two places of 2


def test_sasg_by_hand(quadratics, largest):
  """Server's slots, stale points and the ring of steps as the paper has them, one a worker."""
  problem, steps, weight, window = quadratics(0.3), 60, 20.0, 5
  run = problem.solve(
    algorithms.sasg(0.05, 0.1, axis_name=AXIS, weight=weight, window=window), steps
  )
  e, slots, stale = np.zeros((W, D)), np.zeros((W, D)), np.zeros((W, D))
  staleness, lengths, uploads = np.full(W, window), [], np.zeros(W)

  def step(x, gradients):
    nonlocal staleness, e, slots, stale, uploads
    change = ((gradients(x) - gradients(stale)) ** 2).sum(1)
    limit = weight * sum(lengths[-window:]) / W**2
    sends = (change >= limit) | (staleness >= window)
    due = 0.05 * gradients(x) + e
    sent = largest(due, 2)
    send = sends[:, None]
    e, slots = np.where(send, due - sent, e), np.where(send, sent, slots)
    stale, staleness = np.where(send, x, stale), np.where(sends, 1, staleness + 1)
    uploads += sends
    lengths.append((slots.mean(0) ** 2).sum())
    return x - slots.mean(0)

  np.testing.assert_allclose(run.models, problem.by_hand(step, steps), rtol=1e-4, atol=1e-5)
  assert ledger.bytes_sent(run.state).tolist() == (PAYLOAD * uploads).tolist()
  assert steps / window < uploads.min() < uploads.max() < steps


def test_a_trigger_of_zero_sends_always(quadratics):
  problem = quadratics(2.0)
  lazy = problem.solve(algorithms.sasg(0.1, 1.0, axis_name=AXIS, weight=0.0), 30)
  sgd = problem.solve(algorithms.allreduce_sgd(0.1, axis_name=AXIS), 30)
  np.testing.assert_allclose(lazy.models, sgd.models, atol=2e-6)
  assert ledger.bytes_sent(lazy.state).tolist() == [30 * 4 * D] * W
  sparse = problem.solve(algorithms.sasg(0.1, 0.1, axis_name=AXIS, weight=0.0), 30)
  topk = problem.solve(algorithms.topk_sgd(0.1, 0.1, axis_name=AXIS), 30)
  np.testing.assert_allclose(sparse.models, topk.models, atol=2e-6)


def test_lazy_workers_save_most_uploads_at_equal_error(quadratics):
  """Whole gradients, as LASG: 14 % of the uploads of SGD."""
  problem, steps = quadratics(1.0), 600
  runs = {
    weight: problem.solve(algorithms.sasg(0.1, 1.0, axis_name=AXIS, weight=weight), steps)
    for weight in (0.0, 30.0)
  }
  assert all(problem.error(run.models) < 3e-6 for run in runs.values())
  uploads = ledger.bytes_sent(runs[30.0].state) / (steps * 4 * D)
  assert uploads.mean() < 0.2
  assert len(set(uploads)) > 1  # workers decide alone


def test_the_longest_silence_is_the_window(quadratics):
  problem = quadratics(1.0)
  run = problem.solve(algorithms.sasg(0.01, 1.0, axis_name=AXIS, weight=1e9, window=4), 21)
  assert ledger.bytes_sent(run.state).tolist() == [6 * 4 * D] * W  # steps 0, 4, 8, 12, 16 and 20
  silent = np.diff(run.models[:, 0], axis=0)
  np.testing.assert_allclose(silent[0], silent[1], atol=1e-7)
  assert np.abs(silent[3] - silent[2]).max() > 1e-5


def test_a_gradient_that_is_not_a_number_is_sent():
  tx = transforms.lazy_mean(compressors.identity(), axis_name=AXIS, weight=1e9)

  def step(x):
    _, state = tx.update(x, tx.init(x), x, grad_fn=lambda x: x)
    nan = lambda x: jax.numpy.full_like(x, jax.numpy.nan)  # noqa: E731
    return tx.update(nan(x), state, x, grad_fn=nan)

  updates, state = jax.jit(runtime.simulate(2).spmd(step))(np.ones((2, 3), np.float32))
  assert np.isnan(updates).all()
  assert ledger.bytes_sent(state).tolist() == [24, 24]


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ({'weight': -1.0}, r'weight=-1\.0'),
    ({'weight': float('nan')}, 'weight=nan'),
    ({'weight': 1.0, 'window': 0}, 'window=0'),
    ({'weight': 1.0, 'window': 1.5}, r'window=1\.5'),
    ({'weight': 1.0, 'compressor': compressors.random_k(0.1)}, 'random_k.*shared key'),
  ],
)
def test_lazy_means_refuse(arguments, message):
  arguments = {'compressor': compressors.top_k(0.1)} | arguments
  with pytest.raises(ValueError, match=f'lazy_mean got .*{message}'):
    transforms.lazy_mean(axis_name=AXIS, **arguments)


def test_lazy_means_ask_for_gradients():
  tx = transforms.lazy_mean(compressors.identity(), axis_name=AXIS, weight=1.0)
  step = lambda x: tx.update(x, tx.init(x), x)  # noqa: E731
  with pytest.raises(ValueError, match='lazy_mean .*grad_fn=grad_fn'):
    jax.eval_shape(runtime.simulate(2).spmd(step), np.zeros((2, 3), np.float32))


def feed(tx, gradients):
  """One worker's updates [T, n] and last state, from gradients [T, n]."""

  def worker(gradients):
    step = lambda state, g: tx.update(g, state)[::-1]  # noqa: E731
    return jax.lax.scan(step, tx.init(gradients[0]), gradients)[::-1]

  return jax.jit(runtime.simulate(1).spmd(worker))(gradients[None])


def test_what_waits_in_dgs_is_the_sum_of_its_gradients():
  """m u = sum of lr g exactly, without decay, where nothing was sent; what is sent is momentum."""
  rng = np.random.default_rng(0)
  gradients = rng.normal(size=(9, 6)).astype(np.float32)
  gradients[:, 2] = 100  # always the largest
  tx = algorithms.dgs_sgd(0.5, 1 / 6, axis_name=AXIS, momentum=0.7)
  updates, state = feed(tx, gradients)
  u = optax.tree.get(state, 'velocity')[0]
  waiting = np.arange(6) != 2
  np.testing.assert_allclose(0.7 * u[waiting], -0.5 * gradients.sum(0)[waiting], rtol=1e-5)
  assert not np.asarray(updates)[0][:, waiting].any()
  decays = 0.7 ** np.arange(9)
  np.testing.assert_allclose(updates[0, :, 2], -50 * np.cumsum(decays), rtol=1e-5)


def test_dense_dgs_of_one_worker_is_heavy_ball(quadratics):
  alone = quadratics(0.0, count=1)
  dgs = alone.solve(algorithms.dgs_sgd(0.05, 1.0, axis_name=AXIS, momentum=0.7), 30)
  heavy = alone.solve(optax.sgd(0.05, momentum=0.7), 30)
  np.testing.assert_allclose(dgs.models, heavy.models, atol=1e-5)


def test_dgs_by_hand(quadratics, largest):
  problem = quadratics(1.0)
  run = problem.solve(algorithms.dgs_sgd(0.05, 0.1, axis_name=AXIS, momentum=0.7), 20)
  u = np.zeros((W, D))

  def step(x, gradients):
    nonlocal u
    u = 0.7 * u + 0.05 * gradients(x)
    sent = largest(u, 2)
    u = np.where(sent != 0, u, u / 0.7)
    return x - sent.mean(0)

  np.testing.assert_allclose(run.models, problem.by_hand(step, 20), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('warmup', [(), (0.5, 0.25)], ids=str)
def test_dgc_by_hand(warmup, quadratics, largest):
  """Both memories are cleared where they were sent; k is 10, 5 and 2 in the warm-up."""
  problem, steps = quadratics(1.0), 20
  tx = algorithms.dgc_sgd(
    0.05, 0.1, axis_name=AXIS, momentum=0.6, warmup=warmup, warmup_steps=8 if warmup else 0
  )
  run = problem.solve(tx, steps)
  entries = iter([10] * 4 + [5] * 4 + [2] * 12 if warmup else [2] * steps)
  v, a, values = np.zeros((W, D)), np.zeros((W, D)), 0

  def step(x, gradients):
    nonlocal v, a, values
    k = next(entries)
    v = 0.6 * v + 0.05 * gradients(x)
    a = a + v
    sent = largest(a, k)
    v, a = np.where(sent != 0, 0, v), np.where(sent != 0, 0, a)
    values += k
    return x - sent.mean(0)

  np.testing.assert_allclose(run.models, problem.by_hand(step, steps), rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(optax.tree.get(run.state, 'velocity'), -v, atol=1e-5)
  np.testing.assert_allclose(optax.tree.get(run.state, 'accumulated'), -a, atol=1e-5)
  assert ledger.bytes_sent(run.state).tolist() == [6 * values] * W


def test_velocities_count_what_is_sent_often_for_more(quadratics):
  """On heterogeneous data DGS and DGC settle away from the optimum; error feedback does not."""
  problem, rate = quadratics(1.0), optax.linear_schedule(0.05, 0.0, 1500)
  errors = [
    problem.error(problem.solve(make(rate, 0.25, axis_name=AXIS), 1500).models)
    for make in (algorithms.dgs_sgd, algorithms.dgc_sgd, algorithms.topk_sgd)
  ]
  assert min(errors[:2]) > 5 * errors[2]


@pytest.mark.parametrize('arguments', [{'warmup': (0.5,)}, {'warmup_steps': 3}], ids=str)
def test_a_warmup_has_fractions_and_steps(arguments):
  with pytest.raises(ValueError, match='dgc_sgd got warmup='):
    algorithms.dgc_sgd(0.1, axis_name=AXIS, **arguments)


def test_stages_share_one_state():
  with pytest.raises(ValueError, match='transforms=\\[\\]'):
    transforms.stages([], lambda step: step)
  tx = transforms.stages([optax.trace(0.9), optax.scale(1.0)], lambda step: step)
  with pytest.raises(ValueError, match='states differ.*number 1'):
    tx.init(np.zeros(3, np.float32))
