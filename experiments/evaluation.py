"""Which model answers on the test set, and how well: evaluation changes nothing.

A config names one of `__all__` and its keyword arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments import models
from experiments.data import batches, blocks, datasets
from experiments.models import losses
from jax_dsgd import runtime

__all__ = ('Evaluation', 'block_models', 'trained_model', 'trained_model_by_block')

_BATCH = 256  # examples of the test set at once, for every worker's model


class Evaluation(NamedTuple):
  """Which models answer, each on its part of the test set.

  Attributes:
    models: (params, state) of a worker -> its models, each leaf with a leading axis of K.
    parts: K arrays of test examples.
  """

  models: Callable[[Any, Any], Any]
  parts: tuple[np.ndarray, ...]


def trained_model(dataset: datasets.Dataset) -> Evaluation:
  """The parameters that are trained, on all of the test set.

  Args:
    dataset: gives the test set.

  >>> trained_model(datasets.digits()).parts[0].size
  359
  """
  stacked = lambda params, state: jax.tree.map(lambda x: x[None], params)  # noqa: E731
  return Evaluation(stacked, (np.arange(len(dataset.test_inputs)),))


def trained_model_by_block(dataset: datasets.Dataset, *, blocks: int) -> Evaluation:
  """The parameters that are trained, on each block of classes by itself.

  Args:
    dataset: gives the test set and its classes.
    blocks: how many there are, as in the feed `class_blocks`.
  """

  def repeated(params: Any, state: Any) -> Any:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (blocks, *x.shape)), params)

  return Evaluation(repeated, _by_block(dataset, blocks))


def block_models(dataset: datasets.Dataset, *, blocks: int) -> Evaluation:
  """The models that the algorithm keeps for blocks (`models` of its state), each on its own block.

  Args:
    dataset: gives the test set and its classes.
    blocks: how many there are, as in the algorithm and the feed `class_blocks`.
  """

  def kept(params: Any, state: Any) -> Any:
    found = optax.tree.get(state, 'models')
    if found is None or any(len(x) != blocks for x in jax.tree.leaves(found)):
      raise ValueError(
        f'block_models needs an algorithm that keeps {blocks} models, as mm_psgd and mc_psgd do'
      )
    return found

  return Evaluation(kept, _by_block(dataset, blocks))


def _by_block(dataset: datasets.Dataset, count: int) -> tuple[np.ndarray, ...]:
  block = blocks.of_classes(dataset, dataset.test_targets, blocks=count)
  return tuple(np.flatnonzero(block == m) for m in range(count))


def measures(
  evaluation: Evaluation,
  *,
  workers: runtime.Workers,
  model: models.Model,
  dataset: datasets.Dataset,
  place: Callable[[Any], Any],
) -> Callable[[Any], dict[str, float]]:
  """Makes the function that measures rows {'params', 'state'}.

  Args:
    evaluation: which models answer.
    workers: the runtime.
    model: the model.
    dataset: gives the test set.
    place: puts a tree of arrays where every worker finds it.

  Returns:
    rows -> `test_loss` and, for classes, `accuracy` of the model averaged over workers; the same of
    the worst worker's, `_worst`; and with several parts those of the average by part, `_part0`, ...
  """
  cut, part_of = _batches(dataset, evaluation.parts)
  test = place((cut, part_of))
  one = functools.partial(losses.evaluate, model)

  @jax.jit
  def sums(rows: Any, test: Any) -> Any:
    each = workers.spmd(evaluation.models)(rows['params'], rows['state'])
    mean = runtime.average(each)

    def add(_: None, x: Any) -> tuple[None, Any]:
      batch, k = x
      copies = jax.tree.map(lambda x: jnp.broadcast_to(x, (workers.count, *x.shape)), batch)
      ours = jax.tree.map(lambda x: x[:, k], each)
      return None, (
        one(jax.tree.map(lambda x: x[k], mean), *batch),
        workers.spmd(one)(ours, *copies),
      )

    return jax.lax.scan(add, None, test)[1]

  def measure(rows: Any) -> dict[str, float]:
    member = part_of == np.arange(len(evaluation.parts))[:, None]
    mean, each = jax.tree.map(lambda x: member @ np.asarray(x, np.float64), sums(rows, test))
    found = _rates('test_loss', mean, each, 'loss', np.max, dataset.floor)
    # Of a text, the loss says more than how often the likeliest symbol was right.
    if dataset.targets.ndim == 1 and np.issubdtype(dataset.targets.dtype, np.integer):
      found |= _rates('accuracy', mean, each, 'correct', np.min, 0.0)
    return found

  return measure


def _rates(
  name: str, mean: Any, workers: Any, what: str, worst: Callable[..., Any], floor: float
) -> dict[str, float]:
  """One measure, from sums over parts `[K]`, and over parts and workers `[K, W]`."""
  found = {
    name: float(mean[what].sum() / mean['count'].sum()) - floor,
    f'{name}_worst': float(worst(workers[what].sum(0) / workers['count'].sum(0))) - floor,
  }
  if mean[what].size > 1:
    parts = mean[what] / mean['count'] - floor
    found |= {f'{name}_part{k}': float(x) for k, x in enumerate(parts)}
  return found


def _batches(dataset: datasets.Dataset, parts: tuple[np.ndarray, ...]) -> tuple[Any, np.ndarray]:
  """Inputs, targets and masks of all batches `[N, B, ...]`, and the part that each is of `[N]`."""
  size = min(_BATCH, max(part.size for part in parts))
  cut, part_of = [], []
  for k, part in enumerate(parts):
    pieces = batches.evaluation_batches(dataset.test_inputs[part], dataset.test_targets[part], size)
    cut += list(pieces)
    part_of += [k] * (len(cut) - len(part_of))
  return tuple(np.stack(column) for column in zip(*cut, strict=True)), np.array(part_of)
