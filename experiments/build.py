"""From a config to the objects of a run, all of them checked before anything is written.

A name in the config is an attribute of a public namespace; nothing is registered. An entry of the
config that is not an argument of what it names, or the reverse, is refused by its dotted field.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import ml_collections
import numpy as np
import optax

from configs import base
from experiments import models
from experiments.data import batches, datasets, splits
from jax_dsgd import algorithms, compressors, memories, runtime, topologies, transforms

# Parameter -> where its names live, and what a function must return to be one of them.
_NAMESPACES: dict[str, tuple[Any, Any]] = {
  'dataset': (datasets, datasets.Dataset),
  'split': (splits, list[np.ndarray]),
  'model': (models, models.Model),
  'algorithm': (algorithms, optax.GradientTransformationExtraArgs),
  'topology': (topologies, topologies.Topology),
  'compressor': (compressors, compressors.Compressor),
  'memory': (memories, memories.Memory),
  'learning_rate': (optax, optax.Schedule),
  'period': (optax, optax.Schedule),
}
_RUNTIMES: dict[str, Callable[[int], runtime.Workers]] = {
  'simulate': runtime.simulate,
  'mesh': lambda count: runtime.on_mesh(runtime.make_mesh(workers=count), 'workers'),
}
_COUNTS = ('workers', 'steps', 'batch_size', 'log_every', 'eval_every', 'checkpoint_every')
_NEVER_GIVEN = ('axis_name', 'dataset', 'workers')  # arguments that are the run's, not the config's


class Experiment(NamedTuple):
  """The objects of a run.

  Attributes:
    config: every field, as plain Python values.
    workers: the runtime.
    dataset: the data.
    batches: which examples each worker sees at each step.
    model: the model.
    tx: the algorithm.
  """

  config: dict[str, Any]
  workers: runtime.Workers
  dataset: datasets.Dataset
  batches: batches.Batches
  model: models.Model
  tx: optax.GradientTransformationExtraArgs


def experiment(config: ml_collections.ConfigDict) -> Experiment:
  """Builds the objects that a config names.

  Args:
    config: with the fields of `configs.base`.

  Raises:
    base.ConfigError: the first thing that is wrong, in one line that begins with its field.

  >>> built = experiment(base.get_base())
  >>> built.workers.count, built.dataset.name, built.batches.indices(0).shape
  (8, 'digits', (1, 8, 32))
  """
  settings = config.to_dict()
  _check_fields(settings)
  count, seed = settings['workers'], settings['seed']
  if settings['runtime'] not in _RUNTIMES:
    raise base.ConfigError(f'config.runtime: {base.unknown(settings["runtime"], _RUNTIMES)}')
  workers = _call('config.runtime', _RUNTIMES[settings['runtime']], count)
  share = _call('config.batch_size', batches.worker_batch, settings['batch_size'], count)

  def make(kind: str, **context: Any) -> Any:
    return construct(
      kind, settings[kind], field=f'config.{kind}', context={'seed': seed, **context}
    )

  dataset = make('dataset')
  parts = make('split', dataset=dataset, workers=count)
  tx = make(
    'algorithm', axis_name=workers.axis_name, n=count, examples=[part.size for part in parts]
  )
  if settings['skip_nonfinite']:
    tx = transforms.skip_nonfinite(tx, axis_name=workers.axis_name)
  return Experiment(
    config=settings,
    workers=workers,
    dataset=dataset,
    batches=batches.Batches(parts, share, seed=seed),
    model=make('model', dataset=dataset),
    tx=optax.with_extra_args_support(tx),
  )


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
  ['none', 'reference', 'residual']
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
  if not isinstance(settings['skip_nonfinite'], bool):
    raise base.ConfigError(
      f'config.skip_nonfinite: accepted are True and False, got {settings["skip_nonfinite"]!r}'
    )
