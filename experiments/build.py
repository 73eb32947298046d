"""From a config to the objects of a run, all of them checked before anything is written.

A name in the config is an attribute of a public namespace; nothing is registered. An entry of the
config that is not an argument of what it names, or the reverse, is refused by its dotted field.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np
import optax

from configs import base
from experiments import evaluation, models, simulate
from experiments.data import batches, blocks, datasets, feeds, splits
from jax_dsgd import (
  algorithms,
  clusters,
  compressors,
  memories,
  runtime,
  servers,
  simulation,
  topologies,
  transforms,
)

# Parameter -> where its names live, and what a function must return to be one of them.
_NAMESPACES: dict[str, tuple[Any, Any]] = {
  'dataset': (datasets, datasets.Dataset),
  'split': (splits, list[np.ndarray]),
  'feed': (feeds, feeds.Feed),
  'model': (models, models.Model),
  'algorithm': (algorithms, optax.GradientTransformationExtraArgs),
  'topology': (topologies, topologies.Topology),
  'compressor': (compressors, compressors.Compressor),
  'memory': (memories, memories.Memory),
  'learning_rate': (optax, optax.Schedule),
  'period': (optax, optax.Schedule),
  'inner': (optax, optax.GradientTransformationExtraArgs),
  'outer': (optax, optax.GradientTransformationExtraArgs),
  'server': (algorithms, servers.ParameterServer),
  'prox': (transforms, transforms.Prox),
  'cluster': (clusters, clusters.Cluster),
  'law': (clusters, clusters.Law),
  'policy': (simulation, simulation.Policy),
  'block': (blocks, blocks.Block),
  'evaluation': (evaluation, evaluation.Evaluation),
}
_RUNTIMES: dict[str, Callable[[int], runtime.Workers]] = {
  'simulate': runtime.simulate,
  'mesh': lambda count: runtime.on_mesh(runtime.make_mesh(workers=count), 'workers'),
  'spread': lambda count: runtime.simulate(count, mesh=runtime.make_mesh(all=jax.device_count())),
}
_COUNTS = (
  'workers',
  'clients',
  'steps',
  'local_steps',
  'batch_size',
  'log_every',
  'eval_every',
  'checkpoint_every',
)
# Arguments that are the run's, not the config's.
_NEVER_GIVEN = ('axis_name', 'dataset', 'workers', 'parts', 'batch_size')


class Experiment(NamedTuple):
  """The objects of a run.

  Attributes:
    config: every field, as plain Python values.
    workers: the runtime.
    dataset: the data.
    feed: which examples each worker sees at each step.
    model: the model.
    tx: the algorithm; of a parameter server, what its workers do.
    evaluation: which model answers on the test set.
    server: the algorithm, if it is a parameter server's.
    trace: what happens when, on a simulated cluster; None without one.
  """

  config: dict[str, Any]
  workers: runtime.Workers
  dataset: datasets.Dataset
  feed: feeds.Feed
  model: models.Model
  tx: optax.GradientTransformationExtraArgs
  evaluation: evaluation.Evaluation
  server: servers.ParameterServer | None = None
  trace: simulate.Trace | None = None

  @property
  def shapes(self) -> Any:
    """The shapes of the parameters of one model."""
    return jax.eval_shape(self.model.init, jax.random.key(0))

  @property
  def entries(self) -> int:
    """How many parameters one model has."""
    return sum(leaf.size for leaf in jax.tree.leaves(self.shapes))


def experiment(config: ml_collections.ConfigDict) -> Experiment:
  """Builds the objects that a config names.

  Args:
    config: with the fields of `configs.base`.

  Raises:
    base.ConfigError: the first thing that is wrong, in one line that begins with its field.

  >>> built = experiment(base.get_base())
  >>> built.workers.count, built.dataset.name, built.feed.indices(0).shape
  (8, 'digits', (1, 8, 32))
  """
  settings = config.to_dict()
  _check_fields(settings)
  count, seed = settings['workers'], settings['seed']
  if settings['runtime'] not in _RUNTIMES:
    raise base.ConfigError(f'config.runtime: {base.unknown(settings["runtime"], _RUNTIMES)}')
  workers = _call('config.runtime', _RUNTIMES[settings['runtime']], count)
  share = _call('config.batch_size', batches.worker_batch, settings['batch_size'], count)

  def make(field: str, *, kind: str | None = None, **context: Any) -> Any:
    return construct(
      kind or field, settings[field], field=f'config.{field}', context={'seed': seed, **context}
    )

  dataset = make('dataset')
  parts = make('split', dataset=dataset, workers=settings['clients'])
  # Of clients that are drawn, the feed says how much they weigh.
  examples = [part.size for part in parts] if len(parts) == count else None
  server = None
  if settings['algorithm'].get('name') in candidates('server'):
    server = make('algorithm', kind='server', workers=count)
    _check_server(settings)
    tx = server.inner
  else:
    tx = make('algorithm', axis_name=workers.axis_name, n=count, examples=examples)
  if settings['skip_nonfinite']:
    tx = transforms.skip_nonfinite(tx, axis_name=workers.axis_name)
  made = Experiment(
    config=settings,
    workers=workers,
    dataset=dataset,
    feed=make('feed', dataset=dataset, parts=parts, batch_size=share, workers=count),
    model=make('model', dataset=dataset),
    tx=optax.with_extra_args_support(tx),
    evaluation=make('evaluation', dataset=dataset),
    server=server,
  )
  if settings['cluster'] is None:
    return made
  return _on_cluster(made, make('cluster', n=count), make('policy'), batch=share)


def _on_cluster(
  made: Experiment, cluster: clusters.Cluster, policy: simulation.Policy, *, batch: int
) -> Experiment:
  """The experiment with the trace of a simulation, which its feed follows in rounds."""
  config, server = made.config, made.server
  if cluster.size != made.workers.count:
    raise base.ConfigError(
      f'config.cluster: {cluster!r} is of {cluster.size} workers and config.workers is '
      f'{made.workers.count}'
    )
  local_steps = config['local_steps']
  policy = simulate.with_local_steps(policy, local_steps)
  common = {'params': made.shapes, 'batch': batch, 'seed': config['seed']}
  if server is not None:
    pushes = config['steps']
    trace = _call(
      'config.policy', simulate.of_pushes, cluster, policy, server, pushes=pushes, **common
    )
    return made._replace(trace=trace)
  common |= {'rounds': -(-config['steps'] // local_steps), 'local_steps': local_steps}
  trace = _call('config.policy', simulate.of_rounds, cluster, policy, **common)
  feed = _call('config.feed', simulate.follow, made.feed, trace, local_steps=local_steps)
  return made._replace(trace=trace, feed=feed)


def construct(kind: str, spec: Any, *, field: str, context: Mapping[str, Any]) -> Any:
  """Calls the function that a nested dict of a config names.

  Args:
    kind: the namespace, e.g. 'topology'.
    spec: `{'name': ..., argument: value, ...}`; values of that form are built first.
    field: the dotted place of `spec` in the config, for messages.
    context: values for parameters that the function has and the config does not give.

  Raises:
    base.ConfigError: an unknown name or argument, a missing argument, or what the function refuses.

  >>> construct('topology', {'name': 'ring'}, field='config.x', context={'n': 4}).size
  4
  """
  if not isinstance(spec, Mapping) or 'name' not in spec:
    raise base.ConfigError(f"{field}: takes {{'name': ..., argument: value}}, got {spec!r}")
  functions = candidates(kind)
  if spec['name'] not in functions:
    raise base.ConfigError(f'{field}.name: {base.unknown(spec["name"], functions)}')
  function = functions[spec['name']]
  parameters = inspect.signature(function).parameters
  accepted = [name for name in parameters if name not in _NEVER_GIVEN]
  arguments = {name: value for name, value in context.items() if name in parameters}
  for name, value in spec.items():
    if name == 'name':
      continue
    if name not in accepted:
      raise base.ConfigError(
        f'{field}.{name}: {spec["name"]} has no argument {base.unknown(name, accepted)}'
      )
    arguments[name] = _argument(name, value, f'{field}.{name}', context)
  for name, parameter in parameters.items():
    if name not in arguments and parameter.default is parameter.empty:
      raise base.ConfigError(f'{field}: {spec["name"]} needs the argument {name!r}')
  built = _call(field, function, **arguments)
  if isinstance(built, topologies.Topology) and built.size != context['n']:
    raise base.ConfigError(
      f'{field}: {built!r} is for {built.size} workers and config.workers is {context["n"]}'
    )
  return built


@functools.cache
def candidates(kind: str) -> dict[str, Callable[..., Any]]:
  """The public functions of a namespace that return what it holds, by name.

  >>> sorted(candidates('memory'))
  ['momentum_correction', 'momentum_residual', 'none', 'reference', 'residual']
  """
  module, returns = _NAMESPACES[kind]
  return {
    name: value
    for name, value in vars(module).items()
    if inspect.isfunction(value)
    and not name.startswith('_')
    and value.__module__.startswith(module.__name__)
    and _return_type(value) == returns
  }


def _return_type(function: Callable[..., Any]) -> Any:
  annotation = inspect.get_annotations(function).get('return')
  if isinstance(annotation, str):
    return eval(annotation, function.__globals__)
  return annotation


def _argument(name: str, value: Any, field: str, context: Mapping[str, Any]) -> Any:
  if name not in _NAMESPACES or not isinstance(value, Mapping | str):
    return value
  return construct(name, value, field=field, context=context)


def _call(field: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
  try:
    return function(*args, **kwargs)
  except (TypeError, ValueError, OSError) as error:
    raise base.ConfigError(f'{field}: {" ".join(str(error).split())}') from error


def _check_server(settings: Mapping[str, Any]) -> None:
  needs = f'with the parameter server {settings["algorithm"]["name"]}'
  for field, wrong, accepted in (
    ('cluster', settings['cluster'] is None, 'a cluster'),
    ('runtime', settings['runtime'] != 'simulate', "'simulate'"),
    ('skip_nonfinite', settings['skip_nonfinite'], 'False'),
  ):
    if wrong:
      raise base.ConfigError(
        f'config.{field}: accepted {needs} is {accepted}, got {settings[field]!r}'
      )


def _check_fields(settings: Mapping[str, Any]) -> None:
  fields = base.get_base()
  for name in settings:
    if name not in fields:
      raise base.ConfigError(f'config has no field {base.unknown(name, fields)}')
  for name in fields:
    if name not in settings:
      raise base.ConfigError(f'config lacks the field {name!r}')
  for name, least in [*((name, 1) for name in _COUNTS), ('seed', 0)]:
    _call(f'config.{name}', datasets.whole_number, name, settings[name], least=least)
  if (settings['cluster'] is None) != (settings['policy'] is None):
    lacks = 'cluster' if settings['cluster'] is None else 'policy'
    raise base.ConfigError(f'config.{lacks}: a cluster and a policy come together, got None')
  if not isinstance(settings['skip_nonfinite'], bool):
    raise base.ConfigError(
      f'config.skip_nonfinite: accepted are True and False, got {settings["skip_nonfinite"]!r}'
    )
