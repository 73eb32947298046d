"""Adam whose variance stands still while its momentum is sent in few bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_dsgd import collectives, compressors, exchange, ledger, memories


class FrozenAdamState(NamedTuple):
  """The state of `scale_by_frozen_adam`.

  Attributes:
    count: steps, int32.
    mu: the momentum, the same on every worker, float32; None at leaves that do not cross.
    nu: the variance, the same on every worker, float32.
    exchange: of the compressed momentum, with a residual; it counts the dense bytes too.
  """

  count: jax.Array
  mu: Any
  nu: Any
  exchange: exchange.ExchangeState


def scale_by_frozen_adam(
  compressor: compressors.Compressor,
  refresh: Callable[[jax.Array], jax.Array],
  *,
  axis_name: str,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """Adam on the mean gradient, exact where `refresh` says so, else with a compressed momentum.

      refresh    g = mean_w g_w;   m <- b1 m + (1 - b1) g;   v <- b2 v + (1 - b2) g^2
      else       m_w = b1 m + (1 - b1) g_w;   m <- mean_w C(m_w + e_w);   e_w <- m_w + e_w - C(.)
      u = m / (sqrt(v) + eps)

  Error feedback is sound because nothing after it is nonlinear in m: v stands still.

  Args:
    compressor: the wire format of each leaf of the momentum.
    refresh: from the step (int32, from 0, the same on every worker) to whether it is dense; the
      first always is.
    axis_name: the workers' axis.
    b1: decay of m.
    b2: decay of v.
    eps: added to the root.
    seed: of the key that random compressors draw from.

  Returns:
    A transform. Sends the gradient whole on dense steps, else the payload. State: m, v and e, 12
    bytes an entry. No bias correction.

  >>> from jax_dsgd import compressors
  >>> sign = compressors.scaled_sign()
  >>> tx = scale_by_frozen_adam(sign, lambda step: step < 9, axis_name='workers', b1=0, b2=0.75)
  >>> x = jnp.full((2, 3), 4.0)
  >>> step = lambda x: tx.update(x, tx.init(x))[0]
  >>> jax.vmap(step, axis_name='workers')(x)[0].tolist()
  [2.0, 2.0, 2.0]

  Reference: Tang et al., "1-bit Adam", arXiv 2102.02888.
  """
  memory = memories.residual()
  channel = exchange.mean_of_workers(compressor, axis_name=axis_name)

  def init(params: optax.Params) -> FrozenAdamState:
    zeros = lambda x: jnp.zeros_like(x, jnp.float32)  # noqa: E731
    mu, nu = (jax.tree.map(zeros, collectives.crossing(params)) for _ in range(2))
    count = collectives.vary_with(jnp.zeros((), jnp.int32), params)
    return FrozenAdamState(
      count, mu, nu, exchange.init(params, memory=memory, channel=channel, seed=seed)
    )

  def update(
    updates: Any, state: Any, params: Any = None, **extra: Any
  ) -> tuple[Any, FrozenAdamState]:
    gradients = collectives.crossing(updates)
    collectives.require_varying(gradients, axis_name)
    collectives.require_same_leaves(gradients, state.mu, 'momentum')
    moments = state.mu, state.nu, state.exchange
    blend = lambda b, old, new: b * old + (1 - b) * new.astype(jnp.float32)  # noqa: E731

    def dense() -> Any:
      g = collectives.mean(gradients, axis_name)
      mu = jax.tree.map(lambda m, g: blend(b1, m, g), state.mu, g)
      nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * jnp.square(g), state.nu, _f32(g))
      sent = ledger.payload_bytes(gradients) if collectives.worker_count(axis_name) > 1 else 0
      meter = ledger.add(state.exchange.bytes_sent, sent)
      return collectives.vary_like((mu, nu, state.exchange._replace(bytes_sent=meter)), moments)

    def compressed() -> Any:
      local = jax.tree.map(lambda m, g: blend(b1, m, g), state.mu, gradients)
      _, mu, after = exchange.send(local, state.exchange, memory=memory, channel=channel)
      return collectives.vary_like((_f32(mu), state.nu, after), moments)

    is_dense = jnp.logical_or(refresh(state.count), state.count == 0)
    mu, nu, after = jax.lax.cond(is_dense, dense, compressed)
    scaled = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mu, nu)
    scaled = optax.tree.cast_like(scaled, gradients)
    return collectives.fill(scaled, updates), FrozenAdamState(state.count + 1, mu, nu, after)

  return optax.GradientTransformationExtraArgs(init, update)


def _f32(tree: Any) -> Any:
  return jax.tree.map(lambda x: x.astype(jnp.float32), tree)
