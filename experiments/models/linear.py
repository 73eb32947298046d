"""The linear model: for quadratics and logistic regression, where optima are known."""

from __future__ import annotations

import jax
from flax import nnx

from experiments.data import datasets
from experiments.models import _model


class _Linear(nnx.Module):
  def __init__(self, features: int, outputs: int, *, bias: bool, rngs: nnx.Rngs):
    zeros = nnx.initializers.zeros_init()
    self.layer_0 = nnx.Linear(features, outputs, use_bias=bias, kernel_init=zeros, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.layer_0(x.reshape(x.shape[0], -1))


def linear(dataset: datasets.Dataset, *, bias: bool = False) -> _model.Model:
  """f(x) = W x, or W x + b, from W = 0 and b = 0.

  Args:
    dataset: gives the number of features (all axes of an example, flattened) and of outputs.
    bias: whether there is a b. The data set's `floor` is that of the model without.

  Returns:
    The model.

  Raises:
    ValueError: if the inputs are tokens.

  >>> model = linear(datasets.quadratics(dimension=4))
  >>> jax.tree.map(jax.numpy.shape, model.init(jax.random.key(0)))
  {'layer_0': {'kernel': (4, 1)}}
  """
  features = _model.feature_count('linear', dataset)
  return _model.from_module(
    lambda rngs: _Linear(features, dataset.outputs, bias=bias, rngs=rngs), outputs=dataset.outputs
  )
