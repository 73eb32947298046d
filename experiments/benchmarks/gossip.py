"""What simulated gossip costs a worker as workers are added, and consensus against theory.

  python -m experiments.benchmarks.gossip --figure=consensus.png

The first table is of a step of DSGD, gradient included, of workers on the chip at hand, each with a
perceptron of 20,000 parameters: microseconds a worker, their ratio to those of the fewest workers,
and the same of plain SGD that mixes nothing. Goal: a ratio of at most 1.3 at 1,024 beside 64. Steps
run in one program as in the training loop; numbers of workers take turns, the least time counts.

Gradients are computed 32 workers at a time (`Workers.spmd(..., at_once=32)`): on two CPU cores the
ratio is then 1.1, of plain SGD 1.0, and gossip is a tenth of the time. With all gradients at once
it is 1.5 to 1.6, as 64 models stay in the cache and 1,024 do not.

The second is of rounds until the distance to the mean falls by 1e3 from the worst start, counted in
simulated gossip, beside `ln 1000 / -ln (1 - gap)`. The figure shows these, and on its left how the
distance falls from random values.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from matplotlib.figure import Figure

from experiments import models
from experiments.data import datasets
from experiments.models import losses
from jax_dsgd import algorithms, runtime, topologies, transforms

# Each for n a power of four.
GRAPHS: dict[str, Callable[[int], topologies.Topology]] = {
  'ring': topologies.ring,
  'torus': lambda n: topologies.torus(math.isqrt(n), math.isqrt(n)),
  'random_regular, 4': lambda n: topologies.random_regular(n, 4, seed=0),
  'hypercube': topologies.hypercube,
  'exponential': topologies.exponential,
  'one_peer_exponential': topologies.one_peer_exponential,
}
TIMED = ('ring', 'one_peer_exponential')
_FALL = 1e-3  # of the distance to the mean
_STEPS = 10  # of one program
_AT_ONCE = 32  # gradients: more models than these leave the cache


class Timed(NamedTuple):
  """A program of `_STEPS` steps of all workers: what it turns over, and the seconds it took."""

  program: Callable[[Any], Any]
  rows: Any
  seconds: list[float]


def training(
  tx: optax.GradientTransformation, count: int, *, hidden: int, batch: int
) -> tuple[Timed, int]:
  """Steps of simulated workers on the digits, compiled, and the number of parameters of one."""
  data, workers = datasets.digits(), runtime.simulate(count)
  model = models.mlp(data, hidden=(hidden,))
  chosen = np.random.default_rng(0).integers(len(data.inputs), size=(count, batch))
  examples = jnp.asarray(data.inputs[chosen]), jnp.asarray(data.targets[chosen])

  def gradient(params: Any, inputs: jax.Array, targets: jax.Array) -> Any:
    return jax.grad(lambda params: losses.loss(model, params, inputs, targets))(params)

  def step(params: Any, state: Any, gradient: Any) -> Any:
    updates, state = tx.update(gradient, state, params)
    return optax.apply_updates(params, updates), state

  def one(_: jax.Array, rows: Any) -> Any:
    gradients = workers.spmd(gradient, at_once=_AT_ONCE)(rows[0], *examples)
    return workers.spmd(step)(*rows, gradients)

  def steps(rows: Any) -> Any:
    return jax.lax.fori_loop(0, _STEPS, one, rows)

  params = model.init(jax.random.key(0))
  program = jax.jit(steps, donate_argnums=0)
  rows = workers.replicate(params)
  rows = program((rows, jax.jit(workers.spmd(tx.init))(rows)))
  return Timed(program, rows, []), sum(leaf.size for leaf in jax.tree.leaves(params))


def microseconds(
  graph: str | None, counts: Sequence[int], *, hidden: int, batch: int, repeats: int
) -> tuple[list[float], int]:
  """Of a step a worker, for each number of workers, of plain SGD if None; and the parameters."""
  runs, entries = {}, 0
  for n in counts:
    tx = optax.sgd(0.1)
    if graph is not None:
      tx = algorithms.dsgd(0.1, GRAPHS[graph](n), axis_name='workers')
    runs[n], entries = training(tx, n, hidden=hidden, batch=batch)
  for _ in range(repeats):
    for n, run in runs.items():
      start = time.perf_counter()
      rows = jax.block_until_ready(run.program(run.rows))
      run.seconds.append(time.perf_counter() - start)
      runs[n] = run._replace(rows=rows)
  return [1e6 * min(run.seconds) / _STEPS / n for n, run in runs.items()], entries


def speed(counts: Sequence[int], *, hidden: int, batch: int, repeats: int) -> None:
  """Prints one line for plain SGD and one a graph."""
  sized: dict[str, Any] = {'hidden': hidden, 'batch': batch, 'repeats': repeats}
  for graph in (None, *TIMED):
    taken, entries = microseconds(graph, counts, **sized)
    if graph is None:
      print(f'{entries} parameters, {batch} examples a step; microseconds of a step a worker')
      print(f'{"":<22}' + ''.join(f'{n:>8}' for n in counts) + f'{"ratio":>8}')
    times = ''.join(f'{t:>8.1f}' for t in taken)
    print(f'{graph or "no mixing":<22}{times}{taken[-1] / taken[0]:>8.2f}', flush=True)


def worst_start(topology: topologies.Topology) -> np.ndarray:
  """Values of workers, sum 0, whose distance to the mean a period shrinks least.

  Where a period is the exact mean, those that all of its rounds but the last shrink least.
  """
  rounds = topology.period if topology.spectral_gap() < 1 else topology.period - 1
  product = np.eye(topology.size)
  for t in range(rounds):
    product = topology.matrix(t) @ product
  return np.linalg.svd(product - 1 / topology.size)[2][0]


def promised(topology: topologies.Topology) -> int:
  """Rounds after which the spectral gap promises that the distance has fallen by 1e3."""
  gap = topology.spectral_gap()
  return math.ceil(math.log(_FALL) / math.log1p(-gap)) if gap < 1 else topology.period


def counted(topology: topologies.Topology, most: int = 1_000_000) -> int:
  """Rounds of simulated gossip until the distance of the worst start has fallen by 1e3."""
  workers = runtime.simulate(topology.size)
  tx = transforms.mix_neighbors(topology, axis_name='workers')
  start = jnp.asarray(worst_start(topology), jnp.float32)
  mix = workers.spmd(lambda x, state: tx.update(jnp.zeros_like(x), state, x))

  def body(carry: Any) -> Any:
    t, x, state = carry
    way, state = mix(x, state)
    return t + 1, x + way, state

  def far(carry: Any) -> jax.Array:
    t, x, _ = carry
    return (jnp.linalg.norm(x - x.mean()) > _FALL * (1 + 1e-4)) & (t < most)

  carry = jnp.int32(0), start, workers.spmd(tx.init)(start)
  return int(jax.jit(lambda carry: jax.lax.while_loop(far, body, carry)[0])(carry))


def falling(topology: topologies.Topology, rounds: int) -> np.ndarray:
  """The distance to the mean after 0 to `rounds` rounds from random values, as a share of it."""
  workers = runtime.simulate(topology.size)
  tx = transforms.mix_neighbors(topology, axis_name='workers')
  x = np.random.default_rng(0).normal(size=(topology.size, 16)).astype(np.float32)

  def step(carry: Any, _: None) -> tuple[Any, jax.Array]:
    x, state = carry
    way, state = workers.spmd(lambda x, state: tx.update(jnp.zeros_like(x), state, x))(x, state)
    return (x + way, state), jnp.linalg.norm(x - x.mean(0, keepdims=True))

  start = jnp.asarray(x), workers.spmd(tx.init)(x)
  distances = jax.jit(lambda start: jax.lax.scan(step, start, length=rounds + 1)[1])(start)
  return np.asarray(distances / distances[0])


def consensus(sizes: Sequence[int]) -> Iterator[tuple[str, int, int, int]]:
  """Prints and yields, a graph and a size, the rounds that are promised and counted."""
  print(f'{"rounds to fall by 1e3":<22}{"workers":>8}{"promised":>10}{"counted":>10}')
  for name, make in GRAPHS.items():
    for n in sizes:
      topology = make(n)
      row = name, n, promised(topology), counted(topology)
      print(f'{name:<22}{n:>8}{row[2]:>10}{row[3]:>10}', flush=True)
      yield row


def figure(rows: Sequence[tuple[str, int, int, int]], *, workers: int = 64) -> Figure:
  """Draws how distances fall, and rounds against workers beside what theory says."""
  canvas = Figure(figsize=(13, 4.6), layout='constrained', dpi=120)
  left, right = canvas.subplots(1, 2)
  for index, (name, make) in enumerate(GRAPHS.items()):
    topology, colour = make(workers), f'C{index}'
    left.plot(np.maximum(falling(topology, 60), 1e-6), color=colour, label=name)
    own = [row for row in rows if row[0] == name]
    n, theory, found = zip(*((n, a, b) for _, n, a, b in own), strict=True)
    right.plot(n, theory, color=colour, linestyle='--')
    right.plot(n, found, color=colour, marker='os^vDP'[index], linestyle='')
    gap = topology.spectral_gap()
    if gap < 1:
      left.plot((1 - gap) ** np.arange(61), color=colour, linestyle=':', linewidth=1)
  left.set(yscale='log', ylim=(1e-6, 1.5), xlabel='round')
  left.set_ylabel('distance to the mean, as a share of the first')
  left.set_title(f'{workers} workers, random values; dotted: the spectral gap', fontsize=10)
  right.set(yscale='log', xlabel='workers', ylabel='rounds until 1000 times closer')
  right.set_xscale('log', base=2)
  right.set_title('worst values: counted (marks) and in theory (dashes)', fontsize=10)
  for axes in (left, right):
    axes.grid(True, color='#dddddd', linewidth=0.8)
  canvas.legend(*left.get_legend_handles_labels(), loc='outside right center', frameon=False)
  return canvas


def main(argv: Sequence[str]) -> None:
  """Prints both tables and draws the figure."""
  if len(argv) > 1:
    raise app.UsageError(f'unexpected arguments {argv[1:]}')
  speed((64, 256, 1024), hidden=266, batch=flags.FLAGS.batch, repeats=flags.FLAGS.repeats)
  rows = list(consensus((16, 64, 256)))
  if flags.FLAGS.figure:
    figure(rows).savefig(flags.FLAGS.figure)


if __name__ == '__main__':
  flags.DEFINE_integer('batch', 64, 'Examples of a worker in a step.', lower_bound=1)
  flags.DEFINE_integer('repeats', 5, 'Measurements of each program.', lower_bound=1)
  flags.DEFINE_string('figure', None, 'Where to write the figure, if at all.')
  app.run(main)
