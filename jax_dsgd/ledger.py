"""Bytes on the wire, counted twice: from payload shapes while training, and from what XLA compiled.

The first is what transforms keep in their state (`bytes_sent`); the second reads the operands of
each collective out of HLO text and tests the first. Both count what a worker *hands to the
network*, once a message. How often the network then carries it is another matter: on a ring of W
workers an all-reduce of b bytes puts 2 b (W-1)/W on every link, an all-gather b (W-1): see
`link_bytes`.
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_LIMB = 1 << 32


def payload_bytes(payload: Any) -> int:
  """Bytes of a payload, from the shapes and dtypes of its arrays.

  >>> payload_bytes({'bits': jnp.zeros(2, jnp.uint8), 'scale': jnp.zeros(())})
  6
  """
  return int(
    np.sum(
      [math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(payload)], dtype=np.int64
    )
  )


def new_meter() -> jax.Array:
  """A counter of bytes at zero: uint32 [2], the high and the low half of a 64-bit number."""
  return jnp.zeros(2, jnp.uint32)


def add(meter: jax.Array, nbytes: int | np.ndarray, *index: jax.Array) -> jax.Array:
  """The meter after `nbytes` more: a number, or a table of numbers with the entry to take."""
  table = np.asarray(nbytes, np.int64)
  high, low = (
    jnp.asarray(half.astype(np.uint32))[index] for half in (table // _LIMB, table % _LIMB)
  )
  total = meter[1] + low
  return jnp.stack([meter[0] + high + (total < low).astype(jnp.uint32), total])


def bytes_sent(state: Any) -> np.ndarray | int:
  """Bytes that workers have sent so far, summed over every transform in an optimizer state.

  Args:
    state: any state tree of this library's transforms, of one worker or with a leading axis of
      workers.

  Returns:
    An int, or int64 [W] for per-worker rows; 0 where nothing counts.
  """
  meters = [
    np.asarray(leaf).astype(np.int64)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    if path and getattr(path[-1], 'name', None) == 'bytes_sent'
  ]
  counts = [meter[..., 0] * _LIMB + meter[..., 1] for meter in meters]
  rows = min((count.ndim for count in counts), default=0)
  # A transform may keep a row of states of its own, one a block of data.
  total = sum(count.sum(axis=tuple(range(rows, count.ndim))) for count in counts)
  return total if np.ndim(total) else int(total)


class Collective(NamedTuple):
  """One collective instruction of a compiled program."""

  kind: str  # 'all-reduce', 'all-gather', 'collective-permute', 'all-to-all', 'reduce-scatter'
  operands: tuple[str, ...]  # e.g. ('u8[128]', 'f32[]')
  nbytes: int  # of all operands, on one device
  computation: str  # the HLO computation that holds it, for telling branches and loop bodies apart


_BITS = {'pred': 8}
_KINDS = 'all-reduce|all-gather|collective-permute|all-to-all|reduce-scatter|collective-broadcast'
_INSTRUCTION = re.compile(rf'^\s*(?:ROOT )?%?(\S+) = (.+?) ({_KINDS})(?:-start)?\((.*?)\)(?:,|$)')
_SHAPE = re.compile(r'\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]')
_COMPUTATION = re.compile(r'^(?:ENTRY )?%?([\w.\-]+) \(.*\{\s*$')
_DEFINITION = re.compile(r'^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ')


def collectives(hlo_text: str) -> list[Collective]:
  """The collectives of a compiled program, with the bytes of their operands on one device.

  An instruction in a loop body is listed once, whatever the trip count; both sides of a conditional
  are listed.

  Args:
    hlo_text: `jax.jit(f).lower(...).compile().as_text()`.
  """
  shapes: dict[str, str] = {}
  found, computation = [], ''
  for line in re.sub(r'/\*.*?\*/', '', hlo_text).splitlines():
    if header := _COMPUTATION.match(line):
      computation = header.group(1)
    if definition := _DEFINITION.match(line):
      shapes[definition.group(1)] = definition.group(2)
    if instruction := _INSTRUCTION.match(line):
      _, _, kind, arguments = instruction.groups()
      # Newer XLA prints operands by name only; older prints their shapes inline.
      text = ' '.join(
        shapes.get(name, '') for name in re.findall(r'%?([\w.\-]+)', arguments) if name in shapes
      )
      operands = tuple(f'{dtype}[{dims}]' for dtype, dims in _SHAPE.findall(text or arguments))
      found.append(
        Collective(kind, operands, int(np.sum([_shape_bytes(x) for x in operands])), computation)
      )
  return found


def link_bytes(kind: str, nbytes: int, workers: int) -> float:
  """Bytes that a worker puts on its link when a collective of `nbytes` runs as a ring.

  >>> [link_bytes(kind, 1000, 4) for kind in ('all-reduce', 'all-gather', 'collective-permute')]
  [1500.0, 3000.0, 1000.0]
  """
  factor = {
    'all-reduce': 2 * (workers - 1) / workers,
    'all-gather': workers - 1,
    'collective-permute': 1,
    'all-to-all': (workers - 1) / workers,
    'reduce-scatter': (workers - 1) / workers,
    'collective-broadcast': 1,
  }
  if kind not in factor:
    raise ValueError(f'kind={kind!r} is not a collective; accepted: {", ".join(factor)}')
  return float(factor[kind] * nbytes)


def _shape_bytes(shape: str) -> int:
  dtype, dims = shape.rstrip(']').split('[')
  digits = re.match(r'[a-z]+(\d+)', dtype)
  bits = _BITS[dtype] if dtype in _BITS else int(digits.group(1)) if digits else 0
  entries = math.prod(int(d) for d in dims.split(',') if d)
  return -(-entries * bits // 8)  # entries of less than a byte are packed
