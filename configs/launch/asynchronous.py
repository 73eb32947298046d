"""Four processes of four speeds learn handwritten digits through a parameter server, for real.

Claim: none waits for another, the recorded trace says in real seconds who pushed what when, and its
replay gives the same parameters bit for bit.

Every variant is a method: `async_sgd`, `async_local_sgd` (A2, with fewer local steps for whoever is
slower), `dap_sgd` (A7, with an l1 term) and `dgs` (B5, two hundredths of the entries both ways).

Command: `python -m experiments.launch.asynchronous --config=configs/launch/asynchronous.py:dgs
--workdir=runs/dgs`, then the same with `--replay`. It needs `pip install 'jax-dsgd[async]'`.
"""

from __future__ import annotations

from typing import Any

import ml_collections

from configs import base


def get_config(variant: str = 'async_local_sgd') -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict({
    'seed': 0,  # of the initial model, the split and the batches
    'workers': 4,  # processes, each with its own part of the data
    'steps': 400,  # pushes that the server applies
    'batch_size': 32,  # examples of a local step
    'local_steps': (1, 1, 1, 1),  # of each worker between two pushes
    'delays': (0.0, 0.005, 0.01, 0.02),  # seconds that each worker sleeps for each local step
    'checkpoint_every': 100,  # pushes
    'patience': 120.0,  # seconds without an answer after which a process counts as lost
    'restarts': 10,  # of one worker; one more ends the run
    'dataset': {'name': 'digits'},
    'split': {'name': 'iid'},
    'model': {'name': 'mlp', 'hidden': (64,)},
    'method': {'name': 'async_sgd', 'learning_rate': 0.1},
  })  # fmt: skip
  inner = {'name': 'sgd', 'learning_rate': 0.1}
  prox = {'name': 'soft_threshold', 'strength': 1e-4}
  methods: dict[str, dict[str, Any]] = {
    'async_sgd': {},
    'async_local_sgd': {
      'method': {'name': 'async_local_sgd', 'inner': inner},
      'local_steps': (8, 4, 2, 1),
    },
    'dap_sgd': {'method': {'name': 'dap_sgd', 'learning_rate': 0.1, 'prox': prox}},
    'dgs': {'method': {'name': 'dgs', 'learning_rate': 0.1, 'fraction': 0.02}},
  }
  smoke = {'workers': 3, 'steps': 12, 'delays': (0.0, 0.02, 0.05), 'checkpoint_every': 4}
  three = {name: {**fields, **smoke} for name, fields in methods.items()}
  three['async_local_sgd']['local_steps'] = (4, 2, 1)
  for fields in three.values():
    fields.setdefault('local_steps', (1, 1, 1))
  small = {f'{name}_smoke': fields for name, fields in three.items()}
  return base.select(config, {**methods, **small, 'smoke': small['dgs_smoke']}, variant)
