"""Mixing with neighbours: means, precision, what crosses, partial all-reduce, what is refused."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jax_dsgd import (
  algorithms,
  compressors,
  ledger,
  memories,
  runtime,
  topologies,
  transforms,
)

AXIS, W = 'workers', 8
RING = topologies.ring(W)
tenth = compressors.top_k(0.1)


def rows(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def compressed(compressor, memory, topology=RING, rate=0.3):
  return transforms.mix_compressed(
    topology, compressor, axis_name=AXIS, consensus_rate=rate, memory=memory
  )


def changing():
  """Five rounds of different graphs and weights."""
  lazy = topologies.from_matrix((np.eye(W) + RING.matrix()) / 2)
  return topologies.concatenate(
    RING, topologies.star(W), lazy, topologies.random_pairs(W, 2, seed=0)
  )


KEEPS_THE_MEAN = {
  'ring': transforms.mix_neighbors(RING, axis_name=AXIS),
  'directed ring': transforms.mix_neighbors(topologies.directed_ring(W), axis_name=AXIS),
  'weights that change': transforms.mix_neighbors(changing(), axis_name=AXIS),
  'Chebyshev': transforms.mix_neighbors(RING, axis_name=AXIS, rounds=transforms.chebyshev(RING, 3)),
  'before the step': transforms.before_step(transforms.mix_neighbors(RING, axis_name=AXIS)),
  'CHOCO, top-k': compressed(tenth, None),
  'CHOCO, signs': compressed(compressors.scaled_sign(), None),
  'CHOCO, random': compressed(compressors.random_k(0.1), memories.reference(step=0.5)),
  'CHOCO, levels': compressed(compressors.qsgd(7), None),
  'residual': compressed(tenth, memories.residual()),
  'residual, changing': compressed(compressors.scaled_sign(), memories.residual(), changing()),
  'naive': compressed(compressors.ternary(), memories.none()),
  'a trigger': transforms.mix_compressed(
    RING, tenth, axis_name=AXIS, consensus_rate=0.3, trigger=lambda squared, t: squared > 3.0
  ),
  'pairs and means': transforms.mix_without_waiting(
    topologies.one_peer_hypercube(W), axis_name=AXIS, group_size=2, period=3
  ),
}


@pytest.mark.parametrize('name', KEEPS_THE_MEAN)
def test_the_mean_over_workers_is_kept_at_every_round(walk, name):
  start, updates = rows(W, 40), rows(6, W, 40, seed=1)
  history, _ = walk(KEEPS_THE_MEAN[name], start, 6, updates=updates)
  means = np.concatenate([start[None], history]).astype(np.float64).mean(1)
  np.testing.assert_allclose(
    np.diff(means, axis=0), updates.astype(np.float64).mean(1), rtol=0, atol=1e-6
  )


def test_weights_may_change_every_round(walk):
  topology = changing()
  assert topology.period == 5
  history, _ = walk(transforms.mix_neighbors(topology, axis_name=AXIS), rows(W, 3), 7)
  x = rows(W, 3).astype(np.float64)
  for t, now in enumerate(history):
    x = topology.matrix(t) @ x
    np.testing.assert_allclose(now, x, atol=1e-6)


def test_half_precision_is_mixed_in_float32(walk):
  """Sums in bfloat16 would round 256 + 1 to 256, and lose a small neighbour."""
  values = np.array([256, 1, 1, 1, 1, 1, 1, 1], np.float32)
  values = np.stack([values, np.roll(values, 1)], axis=1)
  tx = transforms.mix_neighbors(topologies.complete(W), axis_name=AXIS)
  step = runtime.simulate(W).spmd(lambda x, s: tx.update(jnp.zeros_like(x), s, x)[0])
  half = jnp.asarray(values, jnp.bfloat16)
  state = runtime.simulate(W).spmd(tx.init)(half)
  updates = step(half, state)
  assert updates.dtype == jnp.bfloat16
  right = np.float32(263 / 8) - values
  np.testing.assert_allclose(updates.astype(np.float32), right, rtol=2**-8)
  history, state = walk(tx, half, 1)
  assert history.dtype == jnp.bfloat16
  assert ledger.bytes_sent(state).tolist() == [7 * 2 * 2] * W  # and it crosses in bfloat16
  np.testing.assert_allclose(history[0].astype(np.float32), 263 / 8, rtol=2**-7)


def test_who_has_no_partner_keeps_its_value(walk):
  """Of an odd number, one is left over in each round, and is not halved."""
  pairs = topologies.random_pairs(5, 4, seed=0)
  history, _ = walk(
    transforms.mix_neighbors(pairs, axis_name=AXIS), np.arange(5.0, dtype=np.float32), 4
  )
  before = np.arange(5.0)
  for t, now in enumerate(history):
    (alone,) = np.flatnonzero(np.diag(pairs.matrix(t)) == 1)
    assert now[alone] == before[alone]
    assert (now != before).sum() == 4 or np.allclose(now, pairs.matrix(t) @ before)
    before = now


def test_uneven_groups_have_their_own_means(walk):
  """Groups of four and of two, of 0 to 5: 1.5 and 4.5; then all: 2.5, not the mean of means 3."""
  schedule = topologies.then_mean_every(uneven(), 2)
  history, _ = walk(
    transforms.mix_neighbors(schedule, axis_name=AXIS), np.arange(6.0, dtype=np.float32), 2
  )
  np.testing.assert_allclose(history[0], [1.5] * 4 + [4.5] * 2, atol=1e-6)
  np.testing.assert_allclose(history[1], [2.5] * 6, atol=1e-6)


def uneven():
  """One round in which 0 to 3 and 4 to 5 meet, by cyclic shifts inside each group."""
  shift = lambda k: [*np.roll(range(4), -k), *(np.roll((4, 5), -k) if k < 2 else (4, 5))]  # noqa: E731
  weights = np.array([[1 / 4] * 4 + [1 / 2] * 2] + [[1 / 4] * 4 + [0] * 2] * 2)
  round_ = topologies.Round(
    np.array([1 / 4] * 4 + [1 / 2] * 2), np.array([shift(k) for k in (1, 2, 3)]), weights
  )
  return topologies.Topology('uneven', (round_,))


def test_a_hypercube_of_pairs_is_the_exact_mean(walk):
  cube = transforms.mix_neighbors(topologies.one_peer_hypercube(16), axis_name=AXIS)
  history, _ = walk(cube, np.eye(16, dtype=np.float32), 4)
  np.testing.assert_array_equal(history[-1], np.full((16, 16), 1 / 16))
  assert history[2].max() == 1 / 8


@pytest.mark.parametrize(('n', 'size'), [(8, 2), (8, 4), (16, 4), (12, 3), (6, 6)])
def test_random_groups_have_the_published_eigenvalue(walk, n, size):
  """(n - g) / (g (n - 1)) of E[W], which is E[W^T W]: W is a projection."""
  groups = topologies.random_groups(n, size, 2000, seed=0)
  mean = np.mean([groups.matrix(t) for t in range(2000)], axis=0)
  second = np.linalg.eigvalsh(mean)[-2]
  assert second == pytest.approx((n - size) / (size * (n - 1)), abs=0.05)
  few = topologies.random_groups(n, size, 3, seed=0)
  history, _ = walk(transforms.mix_neighbors(few, axis_name=AXIS), rows(n, 2), 3)
  x = rows(n, 2)
  for t in range(3):
    members = few.matrix(t) > 0
    x = np.stack([x[members[i]].mean(0) for i in range(n)])
    np.testing.assert_allclose(history[t], x, atol=1e-6)


def test_the_eigenvalue_is_exact_over_all_partitions():
  """Four workers fall into pairs in three ways."""
  ways = [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 3], [1, 2]]]
  mean = np.zeros((4, 4))
  for way in ways:
    for pair in way:
      for i, j in itertools.product(pair, pair):
        mean[i, j] += 1 / 2 / 3
  assert np.linalg.eigvalsh(mean)[-2] == pytest.approx((4 - 2) / (2 * 3))


def test_heads_of_nodes_meet_and_then_their_nodes(walk):
  """Two nodes of three: heads 0 and 3 meet, and the others of each node; then each node."""
  tx = transforms.mix_neighbors(topologies.inter_intra(2, 3), axis_name=AXIS)
  history, _ = walk(tx, np.arange(6.0, dtype=np.float32), 60)
  np.testing.assert_allclose(history[0], [1.5, 1.5, 1.5, 1.5, 4.5, 4.5], atol=1e-6)
  np.testing.assert_allclose(history[1], [1.5] * 3 + [3.5] * 3, atol=1e-6)
  np.testing.assert_allclose(history[-1], [2.5] * 6, atol=1e-5)


# What crosses.


def many_leaves(workers, count=40):
  """Rows of forty leaves of two dtypes."""
  dtypes = (jnp.float32, jnp.bfloat16)
  leaves = {f'leaf{i}': jnp.full((3, i % 4 + 1), i, dtypes[i % 2]) for i in range(count)}
  return workers.replicate(leaves)


def program_of(tx, workers, params):
  def step(params, state):
    updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
    return optax.apply_updates(params, updates), state

  state = jax.jit(workers.spmd(tx.init))(params)
  return jax.jit(workers.spmd(step)).lower(params, state).compile().as_text()


STEPS = {
  # By name: a method, permutations of a round, rounds in the table, messages a permutation.
  'dsgd': (algorithms.dsgd(0.1, RING, axis_name=AXIS, momentum=0.9), 2, 1, 1),
  'd_psgd': (algorithms.d_psgd(0.1, RING, axis_name=AXIS), 2, 1, 1),
  'exponential': (
    algorithms.dsgd(0.1, topologies.one_peer_exponential(W), axis_name=AXIS), 1, 3, 1
  ),
  'push': (
    algorithms.stochastic_gradient_push(0.1, topologies.directed_ring(W), axis_name=AXIS), 1, 1, 1
  ),
  'momentum_tracking': (algorithms.momentum_tracking(0.1, RING, axis_name=AXIS), 2, 1, 2),
  'qg_dsgdm': (algorithms.qg_dsgdm(0.1, RING, axis_name=AXIS), 2, 1, 1),
}  # fmt: skip


@pytest.mark.parametrize('name', STEPS)
def test_a_step_permutes_each_dtype_once_for_each_message(name):
  tx, permutations, rounds, messages = STEPS[name]
  workers = runtime.on_mesh(runtime.make_mesh(workers=W), AXIS)
  found = ledger.collectives(program_of(tx, workers, many_leaves(workers)))
  assert {x.kind for x in found} == {'collective-permute'}
  dtypes = {}
  for x in found:
    dtypes[x.operands[0][:3]] = dtypes.get(x.operands[0][:3], 0) + 1
  # What is tracked is float32, whatever the parameters are: 2 of one word, 1 of the other.
  assert dtypes == {'u32': permutations * rounds * messages, 'u16': permutations * rounds}


def test_one_compressed_payload_goes_to_each_neighbour():
  """Ten values of four bytes and as many places of two, on a ring to two neighbours."""
  workers = runtime.on_mesh(runtime.make_mesh(workers=W), AXIS)
  params, topology = workers.replicate({'a': jnp.ones(60), 'b': jnp.ones((4, 10))}), RING
  tx = algorithms.choco_sgd(0.1, topology, tenth, axis_name=AXIS, consensus_rate=0.3)
  found = ledger.collectives(program_of(tx, workers, params))
  assert sorted(x.nbytes for x in found) == [20, 20, 40, 40]
  assert {x.kind for x in found} == {'collective-permute'}


def test_untriggered_payloads_cross_and_are_not_counted(walk):
  """Even calls have news; odd ones send zeros, which change no copy."""
  tx = transforms.mix_compressed(
    RING, tenth, axis_name=AXIS, consensus_rate=0.3, trigger=lambda squared, t: t % 2 == 0
  )
  history, state = walk(tx, rows(W, 40), 4)
  assert ledger.bytes_sent(state).tolist() == [2 * 2 * 4 * 6] * W
  before, after = history[0], history[1]
  assert np.abs(after - before).max() > 1e-3  # the copies go on mixing
  quiet, _ = walk(
    transforms.mix_compressed(
      RING, tenth, axis_name=AXIS, consensus_rate=0.3, trigger=lambda squared, t: t < 0
    ),
    rows(W, 40), 4,
  )  # fmt: skip
  np.testing.assert_array_equal(quiet[-1], rows(W, 40))


SPECS = {'bias': PartitionSpec(), 'kernel': PartitionSpec(None, 'model')}
TWO = topologies.ring(2)
SLICES = {
  # A device's own shard: 4 x 16 bytes of bias and 4 x 32 of kernel, and its copies in float32.
  'dsgd': (algorithms.dsgd(0.1, TWO, axis_name=AXIS), [192]),
  'momentum_tracking': (algorithms.momentum_tracking(0.1, TWO, axis_name=AXIS), [192, 192]),
  'push': (
    algorithms.stochastic_gradient_push(0.1, topologies.directed_ring(2), axis_name=AXIS),
    [196],
  ),
}


@pytest.mark.parametrize('name', SLICES)
def test_between_slices_only_each_devices_shard_moves(name):
  """Two workers of four devices each, whose kernels lie over the devices."""
  inner, sends = SLICES[name]
  workers = runtime.on_mesh(runtime.make_mesh(workers=2, model=4), AXIS)
  tx = workers.per_shard(inner, SPECS)
  whole = {'bias': rows(2, 16), 'kernel': rows(2, 8, 16, seed=1)}
  params = {
    leaf: jax.device_put(x, NamedSharding(workers.mesh, PartitionSpec(AXIS, *SPECS[leaf])))
    for leaf, x in whole.items()
  }
  text = program_of(tx, workers, params)
  found = ledger.collectives(text)
  assert {x.kind for x in found} == {'collective-permute'}
  assert [x.nbytes for x in found] == sends
  state = jax.jit(workers.spmd(tx.init))(params)

  def step(params, state):
    updates, state = tx.update(jax.tree.map(jnp.zeros_like, params), state, params)
    return optax.apply_updates(params, updates), state

  moved, _ = jax.jit(workers.spmd(step))(params, state)
  for leaf, x in whole.items():
    np.testing.assert_allclose(moved[leaf], np.stack([x.mean(0)] * 2), rtol=1e-5, atol=1e-6)


# What is refused.


def test_a_schedule_that_never_mixes_is_refused():
  swap = topologies.Topology('swap', (topologies.Round([0, 0], [[1, 0]], [[1, 1]]),))
  for make in (
    functools.partial(transforms.mix_neighbors, axis_name=AXIS),
    functools.partial(transforms.mix_push_sum, axis_name=AXIS),
    functools.partial(
      transforms.mix_compressed, compressor=tenth, axis_name=AXIS, consensus_rate=1
    ),
    functools.partial(algorithms.momentum_tracking, 0.1, axis_name=AXIS),
  ):
    with pytest.raises(ValueError, match='swap: the rounds must mix, not move values around'):
      make(topology=swap)
  with pytest.raises(ValueError, match=r"'swap' with eigenvalue -1\.000"):
    algorithms.exact_diffusion(0.1, swap, axis_name=AXIS)


def test_a_schedule_whose_rounds_never_meet_is_refused():
  apart = topologies.Topology('apart', (topologies.Round([0.5] * 4, [[1, 0, 3, 2]], [[0.5] * 4]),))
  with pytest.raises(ValueError, match=r'apart: .*\[0, 1\]'):
    transforms.mix_neighbors(apart, axis_name=AXIS)


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: topologies.from_edges(4, [(0, 1), (2, 3)]), 'the graph must be connected'),
    (lambda: topologies.from_matrix([[1.5, -0.5], [-0.5, 1.5]]), 'entry 0, 1 must be >= 0'),
    (lambda: topologies.from_matrix([[0.5, 0.4], [0.4, 0.5]]), 'must sum to 1'),
  ],
)
def test_graphs_and_weights_are_refused_when_they_are_made(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def test_a_graph_of_another_size_is_refused():
  tx = algorithms.dsgd(0.1, topologies.ring(6), axis_name=AXIS)
  workers = runtime.simulate(W)
  with pytest.raises(ValueError, match="'ring' is for 6 workers; axis 'workers' has 8"):
    workers.spmd(lambda x: tx.update(x, tx.init(x), x)[0])(jnp.zeros((W, 2)))


def test_a_reference_refuses_a_varying_graph_and_no_params_are_refused():
  with pytest.raises(ValueError, match='varies in time'):
    compressed(tenth, None, topologies.one_peer_exponential(W))
  for tx in (transforms.mix_neighbors(RING, axis_name=AXIS), compressed(tenth, None)):
    with pytest.raises(ValueError, match='call update'):
      tx.update(jnp.zeros(3), tx.init(jnp.zeros(3)))
