"""Below which speed of the links a compressor pays, from its measured time and its bytes.

  python -m experiments.benchmarks.break_even
  python -m experiments.benchmarks.break_even --config=configs/digits.py

A mean over W workers on a ring, of a model of 4 n bytes. Dense, each link carries
`D = 2 (W - 1) / W * 4 n` bytes (all-reduce). Compressed to b bytes a worker, it carries
`B = (W - 1) b` (all-gather), or `2 (W - 1) / W b` where payloads add up on the way; and each worker
encodes once, and decodes W payloads, or one: c seconds. So a step is shorter if
`c + B / speed < D / speed`, that is, below `speed = (D - B) / c`. Where B >= D it never pays, which
is where gathered payloads come to as W grows.

With a config the model is that of the run, as one leaf, and W is its number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from absl import app, flags
from ml_collections import config_flags

from experiments import build
from experiments.benchmarks import compressors as benchmark
from jax_dsgd import compressors, ledger


def link_speed(
  compressor: compressors.Compressor, payload: int, dense: int, *, workers: int, seconds: float
) -> float:
  """Bytes a second of a link below which a compressor pays; 0 where it never does.

  Args:
    compressor: tells whether payloads are summed or gathered.
    payload: bytes of a worker's payload.
    dense: bytes of the model's gradient.
    workers: on the ring.
    seconds: of compression and decompression on a worker, in all.

  >>> link_speed(compressors.top_k(0.01), 100, 1000, workers=4, seconds=1.0)
  1200.0
  """
  saved = ledger.link_bytes('all-reduce', dense, workers)
  saved -= carried(compressor, payload, workers=workers)
  return max(saved, 0.0) / seconds


def carried(compressor: compressors.Compressor, payload: int, *, workers: int) -> float:
  """Bytes on each link of the ring for one payload a worker."""
  kind = 'all-reduce' if compressor.summable else 'all-gather'
  return ledger.link_bytes(kind, payload, workers)


def table(entries: int, workers: int, rounds: int) -> None:
  """Prints one line a compressor."""
  print(f'{entries} float32 a model, {workers} workers, one core each')
  print(
    f'{"compressor":<50} {"bytes a step":>12} {"on a link":>12} {"compute, ms":>11} '
    f'{"pays below, Gbit/s":>18}'
  )
  x = jnp.asarray(benchmark.gradient(entries))
  for compressor, _ in benchmark.MEMBERS:
    row = benchmark.measure(compressor, x, rounds=rounds)
    decoded = 1 if compressor.summable else workers
    seconds = row.encode + decoded * row.decode
    speed = link_speed(compressor, row.payload_bytes, 4 * entries, workers=workers, seconds=seconds)
    on_link = carried(compressor, row.payload_bytes, workers=workers)
    print(
      f'{compressor.name:<50} {row.payload_bytes:>12} {on_link:>12.0f} {1e3 * seconds:>11.2f} '
      f'{f"{8e-9 * speed:.2f}" if speed else "never":>18}',
      flush=True,
    )


def main(argv: Sequence[str]) -> None:
  """Prints the table for a config's model, or for a size."""
  if len(argv) > 1:
    raise app.UsageError(f'unexpected arguments {argv[1:]}')
  benchmark.one_core()
  entries, workers = flags.FLAGS.model_entries, flags.FLAGS.workers
  if flags.FLAGS.config is not None:
    run = build.experiment(flags.FLAGS.config)
    params = jax.eval_shape(run.model.init, jax.random.key(0))
    entries, workers = sum(leaf.size for leaf in jax.tree.leaves(params)), run.workers.count
  table(entries, workers, flags.FLAGS.repeats)


if __name__ == '__main__':
  config_flags.DEFINE_config_file('config', None, 'A run whose model and workers count.')
  flags.DEFINE_integer('model_entries', 10_000_000, 'Entries, without a config.')
  flags.DEFINE_integer('workers', 8, 'Workers, without a config.', lower_bound=2)
  flags.DEFINE_integer('repeats', 3, 'Measurements, of which the best counts.')
  app.run(main)
