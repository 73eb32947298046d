"""Methods that take many local steps between few averages."""

from __future__ import annotations

import optax

from jax_dsgd import transforms
from jax_dsgd.transforms import Period


def local_sgd(
  learning_rate: optax.ScalarOrSchedule,
  period: Period,
  *,
  axis_name: str,
  momentum: float | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Local SGD: `period` steps on each worker alone, then the mean of the models.

  Args:
    learning_rate: a float, or a schedule of the local step.
    period: steps between means: an int, or a schedule of the round.
    axis_name: the workers' axis.
    momentum: of local heavy-ball momentum, if any; it stays local, neither averaged nor reset.

  Returns:
    A transform that needs `params`. Sends the model once a round. State: one copy of the model
    besides the momentum.

  >>> tx = local_sgd(0.1, 8, axis_name='workers')

  Reference: Stich, "Local SGD Converges Fast and Communicates Little", arXiv 1805.09767.
  """
  outer = optax.chain(transforms.mean_over(axis_name), optax.sgd(1.0))
  return transforms.local_steps(optax.sgd(learning_rate, momentum=momentum), outer, period)
