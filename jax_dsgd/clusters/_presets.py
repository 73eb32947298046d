"""Clusters that come up: figures are of the right order, not those of one product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jax_dsgd.clusters import _checks
from jax_dsgd.clusters._cluster import Availability, Cluster
from jax_dsgd.clusters._laws import Law, constant, log_normal

# Dense half-precision peaks in 1e12 operations a second, and bytes of memory.
_GPUS = {'h100': (989, 80e9), 'a100': (312, 80e9), 'v100': (125, 32e9), 't4': (65, 16e9)}


def uniform(
  n: int,
  *,
  law: Law | None = None,
  latency: float = 0.0,
  bandwidth: float = 1e9,
  memory: float = 16e9,
) -> Cluster:
  """N equal workers, of one second a nominal batch unless a law is given.

  Args:
    n: workers, >= 1.
    law: of compute time, for each worker a stream of its own; `constant(1.0)` by default.
    latency: seconds of every link, also to the server.
    bandwidth: bytes a second of every link, also to the server.
    memory: bytes of a worker.

  >>> uniform(4)
  Cluster('uniform(4)', size=4)
  """
  laws = (law or constant(1.0),) * _checks.whole_number('uniform: n', n)
  links = (latency, bandwidth, latency, bandwidth)
  return Cluster(f'uniform({n})', laws, *links, memory)


def with_stragglers(
  n: int, *, fraction: float = 0.1, factor: float = 5.0, law: Law | None = None
) -> Cluster:
  """N workers of which the last `round(fraction * n)` are `factor` times slower.

  Args:
    n: workers, >= 1.
    fraction: of stragglers, from 0 to 1.
    factor: how many times longer they take, > 0.
    law: of the others; `constant(1.0)` by default.

  >>> [law.mean for law in with_stragglers(4, fraction=0.25, factor=3).laws]
  [1.0, 1.0, 1.0, 3.0]
  """
  n = _checks.whole_number('with_stragglers: n', n)
  if not 0 <= fraction <= 1:
    raise ValueError(f'with_stragglers: fraction must be from 0 to 1, not {fraction!r}')
  law, slow = law or constant(1.0), round(fraction * n)
  laws = (law,) * (n - slow) + (law.slowed(factor),) * slow
  return Cluster(f'with_stragglers({n}, {fraction:g}, {factor:g})', laws)


def tpu_pod(slices: int, per_slice: int, *, law: Law | None = None) -> Cluster:
  """Slices of fast links (1 us, 90 GB/s) with a data-center network between (50 us, 6 GB/s).

  Args:
    slices: >= 1.
    per_slice: chips of a slice, each a worker, >= 1.
    law: of a chip; `constant(1.0)` by default.

  >>> tpu_pod(2, 4).message_seconds(0, 1, 9e10) < tpu_pod(2, 4).message_seconds(0, 4, 9e10)
  True
  """
  slices = _checks.whole_number('tpu_pod: slices', slices)
  chips = _checks.whole_number('tpu_pod: per_slice', per_slice)
  place = np.repeat(np.arange(slices), chips)
  laws = (law or constant(1.0),) * place.size
  name = f'tpu_pod({slices}, {chips})'
  return Cluster(name, laws, *_links(place, (1e-6, 9e10), (5e-5, 6e9)), 5e-5, 6e9, 32e9)


def gpu_rack(counts: Mapping[str, int], *, seconds: float = 1.0) -> Cluster:
  """GPUs of several kinds on one switch (10 us, 12.5 GB/s), in the order given.

  A nominal batch takes `seconds` on an h100, and longer elsewhere as the peak is lower.

  Args:
    counts: how many of each kind: h100, a100, v100, t4.
    seconds: of a nominal batch on an h100, > 0.

  >>> [round(law.mean, 1) for law in gpu_rack({'h100': 1, 'a100': 2}).laws]
  [1.0, 3.2, 3.2]
  """
  laws, memory = [], []
  for kind, count in counts.items():
    _checks.known('gpu_rack: a kind', kind, _GPUS)
    count = _checks.whole_number(f'gpu_rack: the count of {kind}', count)
    peak, size = _GPUS[kind]
    laws += [constant(seconds * _GPUS['h100'][0] / peak)] * count
    memory += [size] * count
  name = 'gpu_rack(' + ', '.join(f'{kind}={count}' for kind, count in counts.items()) + ')'
  return Cluster(name, tuple(laws), 1e-5, 1.25e10, 1e-5, 1.25e10, np.array(memory))


def data_centers(
  sizes: Sequence[int], *, latency: float = 0.05, bandwidth: float = 1.25e8, law: Law | None = None
) -> Cluster:
  """Data centers of 10 GB/s inside and a wide-area network between; the server is in the first.

  Args:
    sizes: workers of each center, >= 1.
    latency: seconds between two centers.
    bandwidth: bytes a second between two workers of different centers.
    law: of a worker; `constant(1.0)` by default.

  >>> round(data_centers([2, 1]).message_seconds(0, 2, 1.25e8), 2)
  1.05
  """
  sizes = [_checks.whole_number('data_centers: sizes', size) for size in sizes]
  place = np.repeat(np.arange(len(sizes)), sizes)
  near, far = (1e-5, 1e10), (latency, bandwidth)
  latencies, bandwidths = (np.where(place == 0, *pair) for pair in zip(near, far, strict=True))
  laws = (law or constant(1.0),) * place.size
  return Cluster(f'data_centers({sizes})', laws, *_links(place, near, far), latencies, bandwidths)


def phones(n: int, *, seed: int = 0) -> Cluster:
  """Phones: mean speeds spread over a factor of ten, 1 MB/s, and up in a third of the rounds.

  Args:
    n: phones, >= 1.
    seed: of the speeds, and of how often each is up.

  >>> phones(100).available(np.random.default_rng(0), 50).shape
  (50, 100)
  """
  n = _checks.whole_number('phones: n', n)
  rng = np.random.default_rng(seed)
  laws = tuple(log_normal(mean, 0.3) for mean in np.exp(rng.normal(0.0, 0.6, n)))
  chains = Availability(up=rng.uniform(2, 8, n), down=rng.uniform(5, 15, n))
  bandwidth = np.exp(rng.normal(np.log(1e6), 0.5, n))
  return Cluster(f'phones({n})', laws, 0.1, 1e6, 0.1, bandwidth, 4e9, chains)


def _links(
  place: np.ndarray, near: tuple[float, float], far: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray]:
  """Latency and bandwidth [n, n]: `near` within a place, `far` between two."""
  same = place[:, None] == place
  return np.where(same, near[0], far[0]), np.where(same, near[1], far[1])
