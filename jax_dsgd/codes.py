"""Gradient codes: the exact sum of all gradients, although some workers' messages never come.

Every worker computes more than its share of the data and sends one weighted sum of gradients; any
n - s of the n messages, again weighted, give the sum over all data. Weights may be negative.
"""

from __future__ import annotations

import dataclasses
import fractions
import itertools
import math
import reprlib
from typing import NamedTuple

import numpy as np
from numpy import typing as npt

_DRAWS = 32  # codes tried
_PATTERNS = 64  # of stragglers, at random, by which a code is judged
_ROWS = 200_000  # of a table, at most


@dataclasses.dataclass(frozen=True, eq=False)
class GradientCode:
  """A code of n workers that does without any `stragglers` of them.

  Attributes:
    matrix: B, [n, n] float64: worker i sends sum_k B[i, k] g_k, where g_k is the sum of gradients
      of part k of the data.
    stragglers: s, how many messages may be missing.
  """

  matrix: np.ndarray
  stragglers: int


class DecodeTable(NamedTuple):
  """The weights of every pattern of stragglers that a code tolerates, for a look-up on a device.

  Attributes:
    alive: [m, n] bool, the patterns.
    weights: [m, n] float64, what the messages are multiplied by; 0 at stragglers.
  """

  alive: np.ndarray
  weights: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class TreeCode:
  """A gradient code at every parent of a regular tree of workers.

  The root is no worker and has workers 0 to n - 1 as children; those of worker w are workers
  n (w + 1) to n (w + 1) + n - 1. Worker w sends to its parent its own sum_a weights[w, a] g_a, g_a
  the sum of gradients of atom a of the data, plus its children's messages, decoded.

  Attributes:
    code: of every parent and its n children.
    depth: L, the levels of workers.
    bounds: [atoms + 1] float64, from 0 to 1: atom a is this interval of the data.
    weights: [workers, atoms] float64, 0 where a worker does not compute an atom.
    load: the fraction of the data that each worker computes.
  """

  code: GradientCode
  depth: int
  bounds: np.ndarray
  weights: np.ndarray
  load: float


class TreeWeights(NamedTuple):
  """How the messages of a tree are decoded.

  Attributes:
    at_parent: [workers] float64, the weight of each message at its parent; 0 at stragglers.
    in_total: [workers] float64, the weight that each worker's own sum has at the root, so that one
      weighted sum over all workers is the sum over the data; 0 below stragglers.
  """

  at_parent: np.ndarray
  in_total: np.ndarray


def gradient_code(n: int, stragglers: int, *, seed: int) -> GradientCode:
  """The cyclic code: worker i computes the s + 1 parts i, ..., i + s mod n of n.

  The rows of B span the null space of a random H [s, n] whose rows sum to 0, so that the ones are
  among them: B_i = (1, -H_S^-1 H_i) on its support (i, S). Large weights cost digits: of 32
  draws of H the one is kept whose largest weights in decoding, over 64 random patterns, are
  smallest. They still grow with n and s, to some 10 for (8, 2) and 4,000 for (32, 8).
  Reference: Tandon, Lei, Dimakis and Karampatziakis, Gradient coding, 2017, arXiv 1612.03301.

  Args:
    n: workers, and parts of the data.
    stragglers: s < n, how many messages may be missing; 0 is the plain sum.
    seed: of H.

  Raises:
    ValueError: a number is out of its range.

  >>> gradient_code(3, 0, seed=0).matrix.tolist()
  [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
  >>> (gradient_code(4, 1, seed=0).matrix != 0).sum(axis=1).tolist()
  [2, 2, 2, 2]
  """
  n = _whole('gradient_code: n', n, 1)
  stragglers = _whole('gradient_code: stragglers', stragglers, 0)
  generator = np.random.default_rng(_whole('gradient_code: seed', seed, 0))
  if stragglers >= n:
    raise ValueError(f'gradient_code: stragglers must be less than n = {n}, not {stragglers}')
  if stragglers == 0:
    return GradientCode(np.eye(n), 0)
  lost = np.argsort(generator.random((_PATTERNS, n)), axis=1)[:, :stragglers]
  drawn = (_cyclic(n, stragglers, generator) for _ in range(_DRAWS))
  return GradientCode(min(drawn, key=lambda matrix: _largest_weight(matrix, lost)), stragglers)


def decode_weights(code: GradientCode, alive: npt.ArrayLike) -> np.ndarray:
  """Returns a, [n] float64, with a^T B = 1^T and a = 0 at stragglers: the shortest such a.

  Then sum_i a_i m_i over the messages m_i that came is the sum of gradients over all data.

  Args:
    code: the code.
    alive: [n] bool, whose message came.

  Raises:
    ValueError: more stragglers than the code tolerates, by their numbers.

  >>> code = gradient_code(4, 1, seed=0)
  >>> a = decode_weights(code, [True, True, False, True])
  >>> (a @ code.matrix).round(12).tolist(), a.nonzero()[0].tolist()
  ([1.0, 1.0, 1.0, 1.0], [0, 1, 3])
  """
  alive = _alive('decode_weights', alive, len(code.matrix))
  return _weights(code, alive, 'decode_weights: the stragglers')


def decode_table(code: GradientCode) -> DecodeTable:
  """Returns the weights of all patterns with at most s stragglers.

  On a device the row is `jnp.argmax((table.alive == alive).all(axis=1))`.

  Raises:
    ValueError: there are more than 200,000 patterns.

  >>> decode_table(gradient_code(4, 1, seed=0)).alive.shape
  (5, 4)
  """
  n = len(code.matrix)
  count = sum(math.comb(n, lost) for lost in range(code.stragglers + 1))
  if count > _ROWS:
    raise ValueError(
      f'decode_table: n = {n} and {code.stragglers} stragglers must have at most {_ROWS} patterns, '
      f'not {count}'
    )
  alive = np.ones((count, n), bool)
  sizes = range(code.stragglers + 1)
  patterns = itertools.chain(*(itertools.combinations(range(n), size) for size in sizes))
  for row, lost in zip(alive, patterns, strict=True):
    row[list(lost)] = False
  return DecodeTable(alive, np.stack([decode_weights(code, row) for row in alive]))


def tree_code(branching: int, depth: int, stragglers: int, *, seed: int) -> TreeCode:
  """A gradient code at every parent of a tree: less load than one code over as many workers.

  N = n + n^2 + ... + n^L workers compute a fraction r = 1 / sum_{l=1..L} (n / (s + 1))^l of the
  data each, and each parent does without s of its n children. From the root down, whoever has been
  given data keeps r and hands the rest, in n equal parts and with the weights of B, to its
  children. `depth` 1 is `gradient_code`, no stragglers a plain tree.
  Reference: Reisizadeh, Prakash, Pedarsani and Avestimehr, CodedReduce: A fast and robust framework
  for gradient aggregation in distributed learning, 2019, arXiv 1902.01981. Which data a node keeps
  is free; here it is the first.

  Args:
    branching: n, the children of each parent.
    depth: L, the levels of workers.
    stragglers: s < n.
    seed: of the code.

  Raises:
    ValueError: a number is out of its range.

  >>> code = tree_code(4, 2, 1, seed=0)
  >>> code.weights.shape[0], round(code.load, 4)
  (20, 0.1667)
  """
  n = _whole('tree_code: branching', branching, 1)
  depth = _whole('tree_code: depth', depth, 1)
  stragglers = _whole('tree_code: stragglers', stragglers, 0)
  if stragglers >= n:
    raise ValueError(f'tree_code: stragglers must be less than branching = {n}, not {stragglers}')
  code = gradient_code(n, stragglers, seed=_whole('tree_code: seed', seed, 0))
  none = fractions.Fraction(0)
  ratio = fractions.Fraction(n, stragglers + 1)
  load = 1 / sum((ratio**level for level in range(1, depth + 1)), start=none)
  # Pieces (start, stop, weight) of the data: what the root and then each worker is given.
  given = [[(none, none + 1, 1.0)]]
  kept, parents = [], sum(n**level for level in range(depth))
  for parent in range(sum(n**level for level in range(depth + 1))):
    own, rest = _split(given[parent], load if parent else none)
    kept.append(own)
    if parent < parents:
      size = sum((stop - start for start, stop, _ in rest), start=none) / n
      parts = []
      for _ in range(n):
        part, rest = _split(rest, size)
        parts.append(part)
      given += [_encoded(parts, row) for row in code.matrix.tolist()]
  bounds = sorted({end for own in kept for piece in own for end in piece[:2]})
  places = {bound: place for place, bound in enumerate(bounds)}
  weights = np.zeros((len(kept) - 1, len(bounds) - 1))
  for row, own in zip(weights, kept[1:], strict=True):
    for start, stop, weight in own:
      row[places[start] : places[stop]] = weight
  return TreeCode(code, depth, np.array(bounds, float), weights, float(load))


def tree_weights(code: TreeCode, alive: npt.ArrayLike) -> TreeWeights:
  """Returns how the messages that came are decoded, level by level and all at once.

  Args:
    code: the tree.
    alive: [workers] bool, whose message came at its parent. Below a straggler nothing matters.

  Raises:
    ValueError: more stragglers among the children of one parent than it tolerates.

  >>> code = tree_code(2, 2, 0, seed=0)
  >>> tree_weights(code, [True] * 6).in_total.tolist()
  [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
  """
  n, workers = len(code.code.matrix), len(code.weights)
  alive = _alive('tree_weights', alive, workers)
  at_parent, in_total = np.zeros(workers), np.zeros(workers)
  for parent in range(-1, workers // n - 1):
    above = 1.0 if parent < 0 else in_total[parent]
    # A message that is lost, or that its parent does not use, needs no children.
    if parent >= 0 and (not alive[parent] or above == 0):
      continue
    first = n * (parent + 1)
    name = 'the root' if parent < 0 else f'worker {parent}'
    where = f'tree_weights: the stragglers among the children of {name}'
    children = slice(first, first + n)
    at_parent[children] = _weights(code.code, alive[children], where, first)
    in_total[children] = above * at_parent[children]
  return TreeWeights(at_parent, in_total)


_Piece = tuple[fractions.Fraction, fractions.Fraction, float]


def _whole(where: str, value: int, least: int) -> int:
  if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
    raise ValueError(f'{where} must be an int >= {least}, not {value!r}')
  return int(value)


def _alive(where: str, alive: npt.ArrayLike, n: int) -> np.ndarray:
  alive = np.asarray(alive)
  if alive.shape != (n,) or alive.dtype != bool:
    raise ValueError(
      f'{where}: alive must be bool of shape ({n},), not {alive.dtype} of shape {alive.shape}'
    )
  return alive


def _cyclic(n: int, stragglers: int, generator: np.random.Generator) -> np.ndarray:
  """B from one draw of H."""
  H = generator.normal(size=(stragglers, n))
  H -= H.mean(axis=1, keepdims=True)
  matrix = np.zeros((n, n))
  for i in range(n):
    support = (i + np.arange(1, stragglers + 1)) % n
    matrix[i, i] = 1
    matrix[i, support] = -np.linalg.solve(H[:, support], H[:, i])
  return matrix


def _largest_weight(matrix: np.ndarray, lost: np.ndarray) -> float:
  """The largest weight in decoding, over patterns of lost messages [patterns, s]."""
  alive = [np.delete(matrix, row, axis=0).T for row in lost]
  weights = [np.linalg.lstsq(rows, np.ones(len(matrix)))[0] for rows in alive]
  return float(np.abs(weights).max())


def _weights(code: GradientCode, alive: np.ndarray, where: str, first: int = 0) -> np.ndarray:
  lost = np.flatnonzero(~alive)
  if lost.size > code.stragglers:
    listed = reprlib.repr((first + lost).tolist())
    raise ValueError(f'{where} must be at most {code.stragglers}, not {lost.size}: {listed}')
  weights = np.zeros(len(alive))
  weights[alive] = np.linalg.lstsq(code.matrix[alive].T, np.ones(len(alive)))[0]
  error = np.abs(weights @ code.matrix - 1).max()
  if error > 1e-6:
    raise ValueError(
      f'{where} must leave weights that sum to 1 for each part, not off by {error:.1g}: a code of '
      f'{len(alive)} workers and {code.stragglers} stragglers is too ill-conditioned'
    )
  return weights


def _split(pieces: list[_Piece], size: fractions.Fraction) -> tuple[list[_Piece], list[_Piece]]:
  """The first `size` of the data in pieces, and the rest."""
  before, after = [], []
  for start, stop, weight in pieces:
    cut = min(stop, start + size)
    size -= cut - start
    before += [(start, cut, weight)] if cut > start else []
    after += [(cut, stop, weight)] if cut < stop else []
  return before, after


def _encoded(parts: list[list[_Piece]], row: list[float]) -> list[_Piece]:
  """What a child with this row of B is given."""
  return [
    (start, stop, weight * factor)
    for part, factor in zip(parts, row, strict=True)
    if factor
    for start, stop, weight in part
  ]
