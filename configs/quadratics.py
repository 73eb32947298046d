"""Eight workers whose optima differ, no noise at all, a constant rate: what stops each method.

Claim: with full batches and a constant rate only synchronous SGD reaches the least mean loss. Top-k
with a residual wanders around it, as what is held back arrives late; local SGD stops where local
steps have pulled it; gossip leaves each worker its own model, further from the others the weaker
the mixing (compressed gossip most), and so their mean too is off.

Expected after 2000 steps, seed 0, loss above the least one (zero is 1e-8 in float32):

  run        averaged model  worst local model  MB a worker  fewer
  allreduce           -5e-9              -5e-9        0.256  1.0 x
  topk               0.0086             0.0086        0.036  7.1 x
  choco               0.118               2.21        0.072  3.6 x
  dsgd               0.0053              0.124        0.512  0.5 x
  local_sgd           0.029              0.029        0.032  8.0 x

The rate is to blame: with `--config.algorithm.learning_rate=0.01 --config.steps=20000` the averaged
models of the last four come to 1e-4, 0.0095, 8e-5 and 4e-4.

Time: 3 s a run on 2 cores, most of it to compile.

Command: `python -m experiments.sweep --config=configs/quadratics.py --workdir=runs/quadratics`, or
one run: `python -m experiments.train --config=configs/quadratics.py:topk --workdir=runs/topk`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_collections

from configs import base


def get_config(variant: str = 'topk') -> ml_collections.ConfigDict:
  config = base.get_base()
  config.update(steps=2000, batch_size=512, log_every=40, eval_every=40, checkpoint_every=1000)
  config.dataset = {
    'name': 'quadratics',
    'clients': config.get_ref('workers'),
    'dimension': 32,
    'examples': 64,
    'heterogeneity': 1.0,
  }
  config.split = {'name': 'by_client'}
  config.model = {'name': 'linear'}

  algorithms: dict[str, dict[str, Any]] = {
    'allreduce': {'name': 'allreduce_sgd', 'learning_rate': 0.1},
    'topk': {'name': 'topk_sgd', 'learning_rate': 0.1, 'fraction': 0.1},
    'choco': {
      'name': 'choco_sgd',
      'learning_rate': 0.1,
      'topology': {'name': 'ring'},
      'compressor': {'name': 'top_k', 'fraction': 0.1},
      'consensus_rate': 0.1,
    },
    'dsgd': {'name': 'dsgd', 'learning_rate': 0.1, 'topology': {'name': 'ring'}},
    'local_sgd': {'name': 'local_sgd', 'learning_rate': 0.1, 'period': 8},
  }
  variants: dict[str, dict[str, Any]] = {
    name: {'algorithm': algorithm} for name, algorithm in algorithms.items()
  }
  variants['smoke'] = {**variants['topk'], 'steps': 40, 'log_every': 20}
  return base.select(config, variants, variant)


def sweep(add: Callable[..., None]) -> None:
  """Every method, dense first."""
  add(variant='allreduce')
  add(variant='topk')
  add(variant='choco')
  add(variant='dsgd')
  add(variant='local_sgd')
