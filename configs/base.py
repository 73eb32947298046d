"""Every field of a run, named once, and how a config file picks its variant.

A nested dict with a `name` is an object: the name is a public function of a namespace
(`algorithms`, `topologies`, `compressors`, `memories`, `clusters`, `simulation`, optax's schedules
and optimizers, `experiments.data`, `experiments.models`, `experiments.evaluation`) and the other
entries are its keyword arguments. See `experiments.build`.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import ml_collections


class ConfigError(Exception):
  """What a user can put right in a config or a command: one line that names the field.

  Not a ValueError, which the flags of ml_collections would wrap into a traceback.
  """


def get_base() -> ml_collections.ConfigDict:
  """A small run with every field there is: synchronous SGD on the digits."""
  config = ml_collections.ConfigDict({
    'seed': 0,  # of the initial model, the split, the batches and every draw of an algorithm
    'workers': 8,
    'clients': 8,  # parts of the data; as many as workers, unless the feed draws some of them
    'runtime': 'simulate',  # or 'mesh': one device a worker; 'spread': simulated, on all devices
    'steps': 100,
    'batch_size': 256,  # examples a step over all workers
    'log_every': 10,  # steps between lines of metrics.jsonl: the mean loss since the last line
    'eval_every': 50,  # steps between evaluations on the test set; one more at the end
    'checkpoint_every': 100,  # steps between checkpoints; one more at the end
    'skip_nonfinite': False,  # skip a step with a NaN or an infinity, on all workers
    'dataset': {'name': 'digits'},
    'split': {'name': 'iid'},
    'feed': {'name': 'own_parts'},
    'model': {'name': 'mlp'},
    'algorithm': {'name': 'allreduce_sgd', 'learning_rate': 0.1},
    'evaluation': {'name': 'trained_model'},
    'cluster': None,  # a description of machines, on which time is simulated
    'policy': None,  # of a cluster: who waits for whom. Steps are then pushes, or local steps
    'local_steps': 1,  # of a cluster: steps of a round or push, where the policy does not say
  })  # fmt: skip
  config.clients = config.get_oneway_ref('workers')
  return config.lock()


def select(
  config: ml_collections.ConfigDict, variants: Mapping[str, Mapping[str, Any]], variant: str
) -> ml_collections.ConfigDict:
  """The config with the fields of one of its variants.

  Raises:
    ConfigError: an unknown variant.

  >>> select(get_base(), {'short': {'steps': 3}}, 'short').steps
  3
  """
  if variant not in variants:
    raise ConfigError(f'config has no variant {unknown(variant, variants)}')
  for field, value in variants[variant].items():
    config[field] = value
  return config


def load(path: str) -> ModuleType:
  """The module of a config file.

  Raises:
    ConfigError: no such file, or one without `get_config`.
  """
  spec = importlib.util.spec_from_file_location('loaded_config', path)
  if spec is None or spec.loader is None or not os.path.isfile(path):
    raise ConfigError(f'--config={path}: there is no such Python file')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  if not hasattr(module, 'get_config'):
    raise ConfigError(f'--config={path}: the file defines no get_config(variant)')
  return module


def decaying(config: ml_collections.ConfigDict, rate: float) -> dict[str, Any]:
  """The schedule of a rate that falls to 0 as a cosine does, over all steps of the run.

  >>> decaying(get_base(), 0.1)['init_value']
  0.1
  """
  steps = config.get_ref('steps')
  return {'name': 'cosine_decay_schedule', 'init_value': rate, 'decay_steps': steps}


def unknown(name: object, names: Iterable[str]) -> str:
  """The end of an error message on a wrong name: the name, what is near it, and all there are.

  >>> unknown('rng', ['ring', 'torus'])
  "'rng'; did you mean 'ring'? accepted: ring, torus"
  """
  names = sorted(names)
  near = difflib.get_close_matches(str(name), names, n=1)
  hint = f' did you mean {near[0]!r}?' if near else ''
  return f'{name!r};{hint} accepted: {", ".join(names) or "none"}'


def require_fields(config: ml_collections.ConfigDict, names: Iterable[str]) -> None:
  """Refuses dotted names that are not fields of a config.

  Raises:
    ConfigError: with the fields there are.
  """
  for name in names:
    branch: Any = config
    path = 'config'
    for key in name.split('.'):
      fields = list(branch.keys()) if isinstance(branch, ml_collections.ConfigDict) else []
      if key not in fields:
        raise ConfigError(f'{path} has no field {unknown(key, fields)}')
      branch, path = branch[key], f'{path}.{key}'


def override(config: ml_collections.ConfigDict, values: Mapping[str, Any]) -> None:
  """Sets fields by their dotted names.

  Raises:
    ConfigError: a field that is not there, a value of another type.

  >>> config = get_base()
  >>> override(config, {'algorithm.learning_rate': 0.5})
  >>> config.algorithm.learning_rate
  0.5
  """
  require_fields(config, values)
  for name, value in values.items():
    try:
      config.update_from_flattened_dict({name: value})
    except (TypeError, ValueError) as error:
      raise ConfigError(f'config.{name}: {" ".join(str(error).split())}') from error
