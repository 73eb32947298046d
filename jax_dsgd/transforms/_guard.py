"""One agreed decision on bad numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_dsgd import collectives


class SkipState(NamedTuple):
  """The state of `skip_nonfinite`."""

  skipped: jax.Array  # steps skipped so far, int32
  consecutive: jax.Array  # of them, the last ones in a row
  inner: Any  # of the wrapped transform


def skip_nonfinite(
  inner: optax.GradientTransformation, *, axis_name: str
) -> optax.GradientTransformationExtraArgs:
  """Skips a step on every worker alike if the updates of any worker hold a NaN or an infinity.

  On a skipped step the updates are zeros and the inner state, its memories, counters and keys
  included, stays as it was. A bad step is never let through, however many come in a row: read
  `consecutive` and stop the run instead.

  Args:
    inner: what runs on good steps, communication included; wrap the whole chain, so that no NaN
      enters a memory.
    axis_name: the workers' axis.

  Returns:
    A transform. Sends 4 bytes a step, to all workers: it makes even gossip and local steps wait for
    everybody. Where that is too dear, wrap the local part of the chain in `optax.apply_if_finite`
    instead.

  >>> tx = skip_nonfinite(optax.sgd(1.0), axis_name='workers')
  >>> gradients = jnp.array([1.0, jnp.nan])
  >>> state = jax.vmap(tx.init)(jnp.zeros(2))
  >>> updates, state = jax.vmap(tx.update, axis_name='workers')(gradients, state)
  >>> updates.tolist(), state.skipped.tolist()
  ([0.0, 0.0], [1, 1])
  """
  inner = optax.with_extra_args_support(inner)

  def init(params: optax.Params) -> SkipState:
    zero = collectives.vary_with(jnp.zeros((), jnp.int32), params)
    return SkipState(zero, zero, inner.init(params))

  def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, SkipState]:
    finite = [jnp.isfinite(x).all() for x in jax.tree.leaves(collectives.crossing(updates))]
    good = collectives.all_agree(jnp.stack(finite).all() if finite else jnp.array(True), axis_name)

    def step() -> tuple[Any, Any]:
      stepped, inner_state = inner.update(updates, state.inner, params, **extra)
      return collectives.vary_like((optax.tree.cast_like(stepped, updates), inner_state), skip())

    def skip() -> tuple[Any, Any]:
      return jax.tree.map(jnp.zeros_like, updates), state.inner

    stepped, inner_state = jax.lax.cond(good, step, skip)
    bad = 1 - good.astype(jnp.int32)
    return stepped, SkipState(state.skipped + bad, (state.consecutive + 1) * bad, inner_state)

  return optax.GradientTransformationExtraArgs(init, update)
