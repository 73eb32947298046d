"""What becomes of state that is no parameter when workers meet: kept, averaged or reset.

Moments of an inner optimizer, batch statistics and moving averages have no gradient, so no outer
transform moves them (an outer momentum could make a variance negative). One choice is made once:
as `at_meeting` of `local_steps`, or by calling the same function on any such tree.

    keep            each worker's own
    average_state   float leaves become their mean over workers; integers (counters) stay as is
    reset_state     float leaves become what `init` gives at the new parameters; integers stay, so
                    that schedules go on
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jax_dsgd import collectives

AtMeeting = Callable[[Any, Any], Any]


def keep(state: Any, params: Any) -> Any:
  """Keeps each worker's state: the default, as in local AdamW, DiLoCo and local momentum SGD."""
  return state


def average_state(axis_name: str) -> AtMeeting:
  """Averages float leaves over workers, and keeps integers, keys and counters of bytes.

  Sends each float leaf once a meeting; these bytes are in no counter of a state.

  Args:
    axis_name: the workers' axis.

  Returns:
    `(state, params) -> state`. For batch statistics: `average_state('workers')(batch_stats, None)`.
  """
  return lambda state, params: collectives.mean(state, axis_name)


def reset_state(inner: optax.GradientTransformation) -> AtMeeting:
  """Sets float leaves to what `inner.init` gives; integers stay, so that schedules go on.

  Adam's count of steps stays too: its first steps of a round are larger than those of a fresh Adam,
  by up to `(1 - b1) / sqrt(1 - b2)`.

  Args:
    inner: the transform whose state it is.

  Returns:
    `(state, params) -> state`. Sends nothing.
  """

  def reset(state: Any, params: Any) -> Any:
    fresh = inner.init(params)
    return jax.tree.map(
      lambda new, old: new if jnp.issubdtype(old.dtype, jnp.inexact) else old, fresh, state
    )

  return reset
