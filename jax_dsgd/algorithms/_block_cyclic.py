"""Methods for data that comes in blocks, again and again."""

from __future__ import annotations

from collections.abc import Callable

import jax
import optax

from jax_dsgd import transforms
from jax_dsgd.algorithms._local import local_sgd
from jax_dsgd.transforms import Period


def mm_psgd(
  learning_rate: optax.ScalarOrSchedule,
  period: Period,
  *,
  axis_name: str,
  block: Callable[[jax.Array], jax.Array],
  blocks: int,
) -> optax.GradientTransformationExtraArgs:
  """MM-PSGD: local SGD through all blocks of data, and for each block the mean of its models.

  In the block that is worst off the mean is much better than the last model; in the block just
  trained the last model is better.

  Args:
    learning_rate: a float, or a schedule of the local step.
    period: local steps a round: an int, or a schedule of the round.
    axis_name: the workers' axis.
    block: from the round (int32, from 0) to the number of its block.
    blocks: how many there are.

  Returns:
    A transform that needs `params`; `optax.tree.get(state, 'models')` holds the model of each
    block. Sends the model once a round. State: a copy of the model, and one for each block.

  >>> tx = mm_psgd(0.1, 8, axis_name='workers', block=lambda round: round // 10 % 2, blocks=2)

  Reference: Ding et al., "Distributed Optimization over Block-Cyclic Data", arXiv 2002.07454.
  """
  local = local_sgd(learning_rate, period, axis_name=axis_name)
  return transforms.average_by_block(local, block, blocks=blocks)


def mc_psgd(
  learning_rate: optax.ScalarOrSchedule,
  period: Period,
  *,
  axis_name: str,
  block: Callable[[jax.Array], jax.Array],
  blocks: int,
) -> optax.GradientTransformationExtraArgs:
  """MC-PSGD: as `mm_psgd`, with a chain of its own for each block, and the better of both counts.

  Args:
    learning_rate: a float, or a schedule of the local step.
    period: local steps a round: an int, or a schedule of the round.
    axis_name: the workers' axis.
    block: from the round (int32, from 0) to the number of its block.
    blocks: how many there are.

  Returns:
    A transform that needs `params` and `grad_fn`; `optax.tree.get(state, 'models')` holds the model
    of each block. Sends the model twice a round. State: three copies of the model a block, and one.

  >>> tx = mc_psgd(0.1, 8, axis_name='workers', block=lambda round: round // 10 % 2, blocks=2)

  Reference: Ding et al., "Distributed Optimization over Block-Cyclic Data", arXiv 2002.07454. There
    the better model is chosen by losses, here by gradients (see `choose_chain_by_block`).
  """
  local = local_sgd(learning_rate, period, axis_name=axis_name)
  return transforms.choose_chain_by_block(local, block, blocks=blocks, axis_name=axis_name)
