"""From a config to the parameter server that it names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from configs import base
from experiments import build
from jax_dsgd import algorithms, servers, transforms

_OPTAX = ('inner', 'outer', 'learning_rate')


@functools.cache
def names() -> dict[str, Callable[..., servers.ParameterServer]]:
  """The algorithms that are parameter servers.

  >>> [name for name in sorted(names()) if name.startswith('async')]
  ['async_local_sgd', 'async_sgd']
  """
  return {
    name: function
    for name, function in vars(algorithms).items()
    if inspect.isfunction(function)
    and inspect.get_annotations(function).get('return') == 'servers.ParameterServer'
  }


def from_config(spec: Mapping[str, Any], *, workers: int) -> servers.ParameterServer:
  """The parameter server of `{'name': ..., argument: value}`.

  Args:
    spec: optimizers and schedules in it are of that form too; a `prox` is `{'l1': strength}`.
    workers: of methods that ask for it.

  Raises:
    base.ConfigError: an unknown name or argument, a missing one, or what the method refuses.

  >>> from_config({'name': 'dgs', 'learning_rate': 0.1}, workers=4).up.name
  'top_k(fraction=0.01)'
  """
  if not isinstance(spec, Mapping) or spec.get('name') not in names():
    name = spec.get('name') if isinstance(spec, Mapping) else spec
    raise base.ConfigError(f'config.method.name: {base.unknown(name, names())}')
  function = names()[spec['name']]
  accepted = inspect.signature(function).parameters
  arguments: dict[str, Any] = {'workers': workers} if 'workers' in accepted else {}
  for name, value in spec.items():
    if name == 'name':
      continue
    if name not in accepted:
      raise base.ConfigError(
        f'config.method.{name}: {spec["name"]} has no argument {base.unknown(name, accepted)}'
      )
    if name == 'prox':
      value = l1(**value)
    elif name in _OPTAX and isinstance(value, Mapping):
      kind = 'learning_rate' if name == 'learning_rate' else 'inner'
      value = build.construct(kind, value, field=f'config.method.{name}', context={})
    arguments[name] = value
  try:
    return function(**arguments)
  except (TypeError, ValueError) as error:
    raise base.ConfigError(f'config.method: {" ".join(str(error).split())}') from error


def l1(l1: float) -> transforms.Prox:
  """The proximal operator of `l1 |x|_1`: entries move towards 0 by `l1 lr`, and stop there."""

  def prox(x: Any, rate: jax.typing.ArrayLike) -> Any:
    shrink = lambda x: jnp.sign(x) * jnp.maximum(jnp.abs(x) - l1 * rate, 0)  # noqa: E731
    return jax.tree.map(shrink, x)

  return prox
