"""How fast compressors are on one core, as fractions of a plain NumPy copy in the same run.

  python -m experiments.benchmarks.compressors

Speeds are bytes of the float32 input a second. Encode and decode write into donated buffers, as the
copy writes into one that is there: a fresh array of 100 MB costs more in page faults than most
compressors. `apply` is the use in a step: decode four payloads, take their mean, and subtract it
from the parameters, in one program. The fraction is that of encode and decode together.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from jax_dsgd import compressors, ledger

_PAYLOADS = 4  # that `apply` averages
# Each with the fraction of a copy that it is to reach, where there is a goal.
MEMBERS: tuple[tuple[compressors.Compressor, float | None], ...] = (
  (compressors.cast('bfloat16'), 0.15),
  (compressors.scaled_sign(), 0.16),
  (compressors.scaled_blocks(8), 0.12),
  (compressors.scaled_blocks(8, stochastic=True), None),
  (compressors.qsgd(127), 0.09),
  (compressors.ternary(), None),
  (compressors.natural(), None),
  (compressors.random_k(0.01), 0.15),
  (compressors.block_top_k(0.01, block=100), 0.08),
  (compressors.block_top_k(0.01), None),
  (compressors.sampled_top_k(0.01), 0.04),
  (compressors.top_k(0.01), None),
  (compressors.sign_top_k(0.01), None),
  (compressors.importance_sampling(0.01), None),
)


class Row(NamedTuple):
  """What was measured of one compressor; times in seconds."""

  payload_bytes: int
  encode: float
  decode: float
  apply: float
  error: float  # |C(x) - x| / |x|


def one_core() -> None:
  """Keeps this process, and XLA with it, on one core; before the first use of JAX."""
  if hasattr(os, 'sched_setaffinity'):
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
  flag = '--xla_cpu_multi_thread_eigen=false'
  os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {flag}'.strip()
  jax.config.update('jax_platforms', 'cpu')


def gradient(entries: int) -> np.ndarray:
  """A gradient with heavy tails: normal entries, and a log-normal scale every 1,024."""
  rng = np.random.default_rng(0)
  scales = np.exp(rng.standard_normal(-(-entries // 1024), np.float32))
  return rng.standard_normal(entries, np.float32) * np.repeat(scales, 1024)[:entries]


def best(call: Callable[[], Any], rounds: int) -> float:
  """The least seconds of a call, after one that does not count."""
  call()
  taken = []
  for _ in range(rounds):
    start = time.perf_counter()
    call()
    taken.append(time.perf_counter() - start)
  return min(taken)


def seconds_of_copy(x: np.ndarray, rounds: int) -> float:
  """Seconds of a NumPy copy into an array that is there."""
  out = np.empty_like(x)
  return best(lambda: np.copyto(out, x), rounds)


def into_donated(function: Callable[..., Any], *args: Any, rounds: int) -> tuple[float, Any]:
  """Best seconds of a function whose result takes the place of the last one, and the result."""
  again = jax.jit(lambda old, *args: function(*args), donate_argnums=0, keep_unused=True)
  last = jax.jit(function)(*args)

  def call() -> None:
    nonlocal last
    last = jax.block_until_ready(again(last, *args))

  return best(call, rounds), last


def measure(compressor: compressors.Compressor, x: jax.Array, *, rounds: int) -> Row:
  """Times a compressor on a leaf."""
  like, key = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.random.key(0)
  encode, payload = into_donated(compressor.encode, key, x, rounds=rounds)
  decode, decoded = into_donated(
    lambda payload, key: compressor.decode(payload, like, key), payload, key, rounds=rounds
  )
  error = jnp.linalg.norm(decoded - x) / jnp.linalg.norm(x)
  del decoded
  payloads = jax.tree.map(lambda part: jnp.stack([part] * _PAYLOADS), payload)

  def applied(params: jax.Array, payloads: Any, key: jax.Array) -> jax.Array:
    if compressor.summable:
      total = compressor.decode(jax.tree.map(lambda part: part.sum(0), payloads), like, key)
    else:
      total = compressors.sum_of_decoded(compressor, payloads, like, key, jnp.zeros_like(params))
    return params - (0.1 / _PAYLOADS) * total

  step, params = jax.jit(applied, donate_argnums=0), [jnp.array(x)]

  def call() -> None:
    params[0] = jax.block_until_ready(step(params[0], payloads, key))

  apply = best(call, rounds)
  return Row(ledger.payload_bytes(payload), encode, decode, apply, float(error))


def table(entries: int, rounds: int) -> None:
  """Prints one line a compressor."""
  x = gradient(entries)
  copy = seconds_of_copy(x, rounds)
  print(f'numpy copy of {entries} float32: {1e3 * copy:.2f} ms, {4e-9 * entries / copy:.1f} GB/s')
  print(
    f'{"compressor":<50} {"fewer bytes":>11} {"encode, ms":>10} {"decode, ms":>10} '
    f'{"apply, ms":>9} {"GB/s":>6} {"of copy":>7} {"goal":>5} {"error":>7}'
  )
  leaf = jax.device_put(x)
  for compressor, goal in MEMBERS:
    row = measure(compressor, leaf, rounds=rounds)
    both = row.encode + row.decode
    beside = min(copy, seconds_of_copy(x, rounds))
    print(
      f'{compressor.name:<50} {4 * entries / row.payload_bytes:>11.1f} {1e3 * row.encode:>10.2f} '
      f'{1e3 * row.decode:>10.2f} {1e3 * row.apply:>9.2f} {4e-9 * entries / both:>6.2f} '
      f'{beside / both:>7.3f} {"" if goal is None else goal:>5} {row.error:>7.2g}',
      flush=True,
    )


def main(argv: Sequence[str]) -> None:
  """Prints the table."""
  if len(argv) > 1:
    raise app.UsageError(f'unexpected arguments {argv[1:]}')
  one_core()
  table(flags.FLAGS.entries, flags.FLAGS.rounds)


if __name__ == '__main__':
  flags.DEFINE_integer('entries', 25_000_000, 'Entries of the leaf.', lower_bound=1)
  flags.DEFINE_integer('rounds', 5, 'Measurements, of which the best counts.')
  app.run(main)
