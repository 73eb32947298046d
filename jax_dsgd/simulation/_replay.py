"""Replay: the numbers of a run whose times are known, in one compiled scan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_dsgd import runtime, servers, transforms
from jax_dsgd.simulation._trace import EventTrace, RoundTrace


class Replayed(NamedTuple):
  """What came of a replay of events.

  Attributes:
    server: at the end.
    workers: at the end, rows [W, ...].
    shards: at the end, rows [W, ...].
    history: what `record` gave after each event, with a leading axis of events.
    push_bytes: of one push. answer_bytes: of one answer.
  """

  server: servers.ServerState
  workers: servers.WorkerState
  shards: servers.ShardState
  history: Any
  push_bytes: int
  answer_bytes: int


def replay_events(
  trace: EventTrace,
  method: servers.ParameterServer,
  gradient: servers.Gradient,
  params: Any,
  *,
  record: Callable[[Any], Any] = lambda params: (),
) -> Replayed:
  """Replays a parameter server exactly, in one compiled scan over its events.

  The result is that of the run whose trace it is: who pulled what when decides every number. Time
  is in the trace, so loss against seconds is `record` against `trace.seconds`.

  Args:
    trace: made by `simulate_events`, recorded from a run, or read from a file.
    method: what is run.
    gradient: `(params, work) -> gradient` of the loss on a batch, traced once.
    params: the first parameters.
    record: from the server's parameters to what is kept of each event.

  Returns:
    The states at the end, and the history.

  >>> from jax_dsgd import clusters, servers, simulation
  >>> trace = simulation.simulate_events(clusters.uniform(2), simulation.asp(), events=202)
  >>> sgd = servers.ParameterServer(optax.sgd(0.1), optax.sgd(1.0))
  >>> target = lambda work: jnp.where(work.shard == 0, 1.0, 3.0)
  >>> done = replay_events(trace, sgd, lambda x, work: x - target(work), jnp.zeros(()))
  >>> round(float(done.server.params), 1)
  2.0
  """
  rows = lambda state: jax.tree.map(lambda x: jnp.stack([x] * trace.workers), state)  # noqa: E731
  columns = (trace.worker, trace.shard, trace.pushes, trace.pulls, trace.steps, trace.examples)

  def event(carry: Any, column: Any) -> tuple[Any, Any]:
    server, workers, shards = carry
    index, shard_index, pushes, pulls, steps, examples = column
    worker, shard = _row(workers, index), _row(shards, shard_index)

    def push() -> Any:
      work = servers.Work(index, shard_index, shard.count, examples)
      payload, after, used = servers.compute(method, gradient, worker, shard, work, steps)
      return servers.apply(method, server, worker, index, payload), after, used

    server, worker, shard = jax.lax.cond(pushes, push, lambda: (server, worker, shard))
    pull = lambda: servers.answer(method, server, worker, index)[1]  # noqa: E731
    worker = jax.lax.cond(pulls, pull, lambda: worker)
    carry = server, _set_row(workers, index, worker), _set_row(shards, shard_index, shard)
    return carry, record(server.params)

  @jax.jit
  def run(params: Any, columns: Any) -> Any:
    states = (
      servers.init_server(method, params),
      servers.init_worker(method, params),
      servers.init_shard(method, params),
    )
    carry = states[0], rows(states[1]), rows(states[2])
    return jax.lax.scan(event, carry, columns)

  (server, workers, shards), history = run(params, tuple(map(jnp.asarray, columns)))
  return Replayed(server, workers, shards, history, *servers.message_bytes(method, params))


def controls(trace: RoundTrace) -> transforms.Control:
  """The rows of `control` for each round and worker, arrays [T, W]."""
  return transforms.Control(
    active=jnp.asarray(trace.active),
    weight=jnp.asarray(trace.weight),
    steps=jnp.asarray(trace.steps),
    late=jnp.asarray(trace.staleness > 0),
    group=jnp.asarray(trace.group),
    staleness=jnp.asarray(trace.staleness),
  )


def replay_rounds(
  trace: RoundTrace,
  tx: optax.GradientTransformation,
  gradient: servers.Gradient,
  params: Any,
  workers: runtime.Workers,
  *,
  period: int = 1,
  record: Callable[[Any], Any] = lambda params: (),
) -> tuple[Any, Any, Any]:
  """Runs a transform whose `control` is the rows of a trace, in one compiled scan over its rounds.

  Args:
    trace: made by `simulate_rounds`, recorded from a run, or read from a file.
    tx: the transform; it follows `control` as far as it reads it.
    gradient: `(params, work) -> gradient` of the loss on a batch, traced once.
    params: the first parameters, of one worker.
    workers: simulated, or on a mesh.
    period: local steps a round; the same row of the trace holds in all of them.
    record: from a worker's parameters to what is kept of each round.

  Returns:
    Parameters, states, and the history [W, T, ...], as rows.

  Raises:
    ValueError: a trace of another number of workers.
  """
  if trace.workers != workers.count:
    raise ValueError(f'the trace has {trace.workers} workers, and there are {workers.count}')
  tx = optax.with_extra_args_support(tx)
  index = jnp.arange(workers.count, dtype=jnp.int32)
  across = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), controls(trace))

  def whole(params: Any, index: jax.Array, rows: transforms.Control) -> Any:
    def one_round(carry: Any, row: transforms.Control) -> tuple[Any, Any]:
      def step(_: jax.Array, carry: Any) -> Any:
        params, state, count = carry
        work = servers.Work(index, index, count, jnp.ones((), jnp.int32))
        grad_fn = lambda params: gradient(params, work)  # noqa: E731
        updates, state = tx.update(grad_fn(params), state, params, grad_fn=grad_fn, control=row)
        return optax.apply_updates(params, updates), state, count + 1

      carry = jax.lax.fori_loop(0, period, step, carry)
      return carry, record(carry[0])

    start = params, tx.init(params), jnp.zeros_like(index)
    (params, state, _), history = jax.lax.scan(one_round, start, rows)
    return params, state, history

  return workers.spmd(whole)(workers.replicate(params), workers.place(index), workers.place(across))


def _row(rows: Any, index: jax.Array) -> Any:
  return jax.tree.map(lambda x: x[index], rows)


def _set_row(rows: Any, index: jax.Array, row: Any) -> Any:
  return jax.tree.map(lambda x, new: x.at[index].set(new), rows, row)
