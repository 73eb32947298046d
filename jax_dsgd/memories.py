"""What compression remembers, in one place: the exchange that every compressing method uses.

Let C be encode-then-decode and R a linear reduction (the mean over workers, or the mixing of a
topology). Only payloads cross:

    memory      send(state, x):      own                received           state
    none                             C(x)               R(C(x))            -
    residual e                       C(x + e)           R(C(x + e))        e' = x + e - C(x + e)
    reference (h, r), step a         h + C(x - h)       r + R(C(x - h))    h' = h + a C(x - h),  r'
    = r + a R(C(x - h))

`own` is what every receiver now believes of this worker, `received` the reduction of what this
worker believes of the others. A mean uses `received`; gossip uses `x + g (received - own)`, which
keeps the mean over workers for every memory and every compressor.

Units: a memory holds the units of what it is given. Placed after the learning rate (as in
  `algorithms`) it holds *updates*: what was
held back under the old rate arrives as computed, whatever the rate is now. Placed before, it holds
*gradients*, and what is held back is scaled by the rate at which it leaves. Memories are float32
whatever the leaves are: bfloat16 loses small residuals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_dsgd import collectives, compressors, ledger, topologies

Through = Callable[[Any], tuple[Any, Any]]


class Memory(NamedTuple):
  """A rule of memory.

  Attributes:
    name: as a reader would call it.
    init: from a tree shaped like what will be sent to the state of the memory.
    send: `(state, x, through) -> (own, received, state)`, where `through(y) = (C(y), R(C(y)))`
      crosses the wire.
  """

  name: str
  init: Callable[[Any], Any]
  send: Callable[[Any, Any, Through], tuple[Any, Any, Any]]

  def __repr__(self) -> str:
    return self.name


class ResidualState(NamedTuple):
  """The state of `residual`."""

  residual: Any  # e: what was to be sent and was not, float32


class ReferenceState(NamedTuple):
  """The state of `reference`."""

  reference: Any  # h: what all receivers believe of this worker, float32
  received: Any  # r: the reduction of all references, float32; one buffer, not one a neighbour


def none() -> Memory:
  """Remembers nothing: what compression drops is lost. State: no bytes.

  For unbiased compressors and whole values.
  """
  return Memory('none()', lambda like: (), lambda state, x, through: (*through(x), state))


def residual() -> Memory:
  """Error feedback: what compression drops is added to what is sent next.

      p = x + e,   own = C(p),   received = R(C(p)),   e' = p - C(p)

  For every compressor `mean(e') + mean(C(p)) = mean(x + e)`: nothing is lost, only late. Needs a
  contractive compressor.

  State: e, 4 bytes an entry.

  Reference: Seide et al. 2014; Karimireddy et al., "Error Feedback Fixes SignSGD", arXiv
    1901.09847.
  """

  def send(state: ResidualState, x: Any, through: Through) -> tuple[Any, Any, ResidualState]:
    due = jax.tree.map(lambda x, e: _f32(x) + e, x, state.residual)
    own, received = through(due)
    return own, received, ResidualState(jax.tree.map(jnp.subtract, due, own))

  return Memory('residual()', lambda like: ResidualState(_zeros(like)), send)


def reference(*, step: float = 1.0) -> Memory:
  """Differences to a shared copy: as x settles, they and what compression drops go to zero.

      c = C(x - h),   own = h + c,   received = r + R(c),   h' = h + a c,   r' = r + a R(c)

  In a mean it is EF21 and Markov compression (contractive C, a = 1) or DIANA (unbiased C, a <= 1 /
  (1 + omega)); in gossip it is CHOCO.

  Args:
    step: a, in (0, 1].

  State: h and r, 8 bytes an entry.

  Raises:
    ValueError: a step outside (0, 1].

  Reference: Richtarik et al., EF21, arXiv 2106.05203; Mishchenko et al., DIANA, arXiv 1901.09269;
    Koloskova et al., CHOCO,
  arXiv 1902.00340.
  """
  if isinstance(step, bool) or not isinstance(step, int | float) or not 0 < step <= 1:
    raise ValueError(f'reference got step={step!r}; accepted are numbers in (0, 1]')

  def send(state: ReferenceState, x: Any, through: Through) -> tuple[Any, Any, ReferenceState]:
    sent, arrived = through(jax.tree.map(lambda x, h: _f32(x) - h, x, state.reference))
    own = jax.tree.map(jnp.add, state.reference, sent)
    received = jax.tree.map(jnp.add, state.received, arrived)
    if step == 1:
      return own, received, ReferenceState(own, received)
    move = lambda old, change: old + step * change  # noqa: E731
    after = ReferenceState(
      jax.tree.map(move, state.reference, sent), jax.tree.map(move, state.received, arrived)
    )
    return own, received, after

  name = 'reference()' if step == 1 else f'reference(step={step:g})'
  return Memory(name, lambda like: ReferenceState(_zeros(like), _zeros(like)), send)


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


def init_exchange(params: Any, memory: Memory, *, seed: int) -> ExchangeState:
  """The state before the first exchange of trees like params."""
  _refuse_complex(params)
  return ExchangeState(
    jnp.zeros((), jnp.int32),
    jax.random.key(seed),
    memory.init(crossing(params)),
    ledger.new_meter(),
  )


def exchange(
  x: Any,
  state: ExchangeState,
  *,
  compressor: compressors.Compressor,
  memory: Memory,
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
    own, received (see the table above; float32 where a memory or a compressor made it so) and the
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

  sent = crossing(x)
  _require_same_leaves(sent, state.memory)
  own, received, remembered = memory.send(state.memory, sent, through)
  after = ExchangeState(state.count + 1, state.key, remembered, meter)
  return fill(own, x), fill(received, x), after


def crossing(tree: Any) -> Any:
  """The tree with None in place of leaves that do not cross (see `collectives.is_crossing`)."""
  return jax.tree.map(lambda x: x if collectives.is_crossing(x) else None, tree)


def fill(tree: Any, whole: Any) -> Any:
  """The tree with the leaves of `whole` in place of None: undoes `crossing`."""
  return jax.tree.map(lambda w, x: w if x is None else x, whole, tree, is_leaf=lambda x: x is None)


def _f32(x: jax.Array) -> jax.Array:
  return x.astype(jnp.float32)


def _zeros(like: Any) -> Any:
  return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), like)


def _refuse_complex(tree: Any) -> None:
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
      raise ValueError(
        f'leaf {collectives.leaf_name(path)!r} is {leaf.dtype}: compressors take real leaves; '
        'optax.contrib.split_real_and_imaginary '
        f'wraps a transform for complex ones'
      )


def _require_same_leaves(sent: Any, memory: Any) -> None:
  """Refuses a tree whose leaves are not those that the memory was made for."""
  now = {collectives.leaf_name(p): x.shape for p, x in jax.tree_util.tree_leaves_with_path(sent)}
  for part in memory:
    then = {collectives.leaf_name(p): x.shape for p, x in jax.tree_util.tree_leaves_with_path(part)}
    for name in sorted(now.keys() | then.keys()):
      if now.get(name) != then.get(name):
        raise ValueError(
          f'the tree changed between calls: leaf {name!r} has shape {now.get(name, "none")} now, '
          f'and {then.get(name, "none")} in the memory'
        )
