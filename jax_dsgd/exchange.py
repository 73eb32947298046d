"""The one exchange of every method that compresses: a compressor, a memory and a reduction.

Only payloads cross. What is sent, and what is remembered of it, is the table of `memories`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_dsgd import collectives, compressors, ledger, memories, topologies


class Reduction(NamedTuple):
  """A linear map over workers of which each sees only payloads.

  Attributes:
    apply: `(own, payload, compressor, keys, time) -> received`, over lists of leaves.
    count: `(meter, nbytes, time) -> meter` after one payload of so many bytes.
  """

  apply: Callable[
    [list[jax.Array], list[Any], compressors.Compressor, list[jax.Array], jax.Array],
    list[jax.Array],
  ]
  count: Callable[[jax.Array, int, jax.Array], jax.Array]


def mean_of_workers(axis_name: str) -> Reduction:
  """R = the mean: payloads that sum are summed on the way, others gathered, then decoded."""

  def apply(
    own: list, payload: list, compressor: compressors.Compressor, keys: list, time: jax.Array
  ) -> list:
    likes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in own]
    if compressor.summable:
      reduced = collectives.mean(payload, axis_name)
      return [
        compressor.decode(p, like, key) for p, like, key in zip(reduced, likes, keys, strict=True)
      ]
    gathered = collectives.gather(payload, axis_name)
    return [
      compressors.sum_of_decoded(compressor, p, like, key, jnp.zeros_like(x))
      / collectives.worker_count(axis_name)
      for x, p, like, key in zip(own, gathered, likes, keys, strict=True)
    ]

  def count(meter: jax.Array, nbytes: int, time: jax.Array) -> jax.Array:
    return ledger.add(meter, nbytes if collectives.worker_count(axis_name) > 1 else 0)

  return Reduction(apply, count)


def mix_of_neighbors(topology: topologies.Topology, axis_name: str) -> Reduction:
  """R = the mixing of a topology, round after round."""

  def apply(
    own: list, payload: list, compressor: compressors.Compressor, keys: list, time: jax.Array
  ) -> list:
    def decode(payload: list) -> list:
      likes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in own]
      return [
        compressor.decode(p, like, key) for p, like, key in zip(payload, likes, keys, strict=True)
      ]

    return collectives.mix(own, payload, decode, topology, time=time, axis_name=axis_name)

  def count(meter: jax.Array, nbytes: int, time: jax.Array) -> jax.Array:
    index = (time % topology.period, collectives.worker_index(axis_name))
    return ledger.add(meter, nbytes * topology.sends.astype('int64'), *index)

  return Reduction(apply, count)


class ExchangeState(NamedTuple):
  """The state of one exchange.

  Attributes:
    count: exchanges done, int32; the time of the topology and of the keys.
    key: the same on every worker.
    memory: the memory's state, congruent with the parameters; None at leaves that do not cross.
    bytes_sent: see `ledger.bytes_sent`.
  """

  count: jax.Array
  key: jax.Array
  memory: Any
  bytes_sent: jax.Array


def init(params: Any, memory: memories.Memory, *, seed: int) -> ExchangeState:
  """The state before the first exchange of trees like params."""
  _refuse_complex(params)
  counters = (jnp.zeros((), jnp.int32), jax.random.key(seed), ledger.new_meter())
  count, key, meter = collectives.vary_with(counters, params)
  return ExchangeState(count, key, memory.init(collectives.crossing(params)), meter)


def send(
  x: Any,
  state: ExchangeState,
  *,
  compressor: compressors.Compressor,
  memory: memories.Memory,
  reduction: Reduction,
  axis_name: str,
) -> tuple[Any, Any, ExchangeState]:
  """Sends a tree through a compressor, a memory and a reduction.

  Args:
    x: this worker's tree. Leaves that do not cross (integers, booleans, zero-size) come back as
      they are.
    state: of the exchange so far.
    compressor: the wire format of each leaf.
    memory: what is remembered.
    reduction: `mean_of_workers` or `mix_of_neighbors`.
    axis_name: the workers' axis.

  Returns:
    own, received (see `memories`; float32 where a memory or a compressor made it so) and the
    next state.

  Raises:
    ValueError: a complex leaf, or a tree unlike the one that the memory was made for; both name the
      leaf.
  """
  _refuse_complex(x)
  key = jax.random.fold_in(state.key, state.count)
  meter = state.bytes_sent

  def through(tree: Any) -> tuple[Any, Any]:
    nonlocal meter
    leaves, treedef = jax.tree.flatten(tree)
    keys = [jax.random.fold_in(key, i) for i in range(len(leaves))]
    if not compressor.shared_key:
      keys = [collectives.worker_key(k, axis_name) for k in keys]
    payload = [compressor.encode(k, leaf) for k, leaf in zip(keys, leaves, strict=True)]
    own = [
      compressor.decode(p, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), k)
      for p, leaf, k in zip(payload, leaves, keys, strict=True)
    ]
    meter = reduction.count(meter, ledger.payload_bytes(payload), state.count)
    received = collectives.vary(
      reduction.apply(own, payload, compressor, keys, state.count), axis_name
    )
    return jax.tree.unflatten(treedef, own), jax.tree.unflatten(treedef, received)

  sent = collectives.crossing(x)
  for part in state.memory:
    collectives.require_same_leaves(sent, part, 'memory')
  own, received, remembered = memory.send(state.memory, sent, through)
  after = ExchangeState(state.count + 1, state.key, remembered, meter)
  return collectives.fill(own, x), collectives.fill(received, x), after


def _refuse_complex(tree: Any) -> None:
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
      raise ValueError(
        f'leaf {collectives.leaf_name(path)!r} is {leaf.dtype}: compressors take real leaves; '
        'optax.contrib.split_real_and_imaginary wraps a transform for complex ones'
      )
