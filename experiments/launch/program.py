"""What every process of an asynchronous run computes with: the jitted functions of one method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from configs import base
from experiments import build
from experiments.data import datasets
from experiments.models import losses
from jax_dsgd import servers, simulation

_COUNTS = ('workers', 'steps', 'batch_size', 'checkpoint_every')
_OBJECTS = ('dataset', 'split', 'model', 'method')
_FIELDS = (*_COUNTS, *_OBJECTS, 'seed', 'restarts', 'local_steps', 'delays', 'patience')


class Program(NamedTuple):
  """The functions of a run, compiled alike in every process.

  Attributes:
    method: the parameter server.
    gradient: as `simulation.replay_events` takes it. A batch is drawn, with replacement, from the
      shard by the seed, the shard and the step on it.
    params: the first parameters.
    compute: (worker, shard, work, steps) -> payload, worker, shard; `servers.compute`.
    apply: (server, worker, index, payload) -> server; `servers.apply`.
    answer: (server, worker, index) -> payload, worker; `servers.answer`.
    receive: (worker, index, payload, version) -> worker; `servers.receive`.
    measures: params -> loss and accuracy on the test set.
  """

  method: servers.ParameterServer
  gradient: servers.Gradient
  params: Any
  compute: Callable[..., Any]
  apply: Callable[..., Any]
  answer: Callable[..., Any]
  receive: Callable[..., Any]
  measures: Callable[[Any], dict[str, float]]


def program(settings: Mapping[str, Any]) -> Program:
  """Builds the functions of a config.

  Raises:
    base.ConfigError: the first thing that is wrong, in one line that begins with its field.
  """
  _check(settings)
  context = {'seed': settings['seed']}

  def make(kind: str, **more: Any) -> Any:
    return build.construct(
      kind, settings[kind], field=f'config.{kind}', context={**context, **more}
    )

  dataset = make('dataset')
  parts = make('split', dataset=dataset, workers=settings['workers'])
  model = make('model', dataset=dataset)
  method = build.construct(
    'server', settings['method'], field='config.method', context={'workers': settings['workers']}
  )
  loss = lambda params, *batch: losses.loss(model, params, *batch)  # noqa: E731
  sizes = jnp.array([part.size for part in parts])
  table = jnp.array([np.resize(part, max(part.size for part in parts)) for part in parts])
  inputs, targets = jnp.asarray(dataset.inputs), jnp.asarray(dataset.targets)

  def gradient(params: Any, work: servers.Work) -> Any:
    key = jax.random.fold_in(jax.random.key(settings['seed']), work.shard)
    key = jax.random.fold_in(key, work.count)
    places = jax.random.randint(key, (settings['batch_size'],), 0, sizes[work.shard])
    rows = table[work.shard, places]
    return jax.grad(loss)(params, inputs[rows], targets[rows])

  def measures(params: Any) -> dict[str, float]:
    tested = jnp.asarray(dataset.test_inputs), jnp.asarray(dataset.test_targets)
    mask = jnp.ones(len(dataset.test_inputs))
    sums = jax.jit(lambda params: losses.evaluate(model, params, *tested, mask))(params)
    loss, correct, count = (float(sums[name]) for name in ('loss', 'correct', 'count'))
    return {'test_loss': loss / count, 'accuracy': correct / count}

  return Program(
    method=method,
    gradient=gradient,
    params=jax.device_get(jax.jit(model.init)(jax.random.key(settings['seed']))),
    compute=jax.jit(lambda *args: servers.compute(method, gradient, *args)),
    apply=jax.jit(lambda *args: servers.apply(method, *args)),
    answer=jax.jit(lambda *args: servers.answer(method, *args)),
    receive=jax.jit(lambda *args: servers.receive(method, *args)),
    measures=measures,
  )


def replay(settings: Mapping[str, Any], trace: simulation.EventTrace) -> servers.ServerState:
  """The server after the events of a trace, one by one with the functions of the run itself.

  Bit for bit that of the run on machines of one kind. `simulation.replay_events` compiles all
  events into one program, whose sums may be rounded otherwise.

  Raises:
    ValueError: a trace of another number of workers.
  """
  part, count = program(settings), settings['workers']
  if trace.workers != count:
    raise ValueError(f'the trace has {trace.workers} workers, and config.workers={count}')
  server = servers.init_server(part.method, part.params)
  workers = [servers.init_worker(part.method, part.params)] * count
  shards = [servers.init_shard(part.method, part.params)] * count
  columns = (trace.worker, trace.shard, trace.pushes, trace.pulls, trace.steps, trace.examples)
  for k, s, pushes, pulls, steps, examples in zip(*columns, strict=True):
    if pushes:
      work = servers.Work(k, s, shards[s].count, examples)
      payload, workers[k], shards[s] = part.compute(workers[k], shards[s], work, steps)
      server = part.apply(server, workers[k], k, payload)
    if pulls:
      workers[k] = part.answer(server, workers[k], k)[1]
  return jax.device_get(server)


def _check(settings: Mapping[str, Any]) -> None:
  for name in _FIELDS:
    if name not in settings:
      raise base.ConfigError(
        f'config lacks the field {name!r}: begin with configs/launch/asynchronous.py'
      )
  for name in settings:
    if name not in _FIELDS:
      raise base.ConfigError(f'config has no field {base.unknown(name, _FIELDS)}')
  try:
    for name in _COUNTS:
      datasets.whole_number(f'config.{name}', settings[name], least=1)
    for name in ('seed', 'restarts'):
      datasets.whole_number(f'config.{name}', settings[name], least=0)
    for steps in settings['local_steps']:
      datasets.whole_number('config.local_steps', steps, least=1)
  except ValueError as error:
    raise base.ConfigError(str(error)) from error
  for name in ('local_steps', 'delays'):
    if len(settings[name]) != settings['workers']:
      raise base.ConfigError(
        f'config.{name}={settings[name]}: accepted is one number for each of '
        f'{settings["workers"]} workers'
      )
  if not all(delay >= 0 for delay in settings['delays']) or not settings['patience'] > 0:
    raise base.ConfigError(
      f'config.delays={settings["delays"]}, config.patience={settings["patience"]}: accepted are '
      'seconds >= 0, and > 0 of patience'
    )
