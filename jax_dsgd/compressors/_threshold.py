"""Compressors that send the entries that a threshold or a probability picks, in a fixed room."""

from __future__ import annotations

import math
import numbers

import jax
import jax.numpy as jnp

from jax_dsgd.compressors._bits import in_blocks, magnitude_bits
from jax_dsgd.compressors._compressor import (
  Compressor,
  Payload,
  check_share,
  entry_count,
  index_dtype,
)
from jax_dsgd.compressors._places import drawn, largest_of_all, marked
from jax_dsgd.compressors._sparsify import sum_at_places


def sampled_top_k(fraction: float, *, sample: int = 65536) -> Compressor:
  """Sends about the k entries of largest magnitude: above a threshold that a sample tells.

  The threshold is the `round(fraction * sample)`-th largest of `sample` magnitudes at random
  places. The largest entry is sent, and up to k - 1 others that reach the threshold; where more do,
  those that come first from a random place on. Slots that are left hold zeros.

  Args:
    fraction: k / n for each leaf of n entries, rounded, at least one entry.
    sample: magnitudes that are sorted, at most. Of `m = fraction * sample` in the tail the number
      of entries above the threshold is right to about `1 / sqrt(m)`.

  Returns:
    A compressor that is near `top_k`, but proven contractive only with delta = 1 / n, by the
    largest entry. Sends `4 k` bytes of values and `2 k` of places (`4 k` where n > 65,536); a leaf
    that is sent whole sends no places.

  Raises:
    ValueError: a fraction outside (0, 1] or sample < 1; a leaf of 2^31 entries or more, when it is
      encoded.

  >>> c = sampled_top_k(0.5)
  >>> payload = c.encode(jax.random.key(0), jnp.array([1.0, -3.0, 2.0, 0.5]))
  >>> c.decode(payload, jax.ShapeDtypeStruct((4,), jnp.float32), None).tolist()
  [0.0, -3.0, 2.0, 0.0]

  Reference: Lin et al., "Deep Gradient Compression", arXiv 1712.01887, section 3.
  """
  check_share('sampled_top_k', fraction, None)
  if isinstance(sample, bool) or not isinstance(sample, numbers.Integral) or sample < 1:
    raise ValueError(f'sampled_top_k got sample={sample!r}; accepted are integers >= 1')

  def encode(key: jax.Array, x: jax.Array) -> Payload:
    flat = x.reshape(-1).astype(jnp.float32)
    slots = entry_count(flat.size, fraction, None)
    if slots == flat.size:
      return {'values': flat}
    sample_key, start_key = jax.random.split(key)
    looked = min(sample, flat.size)
    seen = flat[drawn(sample_key, flat.size, looked)]
    last = jax.lax.top_k(jnp.abs(seen), entry_count(looked, fraction, None))[1][-1]
    return _reaching(flat, magnitude_bits(seen[last]), slots, start_key)

  return Compressor(
    name=f'sampled_top_k(fraction={fraction:g})'
    if sample == 65536
    else f'sampled_top_k(fraction={fraction:g}, sample={sample})',
    encode=encode,
    decode=sum_at_places,
    decode_sum=sum_at_places,
    delta=lambda n: 1.0 / n,
  )


def threshold(value: float, *, capacity: float) -> Compressor:
  """Sends the entries of magnitude at least `value`, as far as there is room.

  C(x)_i = x_i if |x_i| >= value, else 0. The largest entry is the first to be sent; where more
  reach the value than there is room for, those that come first from a random place on.

  Args:
    value: in the units of x, > 0.
    capacity: the room k / n for each leaf of n entries, rounded, at least one entry. Slots that are
      left hold zeros, and cross: payloads have static shapes.

  Returns:
    A biased compressor. Not contractive: a leaf below the value sends nothing. But with room for
    all the error is bounded, `|C(x) - x|^2 <= n value^2`, which a residual memory keeps so. Sends
    `4 k` bytes of values and `2 k` of places (`4 k` where n > 65,536); with capacity 1 no places.

  Raises:
    ValueError: a value that is not positive and finite, a capacity outside (0, 1]; a leaf of 2^31
      entries or more, when it is encoded.

  >>> c = threshold(1.5, capacity=0.75)
  >>> payload = c.encode(jax.random.key(0), jnp.array([1.0, -3.0, 2.0, 0.5]))
  >>> c.decode(payload, jax.ShapeDtypeStruct((4,), jnp.float32), None).tolist()
  [0.0, -3.0, 2.0, 0.0]

  Reference: Sahu et al., "Rethinking gradient sparsification as total error minimization", arXiv
    2108.00951.
  """
  number = isinstance(value, numbers.Real) and not isinstance(value, bool)
  if not number or not 0 < value < math.inf:
    raise ValueError(f'threshold got value={value!r}; accepted are positive numbers')
  try:
    check_share('threshold', capacity, None)
  except ValueError:
    raise ValueError(
      f'threshold got capacity={capacity!r}; accepted are numbers in (0, 1]'
    ) from None

  def encode(key: jax.Array, x: jax.Array) -> Payload:
    flat = x.reshape(-1).astype(jnp.float32)
    slots = entry_count(flat.size, capacity, None)
    least = magnitude_bits(jnp.float32(value))
    if slots == flat.size:
      return {'values': jnp.where(magnitude_bits(flat) >= least, flat, 0)}
    return _reaching(flat, least, slots, key)

  return Compressor(
    name=f'threshold(value={value:g}, capacity={capacity:g})',
    encode=encode,
    decode=sum_at_places,
    decode_sum=sum_at_places,
  )


def importance_sampling(fraction: float | None = None, *, k: int | None = None) -> Compressor:
  """Sends k entries drawn with the probabilities that make the variance least, with their places.

  `C(x)_i = x_i / p_i` with probability p_i = min(1, c |x_i|), else 0, where c makes sum p = k.

  The draw is systematic: entry i is drawn where the running sum of p, plus one random number,
  passes an integer, so at most k are. The sum is of integers in units of 2^-30, rounded up, and so
  each p is met exactly; c aims a little below k, at k' = k (1 - 2^-12) - n / 2^30, to leave room
  for rounding. Slots that are left hold zeros.

  Args:
    fraction: k / n for each leaf of n entries, rounded, at least one entry.
    k: entries a leaf instead; a smaller leaf is sent whole.

  Returns:
    An unbiased compressor, omega = n / k' - 1 at most, which is reached where all magnitudes are
    alike (0 where a leaf is sent whole). Sends `4 k` bytes of values and `2 k` of places (`4 k`
    where n > 65,536); a leaf that is sent whole sends no places.

  Raises:
    ValueError: a fraction outside (0, 1] or k < 1; a leaf of 2^31 entries or more, or of more than
      2^29 k, when it is encoded.

  >>> c = importance_sampling(k=1)
  >>> payload = c.encode(jax.random.key(0), jnp.array([0.0, -3.0, 0.0]))
  >>> c.decode(payload, jax.ShapeDtypeStruct((3,), jnp.float32), None).round(2).tolist()
  [0.0, -3.0, 0.0]

  Reference: Wangni et al., "Gradient Sparsification for Communication-Efficient Distributed
    Optimization", arXiv 1710.09854; its draws are independent, and their number varies.
  """
  check_share('importance_sampling', fraction, k)

  def encode(key: jax.Array, x: jax.Array) -> Payload:
    flat = x.reshape(-1).astype(jnp.float32)
    slots = entry_count(flat.size, fraction, k)
    if slots == flat.size:
      return {'values': flat}
    aim = _aim(flat.size, slots)
    top = jnp.abs(flat[largest_of_all(flat)])
    units = _probabilities(jnp.abs(flat) / jnp.where(top > 0, top, 1), aim)
    offset_key, start_key = jax.random.split(key)
    offset = jax.random.bits(offset_key, (), jnp.uint32) >> (32 - _UNIT_BITS)
    places, filled = marked(_passes_an_integer(units, offset), slots, start_key)
    share = units[places].astype(jnp.float32) * jnp.float32(2.0**-_UNIT_BITS)
    values = jnp.where(filled, flat[places] / jnp.maximum(share, 2.0**-_UNIT_BITS), 0)
    values = jnp.where(jnp.isnan(top), jnp.nan, values)
    return {'places': places.astype(index_dtype(flat.size)), 'values': values}

  def omega(n: int) -> float:
    slots = entry_count(n, fraction, k)
    return 0.0 if slots == n else n / _aim(n, slots) - 1

  share = f'fraction={fraction:g}' if fraction is not None else f'k={k}'
  return Compressor(
    name=f'importance_sampling({share})',
    encode=encode,
    decode=sum_at_places,
    decode_sum=sum_at_places,
    omega=omega,
  )


_UNIT_BITS = 30


def _aim(n: int, slots: int) -> float:
  if n > slots << (_UNIT_BITS - 1):
    raise ValueError(
      f'importance_sampling got a leaf of {n} entries for k={slots}; accepted are up to 2^29 k'
    )
  return slots * (1 - 2**-12) - n / 2**_UNIT_BITS


def _probabilities(magnitudes: jax.Array, aim: float) -> jax.Array:
  """min(1, c |x_i|) of sum `aim`, in units of 2^-30, rounded up; from magnitudes in [0, 1]."""

  def fill(
    carry: tuple[jax.Array, jax.Array, jax.Array],
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    c, sure, _ = carry
    is_sure = c * magnitudes >= 1
    rest = jnp.sum(jnp.where(is_sure, 0, magnitudes))
    now = jnp.sum(is_sure, dtype=jnp.int32)
    # From below: the sum of probabilities never exceeds the aim, and who is sure remains so.
    better = jnp.maximum(c, (aim - now.astype(jnp.float32)) / jnp.where(rest > 0, rest, 1))
    return jnp.where(rest > 0, better, c), now, sure

  total = jnp.sum(magnitudes)
  c = aim / jnp.where(total > 0, total, 1)
  none = (total * 0).astype(jnp.int32)
  c, _, _ = jax.lax.while_loop(lambda carry: carry[1] > carry[2], fill, (c, none, none - 1))
  scaled = jnp.ceil(jnp.minimum(c * magnitudes, 1) * jnp.float32(2.0**_UNIT_BITS))
  return scaled.astype(jnp.int32).astype(jnp.uint32)


def _passes_an_integer(units: jax.Array, offset: jax.Array) -> jax.Array:
  """Where the running sum of units of 2^-30, from the offset on, passes a multiple of 2^30."""
  rows = in_blocks(units, 4096)
  within = jnp.cumsum(rows, axis=1)
  # Sums wrap at 2^32, of which 2^30 is a divisor.
  before = jnp.cumsum(within[:, -1]) - within[:, -1] + offset
  ends = (within + before[:, None]).reshape(-1)[: units.size]
  return ((ends - units) & jnp.uint32(2**_UNIT_BITS - 1)) + units >= jnp.uint32(2**_UNIT_BITS)


def _reaching(flat: jax.Array, least: jax.Array, slots: int, key: jax.Array) -> Payload:
  """The largest entry first, then others whose `magnitude_bits` are at least `least`."""
  top = largest_of_all(flat)
  marks = (magnitude_bits(flat) >= least) & (jax.lax.iota(jnp.int32, flat.size) != top)
  others, filled = marked(marks, slots, key)
  places = jnp.concatenate([top[None], others[: slots - 1]])
  sent = jnp.concatenate([(magnitude_bits(flat[top]) >= least)[None], filled[: slots - 1]])
  values = jnp.where(sent, flat[places], 0)
  return {'places': places.astype(index_dtype(flat.size)), 'values': values}
