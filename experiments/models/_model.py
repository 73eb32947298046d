"""What a model is here: two pure functions over a plain dict of arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from experiments.data import datasets

Array = jax.Array | np.ndarray


class Model(NamedTuple):
  """A model as pure functions.

  Attributes:
    init: key -> parameters: nested dicts with string keys and float32 leaves.
    apply: (parameters, inputs `[B, ...]`) -> logits `[B, outputs]` or `[B, T, outputs]`, or `[B]`
      where the data set has one output.
  """

  init: Callable[[jax.Array], Any]
  apply: Callable[[Any, Array], jax.Array]


def from_module(build: Callable[[nnx.Rngs], nnx.Module], *, outputs: int) -> Model:
  """Makes a `Model` of a Flax NNX module that has parameters and no other state.

  Args:
    build: makes the module. Sub-modules are attributes, not lists: a list puts integers into the
      paths of its parameters, and checkpoints want strings.
    outputs: the last dimension of what the module returns; 1 is squeezed away.

  Returns:
    The model. Its functions work under `jit`, `grad`, `vmap` and `eval_shape`.

  >>> model = from_module(lambda rngs: nnx.Linear(3, 2, rngs=rngs), outputs=2)
  >>> params = model.init(jax.random.key(0))
  >>> jax.tree.map(jax.numpy.shape, params), model.apply(params, jax.numpy.ones((5, 3))).shape
  ({'bias': (2,), 'kernel': (3, 2)}, (5, 2))
  """
  graphdef, _ = nnx.split(nnx.eval_shape(lambda: build(nnx.Rngs(0))), nnx.Param)

  def init(key: jax.Array) -> Any:
    return nnx.to_pure_dict(nnx.split(build(nnx.Rngs(key)), nnx.Param)[1])

  def apply(params: Any, inputs: Array) -> jax.Array:
    module: Any = nnx.merge(graphdef, nnx.State(params), copy=True)
    result = module(inputs)
    return result[..., 0] if outputs == 1 else result

  return Model(init, apply)


def sizes(name: str, values: Sequence[int]) -> tuple[int, ...]:
  """Returns layer sizes as a tuple of ints, refusing anything else.

  Args:
    name: the argument's name, for the message.
    values: what the caller passed.

  Returns:
    The sizes.

  Raises:
    ValueError: naming the argument and the value.
  """
  if not isinstance(values, (tuple, list)):
    raise ValueError(f'{name} must be a tuple of ints >= 1, got {values!r}')
  return tuple(datasets.whole_number(name, value, least=1) for value in values)


def feature_count(model: str, dataset: datasets.Dataset) -> int:
  """Returns the number of features of an example, refusing tokens.

  Args:
    model: the model's name, for the message.
    dataset: what the model is for.

  Returns:
    The product of the sizes of one example.

  Raises:
    ValueError: naming the model and the data set.
  """
  if not np.issubdtype(dataset.inputs.dtype, np.floating):
    raise ValueError(
      f'{model} takes float features; data set {dataset.name!r} has {dataset.inputs.dtype} inputs'
    )
  return math.prod(dataset.inputs.shape[1:])
