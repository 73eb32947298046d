"""The one exchange of every method that compresses: a memory and a channel.

Only payloads cross. What is sent, and what is remembered of it, is the table of `memories`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsgd import collectives, compressors, ledger, memories, topologies

Choice = compressors.Compressor | compressors.Policy
Trigger = Callable[[jax.Array, jax.Array], jax.Array]


class Channel(NamedTuple):
  """How a tree crosses and what arrives: compression and a linear reduction R over workers.

  Attributes:
    init: from a tree like what will be sent to the channel's own state, () where it has none.
    send: `(tree, state, key, time) -> Delivery`. The key is the same on every worker.
    sends: whether a leaf crosses at all, from its path and shape; one that does not stays as it is.
  """

  init: Callable[[Any], Any]
  send: Callable[[Any, Any, jax.Array, jax.Array], Delivery]
  sends: Callable[[str, Any], bool] = lambda path, like: True


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


def mean_of_workers(compressor: Choice, *, axis_name: str) -> Channel:
  """R = the mean: payloads that sum are summed on the way, others gathered, then decoded."""

  def reduce(coded: _Coded) -> list[jax.Array]:
    workers = collectives.worker_count(axis_name)
    adds = [c.summable for c in coded.compressors]
    payloads = list(zip(coded.payload, adds, strict=True))
    summed = iter(collectives.mean_of_payloads([p for p, add in payloads if add], axis_name))
    gathered = iter(collectives.gather([p for p, add in payloads if not add], axis_name))
    parts = zip(coded.compressors, coded.likes, coded.keys, coded.own, strict=True)
    return [
      c.decode(next(summed), like, key)
      if c.summable
      else compressors.sum_of_decoded(c, next(gathered), like, key, jnp.zeros_like(own)) / workers
      for c, like, key, own in parts
    ]

  def send(tree: Any, state: Any, key: jax.Array, time: jax.Array) -> Delivery:
    coded = _Coded(compressor, tree, key, axis_name)
    workers = collectives.worker_count(axis_name)
    _flag_costly_gather(coded, workers)
    return coded.delivery(reduce(coded), (coded.nbytes if workers > 1 else 0,), axis_name)

  return Channel(lambda like: (), send, _sends(compressor))


_SMALL = 1 << 16  # bytes of a dense tree below which nobody counts


def _flag_costly_gather(coded: _Coded, workers: int) -> None:
  parts = zip(coded.compressors, coded.payload, coded.likes, strict=True)
  gathered = [(p, like) for c, p, like in parts if not c.summable]
  nbytes = ledger.payload_bytes([p for p, _ in gathered])
  dense = ledger.payload_bytes([like for _, like in gathered])
  costs = ledger.link_bytes('all-gather', nbytes, workers)
  if dense >= _SMALL and costs > ledger.link_bytes('all-reduce', dense, workers):
    warnings.warn(
      f'gathering {nbytes} bytes from {workers} workers puts more on a link than the dense mean of '
      f'{dense}: server=memories.residual() sends in two phases',
      stacklevel=2,
    )


def _sends(compressor: Choice) -> Callable[[str, Any], bool]:
  if isinstance(compressor, compressors.Compressor):
    return lambda path, like: True
  return lambda path, like: compressor(path, like) is not None


def _chosen(compressor: Choice, path: str, like: Any) -> compressors.Compressor:
  """The compressor of a leaf that is sent."""
  chosen = compressor
  if not isinstance(chosen, compressors.Compressor):
    chosen = chosen(path, like)
  if chosen is None:
    raise ValueError(f'leaf {path!r} is not sent: its policy gives it no compressor')
  return chosen


def two_phase_mean(compressor: Choice, *, axis_name: str, server: memories.Memory) -> Channel:
  """R = the mean in two phases: what a worker sends stays the same as workers are added.

  Each leaf is cut into W chunks. Compressed chunks go to the workers that own them, who take the
  mean, compress it once more with a memory of their own, and send that to all.

  Raises:
    ValueError: a server memory that keeps what it received. `init` needs the number of workers, and
      so an axis that is bound.
  """

  def init(like: Any) -> Any:
    workers = collectives.worker_count(axis_name)
    state = server.init(jax.tree.map(lambda x: _cut(jnp.zeros_like(x), workers)[0], like))
    if isinstance(state, memories.ReferenceState):
      raise ValueError(f'server={server!r} keeps what it received, which is no chunk')
    return state

  def send(tree: Any, state: Any, key: jax.Array, time: jax.Array) -> Delivery:
    workers, me = collectives.worker_count(axis_name), collectives.worker_index(axis_name)
    chosen: list[compressors.Compressor] = []

    def by_rows(path: str, like: Any) -> compressors.Compressor:
      chosen.append(_chosen(compressor, path, like))
      return _by_rows(chosen[-1])

    rows = jax.tree.map(lambda x: _cut(x, workers), tree)
    there, treedef = _Coded(by_rows, rows, key, axis_name), jax.tree.structure(tree)
    keys = [jax.random.fold_in(k, workers) for k in there.keys]  # of the way back
    back: list[Any] = []

    def through(chunks: Any) -> tuple[Any, Any]:
      leaves = jax.tree.leaves(chunks)
      mine = [jax.random.fold_in(k, me) for k in keys]
      back.extend(c.encode(k, x) for c, k, x in zip(chosen, mine, leaves, strict=True))
      parts = zip(chosen, back, leaves, mine, strict=True)
      own = [c.decode(p, x, k) for c, p, x, k in parts]
      parts = zip(
        there.compressors, collectives.gather(back, axis_name), there.likes, keys, strict=True
      )
      received = [c.decode(p, like, k) for c, p, like, k in parts]
      return jax.tree.unflatten(treedef, own), jax.tree.unflatten(treedef, received)

    traded = collectives.trade_rows(there.payload, axis_name)
    zeros = [jnp.zeros_like(x[0]) for x in there.own]
    here = [jax.random.fold_in(k, me) for k in there.keys]
    total = [
      compressors.sum_of_decoded(c, p, _like(zero), k, zero)
      for c, p, zero, k in zip(chosen, traded, zeros, here, strict=True)
    ]
    mean = jax.tree.unflatten(treedef, [x / workers for x in total])
    _, received, state = server.send(state, mean, through)
    own = jax.tree.map(collectives.whole, tree, jax.tree.unflatten(treedef, there.own))
    received = collectives.vary(jax.tree.map(collectives.whole, tree, received), axis_name)
    sent = there.nbytes + ledger.payload_bytes(back) if workers > 1 else 0
    return Delivery(own, received, state, (sent,))

  return Channel(init, send, _sends(compressor))


def _cut(x: jax.Array, workers: int) -> jax.Array:
  return collectives.cut(x.astype(jnp.float32), workers)


def _by_rows(compressor: compressors.Compressor) -> compressors.Compressor:
  """The compressor of a matrix each of whose rows is compressed alone, with a key of its own."""

  def keys_of(key: jax.Array, rows: int) -> jax.Array:
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(rows))

  def encode(key: jax.Array, x: jax.Array) -> Any:
    return jax.vmap(compressor.encode)(keys_of(key, x.shape[0]), x)

  def decode(payload: Any, like: Any, key: jax.Array) -> jax.Array:
    row = jax.ShapeDtypeStruct(like.shape[1:], like.dtype)
    one = lambda payload, key: compressor.decode(payload, row, key)  # noqa: E731
    return jax.vmap(one)(payload, keys_of(key, like.shape[0]))

  return compressor._replace(encode=encode, decode=decode, decode_sum=None)


def mix_of_neighbors(
  topology: topologies.Topology,
  compressor: Choice,
  *,
  axis_name: str,
  rounds: Sequence[float] = (1.0,),
) -> Channel:
  """R = the mixing of a topology, one or several of its rounds each time.

      y_1 = W C(x);   y_{k+1} = y_{k-1} + rounds[k] (W y_k - y_{k-1})

  All ones are as many plain rounds; other weights make polynomials of W, as Chebyshev's. Only the
  first round is compressed: what others mixed crosses as it is.
  """
  first = np.arange(topology.period) * len(rounds) % topology.period
  later = np.sum([topology.sends[(first + k) % topology.period] for k in range(1, len(rounds))], 0)

  def send(tree: Any, state: Any, key: jax.Array, time: jax.Array) -> Delivery:
    coded = _Coded(compressor, tree, key, axis_name)
    mix = functools.partial(collectives.mix, topology=topology, axis_name=axis_name)
    time = time % topology.period * len(rounds)
    before, mixed = coded.own, mix(coded.own, coded.payload, coded.decode, time=time)
    for k, weight in enumerate(rounds[1:], 1):
      after = mix(mixed, mixed, lambda payload: payload, time=time + k)
      if weight != 1:
        after = jax.tree.map(lambda y, z, a=weight: y + a * (z - y), before, after)
      before, mixed = mixed, after
    table = coded.nbytes * topology.sends[first].astype('int64')
    table = table + ledger.payload_bytes(mixed) * later
    index = (time // len(rounds), collectives.worker_index(axis_name))
    return coded.delivery(mixed, (table, *index), axis_name)

  return Channel(lambda like: (), send, _sends(compressor))


class _Coded:
  """A tree, leaf by leaf, as its compressors send it."""

  def __init__(self, compressor: Choice, tree: Any, key: jax.Array, axis_name: str):
    with_paths, self._treedef = jax.tree_util.tree_flatten_with_path(tree)
    self.likes = [_like(x) for _, x in with_paths]
    self.compressors = [
      _chosen(compressor, collectives.leaf_name(path), like)
      for (path, _), like in zip(with_paths, self.likes, strict=True)
    ]
    self.keys = [jax.random.fold_in(key, i) for i in range(len(with_paths))]
    self.keys = [
      k if c.shared_key else collectives.worker_key(k, axis_name)
      for c, k in zip(self.compressors, self.keys, strict=True)
    ]
    self.payload = [
      c.encode(k, jnp.asarray(x))
      for c, k, (_, x) in zip(self.compressors, self.keys, with_paths, strict=True)
    ]
    self.nbytes = ledger.payload_bytes(self.payload)
    self.own = self.decode(self.payload)

  def decode(self, payload: list[Any]) -> list[jax.Array]:
    parts = zip(self.compressors, payload, self.likes, self.keys, strict=True)
    return [c.decode(p, like, key) for c, p, like, key in parts]

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
  like = _sent_through(channel, params)
  return ExchangeState(count, key, memory.init(like), channel.init(like), meter)


def send(
  x: Any,
  state: ExchangeState,
  *,
  memory: memories.Memory,
  channel: Channel,
  trigger: Trigger | None = None,
) -> tuple[Any, Any, ExchangeState]:
  """Sends a tree through a memory and a channel.

  Args:
    x: this worker's tree. Leaves that do not cross (integers, booleans, zero-size) come back as
      they are.
    state: of the exchange so far.
    memory: what is remembered.
    channel: how it crosses.
    trigger: whether this worker has news, from the squared length of what it would send and the
      count of exchanges. One without news compresses zeros, which decode to zeros, so its memory
      and its receivers' go on; they cross all the same, but a network would not have carried them,
      and they are not counted.

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

  news = []

  def through(tree: Any) -> tuple[Any, Any]:
    if trigger is not None:
      news.append(trigger(squared_length(tree), state.count))
      tree = jax.tree.map(lambda x: jnp.where(news[-1], x, 0), tree)
    deliveries.append(channel.send(tree, state.channel, key, state.count))
    return deliveries[-1].own, deliveries[-1].received

  sent = _sent_through(channel, x)
  for part in state.memory:
    collectives.require_same_leaves(sent, part, 'memory')
  own, received, remembered = memory.send(state.memory, sent, through)
  (delivery,) = deliveries
  meter = ledger.add(state.bytes_sent, *delivery.sent)
  meter = jnp.where(news[0], meter, state.bytes_sent) if news else meter
  after = ExchangeState(state.count + 1, state.key, remembered, delivery.state, meter)
  return collectives.fill(own, x), collectives.fill(received, x), after


def _sent_through(channel: Channel, tree: Any) -> Any:
  """The tree with None in place of leaves that do not cross."""

  def choose(path: Any, x: Any) -> Any:
    crosses = collectives.is_crossing(x) and channel.sends(collectives.leaf_name(path), _like(x))
    return x if crosses else None

  return jax.tree_util.tree_map_with_path(choose, tree)


def squared_length(tree: Any) -> jax.Array:
  """The sum of squares of all entries of a tree, in float32."""
  parts = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)]
  return sum(parts, start=jnp.zeros(()))


def _like(x: Any) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _refuse_complex(tree: Any) -> None:
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
      raise ValueError(
        f'leaf {collectives.leaf_name(path)!r} is {leaf.dtype}: compressors take real leaves; '
        'optax.contrib.split_real_and_imaginary wraps a transform for complex ones'
      )
