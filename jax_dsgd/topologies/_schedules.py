"""Schedules: graphs that change from round to round."""

from __future__ import annotations

import math

import numpy as np

from jax_dsgd.topologies import _checks
from jax_dsgd.topologies._graphs import complete
from jax_dsgd.topologies._topology import Round, Topology, circulant, meeting, uniform


def one_peer_exponential(n: int) -> Topology:
  """The exponential graph, one peer a round: in round t worker i sends to i + 2^t mod n.

  t < k = ceil(log2 n), the period (one empty round if n = 1); both weights are 1/2. Spectral gap:
  1 - sigma^(1/k), sigma = max_j |sin(pi j 2^k / n) / (2^k sin(pi j / n))| over 0 < j < n, that is 0
  for n a power of two: there a period is the exact mean. Messages a worker: 1.
  Reference: Assran et al., Stochastic gradient push for distributed deep learning, 2019, arXiv
  1811.10792; Ying et al., 2021, arXiv 2110.13363, for the exact mean.

  >>> one_peer_exponential(8).period, one_peer_exponential(8).spectral_gap()
  (3, 1.0)
  """
  n = _checks.whole_number('one_peer_exponential: n', n)
  rounds = tuple(circulant(n, [2**t]) for t in range((n - 1).bit_length()))
  return Topology('one_peer_exponential', rounds or (circulant(n, []),))


def one_peer_hypercube(n: int) -> Topology:
  """A hypercube, one dimension a round: in round t worker i averages with i XOR 2^t.

  t < log2 n, the period (one empty round if n = 1), and a period is the exact mean. Spectral gap:
  1. Messages a worker: 1.

  >>> [entry.destinations.tolist() for entry in one_peer_hypercube(4).rounds]
  [[[1, 0, 3, 2]], [[2, 3, 0, 1]]]
  """
  bits = _log2('one_peer_hypercube: n', n)
  rounds = tuple(uniform(n, [np.arange(n) ^ 2**t]) for t in range(bits))
  return Topology('one_peer_hypercube', rounds or (uniform(n, []),))


def random_pairs(n: int, rounds: int, *, seed: int) -> Topology:
  """Random matchings: in each round every worker averages with one other, drawn at random.

  If n is odd, one is left over in each round and keeps its value. Messages a worker: at most 1.
  Reference: Lian et al., Asynchronous decentralized parallel stochastic gradient descent, 2018,
  arXiv 1710.06952.

  >>> random_pairs(5, 3, seed=0).sends.sum(axis=1).tolist()
  [4, 4, 4]
  """
  n = _checks.whole_number('random_pairs: n', n)
  orders = _orders('random_pairs', n, rounds, seed)
  pairs = (order[: n // 2 * 2].reshape(-1, 2) for order in orders)
  return Topology('random_pairs', tuple(meeting(n, groups) for groups in pairs))


def random_groups(n: int, size: int, rounds: int, *, seed: int) -> Topology:
  """Random partitions: in each round the workers fall into groups, and each takes its exact mean.

  W is then a projection, and over the draws the mean of W^T W = W has a second eigenvalue of
  (n - size) / (size (n - 1)). Messages a worker: size - 1.
  Reference: Luo et al., Heterogeneity-aware asynchronous decentralized training (Prague), 2019,
  arXiv 1909.08029: the partial all-reduce with global division.

  Args:
    n: the number of workers, a multiple of `size`.
    size: how many meet.
    rounds: how many partitions are drawn before they repeat.
    seed: of the draws.

  >>> random_groups(6, 3, 2, seed=0).sends.tolist()
  [[2, 2, 2, 2, 2, 2], [2, 2, 2, 2, 2, 2]]
  """
  n = _checks.whole_number('random_groups: n', n)
  size = _checks.whole_number('random_groups: size', size)
  if n % size:
    raise ValueError(f'random_groups: size must divide n = {n}, not {size}')
  orders = _orders('random_groups', n, rounds, seed)
  return Topology('random_groups', tuple(meeting(n, order.reshape(-1, size)) for order in orders))


def butterfly_groups(n: int, size: int) -> Topology:
  """Groups of a butterfly: in round t those meet who differ in a window of log2 size bits.

  The window holds the bits (t log2 size + r) mod log2 n, r < log2 size, of a worker's number, so
  that groups change until they repeat. If log2 size divides log2 n a period is the exact mean, with
  a spectral gap of 1. Messages a worker: size - 1.
  Reference: Li et al., Breaking (global) barriers in parallel stochastic optimization with
  wait-avoiding group averaging, 2021, arXiv 2005.00124.

  Args:
    n: the number of workers, a power of two.
    size: how many meet, a power of two from 2 to n (1 if n = 1).

  >>> butterfly_groups(16, 4).matrix(1)[1].nonzero()[0].tolist()
  [1, 5, 9, 13]
  """
  bits, width = _log2('butterfly_groups: n', n), _log2('butterfly_groups: size', size)
  if not min(1, bits) <= width <= bits:
    least = min(2, n)
    raise ValueError(f'butterfly_groups: size must be from {least} to n = {n}, not {size}')
  rounds = []
  for start in range(0, math.lcm(bits, width) or 1, width or 1):
    masks = [0]
    for r in range(width):
      masks += [mask | 1 << (start + r) % bits for mask in masks]
    rounds.append(uniform(n, [np.arange(n) ^ mask for mask in masks[1:]]))
  return Topology('butterfly_groups', tuple(rounds))


def inter_intra(nodes: int, per_node: int) -> Topology:
  """Two rounds for nodes of several workers: heads meet across nodes, then every node meets.

  Worker w of node v is number v * per_node + w, and worker 0 of each node is its head. In round 0
  all heads take their mean and so do, in each node, the others; in round 1 each node does. Messages
  a worker: nodes - 1 or per_node - 2, then per_node - 1.
  Reference: Luo et al., 2019, arXiv 1909.08029: the static schedule.

  >>> inter_intra(2, 3).sends.tolist()
  [[1, 1, 1, 1, 1, 1], [2, 2, 2, 2, 2, 2]]
  """
  nodes = _checks.whole_number('inter_intra: nodes', nodes)
  per_node = _checks.whole_number('inter_intra: per_node', per_node)
  workers = np.arange(nodes * per_node).reshape(nodes, per_node)
  groups = [workers[:, 0], *workers[:, 1:]]
  rounds = meeting(workers.size, groups), meeting(workers.size, workers)
  return Topology('inter_intra', rounds)


def concatenate(first: Topology, *others: Topology) -> Topology:
  """All rounds of the first topology, then all those of the next, and so on.

  >>> from jax_dsgd.topologies import ring, star
  >>> concatenate(ring(4), star(4), ring(4))
  Topology('ring, star, ring', size=4, period=3)
  """
  topologies = (first, *others)
  sizes = [topology.size for topology in topologies]
  if len(set(sizes)) > 1:
    raise ValueError(f'concatenate: all topologies must have one size, not {sizes}')
  rounds = tuple(entry for topology in topologies for entry in topology.rounds)
  return Topology(', '.join(topology.name for topology in topologies), rounds)


def then_mean_every(topology: Topology, period: int) -> Topology:
  """The rounds of a topology, but the exact mean of all workers in every `period`-th round.

  Round t is the mean where t + 1 is a multiple of `period`; that of the topology is left out.
  Reference: Li et al., 2021, arXiv 2005.00124, with `butterfly_groups`.

  >>> then_mean_every(one_peer_hypercube(8), 2).sends[:, 0].tolist()
  [1, 7, 1, 7, 1, 7]
  """
  period = _checks.whole_number('then_mean_every: period', period)
  mean = complete(topology.size).rounds[0]
  rounds: list[Round] = []
  for t in range(math.lcm(topology.period, period)):
    rounds.append(topology.rounds[t % topology.period] if (t + 1) % period else mean)
  return Topology(f'{topology.name}, mean every {period}', tuple(rounds))


def _orders(name: str, n: int, rounds: int, seed: int) -> list[np.ndarray]:
  rounds = _checks.whole_number(f'{name}: rounds', rounds)
  generator = np.random.default_rng(_checks.whole_number(f'{name}: seed', seed, least=0))
  return [generator.permutation(n) for _ in range(rounds)]


def _log2(where: str, value: int) -> int:
  bits = _checks.whole_number(where, value).bit_length() - 1
  if value != 2**bits:
    raise ValueError(
      f'{where} must be a power of two, as {2**bits} or {2 ** (bits + 1)}, not {value}'
    )
  return bits
