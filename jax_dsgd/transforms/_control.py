"""What a worker is told from outside: its row of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_dsgd import collectives


class Control(NamedTuple):
  """One worker's row of a trace, the extra argument `control` of `update`.

  Transforms read what concerns them and ignore the rest; a field that is None says nothing.

  Attributes:
    active: whether the worker takes part, a bool.
    weight: of its contribution to a mean, float32 >= 0.
    steps: local steps that it has time for in this round, int32.
    late: whether it comes too late for the others to wait, a bool.
    group: workers with the same number meet, int32; below 0 it meets nobody.
    staleness: how many updates its contribution is old, int32.
    view: the parameters that its contribution was computed at.
  """

  active: Any = None
  weight: Any = None
  steps: Any = None
  late: Any = None
  group: Any = None
  staleness: Any = None
  view: Any = None


def told(extra: dict[str, Any], field: str) -> Any:
  """What the extra argument `control` says in a field; None where it says nothing."""
  return getattr(extra.get('control'), field, None)


def share_of(control: Control | None) -> jax.Array | None:
  """The weight that a control row gives to a contribution: 0 of a worker that is not active."""
  if control is None or (control.weight is None and control.active is None):
    return None
  weight = jnp.float32(1) if control.weight is None else jnp.asarray(control.weight, jnp.float32)
  return weight if control.active is None else jnp.where(control.active, weight, 0)


def limit_local_steps(
  tx: optax.GradientTransformation, steps: Sequence[int], *, axis_name: str
) -> optax.GradientTransformationExtraArgs:
  """Gives each worker its own number of local steps a round, as a row of `control` would.

  Args:
    tx: a transform with `local_steps` in it.
    steps: for each worker; it takes the first so many steps of a round, and then stays.
    axis_name: the workers' axis.

  Returns:
    A transform. Sends and keeps what `tx` does.

  Raises:
    ValueError: steps that are not integers >= 0, or not one a worker (when traced).
  """
  table = np.asarray(steps)
  if table.ndim != 1 or table.dtype.kind not in 'iu' or (table < 0).any():
    raise ValueError(
      f'limit_local_steps got steps={steps!r}; accepted is one integer >= 0 a worker'
    )
  tx = optax.with_extra_args_support(tx)

  def update(
    updates: Any,
    state: Any,
    params: Any = None,
    *,
    control: Control | None = None,
    **extra: Any,
  ) -> tuple[Any, Any]:
    collectives.require_varying(collectives.crossing(updates), axis_name)
    row = (control or Control())._replace(steps=collectives.own_entry(table, axis_name))
    return tx.update(updates, state, params, control=row, **extra)

  return optax.GradientTransformationExtraArgs(tx.init, update)
