"""How fast uneven machines are simulated, and their traces replayed.

  python -m experiments.benchmarks.simulation

A tenth of the workers are five times slower, and all are noisy. Goals: a million events of a
thousand workers simulated in less than ten seconds of processor time, and 5,000 events a second
replayed for a perceptron of 20,000 parameters with 64 workers, batches of 8.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from absl import app, flags

from jax_dsgd import algorithms, clusters, servers, simulation

_GOAL = 10.0  # seconds of a million events
_RATE = 5000.0  # events a second
_POLICIES = (simulation.asp(), simulation.psp(4), simulation.psp(4, 4), simulation.bsp())
_METHODS = {
  'async_sgd': algorithms.async_sgd(0.01),
  'dgs 1%': algorithms.dgs(0.01, 0.01),
}
_WIDTHS = (64, 96, 96, 48)


def table(workers: int, events: int) -> None:
  """Prints one line a policy."""
  cluster = clusters.with_stragglers(workers, law=clusters.shifted_exponential(0.5, 0.5))
  print(f'{events} events of {workers} workers')
  print(f'{"policy":<12} {"seconds":>8} {"events/s":>10} {"simulated, s":>12} {"of the goal":>11}')
  for policy in _POLICIES:
    start = time.process_time()
    trace = simulation.simulate_events(cluster, policy, events=events)
    seconds = time.process_time() - start
    share = seconds / events * 1e6 / _GOAL
    print(
      f'{policy.name:<12} {seconds:>8.2f} {events / seconds:>10.0f} {trace.seconds[-1]:>12.1f} '
      f'{share:>10.0%}',
      flush=True,
    )


def replays(workers: int, events: int) -> None:
  """Prints one line a method: wall time of a compiled scan, compilation beside it."""
  cluster = clusters.with_stragglers(workers, law=clusters.shifted_exponential(0.5, 0.5))
  trace = simulation.simulate_events(cluster, simulation.asp(), events=events)
  keys = jax.random.split(jax.random.key(0), 5)
  shapes = tuple(zip(_WIDTHS, _WIDTHS[1:], strict=False))
  params = [0.1 * jax.random.normal(k, s) for k, s in zip(keys[:3], shapes, strict=True)]
  x = jax.random.normal(keys[3], (workers, 32, _WIDTHS[0]))
  y = jax.random.normal(keys[4], (workers, 32, _WIDTHS[-1]))

  def loss(params: list[jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    for weights in params[:-1]:
      x = jax.nn.relu(x @ weights)
    return jnp.mean((x @ params[-1] - y) ** 2)

  def gradient(params: list[jax.Array], work: servers.Work) -> list[jax.Array]:
    rows = (8 * work.count + jnp.arange(8)) % 32
    return jax.grad(loss)(params, x[work.shard, rows], y[work.shard, rows])

  print(f'replay of {events} events of {workers} workers, {sum(p.size for p in params)} parameters')
  print(f'{"method":<12} {"compile, s":>10} {"seconds":>8} {"events/s":>10} {"of the goal":>11}')
  for name, method in _METHODS.items():
    replay = functools.partial(simulation.replay_events, trace, method, gradient)
    run = jax.jit(lambda start, replay=replay: replay(start).server)
    start = time.perf_counter()
    compiled = run.lower(params).compile()
    ready = time.perf_counter()
    jax.block_until_ready(compiled(params))
    seconds = time.perf_counter() - ready
    print(
      f'{name:<12} {ready - start:>10.2f} {seconds:>8.2f} {events / seconds:>10.0f} '
      f'{events / seconds / _RATE:>10.0%}',
      flush=True,
    )


def main(argv: Sequence[str]) -> None:
  """Prints both tables."""
  if len(argv) > 1:
    raise app.UsageError(f'unexpected arguments {argv[1:]}')
  table(flags.FLAGS.workers, flags.FLAGS.events)
  replays(64, flags.FLAGS.replayed)


if __name__ == '__main__':
  flags.DEFINE_integer('workers', 1000, 'Workers.', lower_bound=5)
  flags.DEFINE_integer('events', 1_000_000, 'Events.', lower_bound=1)
  flags.DEFINE_integer('replayed', 20_000, 'Events replayed.', lower_bound=64)
  app.run(main)
