"""Batches as a pure function of the step, so that a resumed run continues where it stopped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from experiments.data import datasets

__all__ = ('Batches', 'evaluation_batches', 'worker_batch')


class Batches:
  """Which examples each worker sees at each step.

  Worker w walks its own part without end, in a fresh random order each epoch (a function of seed, w
  and epoch). Step t takes the places t * B .. t * B + B - 1 of that walk: an epoch may end inside a
  batch, and a part smaller than B goes round several times. Nothing depends on the number of
  processes or on the steps asked for before.

  Args:
    parts: one index array a worker, as the functions of `splits` return them.
    batch_size: examples a worker and step, B.
    seed: of the orders.

  Raises:
    ValueError: on a batch size or a seed out of range, or an empty part.

  >>> batches = Batches([np.array([0, 1, 2]), np.array([3, 4])], 2)
  >>> batches.indices(0).shape, batches.epoch_steps
  ((1, 2, 2), 2)
  >>> sorted(batches.indices(0, 3)[:, 1].ravel().tolist())
  [3, 3, 3, 4, 4, 4]
  """

  def __init__(self, parts: Sequence[np.ndarray], batch_size: int, *, seed: int = 0):
    self._batch_size = datasets.whole_number('batch_size', batch_size, least=1)
    self._seed = datasets.whole_number('seed', seed, least=0)
    self._parts = [np.asarray(part, np.int32) for part in parts]
    if not self._parts:
      raise ValueError('parts must hold one index array a worker, got none')
    for worker, part in enumerate(self._parts):
      if part.ndim != 1 or not part.size:
        raise ValueError(f'parts[{worker}] must be a non-empty vector, got shape {part.shape}')
    self._orders: dict[int, tuple[int, np.ndarray]] = {}  # worker -> its current epoch and order

  @property
  def epoch_steps(self) -> int:
    """Steps in which the largest part is seen once, rounded up."""
    return -(-max(part.size for part in self._parts) // self._batch_size)

  def indices(self, step: int, steps: int = 1) -> np.ndarray:
    """Returns the examples of `steps` steps from `step` on.

    Args:
      step: the first step, from 0.
      steps: how many.

    Returns:
      `[steps, W, B]` int32 indices into the training set.

    Raises:
      ValueError: on a negative step or fewer than one step.
    """
    start = datasets.whole_number('step', step, least=0) * self._batch_size
    count = datasets.whole_number('steps', steps, least=1) * self._batch_size
    walks = [self._walk(worker, start, count) for worker in range(len(self._parts))]
    return np.stack(walks, axis=1).reshape(steps, self._batch_size, -1).swapaxes(1, 2)

  def _walk(self, worker: int, start: int, count: int) -> np.ndarray:
    size = self._parts[worker].size
    first, offset = divmod(start, size)
    last = (start + count - 1) // size
    orders = [self._order(worker, epoch) for epoch in range(first, last + 1)]
    return np.concatenate(orders)[offset : offset + count]

  def _order(self, worker: int, epoch: int) -> np.ndarray:
    cached_epoch, order = self._orders.get(worker, (-1, self._parts[worker]))
    if epoch != cached_epoch:
      order = np.random.default_rng((self._seed, worker, epoch)).permutation(self._parts[worker])
      self._orders[worker] = (epoch, order)
    return order


def evaluation_batches(
  inputs: np.ndarray, targets: np.ndarray, batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
  """Cuts a test set into batches of one fixed shape; the last is padded with zeros and masked.

  Args:
    inputs: `[N, ...]`.
    targets: `[N, ...]`.
    batch_size: examples a batch, B.

  Returns:
    An iterator over (inputs `[B, ...]`, targets `[B, ...]`, mask `[B]` float32: 1 for an example, 0
    for padding).

  Raises:
    ValueError: on a batch size out of range, or if there are more inputs than targets or the
      reverse.

  >>> [mask.tolist() for _, _, mask in evaluation_batches(np.ones(3), np.ones(3), 2)]
  [[1.0, 1.0], [1.0, 0.0]]
  """
  size = datasets.whole_number('batch_size', batch_size, least=1)
  if len(inputs) != len(targets):
    raise ValueError(f'got {len(inputs)} inputs, but {len(targets)} targets')

  def padded(array: np.ndarray, start: int) -> np.ndarray:
    piece = array[start : start + size]
    return np.pad(piece, [(0, size - len(piece))] + [(0, 0)] * (array.ndim - 1))

  mask = np.ones(len(inputs), np.float32)
  return (
    (padded(inputs, start), padded(targets, start), padded(mask, start))
    for start in range(0, len(inputs), size)
  )


def worker_batch(global_batch: int, workers: int) -> int:
  """Returns each worker's share of a global batch.

  Args:
    global_batch: examples a step over all workers.
    workers: number of workers, W.

  Returns:
    `global_batch / workers`.

  Raises:
    ValueError: if it does not divide, naming the nearest sizes that do.

  >>> worker_batch(256, 8)
  32
  """
  datasets.whole_number('workers', workers, least=1)
  share, rest = divmod(datasets.whole_number('global_batch', global_batch, least=1), workers)
  if rest:
    nearest = ' or '.join(str(n * workers) for n in (share, share + 1) if n)
    raise ValueError(
      f'global_batch {global_batch} is not divisible by {workers} workers; take {nearest}'
    )
  return share
