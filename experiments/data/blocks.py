"""Data that comes in blocks of classes, one block after the other, again and again."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from experiments.data import datasets

__all__ = ('Block', 'in_turn', 'of_classes')

Block = Callable[[jax.Array], jax.Array]


def in_turn(*, rounds: int, blocks: int) -> Block:
  """The block of a round: each lasts for some rounds, the first follows the last.

  Args:
    rounds: that a block lasts.
    blocks: how many there are.

  Returns:
    A function from the round (from 0) to the number of its block.

  Raises:
    ValueError: a number below 1.

  >>> [in_turn(rounds=2, blocks=2)(round) for round in range(6)]
  [0, 0, 1, 1, 0, 0]
  """
  rounds = datasets.whole_number('rounds', rounds, least=1)
  blocks = datasets.whole_number('blocks', blocks, least=1)
  return lambda round_: round_ // rounds % blocks


def of_classes(dataset: datasets.Dataset, targets: np.ndarray, *, blocks: int) -> np.ndarray:
  """The block of each example: neighbouring classes are in one, as evenly as may be.

  Args:
    dataset: gives the number of classes.
    targets: `[N]` int classes, of its training or test set.
    blocks: how many there are.

  Returns:
    `[N]` numbers from 0 to `blocks - 1`.

  Raises:
    ValueError: targets that are not one class an example, or fewer classes than blocks.

  >>> of_classes(datasets.digits(), np.arange(10), blocks=5).tolist()
  [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
  """
  blocks = datasets.whole_number('blocks', blocks, least=1)
  if targets.ndim != 1 or not np.issubdtype(targets.dtype, np.integer) or blocks > dataset.outputs:
    raise ValueError(
      f'blocks={blocks} of classes need as many classes, one an example; data set '
      f'{dataset.name!r} has {dataset.outputs}, and targets of shape {targets.shape}'
    )
  return targets * blocks // dataset.outputs
