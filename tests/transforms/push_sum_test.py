"""Push-sum: weights undo what a directed graph does to a mean."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_dsgd import algorithms, checkpoint, runtime, topologies, transforms

AXIS = 'workers'
THREE = topologies.from_matrix([[1 / 3, 0, 1 / 2], [1 / 3, 1 / 2, 0], [1 / 3, 1 / 2, 1 / 2]])


def test_the_ratio_agrees_where_raw_values_do_not(walk):
  """Three workers that hold 3, 0 and 0 hold 1, 2/3 and 4/3 in the end, and x / w is 1."""
  history, state = walk(
    transforms.mix_push_sum(THREE, axis_name=AXIS), np.array([3.0, 0.0, 0.0], np.float32), 200
  )
  np.testing.assert_allclose(history[-1], np.ones(3), atol=1e-5)
  np.testing.assert_allclose(state.weight, [1, 2 / 3, 4 / 3], atol=1e-5)
  np.testing.assert_allclose(history[-1] * state.weight, [1, 2 / 3, 4 / 3], atol=1e-5)
  np.testing.assert_allclose(state.weight.sum(), 3, atol=1e-5)


def test_the_weighted_mean_is_kept_at_every_step(walk):
  rng = np.random.default_rng(0)
  rows = rng.normal(size=(3, 5)).astype(np.float32)
  tx, state, right = transforms.mix_push_sum(THREE, axis_name=AXIS), None, rows.mean(0)
  for _ in range(6):
    updates = rng.normal(size=(1, 3, 5)).astype(np.float32)
    history, state = walk(tx, rows, 1, updates=updates, state=state)
    rows, right = history[0], right + updates[0].mean(0)
    # z = w x keeps its sum; an update moves z.
    np.testing.assert_allclose((state.weight[:, None] * rows).mean(0), right, atol=1e-6)


def push_by_hand(gradient, steps, rate=0.1, momentum=0.5):
  """Stochastic gradient push as published: z biased, x = z / w what gradients see."""
  A = THREE.matrix()
  z, w, trace, history = np.zeros((3, 4)), np.ones(3), np.zeros((3, 4)), []
  for _ in range(steps):
    trace = momentum * trace + gradient(z / w[:, None])
    z, w = A @ (z - rate * trace), A @ w
    history.append(z / w[:, None])
  return np.stack(history)


def trained(tx, centers, steps, rows, state):
  step = runtime.simulate(3).spmd(lambda x, state, c: tx.update(x - c, state, x))
  history = []
  for _ in range(steps):
    updates, state = step(rows, state, centers)
    rows = optax.apply_updates(rows, updates)
    history.append(rows)
  return rows, state, np.stack(history)


def test_sgp_by_hand_and_from_a_checkpoint(tmp_path):
  """Gradients at x = z / w; what is restored in the middle goes on with its weights."""
  centers = jnp.asarray(np.random.default_rng(1).normal(size=(3, 4)), jnp.float32)
  tx = algorithms.stochastic_gradient_push(0.1, THREE, axis_name=AXIS, momentum=0.5)
  rows = jnp.zeros((3, 4))
  state = runtime.simulate(3).spmd(tx.init)(rows)
  fresh = {'params': rows, 'state': state}
  right = push_by_hand(lambda x: x - np.asarray(centers, np.float64), 12)
  rows, state, before = trained(tx, centers, 5, rows, state)
  with checkpoint.Checkpoints(str(tmp_path)) as checkpoints:
    checkpoints.save(5, {'params': rows, 'state': state})
    restored = checkpoints.restore(fresh)
  assert np.ptp(restored['state'][1].weight) > 0.1
  _, _, after = trained(tx, centers, 7, restored['params'], restored['state'])
  np.testing.assert_allclose(np.concatenate([before, after]), right, atol=1e-5)
  # With weights forgotten, it goes elsewhere.
  forgotten = optax.tree.set(restored['state'], weight=jnp.ones(3))
  _, _, wrong = trained(tx, centers, 7, restored['params'], forgotten)
  assert np.abs(wrong[-1] - right[-1]).max() > 1e-3


def test_a_graph_that_keeps_the_mean_needs_no_weights(walk):
  rng = np.random.default_rng(2)
  rows = rng.normal(size=(8, 5)).astype(np.float32)
  for topology in (topologies.directed_ring(8), topologies.one_peer_exponential(8)):
    pushed, state = walk(transforms.mix_push_sum(topology, axis_name=AXIS), rows, 4)
    mixed, _ = walk(transforms.mix_neighbors(topology, axis_name=AXIS), rows, 4)
    np.testing.assert_allclose(pushed, mixed, atol=1e-6)
    np.testing.assert_allclose(state.weight, np.ones(8), atol=1e-6)


def test_half_precision_is_mixed_in_float32(walk):
  """What is pushed crosses in bfloat16; the weight and the sums stay float32."""
  rows = np.array([256.0, 1.0, 1.0])
  tx = transforms.mix_push_sum(THREE, axis_name=AXIS)
  history, state = walk(tx, jnp.asarray(rows, jnp.bfloat16), 1)
  assert history.dtype == jnp.bfloat16
  assert state.weight.dtype == jnp.float32
  right = THREE.matrix() @ rows / THREE.matrix().sum(1)
  np.testing.assert_allclose(history[0].astype(np.float64), right, rtol=2**-8)


def test_what_loses_the_sum_is_refused():
  rows = topologies.from_matrix([[0.5, 0.5, 0], [0, 0.5, 0.5], [0.25, 0.25, 0.5]])
  with pytest.raises(ValueError, match="mix_push_sum got topology 'from_matrix', in which what a"):
    transforms.mix_push_sum(rows, axis_name=AXIS)


def test_other_mixers_refuse_it():
  for make in (
    lambda: transforms.mix_neighbors(THREE, axis_name=AXIS),
    lambda: algorithms.dsgd(0.1, THREE, axis_name=AXIS),
    lambda: algorithms.d_psgd(0.1, THREE, axis_name=AXIS),
    lambda: algorithms.qg_dsgdm(0.1, THREE, axis_name=AXIS),
  ):
    with pytest.raises(ValueError, match='does not sum to 1; mix_push_sum is for directed graphs'):
      make()
