"""A network with an answer after every block, to be stopped at any time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.data import datasets
from experiments.models import _model, losses


class _Exits(nnx.Module):
  def __init__(self, widths: tuple[int, ...], outputs: int, *, rngs: nnx.Rngs):
    self.depth = len(widths) - 1
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(widths)):
      setattr(self, f'block_{i}', nnx.Linear(fan_in, fan_out, rngs=rngs))
      setattr(self, f'exit_{i}', nnx.Linear(fan_out, outputs, rngs=rngs))

  def __call__(self, x: jax.Array) -> jax.Array:
    x = x.reshape(x.shape[0], -1)
    answers = []
    for i in range(self.depth):
      x = jax.nn.relu(getattr(self, f'block_{i}')(x))
      answers.append(getattr(self, f'exit_{i}')(x))
    return jnp.stack(answers)


def anytime(
  dataset: datasets.Dataset, *, hidden: Sequence[int] = (32, 32, 32)
) -> tuple[_model.Model, ...]:
  """Dense blocks with ReLU, and a linear classifier after each; later exits share earlier blocks.

  Args:
    dataset: gives the number of features and of outputs.
    hidden: widths of the blocks, one exit each.

  Returns:
    A model an exit, the earliest first: all have the same `init` and take the same parameters.

  Raises:
    ValueError: if the inputs are tokens, no block, or a width below 1.

  >>> exits = anytime(datasets.digits(), hidden=(16, 8))
  >>> len(exits), sorted(exits[0].init(jax.random.key(0)))
  (2, ['block_0', 'block_1', 'exit_0', 'exit_1'])
  """
  features = _model.feature_count('anytime', dataset)
  blocks = _model.sizes('hidden', hidden)
  if not blocks:
    raise ValueError('hidden must name at least one block, got ()')
  outputs = dataset.outputs
  init, answers = _model.from_module(
    lambda rngs: _Exits((features, *blocks), outputs, rngs=rngs), outputs=outputs
  )
  # Blocks behind an exit are dead code to it, and what several exits need is computed once.
  at = lambda i: _model.Model(init, lambda params, x: answers(params, x)[i])  # noqa: E731
  return tuple(at(i) for i in range(len(blocks)))


def exit_losses(
  exits: Sequence[_model.Model], params: Any, inputs: _model.Array, targets: _model.Array
) -> jax.Array:
  """The mean loss of each exit on a batch, float32 `[exits]`.

  Its `jax.jacrev` with respect to the parameters has a row an exit, the earliest first.
  """
  return jnp.stack([losses.loss(model, params, inputs, targets) for model in exits])
