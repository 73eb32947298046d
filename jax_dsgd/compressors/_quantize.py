"""Compressors that send every entry in a few bits."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_dsgd.compressors._bits import (
  in_blocks,
  magnitude_bits,
  pack,
  random_words,
  reduce_blocks,
  uniform,
  unpack,
)
from jax_dsgd.compressors._compressor import Compressor, Like, Payload

_WHOLE = 2**31 - 1  # a block as long as any leaf


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
  _check_integer('qsgd', 'levels', levels, 127)
  _check_integer('qsgd', 'block', block, _WHOLE)

  def norms(flat: jax.Array, block: int) -> jax.Array:
    largest = largest_magnitude(flat, flat.size)[0]
    # Squares of tiny or huge entries leave float32, squares of entries / largest do not. (Those of
    # blocks 10^19 times smaller than the largest entry of the leaf do, and come back as zeros.)
    unit = flat / jnp.where(largest > 0, largest, 1)
    return largest * jnp.sqrt(reduce_blocks(unit * unit, block, jnp.add))

  return _rounded_blocks(
    f'qsgd(levels={levels}, block={block})',
    levels,
    block,
    scales=norms,
    rounding=at_random,
    omega=lambda n: min(min(n, block) / levels**2, math.sqrt(min(n, block)) / levels),
  )


def ternary() -> Compressor:
  """Sends each entry as -1, 0 or 1 times the largest magnitude of its leaf, at random: TernGrad.

  `C(x)_i = M sign(x_i) floor(|x_i| / M + u_i)` with M = max |x| and u_i uniform in [0, 1).

  Returns:
    An unbiased compressor, omega = (sqrt(n) - 1) / 2: the error of an entry is M |x_i| - x_i^2, of
    the largest 0, and so `(r sqrt(n - 1) - r^2) / (1 + r^2)` at most, where r M is the norm of the
    others. Sends `ceil(n / 4) + 4` bytes a leaf.

  >>> c = ternary()
  >>> payload = c.encode(jax.random.key(0), jnp.array([0.0, -3.0]))
  >>> c.decode(payload, jax.ShapeDtypeStruct((2,), jnp.float32), None).tolist()
  [0.0, -3.0]

  Reference: Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep
    Learning", arXiv 1705.07878; its clipping is left out, which would be a bias.
  """
  return _rounded_blocks(
    'ternary()',
    1,
    _WHOLE,
    scales=largest_magnitude,
    rounding=at_random,
    omega=lambda n: (math.sqrt(n) - 1) / 2,
  )


def scaled_blocks(bits: int = 8, *, block: int = 256, stochastic: bool = False) -> Compressor:
  """Sends each entry rounded to a level of its block's largest magnitude, in 2, 4 or 8 bits.

  With s = 2^(bits - 1) - 1 levels above zero, for each block b of a leaf, `C(x)_i = M round(s x_i /
  M) / s` with M = max |b|.

  Args:
    bits: of an entry: 2, 4 or 8.
    block: entries that share a scale; the last block of a leaf may be shorter.
    stochastic: round up or down at random, so that the mean is right, instead of to the nearest.

  Returns:
    With m = min(block, n) - 1 and q = sqrt(m) / (2 s): to the nearest, a contractive compressor,
    delta = 1 / (1 + q^2), since the largest entry is exact and the error of another is at most M /
    (2 s) and at most |x_i|; stochastic, an unbiased one, omega = min(q^2, q). Sends `ceil(bits n /
    8) + 4 ceil(n / block)` bytes a leaf.

  Raises:
    ValueError: bits other than 2, 4, 8, or block < 1.

  >>> c = scaled_blocks(4)
  >>> payload = c.encode(jax.random.key(0), jnp.array([0.4, -7.0, 2.8]))
  >>> c.decode(payload, jax.ShapeDtypeStruct((3,), jnp.float32), None).tolist()
  [0.0, -7.0, 3.0]

  Reference: Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", arXiv 1511.04561,
    with linear levels.
  """
  if isinstance(bits, bool) or bits not in (2, 4, 8):
    raise ValueError(f'scaled_blocks got bits={bits!r}; accepted are 2, 4 and 8')
  _check_integer('scaled_blocks', 'block', block, _WHOLE)
  levels = 2 ** (bits - 1) - 1

  def q(n: int) -> float:
    return math.sqrt(min(n, block) - 1) / (2 * levels)

  return _rounded_blocks(
    f'scaled_blocks(bits={bits}, block={block}{", stochastic=True" if stochastic else ""})',
    levels,
    block,
    scales=largest_magnitude,
    rounding=at_random if stochastic else to_nearest,
    omega=(lambda n: min(q(n) ** 2, q(n))) if stochastic else None,
    delta=None if stochastic else lambda n: 1 / (1 + q(n) ** 2),
  )


def natural() -> Compressor:
  """Sends each entry rounded at random to one of the two powers of two around it.

  For 2^a <= |x_i| < 2^(a + 1), C(x)_i = sign(x_i) 2^(a + 1) with probability |x_i| / 2^a - 1, else
  sign(x_i) 2^a. On float32 that is adding 23 random bits and keeping the exponent.

  Returns:
    An unbiased compressor, omega = 1 / 8. Sends `n + ceil(n / 8)` bytes a leaf: 9 bits an entry.
    Magnitudes that would round to 2^128, infinities and NaN come back as NaN.

  >>> c = natural()
  >>> payload = c.encode(jax.random.key(0), jnp.array([0.0, -4.0, 0.5]))
  >>> c.decode(payload, jax.ShapeDtypeStruct((3,), jnp.float32), None).tolist()
  [0.0, -4.0, 0.5]

  Reference: Horvath et al., "Natural Compression for Distributed Deep Learning", arXiv 1905.10988.
  """

  def encode(key: jax.Array, x: jax.Array) -> Payload:
    flat = x.reshape(-1).astype(jnp.float32)
    bits = magnitude_bits(flat).astype(jnp.uint32) + (random_words(key, flat.size) >> 9)
    exponents = jnp.minimum(bits >> 23, jnp.uint32(255)).astype(jnp.uint8)
    return {'exponents': exponents, 'signs': jnp.packbits(flat < 0)}

  def decode(payload: Payload, like: Like, key: jax.Array) -> jax.Array:
    exponents = payload['exponents'].astype(jnp.uint32) << 23
    negative = jnp.unpackbits(payload['signs'], count=like.size).astype(jnp.uint32) << 31
    # Infinity has the exponent of NaN; with a bit of mantissa it is one.
    nan = jnp.where(payload['exponents'] == 255, jnp.uint32(1 << 22), jnp.uint32(0))
    values = jax.lax.bitcast_convert_type(exponents | negative | nan, jnp.float32)
    return values.reshape(like.shape)

  return Compressor('natural()', encode, decode, omega=lambda n: 1 / 8)


def largest_magnitude(flat: jax.Array, block: int) -> jax.Array:
  """Gives max |b| of each block, [ceil(n / block)]; NaN where one is."""
  largest = reduce_blocks(magnitude_bits(flat), block, jnp.maximum)
  return jax.lax.bitcast_convert_type(largest, jnp.float32)


def to_nearest(key: jax.Array, levels: jax.Array) -> jax.Array:
  """Rounds to the nearest integer."""
  return jnp.round(levels)


def at_random(key: jax.Array, levels: jax.Array) -> jax.Array:
  """Rounds up or down at random so that the mean is right."""
  return jnp.floor(levels + uniform(key, levels.shape))


def _rounded_blocks(
  name: str,
  levels: int,
  block: int,
  *,
  scales: Callable[[jax.Array, int], jax.Array],
  rounding: Callable[[jax.Array, jax.Array], jax.Array],
  omega: Callable[[int], float] | None = None,
  delta: Callable[[int], float] | None = None,
) -> Compressor:
  """Entries in units of their block's scale / levels, rounded to integers and packed."""
  bits = next(b for b in (2, 4, 8) if 2 * levels + 1 <= 2**b)

  def encode(key: jax.Array, x: jax.Array) -> Payload:
    flat = x.reshape(-1).astype(jnp.float32)
    scale = scales(flat, block)
    # The quotient may exceed the levels by its rounding.
    unit = _in_units(flat, scale, block)
    level = jnp.clip(rounding(key, levels * unit), -levels, levels)
    words = (level.reshape(-1)[: x.size] + levels).astype(jnp.int32).astype(jnp.uint8)
    return {'levels': pack(words, bits), 'scales': scale}

  def decode(payload: Payload, like: Like, key: jax.Array) -> jax.Array:
    level = unpack(payload['levels'], bits, like.size).astype(jnp.int32) - levels
    blocks = in_blocks(level.astype(jnp.float32), block) * (payload['scales'][:, None] / levels)
    return blocks.reshape(-1)[: like.size].reshape(like.shape)

  return Compressor(name, encode, decode, omega=omega, delta=delta)


def _in_units(flat: jax.Array, scale: jax.Array, block: int) -> jax.Array:
  return in_blocks(flat, block) / jnp.where(scale > 0, scale, 1)[:, None]


def _check_integer(function: str, name: str, value: int, most: int) -> None:
  if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not 1 <= value <= most:
    raise ValueError(f'{function} got {name}={value!r}; accepted are integers from 1 to {most}')
