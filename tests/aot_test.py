"""Programs compiled for a TPU pod that is not here: what crosses there, read from their HLO.

Needs libtpu (the extra `aot`) and is skipped without it. It compiles only; numbers are tested on
CPU.
"""

import importlib.util
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_dsgd import algorithms, compressors, ledger, memories, runtime, topologies, transforms

pytestmark = [
  pytest.mark.aot,
  pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='libtpu is missing'),
]

KERNEL, BIAS = 512 * 1024, 1024  # entries
SPECS = {'kernel': PartitionSpec(None, 'model'), 'bias': PartitionSpec()}


@pytest.fixture(scope='module')
def chips():
  """The sixteen chips of a v5e slice."""
  os.environ.update(
    TPU_SKIP_MDS_QUERY='1',
    TPU_ACCELERATOR_TYPE='v5litepod-16',
    TPU_WORKER_HOSTNAMES='localhost',
    ALLOW_MULTIPLE_LIBTPU_LOAD='1',
  )
  from jax.experimental import topologies as pods

  return np.array(pods.get_topology_desc('v5e:4x4', 'tpu').devices)


def crossing(workers, tx, specs):
  """The collectives of one compiled step of a transform."""

  def rows(shape, spec):
    sharding = NamedSharding(workers.mesh, PartitionSpec('workers', *spec))
    return jax.ShapeDtypeStruct((workers.count, *shape), jnp.float32, sharding=sharding)

  params = {
    'kernel': rows((512, 1024), specs['kernel']),
    'bias': rows((1024,), specs['bias']),
  }

  def step(params, state, gradients):
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  state = jax.eval_shape(workers.spmd(tx.init), params)
  compiled = jax.jit(workers.spmd(step)).lower(params, state, params).compile()
  return ledger.collectives(compiled.as_text())


def test_signs_are_permuted_as_packed_bits(chips):
  workers = runtime.on_mesh(Mesh(chips, ('workers',), axis_types=(AxisType.Auto,)), 'workers')
  ring, sign = topologies.ring(16), compressors.scaled_sign()
  tx = transforms.mix_compressed(ring, sign, axis_name='workers', consensus_rate=0.5)
  found = crossing(workers, tx, {'kernel': (), 'bias': ()})
  assert {c.kind for c in found} == {'collective-permute'}
  assert len(found) == 4  # to two neighbours, the bits of all leaves and their magnitudes
  assert sum(c.nbytes for c in found) == 2 * ((KERNEL + BIAS) // 8 + 2 * 4)


def test_a_sharded_worker_sends_its_own_shards_bits(chips):
  mesh = Mesh(chips.reshape(4, 4), ('workers', 'model'), axis_types=(AxisType.Auto,) * 2)
  workers = runtime.on_mesh(mesh, 'workers')
  ring, sign = topologies.ring(4), compressors.scaled_sign()
  mix = transforms.mix_compressed(ring, sign, axis_name='workers', consensus_rate=0.5)
  found = crossing(workers, workers.per_shard(mix, SPECS), SPECS)
  assert {c.kind for c in found} == {'collective-permute'}
  assert sum(c.nbytes for c in found) == 2 * (KERNEL // 4 // 8 + BIAS // 8 + 2 * 4)


def test_a_bfloat16_mean_stays_narrow(chips):
  workers = runtime.on_mesh(Mesh(chips, ('workers',), axis_types=(AxisType.Auto,)), 'workers')
  cast, none = compressors.cast('bfloat16'), memories.none()
  tx = transforms.compressed_mean(cast, axis_name='workers', memory=none)
  with pytest.warns(UserWarning, match='puts more on a link than the dense mean'):
    found = crossing(workers, tx, {'kernel': (), 'bias': ()})
  assert sum(c.nbytes for c in found) == 2 * (KERNEL + BIAS)


def test_tracking_permutes_the_model_and_the_tracked_momentum_by_shards(chips):
  mesh = Mesh(chips.reshape(4, 4), ('workers', 'model'), axis_types=(AxisType.Auto,) * 2)
  workers = runtime.on_mesh(mesh, 'workers')
  tx = algorithms.momentum_tracking(0.1, topologies.ring(4), axis_name='workers')
  found = crossing(workers, workers.per_shard(tx, SPECS), SPECS)
  assert {c.kind for c in found} == {'collective-permute'}
  assert len(found) <= 2 * 2  # a message of each to two neighbours, whatever the leaves
  assert sum(c.nbytes for c in found) == 2 * 2 * 4 * (KERNEL // 4 + BIAS)


def test_local_steps_meet_in_a_loop_of_one_lap_or_none(chips):
  workers = runtime.on_mesh(Mesh(chips, ('workers',), axis_types=(AxisType.Auto,)), 'workers')
  tx = algorithms.local_sgd(0.1, 8, axis_name='workers')
  found = crossing(workers, tx, {'kernel': (), 'bias': ()})
  assert {c.kind for c in found} == {'all-reduce'}
  assert sum(c.nbytes for c in found) == 4 * (KERNEL + BIAS)
  assert not any('main' in c.computation for c in found)
