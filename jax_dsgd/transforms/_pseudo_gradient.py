"""Pseudo-gradients in the units of gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_dsgd import collectives
from jax_dsgd.transforms._local import Period


class LocalUnitsState(NamedTuple):
  """The state of `in_local_units`: local steps and rounds so far, int32, and the inner state."""

  step: jax.Array
  round: jax.Array
  inner: Any


def in_local_units(
  tx: optax.GradientTransformation,
  learning_rate: optax.ScalarOrSchedule,
  period: Period,
) -> optax.GradientTransformationExtraArgs:
  """Runs an outer transform on sums of gradients instead of ways: `v = lr T(delta / lr)`.

  A pseudo-gradient `delta = anchor - params` is a way, in the units of the parameters, and about
  `lr` times the sum of a round's gradients. Divided by lr it does not shrink with the local rate,
  so a momentum mixes rounds of different rates as equals; the result, times lr, does.

  Args:
    tx: an outer transform, that gives ways to go (downhill) for gradients.
    learning_rate: of the local steps: a float, or a schedule of the local step, taken at the last
      step of the round.
    period: that of `local_steps`.

  Returns:
    A transform for `outer` of `local_steps`. State: two counters and that of `tx`.

  >>> tx = in_local_units(optax.trace(0.5), 0.1, 4)
  >>> [round(float(x), 6) for x in tx.update(jnp.array([0.2]), tx.init(jnp.zeros(1)))[0]]
  [0.2]
  """
  tx = optax.with_extra_args_support(tx)

  def init(params: optax.Params) -> LocalUnitsState:
    zero = collectives.vary_with(jnp.zeros((), jnp.int32), params)
    return LocalUnitsState(zero, zero, tx.init(params))

  def update(
    updates: Any, state: Any, params: Any = None, **extra: Any
  ) -> tuple[Any, LocalUnitsState]:
    steps = jnp.maximum(period(state.round), 1) if callable(period) else period
    after = state.step + steps
    rate = learning_rate(after - 1) if callable(learning_rate) else learning_rate
    scaled = jax.tree.map(lambda u: (u / rate).astype(u.dtype), updates)
    v, inner = tx.update(scaled, state.inner, params, **extra)
    v = jax.tree.map(lambda v: (rate * v).astype(v.dtype), v)
    return v, LocalUnitsState(after, state.round + 1, inner)

  return optax.GradientTransformationExtraArgs(init, update)
