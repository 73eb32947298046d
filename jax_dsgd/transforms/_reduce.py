"""Transforms that replace updates by a reduction over workers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_dsgd import collectives, compressors, exchange, ledger, memories
from jax_dsgd.transforms._control import share_of, told

Weights = Sequence[float] | np.ndarray | Callable[[jax.Array], jax.Array]


class MeanState(NamedTuple):
  """count: means taken, int32. bytes_sent: see `ledger.bytes_sent`."""

  count: jax.Array
  bytes_sent: jax.Array


def mean_over(
  axis_name: str, *, weights: Weights | None = None
) -> optax.GradientTransformationExtraArgs:
  """Replaces the updates by their mean over workers: `u = sum_w weight_w u_w / sum_w weight_w`.

  A worker of weight zero contributes nothing, not even a NaN, and receives the mean all the same;
  if all weights are zero, each worker keeps its own updates. Integer, boolean and zero-size leaves
  stay as they are. Where `control` is given, its weight (0 of a worker that is not active)
  multiplies that of the worker.

  Args:
    axis_name: the workers' axis.
    weights: None for a plain mean; one nonnegative number a worker, such as its number of examples;
      or a schedule from the count of means taken to float32 [W].

  Returns:
    A transform. Sends each crossing leaf once a step, in its own dtype, in one all-reduce a dtype.

  Raises:
    ValueError: a negative or non-finite weight, not one weight a worker (when traced), updates that
      are summed already (see `collectives.require_varying`).

  >>> tx = optax.chain(mean_over('workers'), optax.sgd(1.0))
  >>> x = jnp.zeros((4, 2))
  >>> state = jax.vmap(tx.init)(x)
  >>> gradients = jnp.arange(4.0)[:, None] * jnp.ones((4, 2))
  >>> jax.vmap(tx.update, axis_name='workers')(gradients, state)[0][0].tolist()
  [-1.5, -1.5]
  """
  own_weight = None if weights is None else _weight_of(weights, axis_name)

  def init(params: optax.Params) -> MeanState:
    zero = MeanState(jnp.zeros((), jnp.int32), ledger.new_meter())
    return collectives.vary_with(zero, params)

  def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, MeanState]:
    collectives.require_varying(collectives.crossing(updates), axis_name)
    weight = own_weight(state.count) if own_weight else None
    share = share_of(extra.get('control'))
    if share is not None:
      weight = share if weight is None else weight * share
    nbytes = ledger.payload_bytes(collectives.crossing(updates)) + (0 if weight is None else 4)
    sent = nbytes if collectives.worker_count(axis_name) > 1 else 0
    after = MeanState(state.count + 1, ledger.add(state.bytes_sent, sent))
    return collectives.mean(updates, axis_name, weight), after

  return optax.GradientTransformationExtraArgs(init, update)


def _weight_of(weights: Weights, axis_name: str) -> Callable[[jax.Array], jax.Array | float]:
  if callable(weights):
    return lambda count: weights(count)[collectives.worker_index(axis_name)]
  table = np.asarray(weights, np.float64)
  if table.ndim != 1 or not np.isfinite(table).all() or (table < 0).any():
    raise ValueError(f'weights={weights!r} must be one finite number >= 0 a worker')
  return lambda count: collectives.own_entry(table, axis_name)


def compressed_mean(
  compressor: exchange.Choice,
  *,
  axis_name: str,
  memory: memories.Memory,
  server: memories.Memory | None = None,
  seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """Replaces the updates by the mean over workers of what a compressor and a memory let through.

  With `received` of `memories`: `u' = r`, e.g. `u' = mean(C(u + e))`, `e' = u + e - C(u + e)` for
  the residual. Units are those of what arrives: after the learning rate the memory holds updates (a
  change of the rate leaves what is held back as it is), before it gradients (what is held back is
  scaled by the rate at which it leaves).

  Where `control` is given and a worker is not active, nothing of it arrives, its memory stays as it
  is, and the mean is that of the others (with a reference: of what is remembered of all).

  Args:
    compressor: the wire format of all leaves, or a policy (`compressors.by_leaf`).
    axis_name: the workers' axis.
    memory: `memories.none()`, `memories.residual()` or `memories.reference()`.
    server: None, or the memory (none or residual) with which the mean is compressed once more on
      its way back. Then `init` runs where the axis is bound, as in `Workers.spmd(tx.init)`.
    seed: of the key that random compressors draw from.

  Returns:
    A transform whose updates keep their dtype. Sends each payload once a step: in an all-reduce a
    dtype where payloads sum, otherwise in an all-gather a word size, which puts W - 1 times its
    bytes on a link. With a server it sends each chunk's payload to the worker that owns the chunk,
    and that worker's to all (two all-to-all and gather a word size): about twice the payload's
    bytes on a link, however many workers there are.
    Temporary memory: the gathered payloads, twice at most, and up to six buffers of a leaf's size;
    never a dense one a worker.

  Raises:
    ValueError: a complex leaf, a tree that changed between calls, updates that are summed already;
      a residual memory of a compressor that is unbiased and not contractive.

  Warns:
    UserWarning: a biased compressor that drops more than 1 % without memory; a gather that puts
      more on a link than the dense mean would, of a tree of 64 KiB or more (when traced).

  >>> from jax_dsgd import compressors, memories
  >>> tx = compressed_mean(compressors.top_k(k=1), axis_name='workers', memory=memories.residual())
  >>> state = jax.vmap(tx.init)(jnp.zeros((2, 3)))
  >>> gradients = jnp.array([[1.0, 2.0, 0.0], [4.0, 0.0, 3.0]])
  >>> updates, state = jax.vmap(tx.update, axis_name='workers')(gradients, state)
  >>> updates[0].tolist(), state.memory.residual.tolist()
  ([2.0, 1.0, 0.0], [[1.0, 0.0, 0.0], [0.0, 0.0, 3.0]])
  """
  checked = _checked(compressor, memory)
  if server is None:
    channel = exchange.mean_of_workers(checked, axis_name=axis_name)
  else:
    channel = exchange.two_phase_mean(checked, axis_name=axis_name, server=server)
  return exchanged_mean(channel, memory, axis_name=axis_name, seed=seed)


def _checked(compressor: exchange.Choice, memory: memories.Memory) -> exchange.Choice:
  """The compressor or policy, refused or flagged where it does not go with the memory."""
  if not isinstance(compressor, compressors.Compressor):
    policy = compressor

    def choose(path: str, like: jax.ShapeDtypeStruct) -> compressors.Compressor | None:
      chosen = policy(path, like)
      if chosen is not None:
        _checked(chosen, memory)
      return chosen

    return choose
  amplifies = compressor.omega is not None and compressor.delta is None
  if memory.kind == 'residual' and amplifies:
    raise ValueError(f'{compressor!r} is not contractive: what {memory!r} holds back would grow')
  loses = compressor.omega is None and (compressor.delta is None or compressor.delta(10**6) < 0.99)
  if memory.kind == 'none' and loses:
    warnings.warn(f'{compressor!r} is biased: without memory what it drops is lost', stacklevel=3)
  return compressor


def exchanged_mean(
  channel: exchange.Channel, memory: memories.Memory, *, axis_name: str, seed: int
) -> optax.GradientTransformationExtraArgs:
  """Replaces the updates by what arrives through a memory and a channel whose reduction is a mean.

  Args:
    channel: how the updates cross.
    memory: what is remembered.
    axis_name: the workers' axis.
    seed: of the key that the channel draws from.

  Returns:
    A transform whose updates keep their dtype.
  """

  def init(params: optax.Params) -> exchange.ExchangeState:
    return exchange.init(params, memory=memory, channel=channel, seed=seed)

  def update(
    updates: Any, state: Any, params: Any = None, **extra: Any
  ) -> tuple[Any, exchange.ExchangeState]:
    collectives.require_varying(collectives.crossing(updates), axis_name)
    active = told(extra, 'active')
    if active is None:
      _, received, state = exchange.send(updates, state, memory=memory, channel=channel)
      return optax.tree.cast_like(received, updates), state
    own = _where_active(active, updates)
    _, received, state = exchange.send(
      own, state, memory=memory, channel=channel, trigger=lambda squared, count: active
    )
    if memory.kind != 'reference':
      present = collectives.sum(jnp.asarray(active, jnp.float32), axis_name)
      scale = collectives.worker_count(axis_name) / jnp.maximum(present, 1)
      received = jax.tree.map(lambda r: scale * r if collectives.is_crossing(r) else r, received)
    return optax.tree.cast_like(received, updates), state

  return optax.GradientTransformationExtraArgs(init, update)


def _where_active(active: jax.Array, updates: Any) -> Any:
  return jax.tree.map(
    lambda u: jnp.where(active, u, 0) if collectives.is_crossing(u) else u, updates
  )


def vote_majority(*, axis_name: str) -> optax.GradientTransformationExtraArgs:
  """Replaces the updates by the sign that most workers give: `u' = sign(sum_w sign(u_w))`.

  Ties give 0. A worker whose leaf is all zeros does not vote on it; a single zero entry in a leaf
  that is not counts as +1.

  Args:
    axis_name: the workers' axis.

  Returns:
    A transform. Sends `ceil(n / 8) + 4` bytes a leaf of n entries.

  >>> tx = vote_majority(axis_name='workers')
  >>> votes = jnp.array([[1.0, -2.0], [3.0, -1.0], [-9.0, -4.0]])
  >>> jax.vmap(tx.update, axis_name='workers')(votes, jax.vmap(tx.init)(votes))[0][0].tolist()
  [1.0, -1.0]

  Reference: Bernstein et al., "signSGD with Majority Vote is Communication Efficient And Fault
    Tolerant", arXiv 1810.05291.
  """
  votes = compressors.scaled_sign(magnitude=compressors.unit_magnitude)
  channel = exchange.mean_of_workers(votes, axis_name=axis_name)
  mean = exchanged_mean(channel, memories.none(), axis_name=axis_name, seed=0)
  sign = lambda u: jnp.sign(u) if collectives.is_crossing(u) else u  # noqa: E731
  return optax.chain(mean, optax.stateless(lambda updates, params: jax.tree.map(sign, updates)))
