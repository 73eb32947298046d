"""What workers are fed: the examples of each step, and what `control` says of them.

A config names one of `__all__` and its keyword arguments. Everything is a pure function of the
step, so that a resumed run continues where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from experiments.data import batches, blocks, datasets
from jax_dsgd import transforms

__all__ = ('Feed', 'class_blocks', 'drawn_clients', 'own_parts')


class Feed(NamedTuple):
  """Examples and control of each step, for all workers.

  Attributes:
    indices: (step, steps=1) -> `[steps, W, B]` int32, examples of the training set.
    control: (step, steps=1) -> the extra argument `control`, each leaf `[steps, W]`; or None.
  """

  indices: Callable[..., np.ndarray]
  control: Callable[..., transforms.Control | None]


def own_parts(parts: Sequence[np.ndarray], batch_size: int, *, workers: int, seed: int = 0) -> Feed:
  """Each worker walks its own part of the data without end, as in `batches.Batches`.

  Args:
    parts: one index array a worker.
    batch_size: examples a worker and step, B.
    workers: number of workers, W.
    seed: of the orders.

  Raises:
    ValueError: more or fewer parts than workers, or what `Batches` refuses.

  >>> own_parts([np.arange(4), np.arange(4, 8)], 2, workers=2).indices(0, 3).shape
  (3, 2, 2)
  """
  if len(parts) != workers:
    raise ValueError(f'own_parts: {len(parts)} parts for {workers} workers; accepted is one each')
  return Feed(batches.Batches(parts, batch_size, seed=seed).indices, _nothing)


def drawn_clients(
  parts: Sequence[np.ndarray],
  batch_size: int,
  *,
  workers: int,
  period: int,
  epochs: int = 1,
  seed: int = 0,
) -> Feed:
  """In each round workers are the places of W clients, drawn alike from all without replacement.

  A client with n examples takes the first `ceil(epochs n / B)` steps of the round, or all of them
  where there are fewer, through epochs in fresh orders. `control` says these steps, and n as
  weight.

  Args:
    parts: one index array a client, at least W.
    batch_size: examples a worker and step, B.
    workers: places a round, W.
    period: steps a round.
    epochs: passes of a client over its examples.
    seed: of the drawing and of the orders.

  Raises:
    ValueError: fewer clients than workers, an empty part, or a number below 1.

  >>> feed = drawn_clients([np.arange(3), np.arange(3, 8)], 2, workers=2, period=4)
  >>> sorted(zip(feed.control(0).weight[0].tolist(), feed.control(0).steps[0].tolist()))
  [(3.0, 2), (5.0, 3)]
  """
  size = datasets.whole_number('batch_size', batch_size, least=1)
  period = datasets.whole_number('period', period, least=1)
  epochs = datasets.whole_number('epochs', epochs, least=1)
  seed = datasets.whole_number('seed', seed, least=0)
  examples = np.array([np.size(part) for part in parts])
  if len(parts) < workers or not examples.all():
    raise ValueError(
      f'drawn_clients: {np.count_nonzero(examples)} clients with examples for {workers} places; '
      'accepted are as many or more, and none without examples'
    )

  def drawn(round_: int) -> np.ndarray:
    return np.random.default_rng((seed, round_)).choice(len(parts), workers, replace=False)

  def walk(round_: int, client: int) -> np.ndarray:
    rng = np.random.default_rng((seed, round_, int(client)))
    laps = -(-period * size // int(examples[client]))
    walked = np.concatenate([rng.permutation(parts[client]) for _ in range(laps)])
    return walked[: period * size].reshape(period, size)

  def of_round(round_: int) -> np.ndarray:
    return np.stack([walk(round_, client) for client in drawn(round_)], axis=1).astype(np.int32)

  def indices(step: int, steps: int = 1) -> np.ndarray:
    rounds = range(step // period, (step + steps - 1) // period + 1)
    first = step - rounds[0] * period
    return np.concatenate([of_round(round_) for round_ in rounds])[first : first + steps]

  def control(step: int, steps: int = 1) -> transforms.Control:
    rounds, each = np.unique(np.arange(step, step + steps) // period, return_inverse=True)
    clients = np.stack([drawn(round_) for round_ in rounds])[each]
    weight = examples[clients].astype(np.float32)
    own = np.minimum(-(-epochs * examples[clients] // size), period)
    return transforms.Control(weight=weight, steps=own.astype(np.int32))

  return Feed(indices, control)


def class_blocks(
  parts: Sequence[np.ndarray],
  batch_size: int,
  *,
  dataset: datasets.Dataset,
  workers: int,
  steps: int,
  number: int,
  seed: int = 0,
) -> Feed:
  """Blocks of classes that come in turn: for some steps all workers see the classes of one block.

  Args:
    parts: one index array a worker, with examples of every block.
    batch_size: examples a worker and step, B.
    dataset: gives the classes.
    workers: number of workers, W.
    steps: that a block lasts.
    number: of blocks.
    seed: of the orders.

  Raises:
    ValueError: a worker without an example of some block, or what `own_parts` and `of_classes`
      refuse.

  >>> data = datasets.digits()
  >>> feed = class_blocks([np.arange(500)], 32, dataset=data, workers=1, steps=2, number=5)
  >>> [sorted(set(data.targets[rows].ravel().tolist())) for rows in feed.indices(0, 12)[::2]]
  [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [0, 1]]
  """
  steps = datasets.whole_number('steps', steps, least=1)
  block = blocks.of_classes(dataset, dataset.targets, blocks=number)
  walks = [
    own_parts([part[block[part] == m] for part in parts], batch_size, workers=workers, seed=seed)
    for m in range(number)
  ]

  def one(step: int) -> np.ndarray:
    turn, within = divmod(step, steps)
    cycle, m = divmod(turn, number)
    return walks[m].indices(cycle * steps + within)[0]

  def indices(step: int, steps: int = 1) -> np.ndarray:
    return np.stack([one(t) for t in range(step, step + steps)])

  return Feed(indices, _nothing)


def _nothing(step: int, steps: int = 1) -> None:
  return None
