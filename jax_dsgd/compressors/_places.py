"""Which entries: the largest of rows, a random draw, and those that are marked."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jax_dsgd.compressors._bits import magnitude_bits, random_words, reduce_blocks
from jax_dsgd.compressors._compressor import index_dtype

_GROUP = 16


def largest(rows: jax.Array, k: int) -> jax.Array:
  """Places [R, k] of the k largest magnitudes of each row of float32 [R, n], NaN first.

  Cut a row in groups of 16: those k lie in the k groups with the largest maxima. So a row is read
  once, by a fast maximum, and only the maxima and those groups are sorted.

  >>> largest(jnp.array([[1.0, -3.0, 2.0]]), 2).tolist()
  [[1, 2]]
  """
  n = rows.shape[1]
  if (2 * _GROUP) * k > n:
    return jax.lax.top_k(jnp.abs(rows), k)[1]
  # Padding is below every magnitude, so that it is never among the largest. A group has a stride,
  # since maxima of columns are fast and of neighbours are not.
  bits = jnp.pad(magnitude_bits(rows), ((0, 0), (0, -n % _GROUP)), constant_values=-1)
  stride = bits.shape[1] // _GROUP
  strips = [bits[:, i * stride : (i + 1) * stride] for i in range(_GROUP)]
  groups = jax.lax.top_k(_as_float(functools.reduce(jnp.maximum, strips)), k)[1]
  members = jnp.arange(_GROUP, dtype=jnp.int32)[None, :, None] * stride + groups[:, None, :]
  members = members.reshape(-1, _GROUP * k)
  found = jnp.take_along_axis(rows, jnp.minimum(members, n - 1), axis=1, mode='promise_in_bounds')
  candidates = jnp.where(members < n, magnitude_bits(found), -1)
  within = jax.lax.top_k(_as_float(candidates), k)[1]
  return jnp.take_along_axis(members, within, axis=1, mode='promise_in_bounds')


def largest_of_all(flat: jax.Array) -> jax.Array:
  """The place of the largest magnitude of float32 [n], int32 []; of a NaN where there is one."""
  bits, block = magnitude_bits(flat), min(256, flat.size)
  first = jnp.argmax(reduce_blocks(bits, block, jnp.maximum)).astype(jnp.int32) * block
  # The last block may be shorter: then the slice begins before it.
  first = jnp.minimum(first, flat.size - block)
  return first + jnp.argmax(magnitude_bits(jax.lax.dynamic_slice(flat, (first,), (block,)))).astype(
    jnp.int32
  )


def drawn(key: jax.Array, n: int, k: int) -> jax.Array:
  """Draws k different places out of n, int32, each place with probability k / n exactly.

  The n entries, turned by a random number of places, are cut in k parts that differ by one entry at
  most, and one place of each part is drawn. The time is that of k words, not of n.

  >>> sorted(drawn(jax.random.key(0), 4, 4).tolist())
  [0, 1, 2, 3]
  """
  index_dtype(n)
  words_key, turn_key = jax.random.split(key)
  part, longer = n // k, n % k
  j = jax.lax.iota(jnp.uint32, k)
  start = j * jnp.uint32(part) + jnp.minimum(j, jnp.uint32(longer))
  within = random_words(words_key, k) % (jnp.uint32(part) + (j < longer).astype(jnp.uint32))
  turn = jax.random.randint(turn_key, (), 0, n).astype(jnp.uint32)
  places = start + within + turn
  return jnp.where(places >= n, places - jnp.uint32(n), places).astype(jnp.int32)


def marked(marks: jax.Array, slots: int, key: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Places of true entries of bool [n], in `slots` slots, and which slots are filled.

  Where more are marked than there are slots, those are taken that come first from a random start
  on, around the end: no part of a leaf is always left out. A slot that is not filled holds a place
  that is valid.

  >>> marks = jnp.array([False, True, False, True])
  >>> places, filled = marked(marks, 3, jax.random.key(0))
  >>> places[:2].tolist(), filled.tolist()
  ([1, 3], [True, True, False])
  """
  n = marks.size
  bytes_ = jnp.packbits(jnp.pad(marks, (0, -n % 32)), bitorder='little')
  words = jax.lax.bitcast_convert_type(bytes_.reshape(-1, 4), jnp.uint32)
  start = jax.random.randint(key, (), 0, words.size)
  words = jnp.roll(words, -start)
  counts = jax.lax.population_count(words).astype(jnp.int32)
  ends = jnp.cumsum(counts)
  slot = jax.lax.iota(jnp.int32, slots)
  holder = jnp.minimum(jnp.searchsorted(ends, slot, side='right').astype(jnp.int32), words.size - 1)
  bit = _place_of_bit(words[holder], slot - (ends - counts)[holder])
  turned = holder + start
  holder = jnp.where(turned >= words.size, turned - words.size, turned)
  return jnp.minimum(holder * 32 + bit, n - 1), slot < ends[-1]


def _place_of_bit(words: jax.Array, rank: jax.Array) -> jax.Array:
  """The place of the rank-th set bit, from 0, of uint32 words."""
  place = jnp.zeros_like(rank)
  for width in (16, 8, 4, 2, 1):
    low = jax.lax.population_count(words & jnp.uint32(2**width - 1)).astype(jnp.int32)
    higher = rank >= low
    rank = jnp.where(higher, rank - low, rank)
    words = jnp.where(higher, words >> width, words)
    place = place + width * higher.astype(jnp.int32)
  return place


def _as_float(bits: jax.Array) -> jax.Array:
  return jax.lax.bitcast_convert_type(bits, jnp.float32)
