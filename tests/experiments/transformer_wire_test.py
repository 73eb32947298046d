"""A transformer of a hundred leaves crosses in as few collectives as one of ten."""

import jax
import jax.numpy as jnp
import pytest

from experiments import models
from experiments.data import datasets
from jax_dsgd import compressors, ledger, memories, runtime, topologies, transforms

RESIDUAL = memories.residual()
SIGN = compressors.scaled_sign()


@pytest.fixture(scope='module')
def params():
  data = datasets.shakespeare(sequence_length=8, roles=2)
  model = models.transformer(data, width=16, depth=16, heads=2)
  params = jax.eval_shape(model.init, jax.random.key(0))
  assert len(jax.tree.leaves(params)) >= 100
  return params


@pytest.mark.parametrize(
  ('tx', 'kinds'),
  [
    (transforms.mean_over('workers'), {'all-reduce': 1}),
    # Bits in bytes, and magnitudes in words of four.
    (transforms.compressed_mean(SIGN, axis_name='workers', memory=RESIDUAL), {'all-gather': 2}),
    (
      transforms.mix_compressed(
        topologies.ring(8), SIGN, axis_name='workers', consensus_rate=0.5, memory=RESIDUAL
      ),
      {'collective-permute': 4},
    ),
    (transforms.low_rank_mean(1, axis_name='workers', memory=RESIDUAL), {'all-reduce': 2}),
  ],
  ids=['dense', 'signs', 'gossip', 'low-rank'],
)
def test_collectives_do_not_grow_with_leaves(params, tx, kinds):
  workers = runtime.on_mesh(runtime.make_mesh(workers=8), 'workers')
  rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((8, *x.shape), jnp.float32), params)
  state = jax.eval_shape(workers.spmd(tx.init), rows)
  update = workers.spmd(lambda u, s, p: tx.update(u, s, p))
  compiled = jax.jit(update).lower(rows, state, rows).compile()
  found = [c.kind for c in ledger.collectives(compiled.as_text())]
  assert {kind: found.count(kind) for kind in found} == kinds
