"""The one exchange of every method that compresses: a memory and a channel.

Only payloads cross. What is sent, and what is remembered of it, is the table of `memories`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_dsgd import collectives, compressors, ledger, memories, topologies


class Channel(NamedTuple):
  """How a tree crosses and what arrives: compression and a linear reduction R over workers.

  Attributes:
    init: from a tree like what will be sent to the channel's own state, () where it has none.
    send: `(tree, state, key, time) -> Delivery`. The key is the same on every worker.
  """

  init: Callable[[Any], Any]
  send: Callable[[Any, Any, jax.Array, jax.Array], Delivery]


class Delivery(NamedTuple):
  """What came of sending a tree.

  Attributes:
    own: C(tree), what all receivers now have of this worker.
    received: R(C(tree)).
    state: of the channel.
    sent: bytes that this worker sent: a number, or a table and the index of its entry.
  """

  own: Any
  received: Any
  state: Any
  sent: tuple[Any, ...]


def mean_of_workers(compressor: compressors.Compressor, *, axis_name: str) -> Channel:
  """R = the mean: payloads that sum are summed on the way, others gathered, then decoded."""

  def reduce(coded: _Coded) -> list[jax.Array]:
    workers = collectives.worker_count(axis_name)
    if compressor.summable:
      return coded.decode(collectives.mean(coded.payload, axis_name))
    gathered = collectives.gather(coded.payload, axis_name)
    parts = zip(gathered, coded.likes, coded.keys, coded.own, strict=True)
    return [
      compressors.sum_of_decoded(compressor, p, like, key, jnp.zeros_like(own)) / workers
      for p, like, key, own in parts
    ]

  def send(tree: Any, state: Any, key: jax.Array, time: jax.Array) -> Delivery:
    coded = _Coded(compressor, tree, key, axis_name)
    sent = coded.nbytes if collectives.worker_count(axis_name) > 1 else 0
    return coded.delivery(reduce(coded), (sent,), axis_name)

  return Channel(lambda like: (), send)


def mix_of_neighbors(
  topology: topologies.Topology, compressor: compressors.Compressor, *, axis_name: str
) -> Channel:
  """R = the mixing of a topology, round after round."""
  sends = topology.sends.astype('int64')

  def send(tree: Any, state: Any, key: jax.Array, time: jax.Array) -> Delivery:
    coded = _Coded(compressor, tree, key, axis_name)
    mixed = collectives.mix(
      coded.own, coded.payload, coded.decode, topology, time=time, axis_name=axis_name
    )
    index = (time % topology.period, collectives.worker_index(axis_name))
    return coded.delivery(mixed, (coded.nbytes * sends, *index), axis_name)

  return Channel(lambda like: (), send)


class _Coded:
  """A tree, leaf by leaf, as a compressor sends it."""

  def __init__(self, compressor: compressors.Compressor, tree: Any, key: jax.Array, axis_name: str):
    leaves, self._treedef = jax.tree.flatten(tree)
    self.keys = [jax.random.fold_in(key, i) for i in range(len(leaves))]
    if not compressor.shared_key:
      self.keys = [collectives.worker_key(k, axis_name) for k in self.keys]
    self._compressor = compressor
    self.likes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    self.payload = [
      compressor.encode(k, jnp.asarray(x)) for k, x in zip(self.keys, leaves, strict=True)
    ]
    self.nbytes = ledger.payload_bytes(self.payload)
    self.own = self.decode(self.payload)

  def decode(self, payload: list[Any]) -> list[jax.Array]:
    parts = zip(payload, self.likes, self.keys, strict=True)
    return [self._compressor.decode(p, like, key) for p, like, key in parts]

  def delivery(self, received: list[jax.Array], sent: tuple[Any, ...], axis_name: str) -> Delivery:
    arrived = jax.tree.unflatten(self._treedef, collectives.vary(received, axis_name))
    return Delivery(jax.tree.unflatten(self._treedef, self.own), arrived, (), sent)


class ExchangeState(NamedTuple):
  """The state of one exchange.

  Attributes:
    count: exchanges done, int32; the time of the topology and of the keys.
    key: the same on every worker.
    memory: the memory's state, congruent with the parameters; None at leaves that do not cross.
    channel: the channel's own state.
    bytes_sent: see `ledger.bytes_sent`.
  """

  count: jax.Array
  key: jax.Array
  memory: Any
  channel: Any
  bytes_sent: jax.Array


def init(params: Any, *, memory: memories.Memory, channel: Channel, seed: int) -> ExchangeState:
  """The state before the first exchange of trees like params."""
  _refuse_complex(params)
  counters = (jnp.zeros((), jnp.int32), jax.random.key(seed), ledger.new_meter())
  count, key, meter = collectives.vary_with(counters, params)
  like = collectives.crossing(params)
  return ExchangeState(count, key, memory.init(like), channel.init(like), meter)


def send(
  x: Any, state: ExchangeState, *, memory: memories.Memory, channel: Channel
) -> tuple[Any, Any, ExchangeState]:
  """Sends a tree through a memory and a channel.

  Args:
    x: this worker's tree. Leaves that do not cross (integers, booleans, zero-size) come back as
      they are.
    state: of the exchange so far.
    memory: what is remembered.
    channel: how it crosses.

  Returns:
    own, received (see `memories`; float32 where a memory or a compressor made it so) and the next
    state.

  Raises:
    ValueError: a complex leaf, or a tree unlike the one that the memory was made for; both name the
      leaf.
  """
  _refuse_complex(x)
  key = jax.random.fold_in(state.key, state.count)
  deliveries = []

  def through(tree: Any) -> tuple[Any, Any]:
    deliveries.append(channel.send(tree, state.channel, key, state.count))
    return deliveries[-1].own, deliveries[-1].received

  sent = collectives.crossing(x)
  for part in state.memory:
    collectives.require_same_leaves(sent, part, 'memory')
  own, received, remembered = memory.send(state.memory, sent, through)
  (delivery,) = deliveries
  meter = ledger.add(state.bytes_sent, *delivery.sent)
  after = ExchangeState(state.count + 1, state.key, remembered, delivery.state, meter)
  return collectives.fill(own, x), collectives.fill(received, x), after


def _refuse_complex(tree: Any) -> None:
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
      raise ValueError(
        f'leaf {collectives.leaf_name(path)!r} is {leaf.dtype}: compressors take real leaves; '
        'optax.contrib.split_real_and_imaginary wraps a transform for complex ones'
      )
