"""Compressors that send every entry, whole or in a narrower float."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_dsgd.compressors._compressor import Compressor


def identity() -> Compressor:
  """Sends the leaf as it is, in its own dtype: C(x) = x.

  Returns:
    A compressor that is summable, unbiased with omega 0 and contractive with delta 1. Sends `n *
    itemsize` bytes a leaf.

  >>> c = identity()
  >>> c.encode(jax.random.key(0), jnp.array([1.0, -2.0])).tolist()
  [1.0, -2.0]
  """
  return Compressor(
    name='identity()',
    encode=lambda key, x: x,
    decode=lambda payload, like, key: payload.reshape(like.shape),
    summable=True,
    omega=lambda n: 0.0,
    delta=lambda n: 1.0,
  )


_WIRE = {'bfloat16': jnp.uint16, 'float8_e4m3fn': jnp.uint8, 'float8_e5m2': jnp.uint8}


def cast(dtype: str = 'bfloat16') -> Compressor:
  """Sends the leaf rounded to a narrower float: C(x) = dtype(x).

  The bits cross as unsigned integers, since compilers move float conversions across collectives and
  would send the wide value; so it is gathered, never summed in the narrow type.

  Args:
    dtype: 'bfloat16' (2 bytes an entry), 'float8_e4m3fn' or 'float8_e5m2' (1 byte; entries beyond
      their range, 448 and 57344, overflow).

  Returns:
    A compressor; bfloat16 is contractive with delta `1 - 2^-16`, the others claim nothing. Sends `n
    * itemsize` bytes a leaf.

  Raises:
    ValueError: another dtype.

  >>> c = cast('bfloat16')
  >>> payload = c.encode(jax.random.key(0), jnp.array([1.0, 1.001]))
  >>> payload.dtype, c.decode(payload, jax.ShapeDtypeStruct((2,), jnp.float32), None).tolist()
  (dtype('uint16'), [1.0, 1.0])
  """
  if dtype not in _WIRE:
    raise ValueError(f'cast got dtype={dtype!r}; accepted are {", ".join(map(repr, _WIRE))}')
  return Compressor(
    name=f'cast({dtype!r})',
    encode=lambda key, x: jax.lax.bitcast_convert_type(x.astype(dtype), _WIRE[dtype]),
    decode=lambda payload, like, key: (
      jax.lax.bitcast_convert_type(payload, jnp.dtype(dtype))
      .astype(jnp.float32)
      .reshape(like.shape)
    ),
    delta=(lambda n: 1 - 2.0**-16) if dtype == 'bfloat16' else None,
  )
