"""A small convolutional network for images."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.data import datasets
from experiments.models import _model


class _CNN(nnx.Module):
  def __init__(
    self,
    size: tuple[int, int],
    channels: tuple[int, ...],
    hidden: int,
    outputs: int,
    *,
    rngs: nnx.Rngs,
  ):
    self.stages = len(channels) - 1
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(channels)):
      setattr(self, f'conv_{i}', nnx.Linear(9 * fan_in, fan_out, rngs=rngs))
    height, width = (n >> self.stages for n in size)
    self.dense_0 = nnx.Linear(height * width * channels[-1], hidden, rngs=rngs)
    self.dense_1 = nnx.Linear(hidden, outputs, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    for i in range(self.stages):
      x = _pool(jax.nn.relu(getattr(self, f'conv_{i}')(_patches(x))))
    x = jax.nn.relu(self.dense_0(x.reshape(x.shape[0], -1)))
    return self.dense_1(x)


def _patches(x: jax.Array) -> jax.Array:
  """`[B, H, W, C]` -> `[B, H, W, 9 C]`: each pixel's 3 x 3 surroundings, zero outside the image.

  A dense layer on top is a convolution. As a product of matrices it stays one when `vmap` simulates
  workers with a kernel each; `lax.conv` becomes a grouped convolution there, twice as slow on CPU.
  """
  height, width = x.shape[1:3]
  x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
  shifts = itertools.product(range(3), range(3))
  return jnp.concatenate([x[:, i : i + height, j : j + width] for i, j in shifts], axis=-1)


def _pool(x: jax.Array) -> jax.Array:
  """The largest of each 2 x 2 block; an odd last row or column is dropped."""
  batch, height, width, channels = x.shape
  x = x[:, : height // 2 * 2, : width // 2 * 2]
  return x.reshape(batch, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4))


def cnn(
  dataset: datasets.Dataset, *, channels: Sequence[int] = (16, 32), hidden: int = 64
) -> _model.Model:
  """3 x 3 convolutions, each with ReLU and 2 x 2 max pooling, then two dense layers.

  Args:
    dataset: images `[N, H, W, C]`; gives the sizes and the number of outputs.
    channels: output channels of each convolution.
    hidden: width of the dense layer before the outputs.

  Returns:
    The model. The kernel of a convolution is kept as a matrix `[9 * in, out]`.

  Raises:
    ValueError: if the inputs are not images, or too small to be halved once a convolution.

  >>> model = cnn(datasets.digits(), channels=(4, 8), hidden=16)
  >>> params = model.init(jax.random.key(0))
  >>> params['conv_1']['kernel'].shape, params['dense_0']['kernel'].shape
  ((36, 8), (32, 16))
  """
  _model.feature_count('cnn', dataset)
  shape = dataset.inputs.shape
  if len(shape) != 4:
    raise ValueError(f'cnn takes images [N, H, W, C]; data set {dataset.name!r} has shape {shape}')
  widths = _model.sizes('channels', channels)
  if min(shape[1:3]) >> len(widths) == 0:
    raise ValueError(
      f'channels {widths} halve the image {len(widths)} times, but it is {shape[1]} x {shape[2]}'
    )
  size, outputs = (shape[1], shape[2]), dataset.outputs
  (dense,) = _model.sizes('hidden', (hidden,))
  return _model.from_module(
    lambda rngs: _CNN(size, (shape[3], *widths), dense, outputs, rngs=rngs), outputs=outputs
  )
