"""Graphs with a name, the same in every round."""

from __future__ import annotations

import numpy as np

from jax_dsgd.topologies import _checks
from jax_dsgd.topologies._given import from_edges
from jax_dsgd.topologies._topology import Topology, circulant, uniform


def ring(n: int) -> Topology:
  """A ring: worker i averages with i - 1 and i + 1 mod n, with weights 1/3; two swap with 1/2.

  Spectral gap: 1 - |1 + 2 cos(2 pi/n)| / 3 for n >= 3, else 1. Messages a worker: 2; 1 if n = 2.

  >>> ring(4).matrix().round(2).tolist()[0]
  [0.33, 0.33, 0.0, 0.33]
  """
  n = _checks.whole_number('ring: n', n)
  return Topology('ring', (circulant(n, {1 % n, -1 % n} - {0}),))


def directed_ring(n: int) -> Topology:
  """A one-way ring: worker i sends to i + 1 mod n, and averages with i - 1; not symmetric.

  Both weights are 1/2. Spectral gap: 1 - cos(pi/n) for n >= 2, else 1. Messages a worker: 1.

  >>> directed_ring(3).matrix().tolist()
  [[0.5, 0.0, 0.5], [0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]
  """
  n = _checks.whole_number('directed_ring: n', n)
  return Topology('directed_ring', (circulant(n, {1 % n} - {0}),))


def torus(rows: int, columns: int) -> Topology:
  """A ring in each of two directions; worker (r, c) is number r * columns + c.

  Each averages with its d neighbours (r +- 1, c) and (r, c +- 1), with weights 1/(d + 1). A side of
  2 has one neighbour for both directions, a side of 1 none. Spectral gap, if both sides are >= 3:
  2 (1 - cos(2 pi / max(rows, columns))) / 5. Messages a worker: d, then 4.

  >>> torus(3, 4).matrix()[0].nonzero()[0].tolist()
  [0, 1, 3, 4, 8]
  """
  rows, columns = (
    _checks.whole_number('torus: rows', rows),
    _checks.whole_number('torus: columns', columns),
  )
  workers = np.arange(rows * columns).reshape(rows, columns)
  moves = {(r % rows, c % columns) for r, c in ((1, 0), (-1, 0), (0, 1), (0, -1))} - {(0, 0)}
  moved = [np.roll(workers, move, axis=(0, 1)).ravel() for move in sorted(moves)]
  return Topology('torus', (uniform(rows * columns, moved),))


def complete(n: int) -> Topology:
  """Everyone with everyone: W = 11^T / n, the exact mean, in n - 1 cyclic shifts.

  Spectral gap: 1. Messages a worker: n - 1.

  >>> complete(4).matrix().tolist()[0]
  [0.25, 0.25, 0.25, 0.25]
  """
  n = _checks.whole_number('complete: n', n)
  return Topology('complete', (circulant(n, range(1, n)),))


def star(n: int) -> Topology:
  """A star: worker 0 is the hub, and the only neighbour of all others.

  Metropolis weights are 1/n on every edge, so the hub holds the mean after a round. Spectral gap:
  1/n for n >= 3, else 1. Messages: n - 1 from the hub, 1 from every other worker.

  >>> star(4).matrix().tolist()[:2]
  [[0.25, 0.25, 0.25, 0.25], [0.25, 0.75, 0.0, 0.0]]
  """
  n = _checks.whole_number('star: n', n)
  return from_edges(n, ((0, leaf) for leaf in range(1, n)), name='star')


def hypercube(n: int) -> Topology:
  """A hypercube: i averages with the d = log2 n workers whose number differs from i in one bit.

  All weights are 1/(d + 1). Spectral gap: 2/(d + 1), or 1 if n = 1. Messages a worker: d.

  >>> hypercube(8).matrix().tolist()[0]
  [0.25, 0.25, 0.25, 0.0, 0.25, 0.0, 0.0, 0.0]
  """
  n = _checks.whole_number('hypercube: n', n)
  d = n.bit_length() - 1
  if n != 2**d:
    raise ValueError(f'hypercube: n must be a power of two, as {2**d} or {2 ** (d + 1)}, not {n}')
  return Topology('hypercube', (uniform(n, [np.arange(n) ^ 2**t for t in range(d)]),))


def exponential(n: int) -> Topology:
  """The static exponential graph, directed: i sends to i + 2^t mod n for t < k = ceil(log2 n).

  Weights: 1/(k + 1). Spectral gap: 2/(k + 1) for even n, more for odd n. Messages a worker: k.
  Reference: Ying et al., Exponential graph is provably efficient for decentralized deep training,
  2021, arXiv 2110.13363.

  >>> exponential(8).rounds[0].destinations[:, 0].tolist()
  [1, 2, 4]
  """
  n = _checks.whole_number('exponential: n', n)
  return Topology('exponential', (circulant(n, [2**t for t in range((n - 1).bit_length())]),))


def random_regular(n: int, degree: int, *, seed: int) -> Topology:
  """A random connected simple graph where every worker has d = `degree` neighbours.

  d < n and n * d is even. Random switches of two edges, (a, b) and (c, d) to (a, d) and (c, b),
  shuffle a circulant graph until it is connected. All weights are 1/(d + 1). Messages a worker: d.
  Spectral gap: near (d - 2 sqrt(d - 1)) / (d + 1), d >= 3, n large (Friedman, arXiv cs/0405020).

  >>> random_regular(8, 3, seed=0).sends.tolist()
  [[3, 3, 3, 3, 3, 3, 3, 3]]
  """
  n, degree = (
    _checks.whole_number('random_regular: n', n),
    _checks.whole_number('random_regular: degree', degree),
  )
  generator = np.random.default_rng(_checks.whole_number('random_regular: seed', seed, least=0))
  if degree >= n or n * degree % 2 or degree == 1 < n - 1:
    rule = f'degree must be less than n = {n}, n * degree even, and degree >= 2 if n > 2'
    raise ValueError(f'random_regular: {rule}, not degree = {degree}')
  offsets = [*range(1, degree // 2 + 1), *range(n - degree // 2, n)] + [n // 2] * (degree % 2)
  linked = np.isin(np.subtract.outer(np.arange(n), np.arange(n)) % n, offsets)
  while True:
    # Ten tries an edge; one that would make a loop or a double edge is void.
    tries = generator.integers([n, n, degree, degree], size=(5 * n * degree, 4))
    for a, c, i, j in tries.tolist():
      b, d = int(np.flatnonzero(linked[a])[i]), int(np.flatnonzero(linked[c])[j])
      if len({a, b, c, d}) == 4 and not linked[a, d] and not linked[c, b]:
        linked[[a, b, c, d], [b, a, d, c]] = False
        linked[[a, d, c, b], [d, a, b, c]] = True
    if len(_checks.smallest_component(linked)) == n:
      return from_edges(n, np.argwhere(linked), name='random_regular')
