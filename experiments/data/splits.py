"""Splits of a training set over workers: pure functions, the same in every process.

Each returns W sorted int32 index arrays that are disjoint, not empty, and together the whole
training set. A config names one of them (`__all__`) and its keyword arguments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from experiments.data import datasets

__all__ = ('by_client', 'classes_per_worker', 'dirichlet', 'iid')


def iid(dataset: datasets.Dataset, workers: int, *, seed: int = 0) -> list[np.ndarray]:
  """Shuffles the examples and deals them out evenly; sizes differ by at most one.

  Args:
    dataset: what to split.
    workers: number of parts, W.
    seed: of the shuffle.

  Returns:
    W sorted int32 index arrays.

  Raises:
    ValueError: with more workers than examples.

  >>> [part.size for part in iid(datasets.digits(), 4)]
  [360, 360, 359, 359]
  """
  rng = _start('iid', dataset, workers, 1, seed)
  return _sorted(np.array_split(rng.permutation(len(dataset.inputs)), workers))


def dirichlet(
  dataset: datasets.Dataset,
  workers: int,
  *,
  alpha: float = 0.3,
  min_examples: int = 1,
  seed: int = 0,
) -> list[np.ndarray]:
  """Label skew: each class is divided in proportions drawn from Dirichlet(alpha, ..., alpha).

  Sizes are uneven; a worker with fewer than `min_examples` gets random ones from whoever has most.

  Args:
    dataset: what to split; one class label an example.
    workers: number of parts, W.
    alpha: concentration; small gives workers of few classes, large gives `iid`.
    min_examples: the least size of a part.
    seed: of the proportions and of who gets which example.

  Returns:
    W sorted int32 index arrays.

  Raises:
    ValueError: on alpha <= 0, on targets that are not one class an example, on too few examples.

  >>> parts = dirichlet(datasets.digits(), 4, alpha=0.3)
  >>> sum(part.size for part in parts)
  1438

  Reference: Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for
    Federated Visual Classification", arXiv:1909.06335; per-class proportions as in Yurochkin et
    al., arXiv:1905.12022.
  """
  if not 0 < alpha < math.inf:
    raise ValueError(f'alpha must be finite and > 0, got {alpha!r}')
  labels = _labels('dirichlet', dataset)
  least = datasets.whole_number('min_examples', min_examples, least=1)
  rng = _start('dirichlet', dataset, workers, least, seed)
  parts: list[list[int]] = [[] for _ in range(workers)]
  for label in np.unique(labels):
    members = rng.permutation(np.flatnonzero(labels == label))
    shares = np.cumsum(rng.dirichlet(np.full(workers, alpha)))[:-1]
    cuts = np.round(shares * members.size).astype(int)
    for part, piece in zip(parts, np.split(members, cuts), strict=True):
      part.extend(piece.tolist())
  for part in parts:
    while len(part) < least:
      donor = max(parts, key=len)  # has more than `least`: there are at least W * least examples
      part.append(donor.pop(rng.integers(len(donor))))
  return _sorted(parts)


def classes_per_worker(
  dataset: datasets.Dataset, workers: int, *, classes: int = 2, seed: int = 0
) -> list[np.ndarray]:
  """FedAvg's shards: sort by label, cut into W * classes shards, deal `classes` to each worker.

  With balanced classes and shards not larger than a class a worker sees about `classes` labels: one
  more for each of its shards that lies across the border of two classes.

  Args:
    dataset: what to split; one class label an example.
    workers: number of parts, W.
    classes: shards a worker.
    seed: of the order within a class and of the deal.

  Returns:
    W sorted int32 index arrays.

  Raises:
    ValueError: on targets that are not one class an example, on fewer examples than shards.

  >>> data = datasets.digits()
  >>> len(np.unique(data.targets[classes_per_worker(data, 10, classes=1)[0]])) <= 2
  True

  Reference: McMahan, Moore, Ramage, Hampson and Aguera y Arcas, "Communication-Efficient Learning
    of Deep Networks from Decentralized Data", arXiv:1602.05629.
  """
  labels = _labels('classes_per_worker', dataset)
  per_worker = datasets.whole_number('classes', classes, least=1)
  rng = _start('classes_per_worker', dataset, workers, per_worker, seed)
  shuffled = rng.permutation(labels.size)
  order = shuffled[np.argsort(labels[shuffled], kind='stable')]
  shards = np.array_split(order, workers * per_worker)
  deal = rng.permutation(len(shards)).reshape(workers, per_worker)
  return _sorted([np.concatenate([shards[i] for i in row]) for row in deal])


def by_client(dataset: datasets.Dataset, workers: int, *, seed: int = 0) -> list[np.ndarray]:
  """Whole natural clients to workers: largest first, each to the worker with fewest examples.

  Workers are numbered by their lowest client, so with as many workers as clients worker i is client
  i.

  Args:
    dataset: what to split.
    workers: number of parts, W.
    seed: of the order among clients of equal size.

  Returns:
    W sorted int32 index arrays.

  Raises:
    ValueError: with fewer clients than workers.

  >>> data = datasets.quadratics(clients=3, examples=2)
  >>> [part.tolist() for part in by_client(data, 3)]
  [[0, 1], [2, 3], [4, 5]]
  """
  rng = _start('by_client', dataset, workers, 1, seed)
  clients, sizes = np.unique(dataset.clients, return_counts=True)
  if clients.size < workers:
    raise ValueError(
      f'by_client: data set {dataset.name!r} has {clients.size} clients for {workers} workers, '
      'and a client is not divided'
    )
  shuffled = rng.permutation(clients.size)
  groups: list[list[int]] = [[] for _ in range(workers)]
  loads = np.zeros(workers, int)
  for i in shuffled[np.argsort(-sizes[shuffled], kind='stable')]:
    worker = int(np.argmin(loads))
    groups[worker].append(int(clients[i]))
    loads[worker] += sizes[i]
  groups.sort(key=min)
  return _sorted([np.flatnonzero(np.isin(dataset.clients, group)) for group in groups])


def _start(
  split: str, dataset: datasets.Dataset, workers: int, least: int, seed: int
) -> np.random.Generator:
  """Checks the sizes that every split needs and returns its generator."""
  examples = len(dataset.inputs)
  if datasets.whole_number('workers', workers, least=1) * least > examples:
    raise ValueError(
      f'{split}: {workers} workers with at least {least} examples each need more than the '
      f'{examples} examples of data set {dataset.name!r}'
    )
  return np.random.default_rng(datasets.whole_number('seed', seed, least=0))


def _labels(split: str, dataset: datasets.Dataset) -> np.ndarray:
  targets = dataset.targets
  if targets.ndim != 1 or not np.issubdtype(targets.dtype, np.integer):
    raise ValueError(
      f'{split} needs one class label an example; data set {dataset.name!r} has targets of '
      f'shape {targets.shape} and type {targets.dtype}'
    )
  return targets


def _sorted(parts: Sequence[Sequence[int] | np.ndarray]) -> list[np.ndarray]:
  return [np.sort(np.asarray(part, np.int32)) for part in parts]
