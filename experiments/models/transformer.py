"""A small decoder-only transformer language model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.data import datasets
from experiments.models import _model


class _Block(nnx.Module):
  """Pre-norm causal attention and an MLP of four times the width, each added to its input."""

  def __init__(self, width: int, depth: int, heads: int, *, rngs: nnx.Rngs):
    # Two sums a block: this scale keeps the residual stream's variance independent of depth.
    last = nnx.initializers.variance_scaling(1 / (2 * depth), 'fan_in', 'truncated_normal')
    self.heads = heads
    self.norm_0 = nnx.RMSNorm(width, rngs=rngs)
    self.query_key_value = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
    self.attention_out = nnx.Linear(width, width, use_bias=False, kernel_init=last, rngs=rngs)
    self.norm_1 = nnx.RMSNorm(width, rngs=rngs)
    self.mlp_in = nnx.Linear(width, 4 * width, use_bias=False, rngs=rngs)
    self.mlp_out = nnx.Linear(4 * width, width, use_bias=False, kernel_init=last, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    batch, length, width = x.shape
    mixed = self.query_key_value(self.norm_0(x))
    mixed = mixed.reshape(batch, length, 3, self.heads, width // self.heads)
    query, key, value = (mixed[:, :, i] for i in range(3))
    attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    x = x + self.attention_out(attended.reshape(x.shape))
    return x + self.mlp_out(jax.nn.gelu(self.mlp_in(self.norm_1(x))))


class _Transformer(nnx.Module):
  def __init__(
    self, vocabulary: int, length: int, width: int, depth: int, heads: int, *, rngs: nnx.Rngs
  ):
    small = nnx.initializers.normal(0.02)
    self.depth = depth
    self.embed = nnx.Embed(vocabulary, width, embedding_init=small, rngs=rngs)
    self.positions = nnx.Param(small(rngs.params(), (length, width), jnp.float32))
    for i in range(depth):
      setattr(self, f'block_{i}', _Block(width, depth, heads, rngs=rngs))
    self.norm = nnx.RMSNorm(width, rngs=rngs)
    self.head = nnx.Linear(width, vocabulary, use_bias=False, kernel_init=small, rngs=rngs)

  def __call__(self, tokens: jax.Array) -> jax.Array:
    x = self.embed(tokens) + self.positions[None, : tokens.shape[1]]
    for i in range(self.depth):
      x = getattr(self, f'block_{i}')(x)
    return self.head(self.norm(x))


def transformer(
  dataset: datasets.Dataset, *, width: int = 64, depth: int = 2, heads: int = 4
) -> _model.Model:
  """Decoder-only transformer: pre-norm (RMSNorm), causal, learned positions, GELU, no biases.

  The head is not tied to the embedding; it starts small, so the first loss is about log(symbols).

  Args:
    dataset: tokens `[N, T]` with a target each; gives the length T and the number of symbols.
    width: of the residual stream.
    depth: number of blocks.
    heads: attention heads; must divide `width`.

  Returns:
    The model; it takes sequences of up to T tokens.

  Raises:
    ValueError: if the data set is not one of tokens, or if `heads` does not divide `width`.

  >>> model = transformer(datasets.shakespeare(roles=1), width=16, depth=1)
  >>> logits = jax.eval_shape(model.apply, model.init(jax.random.key(0)), jnp.zeros((2, 64), int))
  >>> logits.shape
  (2, 64, 79)
  """
  inputs, targets = dataset.inputs, dataset.targets
  if not np.issubdtype(inputs.dtype, np.integer) or not inputs.ndim == targets.ndim == 2:
    raise ValueError(
      f'transformer takes tokens [N, T] with a target each; data set {dataset.name!r} has inputs '
      f'of shape {inputs.shape} and type {inputs.dtype}, targets of shape {targets.shape}'
    )
  width, depth, heads = (
    datasets.whole_number(name, value, least=1)
    for name, value in (('width', width), ('depth', depth), ('heads', heads))
  )
  if width % heads:
    raise ValueError(f'heads must divide width, got heads {heads} and width {width}')
  length, vocabulary = inputs.shape[1], dataset.outputs
  return _model.from_module(
    lambda rngs: _Transformer(vocabulary, length, width, depth, heads, rngs=rngs),
    outputs=vocabulary,
  )
