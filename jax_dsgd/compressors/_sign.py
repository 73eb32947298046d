"""Compressors that send one bit an entry."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_dsgd.compressors._compressor import Compressor, Like, Payload


def mean_magnitude(x: jax.Array) -> jax.Array:
  """The scale that makes the sign a contraction: mean |x|."""
  return jnp.mean(jnp.abs(x))


def unit_magnitude(x: jax.Array) -> jax.Array:
  """1 for a vote; 0 where all entries are zero, as of a frozen leaf; NaN where one is NaN."""
  # Not of the maximum, which loses a NaN where XLA splits it over threads on CPU.
  return jnp.sign(jnp.sum(jnp.abs(x)))


def scaled_sign(*, magnitude: Callable[[jax.Array], jax.Array] = mean_magnitude) -> Compressor:
  """Sends signs, packed eight to a byte, and one magnitude a leaf: C(x) = magnitude(x) sign(x).

  Here sign(0) = sign(-0) = 1. A leaf of zeros decodes to zeros, since its magnitude is 0.

  Args:
    magnitude: from the float32 leaf to a scalar: `mean_magnitude`, or `unit_magnitude` for votes.

  Returns:
    A biased compressor; with `mean_magnitude` contractive, delta = |x|_1^2 / (n |x|_2^2) >= 1 / n.
    Sends `ceil(n / 8) + 4` bytes a leaf.

  >>> c = scaled_sign()
  >>> payload = c.encode(jax.random.key(0), jnp.array([1.0, -3.0]))
  >>> c.decode(payload, jax.ShapeDtypeStruct((2,), jnp.float32), None).tolist()
  [2.0, -2.0]

  Reference: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression
    Schemes", arXiv 1901.09847.
  """

  def encode(key: jax.Array, x: jax.Array) -> Payload:
    flat = x.reshape(-1).astype(jnp.float32)
    return {'bits': jnp.packbits(flat >= 0), 'magnitude': magnitude(flat)}

  def decode(payload: Payload, like: Like, key: jax.Array) -> jax.Array:
    positive = jnp.unpackbits(payload['bits'], count=like.size)
    return (payload['magnitude'] * (2.0 * positive.astype(jnp.float32) - 1.0)).reshape(like.shape)

  return Compressor(
    name='scaled_sign()'
    if magnitude is mean_magnitude
    else f'scaled_sign(magnitude={magnitude.__name__})',
    encode=encode,
    decode=decode,
    delta=(lambda n: 1.0 / n) if magnitude is mean_magnitude else None,
  )
