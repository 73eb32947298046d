"""What really crosses: programs compiled for eight devices against the ledger."""

from __future__ import annotations

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_dsgd import compressors, ledger, memories, runtime, topologies, transforms

# Without memory, since what crosses is the same.
pytestmark = pytest.mark.filterwarnings('ignore:.* is biased')

W = 8
COMMUNICATES = re.compile(r'\b(?:psum|all_gather|ppermute|all_to_all|reduce_scatter)\w*\[')
RING = topologies.ring(W)


def transform(kind, compressor):
  # The memory decides nothing about what crosses; this one has no state to compile.
  if kind == 'mean':
    return transforms.compressed_mean(compressor, axis_name='workers', memory=memories.none())
  return transforms.mix_compressed(
    RING, compressor, axis_name='workers', consensus_rate=0.5, memory=memories.none()
  )


def rows(shapes):
  return jax.tree.map(
    lambda shape: jax.ShapeDtypeStruct((W, *shape), jnp.float32),
    shapes,
    is_leaf=lambda x: isinstance(x, tuple),
  )


def first_step(tx, eight):
  """All workers' first update, from (updates, params) to (updates, state)."""
  return jax.jit(eight.spmd(lambda updates, params: tx.update(updates, tx.init(params), params)))


def compiled(tx, eight, shapes):
  """The text of one step's program and the bytes that each worker's ledger counts in it."""
  inputs = rows(shapes), rows(shapes)
  program = first_step(tx, eight).lower(*inputs).compile()
  zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), inputs)
  counted = ledger.bytes_sent(program(*jax.device_put(zeros, program.input_shardings[0]))[1])
  return program.as_text(), np.broadcast_to(counted, (W,)).tolist()


@pytest.mark.parametrize('kind', ['mean', 'ring'])
def test_bytes_of_the_program_are_those_of_the_ledger(kind, compressor, eight):
  text, counted = compiled(transform(kind, compressor), eight, {'w': (5, 7), 'b': (3,)})
  in_program = sum(c.nbytes for c in ledger.collectives(text))
  assert in_program > 0
  assert counted == [in_program] * W
  kinds = {c.kind for c in ledger.collectives(text)}
  expected = 'all-reduce' if compressor.summable else 'all-gather'
  assert kinds == ({expected} if kind == 'mean' else {'collective-permute'})


@pytest.mark.parametrize('kind', ['mean', 'ring'])
def test_a_hundred_leaves_cross_in_one_collective_a_dtype(kind, family, eight):
  summed = kind == 'mean' and family.summable  # it is XLA that joins those
  leaves = 10 if summed and family.shared_key else 100  # each draw takes long to compile
  tx, shapes = transform(kind, family), {f'leaf{i}': (2 + i % 3,) for i in range(leaves)}
  if summed:
    found = ledger.collectives(compiled(tx, eight, shapes)[0])
  else:
    traced = jax.make_jaxpr(first_step(tx, eight))(rows(shapes), rows(shapes))
    found = COMMUNICATES.findall(str(traced))
  payload = jax.eval_shape(family.encode, jax.random.key(0), jnp.zeros((40,)))
  whole = jax.eval_shape(family.encode, jax.random.key(0), jnp.zeros((1,)))  # a leaf of one entry
  dtypes = {x.dtype for x in jax.tree.leaves((payload, whole))}
  permutations = len(RING.rounds[0].destinations)
  assert 1 <= len(found) <= len(dtypes) * (1 if kind == 'mean' else permutations)


@pytest.mark.parametrize('kind', ['mean', 'ring'])
def test_nothing_dense_crosses(kind, eight):
  """Of 1e5 floats the top 1 % are 1e3 values and 1e3 places, in words of 4 bytes."""
  text, counted = compiled(transform(kind, compressors.top_k(0.01)), eight, {'w': (100_000,)})
  found = ledger.collectives(text)
  assert found
  for collective in found:
    for operand in collective.operands:
      words = np.prod([int(d) for d in re.findall(r'\d+', operand.split('[')[1])])
      assert words <= 2000, operand
  messages = 1 if kind == 'mean' else 2
  assert counted == [messages * 1000 * (4 + 4)] * W


def test_narrow_values_cross_narrow(eight):
  """XLA does not move the conversion across the collective."""
  for kind in ('mean', 'ring'):
    text, _ = compiled(transform(kind, compressors.cast('bfloat16')), eight, {'w': (64,)})
    operands = {x for c in ledger.collectives(text) for x in c.operands}
    assert operands == {'u16[64]'} or operands == {'u16[1,64]'}


def test_one_worker_sends_nothing():
  one = runtime.simulate(1)
  for tx in (
    transforms.mean_over('workers'),
    transform('mean', compressors.top_k(0.5)),
    transforms.mix_neighbors(topologies.ring(1), axis_name='workers'),
  ):
    x = jnp.ones((1, 4))
    step = lambda x, tx=tx: tx.update(x, tx.init(x), x)[1]  # noqa: E731
    assert ledger.bytes_sent(jax.jit(one.spmd(step))(x)) == 0


def test_bytes_follow_the_degree_and_the_round():
  """On a star of 4 the hub sends three messages, the others one; one-peer graphs send one."""
  four = runtime.simulate(4)
  for topology, each in ((topologies.star(4), [3, 1, 1, 1]), (topologies.complete(4), [3] * 4)):
    tx = transforms.mix_neighbors(topology, axis_name='workers')
    step = lambda x, tx=tx: tx.update(x, tx.init(x), x)[1]  # noqa: E731
    state = jax.jit(four.spmd(step))(jnp.ones((4, 5)))
    assert ledger.bytes_sent(state).tolist() == [20 * messages for messages in each]


def test_between_rounds_nothing_crosses(eight, run):
  """The collectives of `local_steps` are in a loop of one lap or none."""
  outer = optax.chain(transforms.mean_over('workers'), optax.sgd(1.0))
  tx = transforms.local_steps(optax.sgd(0.1), outer, 4)
  zeros = np.zeros((9, W, 67), np.float32)
  state = jax.eval_shape(eight.spmd(tx.init), zeros[0])
  update = jax.jit(eight.spmd(lambda u, s, x: tx.update(u, s, x)))
  text = update.lower(zeros[0], state, zeros[0]).compile().as_text()
  found = ledger.collectives(text)
  assert sum(c.nbytes for c in found) == 67 * 4
  entry = re.search(r'^ENTRY %?([\w.\-]+)', text, re.MULTILINE)
  branches = ' '.join(re.findall(r' while\(.*', text))
  assert entry and branches
  for collective in found:
    assert collective.computation != entry.group(1)
    assert collective.computation in re.findall(r'[\w.\-]+', branches)
  _, state, _ = run(tx, eight, zeros[0], zeros)  # nine steps hold two rounds
  assert np.broadcast_to(ledger.bytes_sent(state), (W,)).tolist() == [2 * 67 * 4] * W


@pytest.mark.parametrize('server', [None, memories.residual()], ids=['gathered', 'two-phase'])
def test_no_dense_copy_of_every_worker(family, server, eight):
  """A step holds gathered payloads, twice at most, and six buffers of a leaf, not one a worker."""
  n = 1 << 17
  amplifies = family.omega is not None and family.delta is None
  memory = memories.none() if amplifies else memories.residual()
  tx = transforms.compressed_mean(family, axis_name='workers', memory=memory, server=server)
  leaf = rows((n,))
  state = jax.eval_shape(eight.spmd(tx.init), leaf)
  with warnings.catch_warnings():
    warnings.filterwarnings('ignore', 'gathering')
    step = jax.jit(eight.spmd(tx.update), donate_argnums=(0, 1)).lower(leaf, state).compile()
  x = jax.ShapeDtypeStruct((n,), jnp.float32)
  payload = jax.eval_shape(family.encode, jax.eval_shape(lambda: jax.random.key(0)), x)
  gathered = W * ledger.payload_bytes(payload)
  assert step.memory_analysis().temp_size_in_bytes < 2 * gathered + 6 * 4 * n
