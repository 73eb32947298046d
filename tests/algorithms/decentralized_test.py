"""Gossip by hand, in both orders and two levels; SQuARM and DeepSqueeze, and what they send."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from jax_dsgd import algorithms, compressors, ledger, runtime, topologies, transforms

AXIS, W, D = 'workers', 8, 20
RING = topologies.ring(W)
M = RING.matrix()
close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  'topology', [RING, topologies.one_peer_exponential(W), topologies.random_groups(W, 4, 3, seed=0)],
  ids=lambda topology: topology.name,
)  # fmt: skip
@pytest.mark.parametrize('first', ['step', 'mix'])
def test_both_orders_by_hand(topology, first, quadratics):
  problem, trace, t = quadratics(3.0), np.zeros((W, D)), 0

  def step(x, gradients):
    nonlocal trace, t
    trace, mix = gradients(x) + 0.5 * trace, topology.matrix(t)
    t += 1
    return mix @ (x - 0.05 * trace) if first == 'step' else mix @ x - 0.05 * trace

  make = algorithms.dsgd if first == 'step' else algorithms.d_psgd
  run = problem.solve(make(0.05, topology, axis_name=AXIS, momentum=0.5), 15)
  close(run.models, problem.by_hand(step, 15))


def two_levels(A, c, steps):
  """Four slices of two: the exact mean gradient inside, half a step of a ring between. By hand."""
  ring, x = topologies.ring(4).matrix(), np.zeros((4, 3))
  for _ in range(steps):
    mean = np.mean(A * (x[:, None] - c), axis=1)
    x = ring @ (x - 0.1 * mean)
  return x


def test_hierarchical_gossip_under_nested_vmap_and_on_a_mesh_of_two_axes():
  rng = np.random.default_rng(0)
  A, c = rng.uniform(1, 3, size=(4, 2, 3)), rng.normal(size=(4, 2, 3))
  tx = algorithms.hierarchical_dsgd(
    0.1, topologies.ring(4), axis_name='slices', inner_axis_name='chips'
  )

  def worker(A, c):
    x = jax.lax.pcast(jnp.zeros(3), (), to='varying') + 0 * c
    state = tx.init(x)
    for _ in range(6):
      updates, state = tx.update(A * (x - c), state, x)
      x = x + updates
    return x

  given = A.astype(np.float32), c.astype(np.float32)
  nested = jax.vmap(jax.vmap(worker, axis_name='chips'), axis_name='slices')(*given)
  mesh = runtime.make_mesh(slices=4, chips=2)
  rows = PartitionSpec('slices', 'chips')

  def one(A, c):
    return worker(A[0, 0], c[0, 0])[None, None]

  program = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=rows, out_specs=rows))
  right = np.repeat(two_levels(A, c, 6)[:, None], 2, axis=1)
  close(nested, right)
  close(program(*given), right)
  kinds = {x.kind for x in ledger.collectives(program.lower(*given).compile().as_text())}
  assert kinds == {'all-reduce', 'collective-permute'}


def test_deep_squeeze_by_hand(quadratics, largest):
  problem, e = quadratics(1.0), np.zeros((W, D))

  def step(x, gradients):
    nonlocal e
    y = x - 0.05 * gradients(x)
    sent = largest(y + e, 5)
    e = y + e - sent
    return y + 0.2 * (M @ sent - sent)

  tx = algorithms.deep_squeeze(
    0.05, RING, compressors.top_k(k=5), axis_name=AXIS, consensus_rate=0.2
  )
  close(problem.solve(tx, 20).models, problem.by_hand(step, 20))


def squarm(rate, compressor, period=1, **arguments):
  return algorithms.squarm_sgd(rate, RING, compressor, period, axis_name=AXIS, **arguments)


@pytest.mark.parametrize(('dtype', 'within'), [(np.float32, 1e-6), (np.float64, 1e-14)])
def test_squarm_without_its_parts_is_dsgd(dtype, within, quadratics):
  tx = squarm(0.05, compressors.identity(), consensus_rate=1.0, momentum=0.0)
  off = quadratics(1.0).solve(tx, 30, dtype).models
  plain = quadratics(1.0).solve(algorithms.dsgd(0.05, RING, axis_name=AXIS), 30, dtype).models
  np.testing.assert_allclose(off, plain, rtol=within, atol=within)


def test_squarm_by_hand(quadratics, largest):
  """Nesterov steps, and every second step differences of whoever has news."""
  problem, steps, threshold = quadratics(3.0), 14, 4000.0
  v, copies, t, sent = np.zeros((W, D)), np.zeros((W, D)), 0, np.zeros(W, int)

  def step(x, gradients):
    nonlocal v, copies, t
    g = gradients(x)
    v = 0.5 * v + g
    x = x - 0.02 * (0.5 * v + g)
    t += 1
    if t % 2:
      return x
    news = ((x - copies) ** 2).sum(1) > threshold * 0.02**2
    sent[:] += news
    copies = copies + news[:, None] * largest(x - copies, 5)
    return x + 0.3 * (M @ copies - copies)

  tx = squarm(
    0.02, compressors.top_k(k=5), 2, consensus_rate=0.3, threshold=threshold, momentum=0.5
  )
  run = problem.solve(tx, steps)
  close(run.models, problem.by_hand(step, steps))
  assert 0 < sent.sum() < W * steps // 2
  assert ledger.bytes_sent(run.state).tolist() == (sent * 2 * 5 * 6).tolist()


@pytest.fixture(scope='module')
def noisy():
  """The mean model's error, the worst distance from it and the bytes, with noisy gradients."""

  def run(tx, steps=12_000):
    rng = np.random.default_rng(5)
    c = rng.normal(size=(W, D)).astype(np.float32)

    def worker(c, key):
      def step(carry, key):
        x, state = carry
        noise = 0.1 * jax.random.normal(key, (D,))
        updates, state = tx.update(x - c + noise, state, x)
        return (x + updates, state), None

      x = jnp.zeros(D)
      return jax.lax.scan(step, (x, tx.init(x)), jax.random.split(key, steps))[0]

    keys = jax.random.split(jax.random.key(0), W)
    x, state = jax.jit(runtime.simulate(W).spmd(worker))(c, keys)
    x = np.asarray(x)
    error = float(np.linalg.norm(x.mean(0) - c.mean(0)))
    apart = float(np.linalg.norm(x - x.mean(0), axis=1).max())
    return error, apart, int(np.sum(ledger.bytes_sent(state)))

  return run


def test_messages_fall_with_the_threshold_at_the_same_error(noisy):
  """The published counts: 19 200 without a threshold, ever fewer with one, 96 000 with neither.

  To both neighbours at once; the error is that of the mean model. Local models pay:
  they are twenty times as far from it.
  """
  steps = 12_000
  rate = lambda step: 0.5 / (step + 100.0)  # noqa: E731
  fifth = compressors.sign_top_k(0.2)
  payload = 2 * (4 * 2 + 1 + 4)  # to two neighbours: places, signs and a magnitude
  errors, distances, messages = [], [], []
  for threshold in (0.0, 30.0, 300.0, 3000.0):
    error, apart, nbytes = noisy(squarm(rate, fifth, 5, consensus_rate=0.2, threshold=threshold))
    errors.append(error)
    distances.append(apart)
    messages.append(nbytes // payload)
  heavy = algorithms.d_psgd(rate, RING, axis_name=AXIS, momentum=0.9)
  dense, apart, nbytes = noisy(heavy)
  assert nbytes // (2 * 4 * D) == W * steps == 96_000
  assert messages[0] == W * steps // 5 == 19_200
  assert messages[0] > messages[1] > messages[2] > messages[3] > 0
  assert messages[3] < messages[0] / 3
  assert max(errors) < 1.1 * min(errors)
  assert max(errors) < 1.2 * dense
  assert min(distances) > 10 * apart


def test_schedules_of_groups_lead_to_the_mean_model(quadratics):
  """Partial all-reduce: a falling rate, random groups, pairs, a hypercube, and nodes with heads."""
  problem, rate = quadratics(1.0), optax.linear_schedule(0.1, 0.0, 2000)
  for topology in (
    topologies.random_groups(W, 4, 20, seed=0),
    topologies.random_pairs(W, 20, seed=0),
    topologies.one_peer_hypercube(W),
    topologies.inter_intra(2, 4),
  ):
    models = problem.solve(algorithms.dsgd(rate, topology, axis_name=AXIS), 2000).models
    assert np.abs(models[-1] - problem.best).max() < 2e-2, topology.name


def test_lateness_comes_from_control(quadratics):
  """A step of WAGMA with one late worker among eight, whose old buffer the others take."""
  tx = algorithms.wagma_sgd(
    0.1, topologies.one_peer_hypercube(W), axis_name=AXIS, group_size=2, period=10
  )
  workers, x = runtime.simulate(W), jnp.arange(8.0)
  state = workers.spmd(tx.init)(x)
  late = transforms.Control(late=jnp.arange(8) == 0)
  step = lambda x, state, row: tx.update(jnp.ones(()), state, x, control=row)[0] + x  # noqa: E731
  after = workers.spmd(step)(x, state, late)
  y = np.arange(8) - 0.1
  right = np.repeat(y.reshape(4, 2).mean(1), 2)
  right[1] = (0 + y[1]) / 2  # worker 0's buffer is where it began
  right[0] = (2 * right[1] + y[0]) / 3
  np.testing.assert_allclose(after, right, rtol=1e-6)
