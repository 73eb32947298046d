"""598 roles of Shakespeare are clients, ten of them drawn a round: what an epoch on each saves.

Claim: federated averaging needs an eighth of the rounds of FedSGD, which averages one gradient of
each client, where a client goes through its text once a round, and a sixtieth where five times.

Expected with seed 0: rounds until the test loss, in nats a character (4.37 before training), is
below 2.4, and what a client's place sends until then:

  run        rounds to 2.4  MB a place  fewer   test loss at the end, after rounds
  fed_sgd              500      36.930  1.0 x                         2.310    600
  fed_avg_1             40       2.954 12.5 x                         2.224     60
  fed_avg_5              8       0.591 62.5 x                         2.110     20

Looked at every 20, 5 and 2 rounds. All at the rate 1; FedSGD diverges with 2. Clients weigh by
their lines, and a quarter of them, the longest roles, are stopped before the end of their epochs,
after 25 and 125 steps of ten lines. FedSGD takes 100 lines of each client: where it has fewer, some
twice.

Time: two minutes, half a minute and a minute on 2 cores.

Command: `python -m experiments.sweep --config=configs/fed_avg.py --workdir=runs/fed_avg`, then
`python -m experiments.report --target=2.4 runs/fed_avg/0*` for the steps (1, 25 and 125 a round).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_collections

from configs import base


def get_config(variant: str = 'fed_avg_5') -> ml_collections.ConfigDict:
  config = base.get_base()
  workers = 10
  config.update(workers=workers, clients=598)
  config.dataset = {'name': 'shakespeare', 'sequence_length': 32, 'test_fraction': 0.02}
  config.split = {'name': 'by_client'}
  config.model = {'name': 'transformer', 'width': 32, 'depth': 1, 'heads': 2}

  def rounds(count: int, *, every: int, period: int, epochs: int, batch: int) -> dict[str, Any]:
    """A run of so many rounds, evaluated every few."""
    often = every * period
    return {
      'steps': count * period,
      'batch_size': batch * workers,
      'log_every': often,
      'eval_every': often,
      'checkpoint_every': count * period,
      'feed': {'name': 'drawn_clients', 'period': period, 'epochs': epochs},
      'algorithm': {'name': 'fed_avg', 'learning_rate': 1.0, 'period': period},
    }

  variants: dict[str, dict[str, Any]] = {
    'fed_sgd': rounds(600, every=20, period=1, epochs=1, batch=100),
    'fed_avg_1': rounds(60, every=5, period=25, epochs=1, batch=10),
    'fed_avg_5': rounds(20, every=2, period=125, epochs=5, batch=10),
  }
  variants['smoke'] = {
    **rounds(2, every=1, period=4, epochs=1, batch=10),
    'dataset': {'name': 'shakespeare', 'sequence_length': 16, 'roles': 12},
    'clients': 12,
    'workers': 4,
    'batch_size': 16,
    'model': {'name': 'transformer', 'width': 8, 'depth': 1, 'heads': 2},
  }
  return base.select(config, variants, variant)


def sweep(add: Callable[..., None]) -> None:
  """One step a round, then an epoch, then five."""
  add(variant='fed_sgd')
  add(variant='fed_avg_1')
  add(variant='fed_avg_5')
