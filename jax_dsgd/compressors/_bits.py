"""Bits of entries: packing, blocks that share a scale, and random words that cost little."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp


def pack(words: jax.Array, bits: int) -> jax.Array:
  """Words below 2^bits, packed 8 / bits to a byte, the first in the lowest bits.

  >>> pack(jnp.array([1, 2, 3], jnp.uint8), 4).tolist()
  [33, 3]
  """
  if bits == 8:
    return words
  per_byte = 8 // bits
  groups = jnp.pad(words, (0, -words.size % per_byte)).reshape(-1, per_byte)
  return jnp.sum(groups << _shifts(bits), axis=1, dtype=jnp.uint8)


def unpack(packed: jax.Array, bits: int, n: int) -> jax.Array:
  """The first n words of what `pack` gave."""
  if bits == 8:
    return packed
  return ((packed[:, None] >> _shifts(bits)) & jnp.uint8(2**bits - 1)).reshape(-1)[:n]


def in_blocks(flat: jax.Array, block: int) -> jax.Array:
  """Rows of `block` entries, or of all where there are fewer; the last is filled with zeros."""
  block = min(block, flat.size)
  return jnp.pad(flat, (0, -flat.size % block)).reshape(-1, block)


def magnitude_bits(x: jax.Array) -> jax.Array:
  """|x| of float32 as int32 of the same order, in which NaN is the largest and no sum loses it."""
  return jax.lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(0x7FFFFFFF)


def reduce_blocks(
  flat: jax.Array, block: int, join: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
  """`jnp.maximum` or `jnp.add` over each block of a flat array, the last of which may be shorter.

  In strips of columns, for XLA on CPU reduces along a row entry by entry, 20 times as slow.

  >>> reduce_blocks(jnp.ones(70), 32, jnp.add).tolist()
  [32.0, 32.0, 6.0]
  """
  n = flat.size
  if block >= n > _piece(join):
    return _reduce_rows(reduce_blocks(flat, _piece(join), join)[None], join)
  full = n - n % block
  parts = [flat[:full].reshape(-1, block), flat[full:].reshape(1, -1)]
  return jnp.concatenate([_reduce_rows(part, join) for part in parts if part.size])


def _reduce_rows(rows: jax.Array, join: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
  reduce = jnp.max if join is jnp.maximum else functools.partial(jnp.sum, dtype=rows.dtype)
  n = rows.shape[1]
  piece = _piece(join)
  if n > piece and n % piece == 0:
    return reduce(_reduce_rows(rows.reshape(-1, piece), join).reshape(rows.shape[0], -1), axis=1)
  count = min(8, n // 32)
  if count < 2:
    return reduce(rows, axis=1)
  width = n // count
  strips = [rows[:, i * width : (i + 1) * width] for i in range(count)]
  joined = _reduce_rows(functools.reduce(join, strips), join)
  rest = rows[:, count * width :]
  return join(joined, reduce(rest, axis=1)) if rest.size else joined


def _piece(join: Callable[[jax.Array, jax.Array], jax.Array]) -> int:
  return 256 if join is jnp.maximum else 512  # as measured


def random_words(key: jax.Array, n: int) -> jax.Array:
  """Gives n random uint32 words, a hash of the place and of two words of the key.

  Threefry takes 20 times as long as the quantiser that it serves. This is the finaliser of
  murmur3 with the second word of the key between its multiplications. It is uniform, and
  independent between keys, as far as statistics tell; it is not cryptographic.

  >>> random_words(jax.random.key(0), 3).dtype
  dtype('uint32')
  """
  first, second = jax.random.bits(key, (2,), jnp.uint32)
  words = jax.lax.iota(jnp.uint32, n) ^ first
  words = (words ^ (words >> 16)) * jnp.uint32(0x85EBCA6B) + second
  words = (words ^ (words >> 13)) * jnp.uint32(0xC2B2AE35)
  words = (words ^ (words >> 16)) * jnp.uint32(0x21F0AAAD)
  return words ^ (words >> 15)


def uniform(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Uniform float32 in [0, 1), multiples of 2^-24, from `random_words`.

  >>> bool((uniform(key=jax.random.key(0), shape=(2, 3)) < 1).all())
  True
  """
  words = random_words(key, math.prod(shape)).reshape(shape)
  return (words >> 8).astype(jnp.int32).astype(jnp.float32) * jnp.float32(2.0**-24)


def _shifts(bits: int) -> jax.Array:
  return bits * jnp.arange(8 // bits, dtype=jnp.uint8)[None, :]
