"""The second compression of two-way methods, on values that all workers hold alike."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jax_dsgd import compressors, exchange, memories


def recompress(
  compressor: compressors.Compressor, *, memory: memories.Memory, seed: int = 0
) -> optax.GradientTransformation:
  """Compresses what was reduced, as a server does before it answers: `u' = received` with R = id.

  With the residual, `p = u + s, u' = C(p), s' = p - C(p)`; with the reference, `r' = r + C(u - r),
  u' = r'`. It comes after a mean, so that all workers compute the same with one key.

  Args:
    compressor: the wire format of each leaf on the way back.
    memory: of the server, see `memories`.
    seed: of the key that random compressors draw from, one for all workers.

  Returns:
    A transform. Sends nothing and counts no bytes, since here every worker plays the server; a real
    one would send the payload to each worker once a step. State: that of the memory, held by every
    worker.

  >>> from jax_dsgd import compressors
  >>> tx = recompress(compressors.top_k(k=1), memory=memories.residual())
  >>> updates, state = tx.update(jnp.array([3.0, 1.0]), tx.init(jnp.zeros(2)))
  >>> tx.update(jnp.array([0.0, 1.0]), state)[0].tolist()
  [0.0, 2.0]
  """

  def send(tree: Any, state: Any, key: jax.Array, time: jax.Array) -> exchange.Delivery:
    leaves, treedef = jax.tree.flatten(tree)
    keys = [jax.random.fold_in(key, i) for i in range(len(leaves))]
    decoded = [
      compressor.decode(compressor.encode(k, x), jax.ShapeDtypeStruct(x.shape, x.dtype), k)
      for k, x in zip(keys, map(jnp.asarray, leaves), strict=True)
    ]
    own = jax.tree.unflatten(treedef, decoded)
    return exchange.Delivery(own, own, (), (0,))

  channel = exchange.Channel(lambda like: (), send)

  def init(params: optax.Params) -> exchange.ExchangeState:
    return exchange.init(params, memory=memory, channel=channel, seed=seed)

  def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, exchange.ExchangeState]:
    _, received, state = exchange.send(updates, state, memory=memory, channel=channel)
    return optax.tree.cast_like(received, updates), state

  return optax.GradientTransformation(init, update)
