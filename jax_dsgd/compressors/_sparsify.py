"""Compressors that send some of the entries."""

from __future__ import annotations

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
    places = jax.lax.top_k(jnp.abs(flat), kept)[1]
    return {'places': places.astype(dtype), 'values': flat[places]}

  def decode_sum(payloads: Payload, like: Like, key: jax.Array) -> jax.Array:
    if 'places' not in payloads:
      return payloads['values'].reshape((-1, *like.shape)).sum(0)
    dense = jnp.zeros(like.size, jnp.float32)
    return (
      dense.at[payloads['places'].reshape(-1)]
      .add(payloads['values'].reshape(-1))
      .reshape(like.shape)
    )

  return Compressor(
    name=f'top_k(fraction={fraction:g})' if fraction is not None else f'top_k(k={k})',
    encode=encode,
    decode=decode_sum,
    decode_sum=decode_sum,
    delta=lambda n: entry_count(n, fraction, k) / n,
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
    = n / k - 1. Sends `4 k` bytes.

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

  def places(key: jax.Array, n: int) -> jax.Array:
    index_dtype(n)
    # The k largest of n random words are a uniform draw without replacement.
    return jax.lax.top_k(jax.random.bits(key, (n,), jnp.uint32), entry_count(n, fraction, k))[1]

  def encode(key: jax.Array, x: jax.Array) -> Payload:
    flat = x.reshape(-1).astype(jnp.float32)
    kept = entry_count(flat.size, fraction, k)
    scale = flat.size / kept if unbiased else 1.0
    return flat if kept == flat.size else scale * flat[places(key, flat.size)]

  def decode(payload: Payload, like: Like, key: jax.Array) -> jax.Array:
    if payload.shape[-1] == like.size:
      return payload.reshape(like.shape)
    return (
      jnp.zeros(like.size, jnp.float32)
      .at[places(key, like.size)]
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
