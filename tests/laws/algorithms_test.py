"""Laws of every published method: hand-written references, and heterogeneous quadratics."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_dsgd import algorithms, compressors, ledger, runtime, topologies, transforms

W, D = 8, 12
EIGHT = runtime.simulate(W)
AXIS = 'workers'
RING, COMPLETE, DIRECTED = (
  make(W) for make in (topologies.ring, topologies.complete, topologies.directed_ring)
)
EXAMPLES = np.arange(1.0, W + 1)
LAZY_RING = topologies.from_matrix((np.eye(W) + RING.matrix()) / 2)
top_quarter = compressors.top_k(0.25)


def problem(spread=3.0):
  """f_w(x) = (x - c_w)^T A_w (x - c_w) / 2: A [W, D, D] with eigenvalues in [0.5, 4], c [W, D]."""
  rng = np.random.default_rng(0)
  factors = rng.normal(size=(W, D, D)) / D**0.5
  A = factors @ factors.transpose(0, 2, 1) + 0.5 * np.eye(D)
  return A, 1 + spread * rng.normal(size=(W, D))


def optimum(A, c, weights=None):
  A = A if weights is None else A * (np.asarray(weights) / np.mean(weights))[:, None, None]
  return np.linalg.solve(A.sum(0), np.einsum('wij,wj->i', A, c))


def trajectory(tx, steps, spread=3.0):
  """The models from 0 after each step, float64 [steps, W, D], and the last state."""
  A, c = problem(spread)
  tx = optax.with_extra_args_support(tx)

  def worker(A, c):
    def step(carry, _):
      x, state = carry
      grad_fn = lambda x: A @ (x - c)  # noqa: E731
      updates, state = tx.update(grad_fn(x), state, x, grad_fn=grad_fn)
      return (x + updates, state), x + updates

    x = jnp.zeros(D)
    (_, state), history = jax.lax.scan(step, (x, tx.init(x)), length=steps)
    return history, state

  history, state = jax.jit(EIGHT.spmd(worker))(A.astype(np.float32), c.astype(np.float32))
  return np.asarray(history, np.float64).swapaxes(0, 1), state


def by_hand(step, steps, spread=3.0):
  """The same from a NumPy `step(x, g) -> x` of all workers [W, D]."""
  A, c = problem(spread)
  x, history = np.zeros((W, D)), []
  for _ in range(steps):
    x = step(x, np.einsum('wij,wj->wi', A, x - c))
    history.append(x)
  return np.stack(history)


def largest(x, k):
  """Each row's k entries of largest magnitude, else 0."""
  places = np.argsort(-np.abs(x), axis=-1)[..., :k]
  kept = np.zeros_like(x)
  np.put_along_axis(kept, places, np.take_along_axis(x, places, -1), -1)
  return kept


def on_one_chip(tx):
  """A transform with a second axis, 'chips', bound to one worker."""

  def bound(function):
    one = jax.vmap(function, axis_name='chips')
    add = lambda tree: jax.tree.map(lambda x: x[None], tree)  # noqa: E731
    return lambda *trees: jax.tree.map(lambda x: x[0], one(*map(add, trees)))

  return optax.GradientTransformation(bound(tx.init), bound(tx.update))


def in_pairs(tx):
  """A transform that is told to meet in pairs along one edge of a cube after the other."""
  pairs = jnp.array([[i & ~(1 << t) for i in range(W)] for t in range(3)])

  def init(params):
    return jnp.zeros((), jnp.int32), tx.init(params)

  def update(updates, state, params=None, **extra):
    count, state = state
    me = jax.lax.axis_index(AXIS)
    row = transforms.Control(active=True, group=pairs[count % 3, me])
    updates, state = tx.update(updates, state, params, control=row, **extra)
    return updates, (count + 1, state)

  return optax.GradientTransformationExtraArgs(init, update)


def decay(rate, steps):
  return optax.linear_schedule(rate, 0.0, steps)


# By name: a transform, steps, |mean x - x*| / |x*| at the end at most, the largest distance between
# workers, and bytes a worker and step (an average).
SOLVED = {
  'allreduce_sgd': (
    algorithms.allreduce_sgd(0.2, axis_name=AXIS, momentum=0.5), 300, 1e-5, 0, 4 * D
  ),
  'scaled_momentum_sgd': (
    algorithms.scaled_momentum_sgd(0.1, axis_name=AXIS, scale=2.0), 300, 1e-5, 0, 4 * D
  ),
  # A vector crosses whole; matrices are in tests/transforms/low_rank_test.py.
  'power_sgd': (algorithms.power_sgd(0.2, axis_name=AXIS, momentum=0.5), 300, 1e-5, 0, 4 * D),
  # Three values of 4 bytes and three places of 2.
  'topk_sgd': (
    algorithms.topk_sgd(decay(0.1, 3000), 0.25, axis_name=AXIS), 3000, 0.01, 0, 3 * 6
  ),
  'ef_sign_sgd': (algorithms.ef_sign_sgd(decay(0.02, 3000), axis_name=AXIS), 3000, 0.01, 0, 2 + 4),
  'signum': (algorithms.signum(decay(0.02, 1500), axis_name=AXIS), 1500, 0.01, 0, 2 + 4),
  'dsgd': (
    algorithms.dsgd(decay(0.1, 4000), RING, axis_name=AXIS), 4000, 0.01, 0.05, 2 * 4 * D
  ),
  'choco_sgd': (
    algorithms.choco_sgd(
      decay(0.02, 4000), RING, top_quarter, axis_name=AXIS, consensus_rate=0.3
    ),
    4000, 0.02, 0.05, 2 * 3 * 6,
  ),
  'saef_sgd': (
    algorithms.saef_sgd(
      decay(0.1, 3000), top_quarter, axis_name=AXIS, average_every=4, server_compressor=top_quarter
    ),
    3000, 0.01, 0, 3 * 6 + D,
  ),
  'd_qsgd': (
    algorithms.d_qsgd(decay(0.05, 6000), compressors.qsgd(7), axis_name=AXIS), 6000, 0.05, 0, 6 + 4
  ),
  'd_ef_sgd': (
    algorithms.d_ef_sgd(decay(0.1, 3000), top_quarter, axis_name=AXIS), 3000, 0.01, 0, 3 * 6
  ),
  # From here to EF21 a constant rate reaches the optimum.
  'linear_ef_sgd': (algorithms.linear_ef_sgd(0.05, 0.25, axis_name=AXIS), 3000, 1e-4, 0, 3 * 4),
  'diana': (algorithms.diana(0.05, compressors.qsgd(7), axis_name=AXIS), 1000, 1e-4, 0, 6 + 4),
  'ef21_sgd': (algorithms.ef21_sgd(0.05, top_quarter, axis_name=AXIS), 1000, 1e-4, 0, 3 * 6),
  'ef21_momentum_sgd': (
    algorithms.ef21_momentum_sgd(0.05, top_quarter, axis_name=AXIS), 1000, 1e-4, 0, 3 * 6
  ),
  'sasg': (
    algorithms.sasg(decay(0.1, 3000), 0.25, axis_name=AXIS, weight=0.0), 3000, 0.01, 0, 3 * 6
  ),
  'dgs_sgd': (algorithms.dgs_sgd(decay(0.05, 3000), 0.25, axis_name=AXIS), 3000, 0.02, 0, 3 * 6),
  # A warm-up of a third of the steps with six entries.
  'dgc_sgd': (
    algorithms.dgc_sgd(
      decay(0.05, 3000), 0.25, axis_name=AXIS, momentum=0.5, warmup=(0.5,), warmup_steps=1000
    ),
    3000, 0.02, 0, 4 * 6,
  ),
  'cd_adam': (algorithms.cd_adam(decay(0.1, 3000), axis_name=AXIS), 3000, 0.01, 0, 2 + 4),
  # One dense step of four.
  'one_bit_adam': (
    algorithms.one_bit_adam(decay(0.1, 3000), axis_name=AXIS, refresh=lambda step: step % 4 == 0),
    3000, 0.05, 0, (4 * D + 3 * (2 + 4)) / 4,
  ),
  'd_psgd': (
    algorithms.d_psgd(decay(0.05, 4000), RING, axis_name=AXIS), 4000, 0.01, 0.05, 2 * 4 * D
  ),
  # The gradient would cross between chips, if there were two.
  'hierarchical_dsgd': (
    on_one_chip(
      algorithms.hierarchical_dsgd(
        decay(0.1, 4000), RING, axis_name=AXIS, inner_axis_name='chips'
      )
    ),
    4000, 0.01, 0.05, 2 * 4 * D,
  ),
  'lsgd': (
    on_one_chip(algorithms.lsgd(0.2, axis_name=AXIS, inner_axis_name='chips')),
    300, 1e-5, 0, 4 * D,
  ),
  'prague_sgd': (
    in_pairs(algorithms.prague_sgd(decay(0.1, 4000), axis_name=AXIS)), 4000, 0.01, 0.1, 4 * D
  ),
  'stochastic_gradient_push': (
    algorithms.stochastic_gradient_push(decay(0.1, 4000), DIRECTED, axis_name=AXIS),
    4000, 0.02, 0.05, 4 * D + 4,
  ),
  'decent_lam': (
    algorithms.decent_lam(decay(0.02, 4000), RING, axis_name=AXIS), 4000, 0.01, 0.05, 2 * 4 * D
  ),
  'qg_dsgdm': (
    algorithms.qg_dsgdm(decay(0.1, 4000), RING, axis_name=AXIS), 4000, 0.01, 0.1, 2 * 4 * D
  ),
  # From here to dual ascent a constant rate reaches the optimum.
  'gradient_tracking': (
    algorithms.gradient_tracking(0.05, RING, axis_name=AXIS), 1000, 1e-4, 1e-3, 2 * 2 * 4 * D
  ),
  'momentum_tracking': (
    algorithms.momentum_tracking(0.01, RING, axis_name=AXIS), 1000, 1e-4, 1e-3, 2 * 2 * 4 * D
  ),
  'exact_diffusion': (
    algorithms.exact_diffusion(0.05, LAZY_RING, axis_name=AXIS), 1000, 1e-3, 1e-3, 2 * 4 * D
  ),
  'lazy_dual_ascent': (
    algorithms.lazy_dual_ascent(RING, axis_name=AXIS, convexity=0.5, smoothness=5.0),
    400, 1e-4, 1e-3, 2 * 4 * D,
  ),
  'wagma_sgd': (
    algorithms.wagma_sgd(
      decay(0.1, 4000), topologies.one_peer_hypercube(W), axis_name=AXIS, group_size=4, period=4
    ),
    4000, 0.01, 0.05, (3 * 2 * 4 * D + 4 * D) / 4,
  ),
  'deep_squeeze': (
    algorithms.deep_squeeze(
      decay(0.02, 4000), RING, top_quarter, axis_name=AXIS, consensus_rate=0.1
    ),
    4000, 0.1, 3.0, 2 * 3 * 6,
  ),
  'squarm_sgd': (
    algorithms.squarm_sgd(
      decay(0.01, 8000), RING, top_quarter, 2, axis_name=AXIS, consensus_rate=0.3, momentum=0.5
    ),
    8000, 0.02, 0.2, 3 * 6,
  ),
  'local_sgd': (algorithms.local_sgd(decay(0.1, 3000), 4, axis_name=AXIS), 3000, 0.01, 0, D),
  'slow_mo': (algorithms.slow_mo(decay(0.1, 3000), 4, axis_name=AXIS), 3000, 0.01, 0, D),
  'overlap_local_sgd': (
    algorithms.overlap_local_sgd(decay(0.1, 4000), 2, axis_name=AXIS), 4000, 0.02, 0.1, 2 * D
  ),
  'diloco': (algorithms.diloco(optax.sgd(decay(0.05, 3000)), 4, axis_name=AXIS), 3000, 0.01, 0, D),
  'streaming_diloco': (
    algorithms.streaming_diloco(
      optax.sgd(decay(0.05, 4000)), 4, axis_name=AXIS, fragment=lambda path, like: [1], fragments=2
    ),
    4000, 0.02, 0.1, D,
  ),
  'distributed_sign_momentum': (
    algorithms.distributed_sign_momentum(
      optax.sgd(decay(0.05, 4000)), decay(0.05, 4000), 4, axis_name=AXIS, weight_decay=0.0
    ),
    4000, 0.01, 0, D,
  ),
  'dream_ddp': (
    algorithms.dream_ddp(
      optax.sgd(decay(0.05, 4000)), 4, axis_name=AXIS, phases=lambda path, like: [1, 3]
    ),
    4000, 0.01, 0.05, 2 * D,
  ),
  'mm_psgd': (
    algorithms.mm_psgd(
      decay(0.1, 3000), 4, axis_name=AXIS, block=lambda round_: round_ % 2, blocks=2
    ),
    3000, 0.01, 0, D,
  ),
  # Both chains, each with its share of the mean.
  'mc_psgd': (
    algorithms.mc_psgd(
      decay(0.1, 3000), 4, axis_name=AXIS, block=lambda round_: round_ // 1000, blocks=2
    ),
    3000, 0.01, 0, 2 * D,
  ),
  'fed_opt': (
    algorithms.fed_opt(decay(0.1, 3000), optax.yogi(decay(0.1, 700)), 4, axis_name=AXIS),
    3000, 0.02, 0, D,
  ),
  'fed_prox': (
    algorithms.fed_prox(decay(0.1, 3000), 4, axis_name=AXIS, strength=1.0), 3000, 0.01, 0, D
  ),
  # A constant rate reaches the optimum, with two copies of the model a round.
  'scaffold': (algorithms.scaffold(0.05, 4, axis_name=AXIS), 1000, 1e-4, 0, 2 * D),
  'bvr_l_sgd': (
    algorithms.bvr_l_sgd(0.05, 4, axis_name=AXIS, stage=5), 1000, 1e-4, 0, 2 * D + 1
  ),
  'fed_avg': (
    algorithms.fed_avg(decay(0.1, 3000), 4, axis_name=AXIS, examples=EXAMPLES),
    3000, 0.01, 0, D + 1,
  ),
}  # fmt: skip
# On skewed data a majority overrules the rest, and velocities count what is sent often for more.
SHARED_DATA_ONLY = {'signum', 'dgs_sgd', 'dgc_sgd'}


def test_every_algorithm_is_tested(require_examples):
  require_examples(algorithms, optax.GradientTransformation, SOLVED)


@pytest.mark.parametrize('name', SOLVED)
def test_solves_quadratics_ends_in_consensus_and_counts_bytes(name):
  tx, steps, error, apart, nbytes = SOLVED[name]
  spread = 0.0 if name in SHARED_DATA_ONLY else 3.0
  history, state = trajectory(tx, steps, spread)
  best = optimum(*problem(spread), EXAMPLES if name == 'fed_avg' else None)
  assert np.linalg.norm(history[-1].mean(0) - best) <= error * np.linalg.norm(best)
  assert np.ptp(history[-1], axis=0).max() <= apart
  assert np.broadcast_to(ledger.bytes_sent(state), (W,)).tolist() == [steps * nbytes] * W


def test_allreduce_is_sgd_on_the_mean_gradient():
  arguments = {'momentum': 0.9, 'nesterov': True}
  history, _ = trajectory(algorithms.allreduce_sgd(0.1, axis_name=AXIS, **arguments), 10)
  trace = np.zeros(D)

  def step(x, g):
    nonlocal trace
    trace = g.mean(0) + 0.9 * trace
    return x - 0.1 * (g.mean(0) + 0.9 * trace)

  np.testing.assert_allclose(history, by_hand(step, 10), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('k', [3, D])
def test_topk_sgd_by_hand(k):
  """acc = e + lr g, c = top_k(acc), x <- x - mean c; and x - y = mean e for the undelayed y."""
  steps, e, y = 12, np.zeros((W, D)), np.zeros(D)
  history, state = trajectory(algorithms.topk_sgd(0.1, k / D, axis_name=AXIS), steps)

  def step(x, g):
    nonlocal e, y
    accumulated = e + 0.1 * g
    sent = largest(accumulated, k)
    e = accumulated - sent
    y = y - 0.1 * g.mean(0)
    return x - sent.mean(0)

  np.testing.assert_allclose(history, by_hand(step, steps), rtol=1e-5, atol=1e-5)
  # The paper's identity, on the library's own run. The memory holds updates, -lr g.
  A, c = problem()
  x = np.concatenate([np.zeros((1, W, D)), history[:-1]])
  y = -0.1 * np.einsum('wij,twj->twi', A, x - c).mean(1).sum(0)
  residual = np.asarray(state[1].memory.residual, np.float64)
  np.testing.assert_allclose(history[-1, 0] - y, -residual.mean(0), atol=5e-6)
  if k == D:
    sgd, _ = trajectory(algorithms.allreduce_sgd(0.1, axis_name=AXIS), steps)
    np.testing.assert_allclose(history, sgd, atol=1e-5)
    assert not residual.any()


def test_ef_sign_sgd_by_hand():
  """p = lr g + e, c = mean |p| sign(p), e <- p - c, x <- x - mean c."""
  history, _ = trajectory(algorithms.ef_sign_sgd(0.1, axis_name=AXIS), 12)
  e = np.zeros((W, D))

  def step(x, g):
    nonlocal e
    p = 0.1 * g + e
    sent = np.abs(p).mean(1, keepdims=True) * np.where(p > 0, 1, -1)
    e = p - sent
    return x - sent.mean(0)

  np.testing.assert_allclose(history, by_hand(step, 12), rtol=1e-5, atol=1e-5)


def test_signum_by_hand():
  """m <- b m + (1 - b) g, x <- x - lr sign(sum_w sign(m_w)); eight voters tie at times."""
  history, _ = trajectory(algorithms.signum(0.05, axis_name=AXIS, momentum=0.8), 40)
  m, ties = np.zeros((W, D)), 0

  def step(x, g):
    nonlocal m, ties
    m = 0.8 * m + 0.2 * g
    votes = np.sign(m).sum(0)
    ties += (votes == 0).sum()
    return x - 0.05 * np.sign(votes)

  np.testing.assert_allclose(history, by_hand(step, 40), atol=1e-5)
  assert ties > 0


@pytest.mark.parametrize('topology', [RING, topologies.star(W), topologies.one_peer_exponential(W)])
def test_dsgd_by_hand(topology):
  """x <- W_t (x - lr g), with momentum that stays local."""
  history, _ = trajectory(algorithms.dsgd(0.1, topology, axis_name=AXIS, momentum=0.5), 10)
  trace, rounds = np.zeros((W, D)), itertools.count()

  def step(x, g):
    nonlocal trace
    trace = g + 0.5 * trace
    return topology.matrix(next(rounds)) @ (x - 0.1 * trace)

  np.testing.assert_allclose(history, by_hand(step, 10), rtol=1e-5, atol=1e-5)


def test_dsgd_on_the_complete_graph_is_allreduce():
  """Before its step each worker holds the mean, so its step is that of the mean gradient."""
  gossip, _ = trajectory(algorithms.dsgd(0.1, COMPLETE, axis_name=AXIS), 10)
  mean, _ = trajectory(algorithms.allreduce_sgd(0.1, axis_name=AXIS), 10)
  np.testing.assert_allclose(gossip, mean, rtol=1e-5, atol=1e-5)


def test_the_distance_of_dsgd_is_proportional_to_the_rate():
  far, near = (
    np.ptp(trajectory(algorithms.dsgd(rate, RING, axis_name=AXIS), 1000)[0][-1], axis=0).max()
    for rate in (0.02, 0.01)
  )
  assert 1.8 < far / near < 2.2


def test_choco_sgd_by_hand():
  """With one copy a neighbour, as the paper writes it and nobody should store it."""
  rate, g_rate, steps = 0.1, 0.4, 15
  tx = algorithms.choco_sgd(rate, RING, top_quarter, axis_name=AXIS, consensus_rate=g_rate)
  history, _ = trajectory(tx, steps)
  matrix = RING.matrix()
  neighbors = {i: np.flatnonzero(matrix[i]).tolist() for i in range(W)}
  copies = {i: {j: np.zeros(D) for j in neighbors[i]} for i in range(W)}

  def step(x, g):
    y = x - rate * g
    messages = [largest(y[i] - copies[i][i], 3) for i in range(W)]
    for i in range(W):
      for j in neighbors[i]:
        copies[i][j] = copies[i][j] + messages[j]
    return np.stack(
      [
        y[i] + g_rate * sum(matrix[i, j] * (copies[i][j] - copies[i][i]) for j in neighbors[i])
        for i in range(W)
      ]
    )

  np.testing.assert_allclose(history, by_hand(step, steps), rtol=1e-5, atol=1e-5)


def test_local_sgd_by_hand():
  history, _ = trajectory(algorithms.local_sgd(0.1, 3, axis_name=AXIS, momentum=0.5), 10)
  trace, steps = np.zeros((W, D)), itertools.count(1)

  def step(x, g):
    nonlocal trace
    trace = g + 0.5 * trace  # stays local, neither averaged nor reset
    x = x - 0.1 * trace
    return x if next(steps) % 3 else np.broadcast_to(x.mean(0), x.shape)

  np.testing.assert_allclose(history, by_hand(step, 10), rtol=1e-5, atol=1e-5)


def test_local_sgd_of_one_step_is_allreduce():
  local, _ = trajectory(algorithms.local_sgd(0.1, 1, axis_name=AXIS), 10)
  mean, _ = trajectory(algorithms.allreduce_sgd(0.1, axis_name=AXIS), 10)
  np.testing.assert_allclose(local, mean, rtol=1e-6, atol=2e-6)


def test_fed_avg_of_one_step_is_gradient_descent_on_the_weighted_loss():
  tx = algorithms.fed_avg(0.1, 1, axis_name=AXIS, examples=EXAMPLES)
  history, _ = trajectory(tx, 10)
  shares = EXAMPLES / EXAMPLES.sum()
  step = lambda x, g: x - 0.1 * shares @ g  # noqa: E731
  np.testing.assert_allclose(history, by_hand(step, 10), rtol=1e-6, atol=2e-6)


# C K is 0.4, 1.6, 3.2 and 8.
@pytest.mark.parametrize(('fraction', 'drawn'), [(0.05, 1), (0.2, 2), (0.4, 3), (1.0, 8)])
def test_only_drawn_clients_matter(fraction, drawn):
  """After each round the models are the weighted mean of exactly one set of clients, of its size.

  The set is found by trying all subsets of the clients' own ways, not by drawing again.
  """
  rounds, period = 12, 2
  tx = algorithms.fed_avg(
    0.1, period, axis_name=AXIS, examples=EXAMPLES, client_fraction=fraction, seed=3
  )
  history, _ = trajectory(tx, rounds * period)
  A, c = problem()
  subsets = [s for m in range(1, W + 1) for s in itertools.combinations(range(W), m)]
  sets, start = [], np.zeros((W, D))
  for r in range(rounds):
    alone = start
    for _ in range(period):
      alone = alone - 0.1 * np.einsum('wij,wj->wi', A, alone - c)
    end = history[(r + 1) * period - 1]
    assert np.ptp(end, axis=0).max() < 1e-6  # x + (anchor - x) rounds
    shares = np.stack([np.isin(range(W), s) * EXAMPLES for s in subsets])
    means = (shares / shares.sum(1, keepdims=True)) @ alone
    matches = np.flatnonzero(np.abs(means - end[0]).max(1) < 1e-4)
    assert len(matches) == 1
    sets.append(subsets[matches[0]])
    start = end
  assert {len(s) for s in sets} == {drawn}
  if drawn < W:
    assert len(set(sets)) > 3  # drawn anew each round


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ({'examples': [1, 0]}, r'examples=\[1, 0\]'),
    ({'examples': [1, -2]}, 'examples='),
    ({'examples': [1, np.nan]}, 'examples='),
    ({'examples': 3}, 'examples=3'),
    ({'examples': [1, 2], 'client_fraction': 0}, 'client_fraction=0'),
    ({'examples': [1, 2], 'client_fraction': 1.5}, r'client_fraction=1\.5'),
  ],
  ids=str,
)
def test_fed_avg_refuses(arguments, message):
  with pytest.raises(ValueError, match=f'fed_avg got {message}'):
    algorithms.fed_avg(0.1, 1, axis_name=AXIS, **arguments)


@pytest.mark.parametrize('rate', [0, -0.5, 1.5, True, 'a', float('nan')], ids=repr)
def test_choco_refuses_consensus_rates(rate):
  with pytest.raises(ValueError, match=f'consensus_rate={rate!r}'):
    algorithms.choco_sgd(0.1, RING, top_quarter, axis_name=AXIS, consensus_rate=rate)


def test_choco_refuses_topologies_that_vary():
  with pytest.raises(ValueError, match='one_peer_exponential.*varies in time'):
    algorithms.choco_sgd(
      0.1, topologies.one_peer_exponential(W), top_quarter, axis_name=AXIS, consensus_rate=0.5
    )


RATED = {
  'allreduce_sgd': algorithms.allreduce_sgd,
  'topk_sgd': functools.partial(algorithms.topk_sgd, fraction=0.25),
  'ef_sign_sgd': algorithms.ef_sign_sgd,
  'power_sgd': algorithms.power_sgd,
  'scaled_momentum_sgd': functools.partial(algorithms.scaled_momentum_sgd, scale=1.0),
  'signum': algorithms.signum,
  'dsgd': functools.partial(algorithms.dsgd, topology=RING),
  'choco_sgd': functools.partial(
    algorithms.choco_sgd, topology=RING, compressor=top_quarter, consensus_rate=0.5
  ),
  'saef_sgd': functools.partial(algorithms.saef_sgd, compressor=top_quarter, average_every=2),
  'd_qsgd': functools.partial(algorithms.d_qsgd, compressor=compressors.qsgd(7)),
  'd_ef_sgd': functools.partial(algorithms.d_ef_sgd, compressor=top_quarter),
  'linear_ef_sgd': algorithms.linear_ef_sgd,
  'diana': functools.partial(algorithms.diana, compressor=compressors.qsgd(7)),
  'ef21_sgd': functools.partial(algorithms.ef21_sgd, compressor=top_quarter),
  'ef21_momentum_sgd': functools.partial(algorithms.ef21_momentum_sgd, compressor=top_quarter),
  'sasg': functools.partial(algorithms.sasg, fraction=0.25, weight=1.0),
  'dgs_sgd': functools.partial(algorithms.dgs_sgd, fraction=0.25),
  'dgc_sgd': functools.partial(algorithms.dgc_sgd, fraction=0.25, warmup=(0.5,), warmup_steps=2),
  'cd_adam': algorithms.cd_adam,
  'one_bit_adam': functools.partial(algorithms.one_bit_adam, refresh=lambda step: step < 2),
  'd_psgd': functools.partial(algorithms.d_psgd, topology=RING),
  'hierarchical_dsgd': lambda learning_rate, axis_name: on_one_chip(
    algorithms.hierarchical_dsgd(learning_rate, RING, axis_name=axis_name, inner_axis_name='chips')
  ),
  'stochastic_gradient_push': functools.partial(
    algorithms.stochastic_gradient_push, topology=DIRECTED
  ),
  'decent_lam': functools.partial(algorithms.decent_lam, topology=RING),
  'qg_dsgdm': functools.partial(algorithms.qg_dsgdm, topology=RING),
  'gradient_tracking': functools.partial(algorithms.gradient_tracking, topology=RING),
  'momentum_tracking': functools.partial(algorithms.momentum_tracking, topology=RING),
  'exact_diffusion': functools.partial(algorithms.exact_diffusion, topology=LAZY_RING),
  'wagma_sgd': functools.partial(
    algorithms.wagma_sgd, topology=topologies.one_peer_hypercube(W), group_size=2, period=3
  ),
  'deep_squeeze': functools.partial(
    algorithms.deep_squeeze, topology=RING, compressor=top_quarter, consensus_rate=0.2
  ),
  'squarm_sgd': functools.partial(
    algorithms.squarm_sgd, topology=RING, compressor=top_quarter, period=2, consensus_rate=0.2,
    threshold=10.0,
  ),
  'lsgd': lambda learning_rate, axis_name: on_one_chip(
    algorithms.lsgd(learning_rate, axis_name=axis_name, inner_axis_name='chips')
  ),
  'prague_sgd': lambda learning_rate, axis_name: in_pairs(
    algorithms.prague_sgd(learning_rate, axis_name=axis_name)
  ),
  'slow_mo': functools.partial(algorithms.slow_mo, period=2),
  'overlap_local_sgd': algorithms.overlap_local_sgd,
  'diloco': lambda learning_rate, axis_name: algorithms.diloco(
    optax.sgd(learning_rate), 2, axis_name=axis_name
  ),
  'streaming_diloco': lambda learning_rate, axis_name: algorithms.streaming_diloco(
    optax.sgd(learning_rate), 2, axis_name=axis_name, fragment=lambda path, x: [0], fragments=1
  ),
  'distributed_sign_momentum': lambda learning_rate, axis_name: (
    algorithms.distributed_sign_momentum(
      optax.sgd(learning_rate), learning_rate, 2, axis_name=axis_name
    )
  ),
  'dream_ddp': lambda learning_rate, axis_name: algorithms.dream_ddp(
    optax.sgd(learning_rate), 2, axis_name=axis_name, phases=lambda path, x: [1]
  ),
  'mm_psgd': functools.partial(algorithms.mm_psgd, period=2, block=lambda r: r % 2, blocks=2),
  'mc_psgd': functools.partial(algorithms.mc_psgd, period=2, block=lambda r: r % 2, blocks=2),
  'fed_opt': functools.partial(algorithms.fed_opt, outer=optax.sgd(1.0), period=2),
  'fed_prox': functools.partial(algorithms.fed_prox, period=2, strength=0.1),
  'scaffold': functools.partial(algorithms.scaffold, period=2),
  'bvr_l_sgd': functools.partial(algorithms.bvr_l_sgd, period=2, stage=2),
  'local_sgd': functools.partial(algorithms.local_sgd, period=2),
  'fed_avg': functools.partial(algorithms.fed_avg, period=2, examples=EXAMPLES),
}  # fmt: skip


@pytest.mark.parametrize('name', RATED)
def test_rates_may_be_schedules_and_injected(name):
  """A schedule's rate, given or injected, is that of the step."""
  make = functools.partial(RATED[name], axis_name=AXIS)
  schedule = optax.piecewise_constant_schedule(0.1, {2: 0.5})
  direct, _ = trajectory(make(schedule), 5)
  injected, state = trajectory(
    optax.inject_hyperparams(lambda learning_rate: make(learning_rate))(learning_rate=schedule), 5
  )
  np.testing.assert_allclose(injected, direct, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(state.hyperparams['learning_rate'], 0.05)


def test_every_algorithm_takes_schedules(require_examples):
  # Its steps follow from constants of the problem.
  require_examples(algorithms, optax.GradientTransformation, RATED | {'lazy_dual_ascent': None})
