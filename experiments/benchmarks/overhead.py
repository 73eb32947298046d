"""What a step through the library costs beside the same step written by hand.

  python -m experiments.benchmarks.overhead

A step of `allreduce_sgd` with momentum on a mesh of two workers, against `jax.lax.pmean` and
`optax.sgd` in a `shard_map` of one's own, for models of 4 and of 400 leaves. The two take turns, so
that both see the same machine; the figure is the median of the ratios of neighbouring measurements.
Goal: at most 1.03.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from jax.sharding import PartitionSpec

from jax_dsgd import algorithms, runtime

Step = Callable[[Any, Any, Any], tuple[Any, Any]]


def gradient(params: Any, batch: jax.Array) -> Any:
  """A gradient that costs one pass over the parameters: of `(x - batch)^2 / 2`."""
  return jax.tree.map(lambda x: x - batch, params)


def by_hand(workers: runtime.Workers, tx: optax.GradientTransformation) -> Step:
  """The step as one would write it without the library."""
  rows = PartitionSpec(workers.axis_name)

  def step(params: Any, state: Any, batch: jax.Array) -> tuple[Any, Any]:
    params, state, batch = jax.tree.map(lambda x: x[0], (params, state, batch))
    mean = jax.lax.pmean(gradient(params, batch), workers.axis_name)
    updates, state = tx.update(mean, state, params)
    params = optax.apply_updates(params, updates)
    return jax.tree.map(lambda x: x[None], (params, state))

  sharded = jax.shard_map(step, mesh=workers.mesh, in_specs=rows, out_specs=rows)
  return jax.jit(sharded, donate_argnums=(0, 1))


def by_library(workers: runtime.Workers, tx: optax.GradientTransformation) -> Step:
  """The same step with a transform of the library."""

  def step(params: Any, state: Any, batch: jax.Array) -> tuple[Any, Any]:
    updates, state = tx.update(gradient(params, batch), state, params)
    return optax.apply_updates(params, updates), state

  return jax.jit(workers.spmd(step), donate_argnums=(0, 1))


def seconds(step: Step, params: Any, state: Any, batch: jax.Array) -> tuple[float, Any, Any]:
  """Runs a step to its end: how long it took, and what it returned."""
  start = time.perf_counter()
  params, state = jax.block_until_ready(step(params, state, batch))
  return time.perf_counter() - start, params, state


def measure(leaves: int, entries: int, count: int, rounds: int) -> tuple[float, float, float]:
  """Median seconds by hand, by the library, and the median ratio."""
  workers = runtime.on_mesh(runtime.make_mesh(workers=count), 'workers')
  plain = optax.sgd(0.1, momentum=0.9)
  ours = algorithms.allreduce_sgd(0.1, axis_name='workers', momentum=0.9)
  model = {f'leaf_{i:03d}': jnp.ones(entries // leaves) for i in range(leaves)}
  batch = workers.place(jnp.arange(float(count)))
  steps = (by_hand(workers, plain), by_library(workers, ours))
  trained = [workers.replicate(model) for _ in steps]
  states = [workers.spmd(tx.init)(trained[0]) for tx in (plain, ours)]
  taken = np.zeros((rounds + 2, 2))
  for row in taken:
    for i, step in enumerate(steps):
      row[i], trained[i], states[i] = seconds(step, trained[i], states[i], batch)
  difference = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), *trained)
  if max(jax.tree.leaves(difference)) > 1e-6:
    raise AssertionError('the two steps do not compute the same parameters')
  hand, library = taken[2:].T
  return float(np.median(hand)), float(np.median(library)), float(np.median(library / hand))


def main(argv: Sequence[str]) -> None:
  """Prints one line a model."""
  if len(argv) > 1:
    raise app.UsageError(f'unexpected arguments {argv[1:]}')
  jax.config.update('jax_num_cpu_devices', flags.FLAGS.workers)
  print(f'{"leaves":>6} {"by hand, ms":>12} {"library, ms":>12} {"ratio":>6}')
  for leaves in (4, 400):
    hand, library, ratio = measure(
      leaves, flags.FLAGS.entries, flags.FLAGS.workers, flags.FLAGS.rounds
    )
    print(f'{leaves:>6} {1e3 * hand:>12.2f} {1e3 * library:>12.2f} {ratio:>6.3f}', flush=True)


if __name__ == '__main__':
  flags.DEFINE_integer('workers', 2, 'Workers, each on a virtual device.')
  flags.DEFINE_integer('entries', 4_000_000, 'Entries of the model.')
  flags.DEFINE_integer('rounds', 40, 'Measurements of each step.')
  app.run(main)
