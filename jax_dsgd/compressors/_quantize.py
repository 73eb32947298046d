"""Compressors that send every entry in a few bits."""

from __future__ import annotations

import math
import numbers

import jax
import jax.numpy as jnp

from jax_dsgd.compressors._compressor import Compressor, Like, Payload


def qsgd(levels: int = 7, *, block: int = 512) -> Compressor:
  """Sends each entry rounded at random to a level of its block's norm, in 2, 4 or 8 bits.

  There are 2 s + 1 levels. For each block b of a leaf, `C(x)_i = |b|_2 sign(x_i) floor(s |x_i| /
  |b|_2 + u_i) / s` with u_i uniform in [0, 1).

  Args:
    levels: s, the levels above zero: 1 takes 2 bits an entry, 2 to 7 take 4, 8 to 127 take 8.
    block: entries that share a norm; the last block of a leaf may be shorter.

  Returns:
    An unbiased compressor, omega = min(block / s^2, sqrt(block) / s). Sends `ceil(bits n / 8) + 4
    ceil(n / block)` bytes a leaf.

  Raises:
    ValueError: levels outside 1..127, or block < 1.

  >>> c = qsgd(levels=1)
  >>> payload = c.encode(jax.random.key(0), jnp.array([0.0, -3.0]))
  >>> c.decode(payload, jax.ShapeDtypeStruct((2,), jnp.float32), None).tolist()
  [0.0, -3.0]

  Reference: Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and
  Encoding", arXiv 1610.02132; its Elias coding is left out, since payloads have static shapes.
  """
  for name, value, most in (('levels', levels, 127), ('block', block, 2**31 - 1)):
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not 1 <= value <= most:
      raise ValueError(f'qsgd got {name}={value!r}; accepted are integers from 1 to {most}')
  bits = next(b for b in (2, 4, 8) if 2 * levels + 1 <= 2**b)

  def encode(key: jax.Array, x: jax.Array) -> Payload:
    blocks = _in_blocks(x.reshape(-1).astype(jnp.float32), block)
    largest = jnp.max(jnp.abs(blocks), axis=1, keepdims=True)
    # Squares of tiny or huge entries leave float32, squares of entries / largest do not.
    unit = blocks / jnp.where(largest > 0, largest, 1)
    norm = jnp.sqrt(jnp.sum(unit * unit, axis=1, keepdims=True))
    uniform = jax.random.uniform(key, blocks.shape)
    level = jnp.minimum(
      jnp.floor(levels * jnp.abs(unit) / jnp.where(norm > 0, norm, 1) + uniform), levels
    )
    signed = jnp.where(blocks < 0, -level, level).reshape(-1)[: x.size] + levels
    return {'levels': _pack(signed.astype(jnp.uint8), bits), 'norms': (largest * norm).reshape(-1)}

  def decode(payload: Payload, like: Like, key: jax.Array) -> jax.Array:
    signed = _unpack(payload['levels'], bits, like.size).astype(jnp.float32) - levels
    blocks = _in_blocks(signed, block) * (payload['norms'][:, None] / levels)
    return blocks.reshape(-1)[: like.size].reshape(like.shape)

  return Compressor(
    name=f'qsgd(levels={levels}, block={block})',
    encode=encode,
    decode=decode,
    omega=lambda n: min(min(n, block) / levels**2, math.sqrt(min(n, block)) / levels),
  )


def _in_blocks(flat: jax.Array, block: int) -> jax.Array:
  block = min(block, flat.size)
  return jnp.pad(flat, (0, -flat.size % block)).reshape(-1, block)


def _pack(words: jax.Array, bits: int) -> jax.Array:
  """Words below 2^bits, packed 8 / bits to a byte, the first in the lowest bits."""
  if bits == 8:
    return words
  per_byte = 8 // bits
  groups = jnp.pad(words, (0, -words.size % per_byte)).reshape(-1, per_byte)
  return jnp.sum(groups << _shifts(bits), axis=1, dtype=jnp.uint8)


def _unpack(packed: jax.Array, bits: int, n: int) -> jax.Array:
  if bits == 8:
    return packed
  return ((packed[:, None] >> _shifts(bits)) & jnp.uint8(2**bits - 1)).reshape(-1)[:n]


def _shifts(bits: int) -> jax.Array:
  return bits * jnp.arange(8 // bits, dtype=jnp.uint8)[None, :]
