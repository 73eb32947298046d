"""Replay of a parameter server: what a run writes of it, from one compiled scan over its events."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import build, metrics, simulate
from experiments.models import losses
from jax_dsgd import servers, simulation

_PROBE = 512  # examples, of the training set and of the test set, measured after every event


def events(experiment: build.Experiment, writer: metrics.Writer) -> None:
  """Replays the trace and writes a line every `log_every` pushes, all of them at the end.

  A line holds the loss of the server's model on some of the training set and its measures on some
  of the test set, up to 512 examples each; `bytes_sent` of pushes and `bytes_received` of answers,
  mean of the workers; the mean `staleness` since the line before; and `simulated_seconds`.

  Raises:
    FloatingPointError: a loss that is not finite, with its push and time.
  """
  trace, server, config = experiment.trace, experiment.server, experiment.config
  if not isinstance(trace, simulation.EventTrace) or server is None:
    raise ValueError('replay.events takes an experiment with a parameter server')
  params = jax.jit(experiment.model.init)(jax.random.key(config['seed']))
  done = simulation.replay_events(
    trace, server, _gradient(experiment, trace), params, record=_probes(experiment)
  )
  history = jax.tree.map(lambda x: np.asarray(x)[trace.pushes], done.history)
  pushed = np.flatnonzero(trace.pushes)
  up = done.push_bytes * np.cumsum(trace.pushes)[pushed] / trace.workers
  down = done.answer_bytes * np.cumsum(trace.pulls)[pushed] / trace.workers
  bad = ~np.isfinite(history['loss'])
  if bad.any():
    push = int(np.argmax(bad))
    raise FloatingPointError(
      f'the loss is {history["loss"][push]} at push {push + 1}, after '
      f'{trace.seconds[pushed[push]]:.4g} simulated seconds: lower config.algorithm.learning_rate'
    )
  last = 0
  for step in [*range(config['log_every'], config['steps'], config['log_every']), config['steps']]:
    line = {name: float(values[step - 1]) for name, values in history.items()}
    line |= {f'{name}_worst': line[name] for name in ('test_loss', 'accuracy') if name in line}
    line['bytes_sent'], line['bytes_received'] = float(up[step - 1]), float(down[step - 1])
    line['staleness'] = float(trace.staleness[pushed[last:step]].mean())
    line['simulated_seconds'] = simulate.seconds_at(trace, step, local_steps=1)
    writer.write(step, line)
    last = step


def _gradient(experiment: build.Experiment, trace: simulation.EventTrace) -> servers.Gradient:
  """The gradient on the batch that a shard comes to next, whoever computes it."""
  steps = np.bincount(trace.shard, weights=trace.steps, minlength=trace.workers)
  table = jnp.asarray(experiment.feed.indices(0, int(steps.max())))
  data = jax.tree.map(jnp.asarray, (experiment.dataset.inputs, experiment.dataset.targets))
  model = experiment.model

  def gradient(params: Any, work: servers.Work) -> Any:
    batch = jax.tree.map(lambda x: x[table[work.count, work.shard]], data)
    return jax.grad(lambda params: losses.loss(model, params, *batch))(params)

  return gradient


def _probes(experiment: build.Experiment) -> Any:
  """A function of parameters that gives the losses that lines show, and the accuracy of classes."""
  dataset, model = experiment.dataset, experiment.model
  rng = np.random.default_rng(experiment.config['seed'])

  def some(inputs: np.ndarray, targets: np.ndarray) -> tuple[jax.Array, jax.Array]:
    chosen = np.sort(rng.permutation(len(inputs))[:_PROBE])
    return jnp.asarray(inputs[chosen]), jnp.asarray(targets[chosen])

  train = some(dataset.inputs, dataset.targets)
  test = some(dataset.test_inputs, dataset.test_targets)
  # Of a text, the loss says more than how often the likeliest symbol was right.
  classes = dataset.targets.ndim == 1 and np.issubdtype(dataset.targets.dtype, np.integer)

  def measure(params: Any) -> dict[str, jax.Array]:
    sums = losses.evaluate(model, params, *test, jnp.ones(len(test[0])))
    found = {
      'loss': losses.loss(model, params, *train) - dataset.floor,
      'test_loss': sums['loss'] / sums['count'] - dataset.floor,
    }
    return found | ({'accuracy': sums['correct'] / sums['count']} if classes else {})

  return measure
