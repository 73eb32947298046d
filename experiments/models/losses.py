"""The loss that a run trains on, and the sums that an evaluation adds up."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from experiments.models import _model


def loss(
  model: _model.Model, params: Any, inputs: _model.Array, targets: _model.Array
) -> jax.Array:
  """Mean loss over a batch: softmax cross entropy for int targets, 0.5 (f(x) - y)^2 for float.

  Args:
    model: the model.
    params: its parameters.
    inputs: `[B, ...]`.
    targets: `[B]` or `[B, T]` int classes, or `[B]` floats.

  Returns:
    A float32 scalar: the mean over examples, and over positions where there are some.

  Raises:
    ValueError: if the model's outputs do not fit the targets.

  >>> square = _model.Model(init=lambda key: (), apply=lambda params, x: x * x)
  >>> float(loss(square, (), jnp.array([1.0, 2.0]), jnp.array([1.0, 2.0])))
  1.0
  """
  return jnp.mean(_losses(model.apply(params, inputs), targets))


def evaluate(
  model: _model.Model,
  params: Any,
  inputs: _model.Array,
  targets: _model.Array,
  mask: _model.Array,
) -> dict[str, jax.Array]:
  """Sums over the examples of a batch that the mask keeps, to be added up over batches.

  Args:
    model: the model.
    params: its parameters.
    inputs: `[B, ...]`.
    targets: as in `loss`.
    mask: `[B]`, 1 for an example and 0 for padding.

  Returns:
    Float32 scalars: `loss`, summed; `correct`, the number of right classes (0 for regression);
    `count`, the number of targets. The means are `loss / count` and `correct / count`.

  Raises:
    ValueError: if the model's outputs do not fit the targets.

  >>> parity = _model.Model(init=lambda key: (), apply=lambda params, x: jnp.eye(2)[x % 2])
  >>> x, y, mask = jnp.array([0, 1, 2, 3]), jnp.array([0, 1, 1, 1]), jnp.array([1, 1, 1, 0])
  >>> sums = evaluate(parity, (), x, y, mask)
  >>> float(sums['correct']), float(sums['count'])
  (2.0, 3.0)
  """
  outputs = model.apply(params, inputs)
  losses = _losses(outputs, targets)
  weights = mask.astype(jnp.float32).reshape(mask.shape + (1,) * (targets.ndim - 1))
  weights = jnp.broadcast_to(weights, targets.shape)
  correct = jnp.zeros_like(losses)
  if jnp.issubdtype(targets.dtype, jnp.integer):
    correct = (jnp.argmax(outputs, axis=-1) == targets).astype(jnp.float32)
  return {
    'loss': jnp.sum(losses * weights),
    'correct': jnp.sum(correct * weights),
    'count': jnp.sum(weights),
  }


def _losses(outputs: jax.Array, targets: _model.Array) -> jax.Array:
  """One loss a target."""
  is_class = jnp.issubdtype(targets.dtype, jnp.integer)
  if (outputs.shape[:-1] if is_class else outputs.shape) != targets.shape:
    raise ValueError(
      f'outputs of shape {outputs.shape} do not fit {targets.dtype} targets of shape '
      f'{targets.shape}'
    )
  if is_class:
    return optax.losses.softmax_cross_entropy_with_integer_labels(outputs, targets)
  return 0.5 * jnp.square(outputs - targets)
