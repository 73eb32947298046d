"""Clusters that are described in a file."""

from __future__ import annotations

import inspect
import os
from typing import Any

import numpy as np

from jax_dsgd.clusters import _checks, _laws
from jax_dsgd.clusters._cluster import Availability, Cluster

_LAWS = {
  name: law
  for name, law in vars(_laws).items()
  if inspect.isfunction(law) and not name.startswith('_')
}
_TOP = ('name', 'workers', 'links', 'server', 'availability', 'failures_per_hour')
_WORKERS = ('count', 'law', 'memory', 'group')
_LINK = ('latency', 'bandwidth')
_CHAINS = ('up', 'down', 'group_up', 'group_down')


def from_yaml(path: str | os.PathLike[str]) -> Cluster:
  """Reads a cluster from a YAML file; a key that is not known is refused.

  Only `workers` is required: a list of kinds, each with its `count`, its `law` by name with the
  arguments of the function of this module, and optionally `memory` and the `group` it fails with.
  `links` and `server` are `latency` in seconds and `bandwidth` in bytes a second, numbers or
  arrays of the shapes of `Cluster`; `availability` takes the fields of `Availability`.

      name: lab
      workers:
        - {count: 6, law: {constant: {seconds: 1.0}}, memory: 8.0e+10}
        - {count: 2, law: {markov_slowdown: {seconds: 1.0, factor: 5, fast: 60, slow: 20}}}
      links: {latency: 1.0e-5, bandwidth: 1.0e+10}
      server: {latency: 0.001, bandwidth: 1.0e+9}
      availability: {up: 20, down: 2}
      failures_per_hour: 0.01

  Args:
    path: of the file.

  Raises:
    ValueError: the file is not of that form; the message names the file and the field.
  """
  import yaml

  with open(path, encoding='utf-8') as file:
    try:
      read = yaml.safe_load(file)
    except yaml.YAMLError as error:
      raise ValueError(f'{path} must be YAML: {" ".join(str(error).split())}') from None
  top = _mapping(str(path), read, _TOP)
  kinds = top.get('workers')
  if not isinstance(kinds, list) or not kinds:
    raise ValueError(f'{path}: workers must be a list of kinds of workers, not {kinds!r}')
  fields: dict[str, list[Any]] = {'laws': [], 'memory': [], 'group': []}
  for k, kind in enumerate(kinds):
    where = f'{path}: workers[{k}]'
    kind = _mapping(where, kind, _WORKERS)
    count = _checks.whole_number(f'{where}: count', kind.get('count', 1))
    fields['laws'] += [_law(f'{where}: law', kind.get('law'))] * count
    fields['memory'] += [kind.get('memory', 16e9)] * count
    fields['group'] += [kind.get('group')] * count
  links = _mapping(f'{path}: links', top.get('links', {}), _LINK)
  server = _mapping(f'{path}: server', top.get('server', {}), _LINK)
  failures = top.get('failures_per_hour')
  return Cluster(
    str(top.get('name', path)),
    tuple(fields['laws']),
    memory=fields['memory'],
    availability=_availability(f'{path}: availability', top.get('availability'), fields['group']),
    failures_per_hour=failures
    if failures is None
    else _checks.number(f'{path}: failures_per_hour', failures),
    **links,
    **{f'server_{key}': value for key, value in server.items()},
  )


def _mapping(where: str, value: Any, keys: tuple[str, ...]) -> dict[str, Any]:
  if not isinstance(value, dict):
    raise ValueError(f'{where} must be a mapping with keys of {", ".join(keys)}, not {value!r}')
  for key in value:
    _checks.known(f'{where}: a key', key, keys)
  return value


def _law(where: str, value: Any) -> _laws.Law:
  if not isinstance(value, dict) or len(value) != 1:
    raise ValueError(f'{where} must be one name with its arguments, not {value!r}')
  ((name, arguments),) = value.items()
  _checks.known(where, name, _LAWS)
  parameters = inspect.signature(_LAWS[name]).parameters
  arguments = _mapping(f'{where}: {name}', arguments, tuple(parameters))
  for key, parameter in parameters.items():
    if parameter.default is parameter.empty and key not in arguments:
      raise ValueError(f'{where}: {name} must have {key}, not only {sorted(arguments)}')
  return _LAWS[name](**arguments)


def _availability(where: str, value: Any, groups: list[Any]) -> Availability | None:
  if value is None:
    return None
  chains = _mapping(where, value, _CHAINS)
  for key in ('up', 'down'):
    if key not in chains:
      raise ValueError(f'{where} must have {key}, not only {sorted(chains)}')
  if all(group is None for group in groups):
    return Availability(**chains)
  # Who is in no group is alone in one of its own, which would fail too: so all are, or none.
  if any(group is None for group in groups):
    raise ValueError(f'{where}: every kind of workers must have a group, or none; not {groups!r}')
  return Availability(groups=np.unique(groups, return_inverse=True)[1], **chains)
