"""The multilayer perceptron."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
from flax import nnx

from experiments.data import datasets
from experiments.models import _model


class _MLP(nnx.Module):
  def __init__(self, widths: tuple[int, ...], *, rngs: nnx.Rngs):
    self.depth = len(widths) - 1
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(widths)):
      setattr(self, f'layer_{i}', nnx.Linear(fan_in, fan_out, rngs=rngs))

  def __call__(self, x: jax.Array) -> jax.Array:
    x = x.reshape(x.shape[0], -1)
    for i in range(self.depth - 1):
      x = jax.nn.relu(getattr(self, f'layer_{i}')(x))
    return getattr(self, f'layer_{self.depth - 1}')(x)


def mlp(dataset: datasets.Dataset, *, hidden: Sequence[int] = (64,)) -> _model.Model:
  """Dense layers with ReLU between them, on the flattened example.

  Args:
    dataset: gives the number of features and of outputs.
    hidden: widths of the hidden layers; none gives a linear model.

  Returns:
    The model.

  Raises:
    ValueError: if the inputs are tokens, or on a width below 1.

  >>> model = mlp(datasets.digits(), hidden=(32,))
  >>> params = model.init(jax.random.key(0))
  >>> params['layer_0']['kernel'].shape, params['layer_1']['kernel'].shape
  ((64, 32), (32, 10))
  """
  features = _model.feature_count('mlp', dataset)
  widths = (features, *_model.sizes('hidden', hidden), dataset.outputs)
  return _model.from_module(lambda rngs: _MLP(widths, rngs=rngs), outputs=dataset.outputs)
