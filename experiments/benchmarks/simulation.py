"""How fast the simulator of uneven machines is, in events a second of processor time.

  python -m experiments.benchmarks.simulation

A tenth of the workers are five times slower, and all are noisy. Goal: a million events of a
thousand workers in less than ten seconds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from absl import app, flags

from jax_dsgd import clusters, simulation

_GOAL = 10.0  # seconds of a million events
_POLICIES = (simulation.asp(), simulation.psp(4), simulation.psp(4, 4))


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


def main(argv: Sequence[str]) -> None:
  """Prints the table for one size."""
  if len(argv) > 1:
    raise app.UsageError(f'unexpected arguments {argv[1:]}')
  table(flags.FLAGS.workers, flags.FLAGS.events)


if __name__ == '__main__':
  flags.DEFINE_integer('workers', 1000, 'Workers.', lower_bound=5)
  flags.DEFINE_integer('events', 1_000_000, 'Events.', lower_bound=1)
  app.run(main)
