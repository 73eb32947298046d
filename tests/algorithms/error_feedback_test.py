"""Error feedback and differences: recurrences by hand, and what heterogeneous data does to them."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

from jax_dsgd import algorithms, compressors, ledger, memories, runtime, transforms

AXIS, D = 'workers', 20
# Toy leaves: gathering them from eight workers costs more than a dense mean, and is flagged.
pytestmark = pytest.mark.filterwarnings('ignore:gathering:UserWarning')
tenth = compressors.top_k(0.1)


@pytest.mark.parametrize(
  'compressor',
  [compressors.scaled_sign(), tenth, compressors.random_k(0.1), compressors.cast('bfloat16')],
  ids=repr,
)
def test_one_worker_looks_ahead_to_uncompressed_descent(compressor, quadratics):
  """x + e is exactly gradient descent, whatever the compressor drops: the theorem of SAEF."""
  alone = quadratics(0.0, count=1)
  run = alone.solve(algorithms.saef_sgd(0.1, compressor, axis_name=AXIS), 30)
  descent = alone.by_hand(lambda x, g: x - 0.1 * g(x), 30)
  residual = optax.tree.get(run.state, 'residual')
  assert np.abs(residual).max() > 1e-5
  np.testing.assert_allclose(run.models[-1] + residual, descent[-1], atol=1e-6)


def test_saef_by_hand(quadratics, largest):
  """With momentum, half a step ahead, averages every third step, and two ways."""
  problem, steps = quadratics(1.0), 14
  tx = algorithms.saef_sgd(
    0.1, compressors.top_k(k=4), axis_name=AXIS, step_ahead=0.5, average_every=3, momentum=0.5,
    server_compressor=compressors.top_k(k=6),
  )  # fmt: skip
  run = problem.solve(tx, steps)
  e, trace, server, count = np.zeros((8, D)), np.zeros((8, D)), np.zeros(D), 0

  def step(x, gradients):
    nonlocal e, trace, server, count
    trace = gradients(x + 0.5 * e) + 0.5 * trace
    due = e - 0.1 * trace
    sent = largest(due, 4)
    e, count = due - sent, count + 1
    if count % 3 == 0:
      e = np.broadcast_to(e.mean(0), e.shape)
    answer = largest(sent.mean(0) + server, 6)
    server = sent.mean(0) + server - answer
    return x + answer

  np.testing.assert_allclose(run.models, problem.by_hand(step, steps), rtol=1e-5, atol=1e-5)
  # 4 values and places; 4 means of residuals of 80 bytes; the answer is not counted.
  assert ledger.bytes_sent(run.state).tolist() == [steps * 4 * 6 + 4 * 4 * D] * 8


def test_step_ahead_and_averages_help_as_published(quadratics):
  """Scaled sign, 1500 steps of a decaying rate: EF > SAEF > averages every 20 >> every step.

  At a constant rate this order does not hold: there the residual itself, in x, hides it.
  """
  problem, rate = quadratics(1.0, variety=0.1), optax.linear_schedule(0.05, 0.0, 1500)

  def error(**arguments):
    tx = algorithms.saef_sgd(rate, compressors.scaled_sign(), axis_name=AXIS, **arguments)
    return problem.error(problem.solve(tx, 1500).models)

  plain, ahead = error(step_ahead=0.0), error()
  rarely, always = error(average_every=20), error(average_every=1)
  assert plain > 3 * ahead
  assert ahead > 1.2 * rarely
  assert rarely > 30 * always
  assert always < 1e-3


def test_no_step_ahead_is_error_feedback(quadratics):
  problem = quadratics(1.0)
  saef = algorithms.saef_sgd(0.1, tenth, axis_name=AXIS, step_ahead=0.0)
  plain = algorithms.d_ef_sgd(0.1, tenth, axis_name=AXIS)
  np.testing.assert_allclose(
    problem.solve(saef, 20).models, problem.solve(plain, 20).models, atol=1e-6
  )


def test_heterogeneity_stalls_quantised_sgd_and_error_feedback_only(quadratics):
  """|x - x*|^2 after 8000 steps with full gradients and a tenth sent, the table of Stich."""
  coarse = compressors.qsgd(1, block=D)  # omega is the root of 20
  methods = {
    'quantised': algorithms.d_qsgd(0.02, coarse, axis_name=AXIS),
    'feedback': algorithms.d_ef_sgd(0.02, tenth, axis_name=AXIS),
    'linear': algorithms.linear_ef_sgd(0.02, 0.1, axis_name=AXIS),
    'difference': algorithms.diana(0.02, coarse, axis_name=AXIS),
    'ef21': algorithms.ef21_sgd(0.02, tenth, axis_name=AXIS),
  }
  squared = {
    skew: {name: problem.error(problem.solve(tx, 8000).models) ** 2 for name, tx in methods.items()}
    for skew, problem in ((0, quadratics(0.0)), (5, quadratics(5.0)))
  }
  assert max(squared[0].values()) < 1e-8
  assert squared[5]['quantised'] > 0.1
  assert squared[5]['quantised'] > 2 * squared[5]['feedback'] > 2e-2
  for name in ('linear', 'difference', 'ef21'):
    assert squared[5][name] < 1e-8


@pytest.mark.parametrize('momentum', [0.0, 0.8])
def test_ef21_by_hand(momentum, quadratics, largest):
  problem = quadratics(2.0)
  make = algorithms.ef21_momentum_sgd
  run = problem.solve(make(0.1, tenth, axis_name=AXIS, momentum=momentum), 20)
  v, h = np.zeros((8, D)), np.zeros((8, D))

  def step(x, gradients):
    nonlocal v, h
    v = momentum * v + (1 - momentum) * gradients(x)
    h = h + largest(v - h, 2)
    return x - 0.1 * h.mean(0)

  np.testing.assert_allclose(run.models, problem.by_hand(step, 20), rtol=1e-5, atol=1e-5)
  if momentum == 0:
    plain = problem.solve(algorithms.ef21_sgd(0.1, tenth, axis_name=AXIS), 20)
    np.testing.assert_array_equal(plain.models, run.models)


def test_the_memory_of_diana_takes_the_step_of_each_leaf():
  """1 / (1 + omega): a third of 9 entries and a half of 4 are sent, so 1 / 3 and 1 / 2."""
  tx = algorithms.diana(1.0, compressors.random_k(0.35, unbiased=True), axis_name=AXIS)
  rng = np.random.default_rng(0)
  x = {name: rng.normal(size=(2, n)).astype(np.float32) for name, n in (('a', 9), ('b', 4))}
  entries = {'a': 3, 'b': 1}
  step = jax.jit(runtime.simulate(2).spmd(lambda x: tx.update(x, tx.init(x))))
  updates, state = step(x)
  reference = optax.tree.get(state, 'reference')
  for name, kept in entries.items():
    assert np.count_nonzero(updates[name][0]) == kept
    # On the first step what was sent is -updates, in the mean.
    share = kept / x[name].shape[1]
    sent = np.asarray(reference[name]).mean(0)
    np.testing.assert_allclose(sent, -share * np.asarray(updates[name][0]), rtol=1e-5, atol=1e-6)


def test_linear_error_feedback_is_one_worker_with_the_mean_gradient(quadratics):
  """mean C(p_w) = C(mean p_w): the others' heterogeneity does not show in the way of x."""
  problem = quadratics(5.0)
  run = problem.solve(algorithms.linear_ef_sgd(0.05, 0.1, axis_name=AXIS, seed=3), 40)
  one = quadratics(0.0, count=1)
  one.A, one.best = problem.A.mean(0, keepdims=True), problem.best
  alone = one.solve(algorithms.linear_ef_sgd(0.05, 0.1, axis_name=AXIS, seed=3), 40)
  np.testing.assert_allclose(run.models[:, 0], alone.models[:, 0], atol=1e-5)


@pytest.mark.parametrize(
  ('make', 'compressor', 'kind'),
  [
    (algorithms.d_qsgd, tenth, 'unbiased'),
    (algorithms.diana, tenth, 'unbiased'),
    (algorithms.ef21_sgd, compressors.qsgd(7), 'contractive'),
    (algorithms.d_ef_sgd, compressors.qsgd(7), 'contractive'),
  ],
)
def test_compressors_that_a_method_does_not_take(make, compressor, kind):
  with pytest.raises(ValueError, match=kind) as error:
    make(0.1, compressor, axis_name=AXIS)
  assert repr(compressor) in str(error.value)


def mean(memory):
  return transforms.compressed_mean(tenth, axis_name=AXIS, memory=memory)


WRAPPERS = {
  'step_ahead': transforms.step_ahead,
  'average_residual': lambda inner: transforms.average_residual(inner, 1, axis_name=AXIS),
}


@pytest.mark.parametrize('name', WRAPPERS)
@pytest.mark.parametrize(
  ('inner', 'found'),
  [
    (optax.sgd(0.1), 0),
    (mean(memories.reference()), 0),
    (optax.chain(mean(memories.residual()), mean(memories.residual())), 2),
  ],
)
def test_wrappers_need_exactly_one_residual(name, inner, found):
  with pytest.raises(ValueError, match=f'{name} found {found} residual'):
    jax.eval_shape(WRAPPERS[name](inner).init, np.zeros(3, np.float32))


def test_a_server_with_a_residual_of_its_own_is_not_mistaken(quadratics):
  """Two phases: the channel's residual is a chunk, the memory's is what step_ahead looks at."""
  inner = transforms.compressed_mean(
    tenth, axis_name=AXIS, memory=memories.residual(), server=memories.residual()
  )
  inner = transforms.average_residual(inner, 2, axis_name=AXIS)
  tx = transforms.step_ahead(optax.chain(optax.sgd(0.05), inner))
  problem = quadratics(0.0)
  assert problem.error(problem.solve(tx, 600).models) < 0.1 * np.linalg.norm(problem.best)


def test_step_ahead_asks_for_gradients():
  tx = transforms.step_ahead(mean(memories.residual()))
  step = lambda x: tx.update(x, tx.init(x), x)  # noqa: E731
  with pytest.raises(ValueError, match='step_ahead .*grad_fn=grad_fn'):
    jax.eval_shape(runtime.simulate(2).spmd(step), np.zeros((2, 3), np.float32))


@pytest.mark.parametrize('fraction', [-0.1, 1.5, True, 'a', float('nan')], ids=repr)
def test_refused_fractions(fraction):
  with pytest.raises(ValueError, match=f'fraction={fraction!r}'):
    transforms.step_ahead(mean(memories.residual()), fraction)


@pytest.mark.parametrize('every', [0, -1, 1.0, True], ids=repr)
def test_refused_periods_of_averages(every):
  with pytest.raises(ValueError, match=f'every={every!r}'):
    transforms.average_residual(mean(memories.residual()), every, axis_name=AXIS)
