"""The one training loop: whatever the algorithm, whatever the runtime."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from configs import base
from experiments import build, evaluation, metrics, simulate
from experiments.models import losses
from jax_dsgd import checkpoint, ledger, runtime

_AT_ONCE = 32  # gradients of simulated workers: more models than these leave the cache


class Program(NamedTuple):
  """The parts of a run. `rows` is {'params', 'state'}, each leaf with one row a worker.

  Attributes:
    init: () -> rows at step 0: the same model everywhere.
    advance: (rows, step, count) -> (rows, losses `[count, W]`, consensus distance). Donates the
      rows; one compilation serves every count up to `log_every`.
    evaluate: rows -> measures on the test set, as in `evaluation.measures`.
  """

  init: Callable[[], Any]
  advance: Callable[[Any, int, int], tuple[Any, np.ndarray, jax.Array]]
  evaluate: Callable[[Any], dict[str, float]]


def program(experiment: build.Experiment) -> Program:
  """Makes the parts of a run and traces a step.

  Raises:
    base.ConfigError: what the algorithm or the model refuses when it is traced.
  """
  dataset, span = experiment.dataset, experiment.config['log_every']
  init, chunk = _init_function(experiment), _chunk_function(experiment)
  place = functools.partial(_on_every_device, experiment.workers)
  data, feed = place((dataset.inputs, dataset.targets)), experiment.feed
  evaluate = evaluation.measures(
    experiment.evaluation,
    workers=experiment.workers,
    model=experiment.model,
    dataset=dataset,
    place=place,
  )
  try:
    rows = jax.eval_shape(init)
    chunk.eval_shape(rows, data, (feed.indices(0, span), feed.control(0, span)), 1)
    jax.eval_shape(
      experiment.workers.spmd(experiment.evaluation.models), rows['params'], rows['state']
    )
  except (TypeError, ValueError) as error:
    raise base.ConfigError(f'config: {" ".join(str(error).split())}') from error

  def advance(rows: Any, step: int, count: int) -> tuple[Any, np.ndarray, jax.Array]:
    fed = feed.indices(step, span), feed.control(step, span)
    rows, history, distance = chunk(rows, data, fed, count)
    return rows, np.asarray(history)[:count], distance

  return Program(init, advance, evaluate)


def train(
  experiment: build.Experiment,
  parts: Program,
  *,
  checkpoints: checkpoint.Checkpoints,
  writer: metrics.Writer,
) -> None:
  """Runs from the newest checkpoint, or from the start, to `config.steps`.

  Raises:
    FloatingPointError: a loss that is not finite, with its step and worker; under
      `skip_nonfinite` only where no step since the last line was good.
  """
  config = experiment.config
  rows, start = parts.init(), checkpoints.latest_step()
  if start:
    rows = checkpoints.restore(rows)
  ends = functools.partial(_ends, steps=config['steps'])
  for step, end in spans(config, start or 0):
    rows, history, distance = parts.advance(rows, step, end - step)
    line = {
      'bytes_sent': float(np.mean(ledger.bytes_sent(rows['state']))),
      'loss': _mean_loss(history, step, config),
      'consensus_distance': float(distance),
    }
    if experiment.trace is not None:
      spent = simulate.seconds_at(experiment.trace, end, local_steps=config['local_steps'])
      line['simulated_seconds'] = spent
    if (skipped := optax.tree.get(rows['state'], 'skipped')) is not None:
      line['skipped'] = int(np.max(skipped))
    if ends(end, config['eval_every']):
      line |= parts.evaluate(rows)
    writer.write(end, line)
    if ends(end, config['checkpoint_every']):
      checkpoints.save(end, rows)


def spans(config: Mapping[str, Any], start: int) -> Iterator[tuple[int, int]]:
  """Cuts the steps from `start` on where something is due: a line, an evaluation, a checkpoint.

  >>> config = {'steps': 10, 'log_every': 4, 'eval_every': 6, 'checkpoint_every': 100}
  >>> list(spans(config, 0))
  [(0, 4), (4, 6), (6, 8), (8, 10)]
  """
  periods = [config[name] for name in ('log_every', 'eval_every', 'checkpoint_every')]
  while start < config['steps']:
    end = min(config['steps'], *((start // period + 1) * period for period in periods))
    yield start, end
    start = end


def _ends(step: int, period: int, *, steps: int) -> bool:
  return step % period == 0 or step == steps


def _init_function(experiment: build.Experiment) -> Callable[[], Any]:
  workers = experiment.workers
  seed = experiment.config['seed']

  def init() -> Any:
    params = workers.replicate(jax.jit(experiment.model.init)(jax.random.key(seed)))
    return {'params': params, 'state': jax.jit(workers.spmd(experiment.tx.init))(params)}

  return init


def _chunk_function(experiment: build.Experiment) -> Any:
  workers, model, tx = experiment.workers, experiment.model, experiment.tx

  def batch_gradient(params: Any, batch: tuple[jax.Array, jax.Array]) -> Any:
    return jax.value_and_grad(lambda params: losses.loss(model, params, *batch))(params)

  def worker_step(params: Any, state: Any, gradients: Any, batch: Any, control: Any) -> Any:
    grad_fn = lambda params: batch_gradient(params, batch)[1]  # noqa: E731
    extra = {'grad_fn': grad_fn, 'control': control}
    updates, state = tx.update(gradients, state, params, **extra)
    return optax.apply_updates(params, updates), state

  @functools.partial(jax.jit, donate_argnums=0)
  def chunk(rows: Any, data: Any, fed: Any, count: jax.Array) -> Any:
    # `count` is a value, not a shape: the last steps before a checkpoint compile nothing new.
    def step(i: jax.Array, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
      rows, history = carry
      indices, control = jax.tree.map(lambda x: x[i], fed)
      batch = jax.tree.map(lambda x: x[indices], data)
      loss, gradients = workers.spmd(batch_gradient, at_once=_AT_ONCE)(rows['params'], batch)
      params, state = workers.spmd(worker_step)(
        rows['params'], rows['state'], gradients, batch, control
      )
      return {'params': params, 'state': state}, history.at[i].set(loss)

    history = jnp.zeros(fed[0].shape[:2], jnp.float32)
    rows, history = jax.lax.fori_loop(0, count, step, (rows, history))
    return rows, history, runtime.consensus_distance(rows['params'])

  return chunk


def _on_every_device(workers: runtime.Workers, tree: Any) -> Any:
  if workers.sharding is None:
    return jax.tree.map(jnp.asarray, tree)
  return jax.device_put(tree, NamedSharding(workers.sharding.mesh, PartitionSpec()))


def _mean_loss(history: np.ndarray, step: int, config: Mapping[str, Any]) -> float:
  """The mean over workers and good steps of losses `[count, W]` that begin after `step` steps."""
  good = np.isfinite(history).all(axis=1)
  if not (good.any() if config['skip_nonfinite'] else good.all()):
    first = int(np.argmin(good))
    worker = int(np.argmin(np.isfinite(history[first])))
    raise FloatingPointError(
      f'the loss of worker {worker} is {history[first, worker]} at step {step + first + 1}: lower '
      'config.algorithm.learning_rate, or set config.skip_nonfinite if such batches are rare'
    )
  return float(history[good].mean(dtype=np.float64))
