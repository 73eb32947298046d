"""Laws of every memory with every compressor, in a mean and in gossip, over `conftest`'s tables."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_dsgd import compressors, exchange, memories, runtime, topologies, transforms

W, STEPS = 4, 3
FOUR = runtime.simulate(W)
RING = topologies.ring(W)
DIMENSIONS, CLIENTS = 20, 8


def inputs():
  """What workers send at each step, [STEPS, W, 3, 5]."""
  return np.random.default_rng(0).normal(size=(STEPS, W, 3, 5)).astype(np.float32)


@functools.cache
def exchanges(memory, compressor):
  """(own, received, memory's state) after each step by reduction, leaves [STEPS, W, 3, 5]."""
  channels = {name: make(compressor) for name, (make, _) in REDUCTIONS.items()}

  def worker(xs):
    def step(states, x):
      outputs = {}
      for name, channel in channels.items():
        own, received, states[name] = exchange.send(x, states[name], memory=memory, channel=channel)
        outputs[name] = own, received, states[name].memory
      return states, outputs

    states = {
      name: exchange.init(xs[0], memory=memory, channel=channel, seed=1)
      for name, channel in channels.items()
    }
    return jax.lax.scan(step, states, xs)[1]

  outputs = jax.jit(FOUR.spmd(worker))(np.moveaxis(inputs(), 0, 1))
  return jax.tree.map(lambda x: np.moveaxis(np.asarray(x, np.float64), 1, 0), outputs)


def mixed(matrix, x):
  """`sum_j matrix[i, j] x_j` of [STEPS, W, 3, 5]."""
  return np.einsum('ij,tj...->ti...', matrix, x)


def before(state):
  """A state's value before each step, from the values after."""
  return np.concatenate([np.zeros_like(state[:1]), state[:-1]])


REDUCTIONS = {
  'mean': (
    functools.partial(exchange.mean_of_workers, axis_name='workers'),
    np.full((W, W), 1 / W),
  ),
  'ring': (
    functools.partial(exchange.mix_of_neighbors, RING, axis_name='workers'),
    RING.matrix(),
  ),
}


def test_every_memory_has_an_example(require_examples, memory_examples):
  require_examples(memories, memories.Memory, memory_examples)


@pytest.mark.parametrize('reduction', REDUCTIONS)
def test_the_table(memory, family, reduction):
  """The rows of the table in DESIGN.md, and that nothing is lost in the reduction."""
  own, received, state = exchanges(memory, family)[reduction]
  x, matrix = inputs(), REDUCTIONS[reduction][1]
  # Whatever the memory, what arrives is the reduction of what is believed of each worker.
  np.testing.assert_allclose(received, mixed(matrix, own), atol=2e-6)
  assert np.abs((received - own).mean(1)).max() < 1e-6
  if isinstance(state, memories.ResidualState):
    due = x + before(state.residual)
    np.testing.assert_allclose(own + state.residual, due, atol=1e-6)
    kept_and_applied = state.residual.mean(1) + received.mean(1)
    np.testing.assert_allclose(kept_and_applied, due.mean(1), atol=1e-6)
  elif isinstance(state, memories.ReferenceState):
    h = before(state.reference)
    a = 0.5 if 'step' in memory.name else 1.0
    np.testing.assert_allclose(state.reference, h + a * (own - h), atol=1e-6)
    np.testing.assert_allclose(state.received, mixed(matrix, state.reference), atol=2e-6)
  elif isinstance(state, memories.MomentumResidualState):
    u = 0.5 * before(state.velocity) + x
    # Until an entry is sent, m u is the sum of what came, exactly.
    kept = np.where(own != 0, u, u / 0.5)
    np.testing.assert_allclose(state.velocity, kept, atol=1e-6)
  elif isinstance(state, memories.MomentumCorrectionState):
    v = 0.5 * before(state.velocity) + x
    np.testing.assert_allclose(state.velocity, np.where(own != 0, 0, v), atol=1e-6)
    due = before(state.accumulated) + v
    np.testing.assert_allclose(own + state.accumulated, due, atol=1e-6)
  else:
    assert state == ()


@pytest.mark.parametrize('reduction', REDUCTIONS)
def test_the_identity_compressor_is_no_compressor(memory, reduction):
  own, received, _ = exchanges(memory, compressors.identity())[reduction]
  expected = inputs()
  if memory.name.startswith('momentum_residual'):  # of which heavy-ball momentum is left
    for t in range(1, STEPS):
      expected[t] += 0.5 * expected[t - 1]
  np.testing.assert_allclose(own, expected, atol=1e-6)
  np.testing.assert_allclose(received, mixed(REDUCTIONS[reduction][1], expected), atol=1e-6)


def test_gossip_keeps_the_mean(memory, run):
  """Of parameters; that all compressors do is in the table's ring."""
  tx = transforms.mix_compressed(
    RING, compressors.top_k(0.1), axis_name='workers', consensus_rate=0.3, memory=memory
  )
  rng = np.random.default_rng(3)
  params = rng.normal(size=(W, 13)).astype(np.float32)
  after, _, _ = run(tx, FOUR, params, np.zeros((STEPS, W, 13), np.float32))
  after = np.asarray(after, np.float64)
  assert np.abs(after - params).max() > 1e-4
  np.testing.assert_allclose(after.mean(0), params.mean(0), atol=1e-6)


def test_consensus_is_a_fixed_point_of_choco(family):
  tx = transforms.mix_compressed(RING, family, axis_name='workers', consensus_rate=0.5)
  x = jnp.linspace(-2.0, 3.0, 13)

  def step(x):
    state = tx.init(x)._replace(memory=memories.ReferenceState(x, x))
    return tx.update(jnp.zeros_like(x), state, x)

  updates, state = jax.jit(FOUR.spmd(step))(FOUR.replicate(x))
  np.testing.assert_allclose(updates, 0, atol=1e-6)  # W x sums with rounding
  np.testing.assert_array_equal(state.memory.reference[0], x)


@pytest.fixture(scope='module')
def errors_by_memory():
  """|mean x - x*| on heterogeneous quadratics after 4000 steps at a constant rate, by memory."""
  rng = np.random.default_rng(0)
  factors = rng.normal(size=(CLIENTS, DIMENSIONS, DIMENSIONS)) / DIMENSIONS**0.5
  curvature = factors @ factors.transpose(0, 2, 1) + 0.5 * np.eye(DIMENSIONS)
  center = 3 * rng.normal(size=(CLIENTS, DIMENSIONS))
  optimum = np.linalg.solve(curvature.sum(0), np.einsum('wij,wj->i', curvature, center))

  def solve(tx):
    def worker(curvature, center):
      def step(carry, _):
        x, state = carry
        updates, state = tx.update(curvature @ (x - center), state, x)
        return (x + updates, state), None

      x = jnp.zeros(DIMENSIONS)
      return jax.lax.scan(step, (x, tx.init(x)), length=4000)[0][0]

    rows = curvature.astype(np.float32), center.astype(np.float32)
    x = np.asarray(jax.jit(runtime.simulate(CLIENTS).spmd(worker))(*rows))
    return float(np.linalg.norm(x.mean(0) - optimum)), float(np.ptp(x, axis=0).max())

  tenth = compressors.top_k(0.1)
  mean = transforms.compressed_mean
  return {
    name: solve(optax.chain(optax.sgd(0.05), mean(tenth, axis_name='workers', memory=memory)))
    for name, memory in (('residual', memories.residual()), ('none', memories.none()))
  } | {
    'reference': solve(
      optax.chain(mean(tenth, axis_name='workers', memory=memories.reference()), optax.sgd(0.05))
    )
  }


@pytest.mark.filterwarnings('ignore:.* is biased:UserWarning')
def test_a_reference_reaches_the_optimum_of_heterogeneous_quadratics(errors_by_memory):
  assert errors_by_memory['reference'][0] < 1e-5
  assert errors_by_memory['residual'][0] > 1e-2
  assert errors_by_memory['none'][0] > errors_by_memory['residual'][0]
  for _, spread in errors_by_memory.values():
    assert spread == 0  # a mean moves all alike


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_small_bfloat16_gradients_move_parameters_in_the_end(dtype, run):
  """In bfloat16 1 - 0.001 = 1; a float32 residual sums the gradients until they count."""
  tx = optax.chain(
    transforms.compressed_mean(
      compressors.top_k(k=1), axis_name='workers', memory=memories.residual()
    ),
    optax.sgd(1.0),
  )
  params = np.ones((2, 10), dtype)
  gradients = np.full((1000, 2, 10), 0.001, jnp.bfloat16)
  two = runtime.simulate(2)
  after, state, _ = run(tx, two, params, gradients)
  assert after.dtype == dtype
  assert state[0].memory.residual.dtype == jnp.float32
  # 1000 steps of 0.001 would end at 0; bfloat16 parameters round each of 100 steps of 0.01.
  np.testing.assert_allclose(
    np.asarray(after, np.float32), 0, atol=0.02 if dtype == 'float32' else 0.3
  )
  plain, _, _ = run(optax.sgd(1.0), two, np.ones((2, 10), jnp.bfloat16), gradients)
  assert (np.asarray(plain, np.float32) == 1).all()


def test_residual_units_are_those_of_what_is_sent(run):
  """After the learning rate, a change of the rate leaves what is held back as it is."""
  rate = optax.piecewise_constant_schedule(1.0, {1: 0.0})  # 1, then 0
  tx = optax.chain(
    optax.scale_by_learning_rate(rate),
    transforms.compressed_mean(
      compressors.top_k(k=1), axis_name='workers', memory=memories.residual()
    ),
  )
  gradients = np.tile(np.float32([3.0, 2.0, 1.0]), (3, 1, 1))
  _, _, updates = run(tx, runtime.simulate(1), np.zeros((1, 3), np.float32), gradients)
  np.testing.assert_allclose(updates[:, 0], [[-3, 0, 0], [0, -2, 0], [0, 0, -1]])


@pytest.mark.parametrize('step', [0, -1, 1.5, True, 'a', float('nan')])
def test_refused_steps(step):
  with pytest.raises(ValueError, match=f'step={step!r}'):
    memories.reference(step=step)


def test_a_step_may_depend_on_the_leaf():
  memory = memories.reference(step=lambda n: 1 / n)
  x = {'pair': jnp.full(2, 4.0), 'four': jnp.full((2, 2), 4.0)}
  own, received, state = memory.send(memory.init(x), x, lambda y: (y, y))
  assert own['pair'].tolist() == received['pair'].tolist() == [4, 4]
  for kept in state:
    assert kept['pair'].tolist() == [2, 2]
    assert kept['four'].tolist() == [[1, 1], [1, 1]]
  memory = memories.reference(step=lambda n: 2.0)
  with pytest.raises(ValueError, match=r'step=2\.0'):
    memory.send(memory.init(x), x, lambda y: (y, y))


@pytest.mark.parametrize('momentum', [0, 1, -0.5, True, 'a', float('nan')])
@pytest.mark.parametrize('make', [memories.momentum_residual, memories.momentum_correction])
def test_refused_momenta(make, momentum):
  with pytest.raises(ValueError, match=f'{make.__name__} got momentum={momentum!r}'):
    make(momentum)
