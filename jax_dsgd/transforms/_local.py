"""Transforms that work locally and meet rarely."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_dsgd import collectives

Period = int | Callable[[jax.Array], jax.Array]


class LocalStepsState(NamedTuple):
  """The state of `local_steps`.

  Attributes:
    step: local steps done in this round, int32.
    round: rounds done, int32.
    anchor: the parameters at which this round began; None at leaves that do not cross.
    inner: the state of the inner transform; its counts are steps.
    outer: the state of the outer transform; its counts are rounds.
  """

  step: jax.Array
  round: jax.Array
  anchor: Any
  inner: Any
  outer: Any


def local_steps(
  inner: optax.GradientTransformation,
  outer: optax.GradientTransformation,
  period: Period,
) -> optax.GradientTransformationExtraArgs:
  """Steps locally with one transform, and at the end of each round applies another to the way gone.

      every step        u, inner' = inner.update(g, inner, params)                  params + u is
      the local iterate end of a round    delta = anchor - (params + u)
      a pseudo-gradient: it points like a gradient
                        v, outer' = outer.update(delta, outer, anchor)              outer reduces,
                        compresses, mixes, accelerates anchor' = anchor + v,  the update returned is
                        anchor' - params

  A mean and `sgd(1)` as outer is local SGD; with Nesterov momentum it is DiLoCo. Period 1 with a
  mean and `sgd(1)` is synchronous SGD. Workers begin at one point: outer reduces ways gone, not
  places.

  Args:
    inner: the local optimizer.
    outer: applied to delta once a round; its `params` are the anchor.
    period: steps a round, an int >= 1, or a schedule from the round (int32, from 0) to its steps
      (below 1 counts as 1).

  Returns:
    A transform that needs `params`. Sends what outer sends, once a round; between, the compiled
    step runs no collective (under vmap, where a condition is a selection, outer is computed each
    step and used once a round).

  Raises:
    ValueError: a period below 1 or not an integer, no params.

  >>> from jax_dsgd import transforms
  >>> outer = optax.chain(transforms.mean_over('workers'), optax.sgd(1.0))
  >>> tx = local_steps(optax.sgd(0.5), outer, 2)
  >>> params = jnp.zeros(2)
  >>> state = jax.vmap(tx.init)(params)
  >>> for _ in range(2):  # worker w minimises (x - w)^2 / 2 from 0
  ...   gradients = params - jnp.arange(2.0)
  ...   updates, state = jax.vmap(tx.update, axis_name='workers')(gradients, state, params)
  ...   params = params + updates
  >>> params.tolist()
  [0.375, 0.375]
  """
  if not callable(period) and (
    isinstance(period, bool) or not isinstance(period, numbers.Integral) or period < 1
  ):
    raise ValueError(
      f'local_steps got period={period!r}; accepted are integers >= 1, or a schedule from the '
      'round to its steps'
    )
  inner = optax.with_extra_args_support(inner)
  outer = optax.with_extra_args_support(outer)

  def init(params: optax.Params) -> LocalStepsState:
    # A copy: donating the parameters must not take the anchor with them.
    anchor = jax.tree.map(jnp.copy, collectives.crossing(params))
    zero = collectives.vary_with(jnp.zeros((), jnp.int32), params)
    return LocalStepsState(
      zero, zero, anchor, inner.init(params), outer.init(collectives.crossing(params))
    )

  def update(
    updates: Any, state: Any, params: Any = None, **extra: Any
  ) -> tuple[Any, LocalStepsState]:
    if params is None:
      raise ValueError('local_steps moves parameters: call update(updates, state, params)')
    updates, inner_state = inner.update(updates, state.inner, params, **extra)
    here, way = collectives.crossing(params), collectives.crossing(updates)
    collectives.require_same_leaves(here, state.anchor, 'anchor')
    # As precise as the parameters: the way back to the anchor must end there, on all workers.
    way = jax.tree.map(lambda u, x: u.astype(jnp.promote_types(u.dtype, x.dtype)), way, here)

    def meet() -> tuple[Any, Any, Any]:
      delta = jax.tree.map(lambda a, x, u: (a - (x + u)).astype(a.dtype), state.anchor, here, way)
      v, outer_state = outer.update(delta, state.outer, state.anchor, **extra)
      anchor = jax.tree.map(lambda a, v: (a + v).astype(a.dtype), state.anchor, v)
      back = jax.tree.map(lambda a, x, u: (a - x).astype(u.dtype), anchor, here, way)
      return collectives.vary_like((back, anchor, outer_state), stay())

    def stay() -> tuple[Any, Any, Any]:
      return way, state.anchor, state.outer

    steps = jnp.maximum(period(state.round), 1) if callable(period) else period
    ends = state.step + 1 >= steps
    way, anchor, outer_state = jax.lax.cond(ends, meet, stay)
    step, round_ = jnp.where(ends, 0, state.step + 1), state.round + ends.astype(jnp.int32)
    after = LocalStepsState(step, round_, anchor, inner_state, outer_state)
    return collectives.fill(way, updates), after

  return optax.GradientTransformationExtraArgs(init, update)
