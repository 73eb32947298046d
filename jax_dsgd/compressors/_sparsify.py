"""Compressors that send a fixed number of the entries."""

from __future__ import annotations

import numbers

import jax
import jax.numpy as jnp

from jax_dsgd.compressors._compressor import (
  Compressor,
  Like,
  Payload,
  check_share,
  entry_count,
  index_dtype,
)
from jax_dsgd.compressors._places import drawn, largest


def top_k(fraction: float | None = None, *, k: int | None = None) -> Compressor:
  """Sends the k entries of largest magnitude, with their places.

  C(x)_i = x_i if |x_i| is among the k largest, else 0.

  Args:
    fraction: k / n for each leaf of n entries, rounded, at least one entry.
    k: entries a leaf instead; a smaller leaf is sent whole.

  Returns:
    A contractive compressor, delta = k / n. Sends `4 k` bytes of values and `2 k` of places (`4 k`
    where n > 65,536); a leaf that is sent whole sends no places.

  Raises:
    ValueError: a fraction outside (0, 1] or k < 1; a leaf of 2^31 entries or more, when it is
      encoded.

  >>> c = top_k(fraction=0.5)
  >>> payload = c.encode(jax.random.key(0), jnp.array([1.0, -3.0, 2.0, 0.5]))
  >>> c.decode(payload, jax.ShapeDtypeStruct((4,), jnp.float32), None).tolist()
  [0.0, -3.0, 2.0, 0.0]

  Reference: Alistarh et al., "The Convergence of Sparsified Gradient Methods", arXiv 1809.10505.
  """
  check_share('top_k', fraction, k)

  def encode(key: jax.Array, x: jax.Array) -> Payload:
    flat = x.reshape(-1).astype(jnp.float32)
    kept = entry_count(flat.size, fraction, k)
    dtype = index_dtype(flat.size)
    if kept == flat.size:
      return {'values': flat}
    places = largest(flat[None], kept)[0]
    return {'places': places.astype(dtype), 'values': flat[places]}

  return Compressor(
    name=f'top_k(fraction={fraction:g})' if fraction is not None else f'top_k(k={k})',
    encode=encode,
    decode=sum_at_places,
    decode_sum=sum_at_places,
    delta=lambda n: entry_count(n, fraction, k) / n,
  )


def sum_at_places(payloads: Payload, like: Like, key: jax.Array) -> jax.Array:
  """Decodes one payload of 'values' and 'places', or the sum of several; no places if whole."""
  if 'places' not in payloads:
    return payloads['values'].reshape((-1, *like.shape)).sum(0)
  places, values = payloads['places'].reshape(-1), payloads['values'].reshape(-1)
  return jnp.zeros(like.size, jnp.float32).at[places].add(values).reshape(like.shape)


def sign_top_k(fraction: float) -> Compressor:
  """Sends the places of the k entries of largest magnitude, their signs and one magnitude.

  C(x)_i = m sign(x_i) if |x_i| is among the k largest, else 0; m is the mean of those magnitudes.

  Args:
    fraction: k / n for each leaf of n entries, rounded, at least one entry.

  Returns:
    A contractive compressor. With v the k kept entries the error is |x|^2 - |v|_1^2 / k, and
    |v|_1^2 >= |v|_2^2 >= k |x|^2 / n, so delta = 1 / n (k / n where magnitudes are alike). Sends
    `2 k` bytes of places (`4 k` where n > 65,536; none where k = n), `ceil(k / 8)` of signs and 4.

  Raises:
    ValueError: a fraction outside (0, 1]; a leaf of 2^31 entries or more, when it is encoded.

  >>> c = sign_top_k(0.5)
  >>> payload = c.encode(jax.random.key(0), jnp.array([1.0, -3.0, 2.0, 0.5]))
  >>> c.decode(payload, jax.ShapeDtypeStruct((4,), jnp.float32), None).tolist()
  [0.0, -2.5, 2.5, 0.0]

  Reference: Singh et al., "SQuARM-SGD: Communication-Efficient Momentum SGD for Decentralized
    Optimization", arXiv 2005.07041.
  """
  check_share('sign_top_k', fraction, None)
  sparse = top_k(fraction)

  def encode(key: jax.Array, x: jax.Array) -> Payload:
    payload = sparse.encode(key, x)
    values = payload.pop('values')
    magnitude = jnp.mean(jnp.abs(values))
    return {**payload, 'bits': jnp.packbits(values >= 0), 'magnitude': magnitude}

  def decode(payload: Payload, like: Like, key: jax.Array) -> jax.Array:
    positive = jnp.unpackbits(payload['bits'], count=entry_count(like.size, fraction, None))
    values = payload['magnitude'] * (2.0 * positive.astype(jnp.float32) - 1.0)
    places = {name: payload[name] for name in payload if name == 'places'}
    return sum_at_places({**places, 'values': values}, like, key)

  return Compressor(
    name=f'sign_top_k(fraction={fraction:g})',
    encode=encode,
    decode=decode,
    delta=lambda n: 1.0 / n,
  )


def block_top_k(fraction: float, *, block: int = 1024) -> Compressor:
  """Sends the k entries of largest magnitude of each block, with their places in the block.

  C(x)_i = x_i if |x_i| is among the k largest of its block, else 0. Blocks are independent, so no
  sort is longer than a block, and a place takes two bytes in a leaf of any size. With k = 1 there
  is no sort at all, and it is three times as fast on CPU.

  Args:
    fraction: k / block, rounded, at least one entry.
    block: entries of a block, at most 65,536; the last block of a leaf may be shorter, and then
      slots that it cannot fill hold zeros.

  Returns:
    A contractive compressor, delta = k / min(block, n). Sends `6 k` bytes a block; if fraction = 1,
    `4 n`.

  Raises:
    ValueError: a fraction outside (0, 1], or a block outside 1..65536; a leaf of 2^31 entries or
      more, when it is encoded.

  >>> c = block_top_k(0.5, block=2)
  >>> payload = c.encode(jax.random.key(0), jnp.array([1.0, -3.0, 0.2, 0.5, 4.0]))
  >>> c.decode(payload, jax.ShapeDtypeStruct((5,), jnp.float32), None).tolist()
  [0.0, -3.0, 0.0, 0.5, 4.0]

  Reference: Dutta et al., "On the Discrepancy between the Theoretical Analysis and Practical
    Implementations of Compressed Communication for Distributed Deep Learning", arXiv 1911.08250.
  """
  check_share('block_top_k', fraction, None)
  if isinstance(block, bool) or not isinstance(block, numbers.Integral) or not 1 <= block <= 65536:
    raise ValueError(f'block_top_k got block={block!r}; accepted are integers from 1 to 65536')

  def encode(key: jax.Array, x: jax.Array) -> Payload:
    flat = x.reshape(-1).astype(jnp.float32)
    index_dtype(flat.size)
    length = min(block, flat.size)
    kept = entry_count(length, fraction, None)
    if kept == length:
      return {'values': flat}
    full = flat.size - flat.size % length
    # Apart, so that only the last block is copied to be filled.
    parts = [flat[:full].reshape(-1, length)]
    if full < flat.size:
      parts.append(jnp.pad(flat[full:], (0, length - flat.size % length))[None])
    places = [largest(rows, kept) for rows in parts]
    values = [
      jnp.take_along_axis(rows, at, axis=1, mode='promise_in_bounds')
      for rows, at in zip(parts, places, strict=True)
    ]
    return {
      'places': jnp.concatenate(places).astype(jnp.uint16),
      'values': jnp.concatenate(values),
    }

  def decode_sum(payloads: Payload, like: Like, key: jax.Array) -> jax.Array:
    if 'places' not in payloads:
      return sum_at_places(payloads, like, key)
    places = payloads['places'].astype(jnp.int32)
    first = jax.lax.broadcasted_iota(jnp.int32, places.shape, places.ndim - 2)
    # Places beyond the end are of the padding, and dropped.
    places = first * min(block, like.size) + places
    return sum_at_places({'places': places, 'values': payloads['values']}, like, key)

  return Compressor(
    name=f'block_top_k(fraction={fraction:g}, block={block})',
    encode=encode,
    decode=decode_sum,
    decode_sum=decode_sum,
    delta=lambda n: entry_count(min(block, n), fraction, None) / min(block, n),
  )


def random_k(
  fraction: float | None = None, *, k: int | None = None, unbiased: bool = False
) -> Compressor:
  """Sends k entries at places that all workers draw alike: no place is sent, and payloads add up.

  `C(x)_i = s x_i` at the k drawn places, else 0, with s = 1, or s = n / k where unbiased. With one
  key for all it is linear: the mean of compressed values is the compressed mean.

  Args:
    fraction: k / n for each leaf of n entries, rounded, at least one entry.
    k: entries a leaf instead; a smaller leaf is sent whole.
    unbiased: scale by n / k, for use without a residual memory.

  Returns:
    A summable compressor with a shared key; contractive with delta = k / n, or unbiased with omega
    = n / k - 1. Both need only that each place is drawn with probability k / n; here one is drawn
    of each of k parts of a leaf. Sends `4 k` bytes.

  Raises:
    ValueError: a fraction outside (0, 1] or k < 1; a leaf of 2^31 entries or more, when it is
      encoded.

  >>> c = random_k(k=2)
  >>> like, key = jax.ShapeDtypeStruct((4,), jnp.float32), jax.random.key(0)
  >>> float(c.decode(c.encode(key, jnp.ones(4)), like, key).sum())
  2.0

  Reference: Stich, "On Communication Compression for Distributed Optimization on Heterogeneous
    Data", arXiv 2009.02388.
  """
  check_share('random_k', fraction, k)

  def encode(key: jax.Array, x: jax.Array) -> Payload:
    flat = x.reshape(-1).astype(jnp.float32)
    kept = entry_count(flat.size, fraction, k)
    scale = flat.size / kept if unbiased else 1.0
    index_dtype(flat.size)
    return flat if kept == flat.size else scale * flat[drawn(key, flat.size, kept)]

  def decode(payload: Payload, like: Like, key: jax.Array) -> jax.Array:
    if payload.shape[-1] == like.size:
      return payload.reshape(like.shape)
    return (
      jnp.zeros(like.size, jnp.float32)
      .at[drawn(key, like.size, payload.shape[-1])]
      .set(payload, unique_indices=True)
      .reshape(like.shape)
    )

  share = f'fraction={fraction:g}' if fraction is not None else f'k={k}'
  return Compressor(
    name=f'random_k({share}{", unbiased=True" if unbiased else ""})',
    encode=encode,
    decode=decode,
    summable=True,
    shared_key=True,
    omega=(lambda n: n / entry_count(n, fraction, k) - 1) if unbiased else None,
    delta=None if unbiased else lambda n: entry_count(n, fraction, k) / n,
  )
