"""Three ways to a mean of payloads, which leaf is sent how, and what is refused or flagged."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_dsgd import compressors, ledger, memories, runtime, transforms

W = 4
WORKERS = runtime.simulate(W)
SHAPES = {'kernel': (6, 7), 'bias': (5,), 'scalar': ()}
mean = functools.partial(transforms.compressed_mean, axis_name='workers')


def gradients(workers=W, steps=1):
  rng = np.random.default_rng(0)
  return [
    {k: jnp.asarray(rng.normal(size=(workers, *s)), jnp.float32) for k, s in SHAPES.items()}
    for _ in range(steps)
  ]


def run(tx, steps, workers=WORKERS):
  """The updates of each step and the last state, as NumPy arrays."""
  state = workers.spmd(tx.init)(steps[0])
  update = workers.spmd(tx.update)
  history = []
  for each in steps:
    updates, state = update(each, state)
    history.append(jax.tree.map(np.asarray, updates))
  return history, state


def test_two_phases_of_whole_values_are_the_mean():
  (steps,) = [gradients(steps=1)]
  (updates,), _ = run(
    mean(compressors.identity(), memory=memories.none(), server=memories.none()), steps
  )
  for name in SHAPES:
    expected = np.broadcast_to(np.asarray(steps[0][name]).mean(0), updates[name].shape)
    np.testing.assert_allclose(updates[name], expected, atol=1e-6)


@pytest.mark.parametrize(
  'compressor',
  [
    compressors.scaled_sign(),
    compressors.top_k(0.3),
    compressors.random_k(0.5),
    compressors.cast(),
  ],
  ids=repr,
)
@pytest.mark.parametrize('memory', [memories.residual(), memories.reference()], ids=repr)
def test_two_phases_lose_nothing(compressor, memory):
  """What was applied, what workers hold back and what chunk owners hold back is all there was."""
  steps = gradients(steps=5)
  tx = mean(compressor, memory=memory, server=memories.residual())
  history, state = run(tx, steps)
  for name, shape in SHAPES.items():
    # Row w of the server's residual belongs to chunk w of the leaf.
    chunks = np.asarray(state.channel.residual[name]).reshape(-1)
    held = chunks[: int(np.prod(shape))].reshape(shape)
    applied = sum(updates[name][0] for updates in history)
    if isinstance(state.memory, memories.ResidualState):
      held = held + np.asarray(state.memory.residual[name]).mean(0)
      whole = sum(np.asarray(step[name]).mean(0) for step in steps)
      np.testing.assert_allclose(applied + held, whole, atol=2e-5)
    else:
      received = np.asarray(state.memory.received[name])
      np.testing.assert_allclose(
        received[0] + held, np.asarray(state.memory.reference[name]).mean(0), atol=2e-5
      )
    agree = np.abs(history[-1][name] - history[-1][name][:1]).max()
    assert agree < 1e-6


def test_what_two_phases_send_stays_as_workers_are_added():
  tx = mean(compressors.scaled_sign(), memory=memories.residual(), server=memories.residual())
  sent = []
  for count in (2, 8, 32):
    leaf = [jnp.ones((count, 4096))]
    _, state = run(tx, leaf, runtime.simulate(count))
    sent.append(int(ledger.bytes_sent(state)[0]))
  # Signs of all chunks and of one's own, and a magnitude each.
  assert sent == [4096 // 8 * (c + 1) // c + 4 * (c + 1) for c in (2, 8, 32)]


def test_two_phases_on_a_mesh_send_what_the_ledger_says():
  workers = runtime.on_mesh(runtime.make_mesh(workers=8), 'workers')
  tx = mean(compressors.scaled_sign(), memory=memories.residual(), server=memories.residual())
  steps = gradients(8, 2)
  (_, simulated), _ = run(tx, steps, runtime.simulate(8))
  (_, meshed), state = run(tx, [workers.place(step) for step in steps], workers)
  for name in SHAPES:
    np.testing.assert_allclose(meshed[name], simulated[name], atol=1e-6)
  program = jax.jit(workers.spmd(tx.update)).lower(workers.place(steps[0]), state).compile()
  found = ledger.collectives(program.as_text())
  assert sorted(c.kind for c in found) == ['all-gather'] * 2 + ['all-to-all'] * 2
  assert 2 * sum(c.nbytes for c in found) == ledger.bytes_sent(state)[0]


def test_two_phases_refuse_a_memory_of_what_was_received():
  tx = mean(compressors.cast(), memory=memories.none(), server=memories.reference())
  with pytest.raises(ValueError, match='server=.*keeps what it received'):
    WORKERS.spmd(tx.init)(gradients()[0])


def test_each_leaf_is_sent_by_its_rule():
  policy = compressors.by_leaf(
    ('bias', None),
    (lambda path, like: like.ndim == 0, compressors.cast()),
    (40, compressors.top_k(k=2)),
  )
  (step,) = gradients()
  (updates,), state = run(mean(policy, memory=memories.residual()), [step])
  np.testing.assert_array_equal(updates['bias'], step['bias'])  # unsent: each worker keeps its own
  assert state.memory.residual['bias'] is None
  expected = np.asarray(step['scalar'].astype(jnp.bfloat16), np.float32).mean()
  np.testing.assert_allclose(updates['scalar'], expected, rtol=1e-5)
  assert (updates['kernel'][0] != 0).sum() <= 2 * W
  assert ledger.bytes_sent(state).tolist() == [2 + 2 * (4 + 2)] * W


def test_a_leaf_without_a_rule_is_sent_whole():
  (step,) = gradients()
  tx = mean(compressors.by_leaf((1000, compressors.top_k(k=1))), memory=memories.residual())
  (updates,), state = run(tx, [step])
  np.testing.assert_allclose(updates['kernel'][0], step['kernel'].mean(0), atol=1e-6)
  assert ledger.bytes_sent(state).tolist() == [4 * (42 + 5 + 1)] * W


def test_rules_hold_in_two_phases_and_in_gossip_too():
  from jax_dsgd import topologies

  policy = compressors.by_leaf(('bias', None), ('kernel', compressors.scaled_sign()))
  (step,) = gradients()
  (updates,), _ = run(mean(policy, memory=memories.residual(), server=memories.residual()), [step])
  np.testing.assert_array_equal(updates['bias'], step['bias'])
  np.testing.assert_allclose(updates['scalar'], np.full(W, step['scalar'].mean()), atol=1e-6)
  mix = transforms.mix_compressed(
    topologies.complete(W), policy, axis_name='workers', consensus_rate=1.0
  )
  zero = jax.tree.map(jnp.zeros_like, step)
  state = WORKERS.spmd(mix.init)(step)
  updates, _ = WORKERS.spmd(mix.update)(zero, state, step)
  assert (np.asarray(updates['bias']) == 0).all()
  np.testing.assert_allclose(
    updates['scalar'] + step['scalar'], np.full(W, step['scalar'].mean()), atol=1e-6
  )


def test_frozen_leaves_stay_and_cost_nothing():
  labels = {'kernel': 'trained', 'bias': 'frozen', 'scalar': 'frozen'}
  trained = mean(compressors.top_k(k=1), memory=memories.residual())
  tx = optax.partition({'trained': trained, 'frozen': optax.set_to_zero()}, labels)
  (updates,), state = run(tx, gradients())
  assert (updates['bias'] == 0).all() and (updates['scalar'] == 0).all()
  assert ledger.bytes_sent(state).tolist() == [6] * W


@pytest.mark.parametrize('rule', [(1,), (True, None), (1.5, None), ('a', 'top_k'), (None, None)])
def test_bad_rules_are_refused(rule):
  with pytest.raises(ValueError, match='by_leaf got the'):
    compressors.by_leaf(rule)


def test_a_residual_of_what_is_not_contractive_is_refused():
  with pytest.raises(ValueError, match=r'qsgd.*not contractive'):
    mean(compressors.qsgd(1), memory=memories.residual())
  policy = compressors.by_leaf((1, compressors.qsgd(1)))
  with pytest.raises(ValueError, match=r'qsgd.*not contractive'):
    WORKERS.spmd(mean(policy, memory=memories.residual()).init)(gradients()[0])


def test_a_biased_compressor_without_memory_is_flagged():
  with pytest.warns(UserWarning, match='top_k.*biased'):
    mean(compressors.top_k(0.1), memory=memories.none())


def test_a_gather_that_costs_more_than_the_dense_mean_is_flagged():
  workers = runtime.simulate(8)
  leaf = jnp.ones((8, 1 << 15))
  tx = mean(compressors.cast(), memory=memories.residual())
  state = workers.spmd(tx.init)(leaf)
  with pytest.warns(UserWarning, match='gathering 65536 bytes from 8 workers.*two phases'):
    workers.spmd(tx.update)(leaf, state)
