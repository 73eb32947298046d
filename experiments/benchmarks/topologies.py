"""How fast topologies mix and what they send, from 4 to 1,024 workers.

  python -m experiments.benchmarks.topologies --figure=topologies.png

The spectral gap is a round's, of rounds in their order; the expected rate is that of squared
distances where rounds come in a random order. Bytes are those of a dense float32 model that the
busiest worker sends, in the mean over rounds. What matters where all links are alike are the bytes
until any disagreement is e times smaller.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from absl import app, flags
from matplotlib.figure import Figure

from jax_dsgd import topologies

SIZES = (4, 16, 64, 256, 1024)
_ROUNDS = 24  # of the random schedules
# Each for n a power of four.
FAMILIES: dict[str, Callable[[int], topologies.Topology]] = {
  'ring': topologies.ring,
  'directed_ring': topologies.directed_ring,
  'torus': lambda n: topologies.torus(math.isqrt(n), math.isqrt(n)),
  'star': topologies.star,
  'random_regular, 4': lambda n: topologies.random_regular(n, min(4, n - 1), seed=0),
  'hypercube': topologies.hypercube,
  'exponential': topologies.exponential,
  'complete': topologies.complete,
  'one_peer_exponential': topologies.one_peer_exponential,
  'one_peer_hypercube': topologies.one_peer_hypercube,
  'random_pairs': lambda n: topologies.random_pairs(n, _ROUNDS, seed=0),
  'random_groups of 4': lambda n: topologies.random_groups(n, 4, _ROUNDS, seed=0),
  'butterfly_groups of 4': lambda n: topologies.butterfly_groups(n, 4),
  'butterfly_groups, mean every 10': lambda n: topologies.then_mean_every(
    topologies.butterfly_groups(n, 4), 10
  ),
  'inter_intra': lambda n: topologies.inter_intra(math.isqrt(n), math.isqrt(n)),
}


class Row(NamedTuple):
  """What is known of one topology.

  Attributes:
    family: its name.
    workers: n.
    gap: the spectral gap.
    rate: the expected consensus rate.
    step_bytes: that the busiest worker sends a step, in the mean over rounds.
    rounds: until any disagreement is e times smaller.
    seconds: that it took to build it and to find this out.
  """

  family: str
  workers: int
  gap: float
  rate: float
  step_bytes: float
  rounds: float
  seconds: float


def rounds_to_shrink(topology: topologies.Topology, gap: float) -> float:
  """Rounds, from round 0 on, until any disagreement is e times smaller.

  A schedule may take a period to do anything for the worst start, so its rounds are played; where a
  period is not enough, the gap says how it goes on.
  """
  product = topology.matrix()
  for t in range(1, topology.period):
    if np.linalg.norm(product - 1 / topology.size, 2) <= math.exp(-1):
      return t
    product = topology.matrix(t) @ product
  if gap < 1:
    return max(1.0, -1 / math.log1p(-gap))
  return topology.period


def measure(family: str, n: int, *, entries: int) -> Row:
  """Builds a topology of n workers and judges it."""
  start = time.perf_counter()
  topology = FAMILIES[family](n)
  gap, rate = topology.spectral_gap(), topologies.expected_consensus_rate(topology)
  sent = 4 * entries * float(topology.sends.max(axis=1).mean())
  rounds = rounds_to_shrink(topology, gap)
  return Row(family, n, gap, rate, sent, rounds, time.perf_counter() - start)


def table(entries: int, sizes: Sequence[int]) -> Iterator[Row]:
  """Prints and yields one line a topology."""
  print(f'{entries} float32 a model, bytes of the busiest worker')
  print(
    f'{"topology":<32} {"workers":>7} {"gap":>9} {"rate":>9} {"bytes a step":>12} '
    f'{"bytes to shrink by e":>20} {"built in, s":>11}'
  )
  for family in FAMILIES:
    for n in sizes:
      row = measure(family, n, entries=entries)
      print(
        f'{family:<32} {n:>7} {row.gap:>9.3g} {row.rate:>9.3g} {row.step_bytes:>12.3g} '
        f'{row.rounds * row.step_bytes:>20.3g} {row.seconds:>11.2f}',
        flush=True,
      )
      yield row


def figure(rows: Sequence[Row]) -> Figure:
  """Draws gaps, rates and bytes against the number of workers, a line a family."""
  canvas = Figure(figsize=(15, 5), layout='constrained')
  panels = {'gap': 'spectral gap', 'rate': 'expected rate', 'step_bytes': 'bytes a step'}
  families = list(dict.fromkeys(row.family for row in rows))
  axes_of = canvas.subplots(1, len(panels))
  for axes, (field, what) in zip(axes_of, panels.items(), strict=True):
    for index, family in enumerate(families):
      own = [row for row in rows if row.family == family]
      axes.plot(
        [row.workers for row in own],
        [getattr(row, field) for row in own],
        color=f'C{index % 10}',
        linestyle='-' if index < 10 else '--',
        marker='os^vD'[index % 5],
        markersize=4,
        label=family,
      )
    axes.set_xscale('log', base=2)
    axes.set_yscale('log', nonpositive='mask')
    axes.set_xlabel('workers')
    axes.set_ylabel(what)
    axes.grid(True, color='#dddddd', linewidth=0.8)
  canvas.legend(*axes_of[0].get_legend_handles_labels(), loc='outside right upper', frameon=False)
  return canvas


def main(argv: Sequence[str]) -> None:
  """Prints the table and draws the figure."""
  if len(argv) > 1:
    raise app.UsageError(f'unexpected arguments {argv[1:]}')
  rows = list(table(flags.FLAGS.entries, [n for n in SIZES if n <= flags.FLAGS.most]))
  if flags.FLAGS.figure:
    figure(rows).savefig(flags.FLAGS.figure)


if __name__ == '__main__':
  flags.DEFINE_integer('entries', 25_000_000, 'Entries of the model.', lower_bound=1)
  flags.DEFINE_integer('most', max(SIZES), 'The greatest number of workers.', lower_bound=4)
  flags.DEFINE_string('figure', None, 'Where to write the figure, if at all.')
  app.run(main)
