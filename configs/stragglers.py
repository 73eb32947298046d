"""Twenty workers learn digits, two of them five times slower: what is waiting worth?

Claim: loss against (simulated) seconds depends on who waits for whom more than on how old gradients
are. Waiting for all (BSP), or for all who are five steps behind (SSP), is slowest. Nobody waiting
(ASP) and looking at one other, drawn at random (PSP), reach in a quarter of the time what BSP
reaches at the end, and the 18 fastest in a third. Groups of four without a server (partial
all-reduce, with the filter for those who fall behind) come after these, and send most.

Expected after 150 simulated seconds, seed 0, on 359 test images; `reached` are the simulated
seconds to the test loss of BSP at the end:

  run                test loss  accuracy  MB a worker  reached
  bsp                    0.345     90.8%        0.260    148.6
  ssp                    0.320     91.1%        0.318    129.4
  psp                    0.164     95.0%        1.234     34.7
  asp                    0.172     94.7%        1.335     35.7
  fastest                0.180     94.2%        1.003     45.7
  partial_allreduce      0.195     94.2%        1.369     60.2

With `--config.seed=1`: 0.328, 0.286, 0.118, 0.106, 0.128 and 0.139, reached after 147, 105, 33, 28,
39 and 48 seconds. So PSP and ASP cannot be told apart: gradients that are 19 updates old on average
do little harm at this rate, and there is little for a sample to mend. The 18 fastest never hear
from the two slow workers (seed 0), whose examples are lost to the model. Partial all-reduce counts
a ring in the group, 1.5 models a meeting; the others count pushes, not what the server answers.
A step of `bsp`, `ssp`, `psp` and `asp` is a push, of `fastest` a round, of `partial_allreduce` a
meeting of one group.

Time: 5 s to 10 s a run on 2 cores that others use too; the six of the sweep in a minute.

Command: `python -m experiments.sweep --config=configs/stragglers.py --workdir=runs/stragglers`, or
one run: `python -m experiments.train --config=configs/stragglers.py:psp --workdir=runs/psp`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_collections

from configs import base


def get_config(variant: str = 'psp') -> ml_collections.ConfigDict:
  config = base.get_base()
  config.update(workers=20, batch_size=320, eval_every=10, checkpoint_every=1000)
  config.split = {'name': 'dirichlet', 'alpha': 0.3, 'min_examples': 16}
  config.model = {'name': 'mlp', 'hidden': (32,)}
  config.cluster = {
    'name': 'with_stragglers',
    'fraction': 0.1,
    'factor': 5.0,
    'law': {'name': 'log_normal', 'seconds': 1.0, 'sigma': 0.2},
  }

  # A push is the twentieth part of a mean, so that a gradient moves every method equally far.
  rate = 0.5
  pushed = {'name': 'async_sgd', 'learning_rate': rate / 20}
  # As many steps as there are in 150 simulated seconds: pushes, rounds, or meetings of groups.
  variants: dict[str, dict[str, Any]] = {
    'bsp': {'algorithm': pushed, 'policy': {'name': 'bsp'}, 'steps': 560, 'log_every': 20},
    'ssp': {
      'algorithm': pushed,
      'policy': {'name': 'ssp', 'slack': 4},
      'steps': 680,
      'log_every': 20,
    },
    'psp': {
      'algorithm': pushed,
      'policy': {'name': 'psp', 'sample': 1},
      'steps': 2560,
      'log_every': 20,
    },
    'asp': {'algorithm': pushed, 'policy': {'name': 'asp'}, 'steps': 2770, 'log_every': 20},
    'fastest': {
      'algorithm': {'name': 'allreduce_sgd', 'learning_rate': rate},
      'policy': {'name': 'fastest', 'k': 18},
      'steps': 106,
      'log_every': 1,
      'eval_every': 2,
    },
    'partial_allreduce': {
      'algorithm': {'name': 'prague_sgd', 'learning_rate': rate},
      'policy': {'name': 'group_generator', 'size': 4, 'threshold': 4},
      'steps': 615,
      'log_every': 5,
    },
  }
  variants['smoke'] = {**variants['psp'], 'steps': 60}
  return base.select(config, variants, variant)


def sweep(add: Callable[..., None]) -> None:
  """From all waiting for all to nobody waiting, then the fastest, then groups without a server."""
  add(variant='bsp')
  add(variant='ssp')
  add(variant='psp')
  add(variant='asp')
  add(variant='fastest')
  add(variant='partial_allreduce')
