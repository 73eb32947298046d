"""One transform after another, on one state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_dsgd import collectives


class StagesState(NamedTuple):
  """The state of `stages`."""

  count: jax.Array  # steps, int32
  inner: Any  # the one state of all transforms


def stages(
  transforms: Sequence[optax.GradientTransformation], stage: Callable[[jax.Array], jax.Array]
) -> optax.GradientTransformationExtraArgs:
  """Runs one of several transforms that share a state: which one is a schedule of the step.

  For what changes shapes and so cannot be a schedule itself, like the fraction of entries sent: the
  memory stays, the payload differs.

  Args:
    transforms: of one kind, whose states have the same leaves, shapes and dtypes.
    stage: from the step (int32, from 0, the same on every worker) to the place of the transform;
      clipped to the places there are.

  Returns:
    A transform. Sends what the transform of the stage sends (under vmap, where a switch is a
    selection, all are computed).

  Raises:
    ValueError: no transforms; states that differ, when it is initialised.

  >>> import optax
  >>> tx = stages([optax.scale(1.0), optax.scale(-1.0)], lambda step: step // 2)
  >>> state, seen = tx.init(jnp.zeros(())), []
  >>> for _ in range(4):
  ...   update, state = tx.update(jnp.ones(()), state)
  ...   seen.append(float(update))
  >>> seen
  [1.0, 1.0, -1.0, -1.0]
  """
  if not transforms:
    raise ValueError('stages got transforms=[]; accepted is at least one')
  supported = [optax.with_extra_args_support(tx) for tx in transforms]

  def init(params: optax.Params) -> StagesState:
    states = [tx.init(params) for tx in supported]
    first, *others = [jax.tree.map(lambda x: (x.shape, x.dtype), state) for state in states]
    for i, other in enumerate(others, 1):
      if other != first:
        raise ValueError(f'stages got transforms whose states differ: the first and number {i}')
    count = collectives.vary_with(jnp.zeros((), jnp.int32), params)
    return StagesState(count, states[0])

  def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, StagesState]:
    like = updates, state.inner

    def branch(tx: optax.GradientTransformationExtraArgs) -> Callable[[], Any]:
      return lambda: collectives.vary_with(tx.update(updates, state.inner, params, **extra), like)

    branches = [branch(tx) for tx in supported]
    updates, inner = jax.lax.switch(stage(state.count), branches)
    return updates, StagesState(state.count + 1, inner)

  return optax.GradientTransformationExtraArgs(init, update)
