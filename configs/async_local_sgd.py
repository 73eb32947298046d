"""TBD."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import ml_collections

from configs import base


def get_config(variant: str = 'delayed') -> ml_collections.ConfigDict:
  config = base.get_base()
  config.update(workers=4, batch_size=64, log_every=8, checkpoint_every=2000, local_steps=20)
  config.dataset = {
    'name': 'shakespeare',
    'sequence_length': 32,
    'roles': 32,
    'test_fraction': 0.04,
  }
  config.split = {'name': 'by_client'}
  config.model = {'name': 'transformer', 'width': 32, 'depth': 1, 'heads': 2}
  machines = pathlib.Path(__file__).with_suffix('.yaml')
  config.cluster = {'name': 'from_yaml', 'path': str(machines)}

  inner = {'name': 'adamw', 'learning_rate': 0.002, 'b2': 0.95, 'weight_decay': 0.01}
  delayed = {'name': 'async_local_sgd', 'inner': inner}
  naive = {'name': 'sgd', 'learning_rate': 0.7, 'momentum': 0.9, 'nesterov': True}
  # Twenty steps everywhere, or fewer where a step takes longer.
  equal = {'name': 'dynamic_local_updates', 'steps': 20, 'least': 20}
  uneven = {'name': 'dynamic_local_updates', 'steps': 20}
  # As many steps as there are in 800 simulated seconds: local steps of DiLoCo, else pushes.
  variants: dict[str, dict[str, Any]] = {
    'diloco': {
      'algorithm': {'name': 'diloco', 'inner': inner, 'period': 20},
      'policy': {'name': 'bulk'},
      'steps': 240,
      'log_every': 20,
      'eval_every': 20,
    },
    'naive': {
      'algorithm': {'name': 'fed_buff', 'inner': inner, 'buffer': 1, 'outer': naive},
      'policy': equal,
      'steps': 160,
    },
    'naive_slow': {
      'algorithm': {
        'name': 'fed_buff',
        'inner': inner,
        'buffer': 1,
        'outer': {**naive, 'learning_rate': 0.07},
      },
      'policy': equal,
      'steps': 160,
    },
    'delayed': {'algorithm': delayed, 'policy': equal, 'steps': 160},
    'delayed_pinned': {'algorithm': delayed, 'policy': {**equal, 'pinned': True}, 'steps': 160},
    'delayed_dylu': {'algorithm': delayed, 'policy': uneven, 'steps': 262},
    # As many steps a push, on average, as where all do twenty.
    'delayed_dylu_40': {'algorithm': delayed, 'policy': {**uneven, 'steps': 40}, 'steps': 146},
  }
  variants['smoke'] = {
    **variants['delayed_dylu'],
    'dataset': {'name': 'shakespeare', 'sequence_length': 16, 'roles': 8},
    'model': {'name': 'transformer', 'width': 8, 'depth': 1, 'heads': 2},
    'steps': 8,
    'log_every': 4,
  }
  return base.select(config, variants, variant)


def sweep(add: Callable[..., None]) -> None:
  """All wait for all; nobody waits, with naive momentum and delayed; fewer steps for the slow."""
  add(variant='diloco')
  add(variant='naive')
  add(variant='naive_slow')
  add(variant='delayed')
  add(variant='delayed_pinned')
  add(variant='delayed_dylu')
  add(variant='delayed_dylu_40')
