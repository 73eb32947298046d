"""Parameter servers: what workers do with what they pulled, and the server with what comes.

One text of a method serves the replay of a trace in one program (`simulation.replay_events`) and a
run of processes of which each is somewhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_dsgd import compressors, ledger, memories, transforms


class Work(NamedTuple):
  """One local step of a worker, as the gradient of a replay is asked for it.

  Attributes:
    worker: who computes, int32.
    shard: whose data, int32.
    count: steps done on this shard before, int32: the number of the batch.
    examples: in the batch, int32.
  """

  worker: jax.Array
  shard: jax.Array
  count: jax.Array
  examples: jax.Array


Gradient = Callable[[Any, Work], Any]


class ParameterServer(NamedTuple):
  """An asynchronous method: what workers do with what they pulled, and the server with what comes.

      worker k   y <- view_k, then local steps of inner;   push C(view_k - y + memory)
      server     x <- x + outer.update(what arrived, x);   answer C'(x - view_k)
      worker k   view_k <- view_k + C'(x - view_k)

  What is pushed is a pseudo-gradient: it points like a gradient, in the units of the parameters.

  Attributes:
    inner: of workers; its state belongs to the shard of data, and so does its count of steps.
    outer: of the server; its counts are pushes. It may read `staleness` and `view` of `control`.
    up: how pushes are compressed, leaf by leaf.
    memory: of pushes, one a worker.
    down: how answers are compressed.
    seed: of random compressors.
  """

  inner: optax.GradientTransformation
  outer: optax.GradientTransformation
  up: compressors.Compressor = compressors.identity()
  memory: memories.Memory = memories.none()
  down: compressors.Compressor = compressors.identity()
  seed: int = 0


class ServerState(NamedTuple):
  """The state of the server: parameters, that of outer, and how many pushes it applied, int32."""

  params: Any
  outer: Any
  version: jax.Array


class WorkerState(NamedTuple):
  """The state of one worker: what it pulled, at which version, and the memory of its pushes."""

  view: Any
  version: jax.Array
  memory: Any


class ShardState(NamedTuple):
  """What goes with a shard of the data: steps done on it, int32, and the state of inner."""

  count: jax.Array
  inner: Any


def init_server(method: ParameterServer, params: Any) -> ServerState:
  """The server before the first push."""
  return ServerState(params, method.outer.init(params), jnp.zeros((), jnp.int32))


def init_worker(method: ParameterServer, params: Any) -> WorkerState:
  """A worker that has pulled the first parameters."""
  return WorkerState(params, jnp.zeros((), jnp.int32), method.memory.init(params))


def init_shard(method: ParameterServer, params: Any) -> ShardState:
  """A shard of which nothing was read."""
  return ShardState(jnp.zeros((), jnp.int32), method.inner.init(params))


def compute(
  method: ParameterServer,
  gradient: Gradient,
  worker: WorkerState,
  shard: ShardState,
  work: Work,
  steps: jax.Array,
) -> tuple[Any, WorkerState, ShardState]:
  """A worker's local steps from its view: the payload to push, and the states after."""
  inner = optax.with_extra_args_support(method.inner)

  # The sum of updates, not view - y, which would round: one step is pushed as it is.
  def step(_: jax.Array, carry: tuple[Any, ShardState]) -> tuple[Any, ShardState]:
    total, shard = carry
    y = jax.tree.map(jnp.add, worker.view, total)
    grad_fn = lambda params: gradient(params, work._replace(count=shard.count))  # noqa: E731
    updates, state = inner.update(grad_fn(y), shard.inner, y, grad_fn=grad_fn)
    return optax.apply_updates(total, updates), ShardState(shard.count + 1, state)

  start = jax.tree.map(jnp.zeros_like, worker.view), shard
  total, shard = jax.lax.fori_loop(0, steps, step, start)
  delta = jax.tree.map(jnp.negative, total)
  key = _key(method, 0, work.worker, worker.version)
  payloads: list[Any] = []

  def through(tree: Any) -> tuple[Any, Any]:
    payload, own = _coded(method.up, tree, key)
    payloads.append(payload)
    return own, own

  _, _, memory = method.memory.send(worker.memory, delta, through)
  return payloads[0], worker._replace(memory=memory), shard


def apply(
  method: ParameterServer, server: ServerState, worker: WorkerState, index: jax.Array, payload: Any
) -> ServerState:
  """The server after a push of worker `index`, whose view and version are those it computed at."""
  outer = optax.with_extra_args_support(method.outer)
  key = _key(method, 0, index, worker.version)
  delta = _decoded(method.up, payload, server.params, key)
  control = transforms.Control(staleness=server.version - worker.version, view=worker.view)
  updates, state = outer.update(delta, server.outer, server.params, control=control)
  params = optax.apply_updates(server.params, updates)
  return ServerState(params, state, server.version + 1)


def answer(
  method: ParameterServer, server: ServerState, worker: WorkerState, index: jax.Array
) -> tuple[Any, WorkerState]:
  """What the server sends to worker `index`, and the worker after it has received it.

  Where answers are not compressed it is the model itself: a difference would be added with a
  rounding.
  """
  if _is_whole(method):
    payload = jax.tree.leaves(server.params)
  else:
    behind = jax.tree.map(jnp.subtract, server.params, worker.view)
    payload = _coded(method.down, behind, _key(method, 1, index, server.version))[0]
  return payload, receive(method, worker, index, payload, server.version)


def receive(
  method: ParameterServer,
  worker: WorkerState,
  index: jax.Array,
  payload: Any,
  version: jax.Array,
) -> WorkerState:
  """Worker `index` after it has received the answer of the server at a version."""
  if _is_whole(method):
    view = jax.tree.unflatten(jax.tree.structure(worker.view), payload)
  else:
    change = _decoded(method.down, payload, worker.view, _key(method, 1, index, version))
    view = jax.tree.map(jnp.add, worker.view, change)
  return worker._replace(view=view, version=version)


def _is_whole(method: ParameterServer) -> bool:
  return method.down.name == 'identity()'


def message_bytes(method: ParameterServer, params: Any) -> tuple[int, int]:
  """Bytes of one push and of one answer, from the shapes of payloads."""
  key = jax.random.key(0)
  up, down = (
    jax.eval_shape(lambda params, c=c: _coded(c, params, key)[0], params)
    for c in (method.up, method.down)
  )
  return ledger.payload_bytes(up), ledger.payload_bytes(down)


def _key(method: ParameterServer, way: int, index: jax.Array, version: jax.Array) -> jax.Array:
  key = jax.random.fold_in(jax.random.key(method.seed), way)
  return jax.random.fold_in(jax.random.fold_in(key, index), version)


def _coded(compressor: compressors.Compressor, tree: Any, key: jax.Array) -> tuple[list[Any], Any]:
  """The payloads of the leaves, and the tree that they decode to."""
  leaves, treedef = jax.tree.flatten(tree)
  keys = [jax.random.fold_in(key, i) for i in range(len(leaves))]
  payload = [compressor.encode(k, x) for k, x in zip(keys, leaves, strict=True)]
  own = [compressor.decode(p, _like(x), k) for p, x, k in zip(payload, leaves, keys, strict=True)]
  return payload, jax.tree.unflatten(treedef, own)


def _decoded(compressor: compressors.Compressor, payload: Any, like: Any, key: jax.Array) -> Any:
  leaves, treedef = jax.tree.flatten(like)
  keys = [jax.random.fold_in(key, i) for i in range(len(leaves))]
  parts = zip(payload, leaves, keys, strict=True)
  return jax.tree.unflatten(treedef, [compressor.decode(p, _like(x), k) for p, x, k in parts])


def _like(x: Any) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(x.shape, x.dtype)
