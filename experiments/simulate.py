"""From a config's cluster and policy to a trace, and what a run needs of it.

A parameter server's trace has events, and a step of the run is a push; any other algorithm's has
rounds, and `local_steps` steps of the run are a round.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from experiments.data import feeds
from jax_dsgd import clusters, ledger, servers, simulation

Trace = simulation.EventTrace | simulation.RoundTrace
TRACE = 'trace.npz'  # in a workdir


def with_local_steps(policy: simulation.Policy, steps: int) -> simulation.Policy:
  """The policy with this number of steps a task, unless it has its own way to choose them."""
  if policy.amount is not simulation.Policy('').amount:
    return policy
  return policy._replace(amount=lambda view, worker: simulation.Task(steps))


def of_pushes(
  cluster: clusters.Cluster,
  policy: simulation.Policy,
  server: servers.ParameterServer,
  *,
  params: Any,
  pushes: int,
  batch: int,
  seed: int,
) -> simulation.EventTrace:
  """Simulates a parameter server up to a number of pushes, with the bytes of its real payloads.

  Args:
    cluster: the machines.
    policy: of events.
    server: whose payloads are counted.
    params: of the model, arrays or their shapes.
    pushes: where the trace ends.
    batch: examples a worker and step.
    seed: of machines and policy.

  Raises:
    ValueError: what the simulator refuses; or the policy changes batch sizes.
  """
  up, down = servers.message_bytes(server, params)
  trace = simulation.simulate_events(
    cluster,
    policy,
    events=2 * pushes + cluster.size,  # at most one pull a push, and the first ones
    up_bytes=up,
    down_bytes=down,
    batch=batch,
    seed=seed,
  )
  if (trace.examples[trace.pushes] != batch).any():
    raise ValueError(f'{policy.name} changes batch sizes, and the data come in batches of {batch}')
  end = int(np.flatnonzero(trace.pushes)[pushes - 1]) + 1
  names = ('seconds', 'worker', 'pushes', 'pulls', 'staleness', 'steps', 'examples', 'started')
  columns = {name: getattr(trace, name)[:end] for name in (*names, 'shard')}
  return simulation.EventTrace(**columns, workers=trace.workers)


def of_rounds(
  cluster: clusters.Cluster,
  policy: simulation.Policy,
  *,
  params: Any,
  rounds: int,
  local_steps: int,
  batch: int,
  seed: int,
) -> simulation.RoundTrace:
  """Simulates rounds in which models, or gradients as large, are sent.

  Args:
    cluster: the machines.
    policy: of rounds.
    params: of the model, arrays or their shapes.
    rounds: how many.
    local_steps: of a round.
    batch: examples a worker and step.
    seed: of machines and policy.

  Raises:
    ValueError: what the simulator refuses; or the policy changes the number of steps.
  """
  trace = simulation.simulate_rounds(
    cluster,
    policy,
    rounds=rounds,
    message_bytes=ledger.payload_bytes(params),
    batch=batch,
    seed=seed,
  )
  if (trace.steps[trace.active] != local_steps).any():
    raise ValueError(f'{policy.name} changes the steps of a round from {local_steps}')
  return trace


def follow(feed: feeds.Feed, trace: simulation.RoundTrace, *, local_steps: int) -> feeds.Feed:
  """The same examples, and the trace's rows as `control`; the last row stays after its end.

  Raises:
    ValueError: the feed has a `control` of its own.

  >>> feed = feeds.own_parts([np.arange(4), np.arange(4)], 2, workers=2)
  >>> trace = simulation.simulate_rounds(clusters.uniform(2), simulation.fastest(1), rounds=2)
  >>> follow(feed, trace, local_steps=3).control(2, 3).active.tolist()
  [[True, False], [True, False], [True, False]]
  """
  if feed.control(0) is not None:
    raise ValueError('it says who takes part, which config.policy does on a cluster')
  rows = jax.tree.map(np.asarray, simulation.controls(trace))

  def control(step: int, steps: int = 1) -> Any:
    index = np.minimum(np.arange(step, step + steps) // local_steps, len(trace.seconds) - 1)
    return jax.tree.map(lambda x: x[index], rows)

  return feed._replace(control=control)


def seconds_at(trace: Trace, step: int, *, local_steps: int) -> float:
  """Simulated seconds at a step of the run: of that push, or of the end of its round.

  >>> trace = simulation.simulate_rounds(clusters.uniform(2), simulation.bulk(), rounds=2)
  >>> [seconds_at(trace, step, local_steps=2) for step in (1, 2, 3)]
  [1.0, 1.0, 2.0]
  """
  if isinstance(trace, simulation.EventTrace):
    return float(trace.seconds[trace.pushes][step - 1])
  return float(trace.seconds[-(-step // local_steps) - 1])
