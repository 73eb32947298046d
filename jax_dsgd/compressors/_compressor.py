"""What a compressor is: the wire format of one leaf, as pure functions with declared properties."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Payload = Any
Like = jax.ShapeDtypeStruct


class Compressor(NamedTuple):
  """The wire format of one leaf. Stateless, and it never communicates.

  `C(x) = decode(encode(key, x), like, key)`. A payload is exactly the arrays that cross the wire: a
  pytree of static shapes and compact dtypes, whose bytes are counted from its shapes. Leaves arrive
  with at least one entry and a real float dtype; any shape, 0-d included.

  Attributes:
    name: as a reader would call it, e.g. 'top_k(fraction=0.01)'.
    encode: `(key, x) -> payload`.
    decode: `(payload, like, key) -> x_hat` of like.shape, float32 or like.dtype.
    decode_sum: `(payloads, like, key) -> sum of x_hat` for payloads stacked along a leading axis,
      where there is a faster way than decoding one after the other; None otherwise.
    summable: payloads of several workers may be added on the way: `decode(sum of payloads) = sum of
      decoded payloads`.
    shared_key: encode and decode need the same key on every worker; otherwise each worker gets a
      key of its own.
    omega: from the number of entries n to the least known `w` with `E C(x) = x` and `E|C(x) - x|^2
      <= w |x|^2`; None if biased.
    delta: from n to the largest known `d` in (0, 1] with `E|C(x) - x|^2 <= (1 - d) |x|^2`; None if
      not contractive.
  """

  name: str
  encode: Callable[[jax.Array, jax.Array], Payload]
  decode: Callable[[Payload, Like, jax.Array], jax.Array]
  decode_sum: Callable[[Payload, Like, jax.Array], jax.Array] | None = None
  summable: bool = False
  shared_key: bool = False
  omega: Callable[[int], float] | None = None
  delta: Callable[[int], float] | None = None

  def __repr__(self) -> str:
    return self.name


def sum_of_decoded(
  compressor: Compressor, payloads: Payload, like: Like, key: jax.Array, start: jax.Array
) -> jax.Array:
  """`start + sum_w decode(payloads[w])` without a dense copy a worker."""
  if compressor.decode_sum is not None:
    return start + compressor.decode_sum(payloads, like, key)
  workers = jax.tree.leaves(payloads)[0].shape[0]
  add = lambda total, payload: (total + compressor.decode(payload, like, key), None)  # noqa: E731
  return jax.lax.scan(add, start, payloads, unroll=min(workers, 8))[0]


def entry_count(n: int, fraction: float | None, k: int | None) -> int:
  """How many of n entries are sent: k, or the fraction of n rounded, but at least 1, at most n."""
  if fraction is not None:
    k = round(fraction * n)
  return min(max(k or 0, 1), n)


def check_share(name: str, fraction: float | None, k: int | None) -> None:
  """Refuses a share of entries that is not one of a fraction in (0, 1] and a count k >= 1."""
  if (fraction is None) == (k is None):
    raise ValueError(
      f'{name} takes exactly one of fraction= (sent entries / all entries, in (0, 1]) and k= '
      '(entries a leaf)'
    )
  if fraction is not None:
    if (
      isinstance(fraction, bool) or not isinstance(fraction, numbers.Real) or not 0 < fraction <= 1
    ):
      hint = ''
      if isinstance(fraction, numbers.Real) and fraction > 1 and math.isfinite(fraction):
        hint = f' (it is sent/all: one entry in {fraction:g} is fraction={1 / fraction:g})'
      raise ValueError(f'{name} got fraction={fraction!r}; accepted are numbers in (0, 1]{hint}')
  elif isinstance(k, bool) or not isinstance(k, numbers.Integral) or k < 1:
    raise ValueError(f'{name} got k={k!r}; accepted are integers >= 1')


def index_dtype(n: int) -> Any:
  """The narrowest dtype that addresses n entries: uint16 or uint32.

  Raises:
    ValueError: more than 2^31 - 1 entries, which the 32-bit indices of `jax.lax.top_k` do not
      reach.
  """
  if n > 2**31 - 1:
    raise ValueError(
      f'a leaf of {n} entries is beyond 32-bit indices; split it into leaves of less than 2^31 '
      'entries'
    )
  return jnp.uint16 if n <= 2**16 else jnp.uint32
