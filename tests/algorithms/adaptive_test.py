"""CD-Adam and 1-bit Adam by hand, and why error feedback must not feed an adaptive step."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_dsgd import algorithms, compressors, ledger, memories, transforms

AXIS, D, W = 'workers', 20, 8
# Toy leaves: gathering them from eight workers costs more than a dense mean, and is flagged.
pytestmark = pytest.mark.filterwarnings('ignore:gathering:UserWarning')


def amsgrad_by_hand(rate, reconstruct):
  """`step(x, gradients)` with moments of what reconstruct makes of the workers' gradients."""
  m, v, largest = np.zeros(D), np.zeros(D), np.zeros(D)

  def step(x, gradients):
    nonlocal m, v, largest
    g = reconstruct(gradients(x))
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
    largest = np.maximum(largest, v)
    return x - rate * m / np.sqrt(largest + 1e-8)

  return step


def test_cd_adam_without_compression_is_amsgrad(quadratics):
  problem = quadratics(2.0)
  tx = algorithms.cd_adam(0.01, axis_name=AXIS, compressor=compressors.identity())
  expected = problem.by_hand(amsgrad_by_hand(0.01, lambda g: g.mean(0)), 60)
  np.testing.assert_allclose(problem.solve(tx, 60).models, expected, rtol=1e-4, atol=1e-4)


def test_cd_adam_by_hand(quadratics, signs):
  problem, steps = quadratics(2.0), 25
  run = problem.solve(algorithms.cd_adam(0.01, axis_name=AXIS), steps)
  there, back = np.zeros((W, D)), np.zeros(D)

  def reconstruct(g):
    nonlocal there, back
    there = there + signs(g - there)
    back = back + signs(there.mean(0) - back)
    return back

  expected = problem.by_hand(amsgrad_by_hand(0.01, reconstruct), steps)
  np.testing.assert_allclose(run.models, expected, rtol=1e-4, atol=1e-4)
  # Twenty bits take three bytes; the answer is not counted.
  assert ledger.bytes_sent(run.state).tolist() == [steps * (3 + 4)] * W


def amsgrad(rate):
  return optax.chain(
    optax.scale_by_amsgrad(
      0.9, 0.99, eps=0.0, eps_root=1e-8, bias_correction_mu=False, bias_correction_nu=False
    ),
    optax.scale(-rate),
  )


def test_differences_reconstruct_the_gradient_where_error_feedback_does_not(quadratics):
  """|q - mean gradient| and the error at the end, as published: CD-Adam is as good as AMSGrad."""
  problem, steps = quadratics(5.0), 3000

  def last_gradient(run):
    return problem.gradients(run.models[-2]).mean(0)

  dense = problem.solve(optax.chain(transforms.mean_over(AXIS), amsgrad(0.01)), steps)
  cd = problem.solve(algorithms.cd_adam(0.01, axis_name=AXIS), steps)
  answer = cd.state[1].memory.received[0]
  assert np.linalg.norm(answer - last_gradient(cd)) < 1e-3
  assert problem.error(cd.models) < 1e-3
  assert problem.error(dense.models) < 1e-3

  feedback = transforms.compressed_mean(
    compressors.scaled_sign(), axis_name=AXIS, memory=memories.residual()
  )
  fed = problem.solve(optax.chain(feedback, amsgrad(0.01)), steps)
  assert problem.error(fed.models) > 10 * problem.error(cd.models)
  # m is the mean over ten steps of what arrived; what arrives at each is farther still.
  moment = np.asarray(optax.tree.get(fed.state, 'mu')[0])
  assert np.linalg.norm(moment - last_gradient(fed)) > 0.5


def test_one_bit_adam_by_hand(quadratics, signs):
  """Dense for six steps and at step ten; the variance stands still in between."""
  problem, steps = quadratics(1.0), 16
  dense_at = {*range(6), 10}
  tx = algorithms.one_bit_adam(
    0.01, axis_name=AXIS, refresh=lambda t: (t < 6) | (t == 10), b1=0.8, b2=0.9, eps=1e-3
  )
  run = problem.solve(tx, steps)
  m, v, e, t = np.zeros(D), np.zeros(D), np.zeros((W, D)), 0

  def step(x, gradients):
    nonlocal m, v, e, t
    g = gradients(x)
    if t in dense_at:
      m, v = 0.8 * m + 0.2 * g.mean(0), 0.9 * v + 0.1 * g.mean(0) ** 2
    else:
      due = 0.8 * m + 0.2 * g + e
      sent = signs(due)
      m, e = sent.mean(0), due - sent
    t += 1
    return x - 0.01 * m / (np.sqrt(v) + 1e-3)

  np.testing.assert_allclose(run.models, problem.by_hand(step, steps), rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(optax.tree.get(run.state, 'nu')[0], v, rtol=1e-4)
  assert ledger.bytes_sent(run.state).tolist() == [7 * 4 * D + 9 * (3 + 4)] * W


def test_the_first_step_of_one_bit_adam_is_dense(quadratics):
  """A variance of zero would make the first steps 1 / eps long."""
  problem = quadratics(1.0)
  tx = algorithms.one_bit_adam(0.01, axis_name=AXIS, refresh=lambda t: jnp.zeros((), bool))
  run = problem.solve(tx, 3)
  assert np.abs(run.models[0]).max() < 0.05
  assert ledger.bytes_sent(run.state).tolist() == [4 * D + 2 * 7] * W


def test_cd_adam_refuses_compressors_that_do_not_contract():
  with pytest.raises(ValueError, match='cd_adam got compressor=qsgd.*contractive'):
    algorithms.cd_adam(0.1, axis_name=AXIS, compressor=compressors.qsgd(7))
