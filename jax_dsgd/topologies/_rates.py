"""How fast rounds that come in no order lead to consensus."""

from __future__ import annotations

import numpy as np

from jax_dsgd.topologies._topology import Topology


def expected_consensus_rate(topology: Topology) -> float:
  """Returns 1 - lambda_2 of the mean over the rounds of W^T W.

  Where each step draws one of the rounds at random, the expected squared distance to the mean
  shrinks at least by 1 - rate a step. It is squared: of one symmetric round with a spectral gap g
  the rate is 1 - (1 - g)^2.
  Reference: Boyd, Ghosh, Prabhakar and Shah, Randomized gossip algorithms, 2006.

  Args:
    topology: with doubly stochastic rounds.

  Raises:
    ValueError: the rounds are not doubly stochastic, and the mean is not what they lead to.

  >>> from jax_dsgd.topologies import one_peer_hypercube
  >>> round(expected_consensus_rate(one_peer_hypercube(8)), 9)
  0.333333333
  """
  if not topology.doubly_stochastic:
    kind = 'row' if topology.row_stochastic else 'column'
    raise ValueError(
      f'expected_consensus_rate: {topology.name} must be doubly stochastic, not only '
      f'{kind}-stochastic'
    )
  total = np.zeros((topology.size, topology.size))
  for t in range(topology.period):
    matrix = topology.matrix(t)
    total += matrix.T @ matrix
  away = total / topology.period - 1 / topology.size
  return float(np.clip(1 - np.linalg.eigvalsh(away)[-1], 0, 1))
