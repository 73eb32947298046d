"""The graph that leads to consensus in the fewest seconds, for given links."""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy import typing as npt
from scipy.sparse import csgraph

from jax_dsgd.topologies import _checks
from jax_dsgd.topologies._given import from_edges
from jax_dsgd.topologies._topology import Topology

_BATCH = 64  # graphs that are judged together in the search
_PATIENCE = 30  # kicks in a row that may lead to nothing better


class TopologyPlan(NamedTuple):
  """A topology and what it is expected to take.

  Attributes:
    topology: an undirected graph with Metropolis weights.
    round_seconds: of one round, the time of the worker whose sends take longest together.
    seconds: until the distance to the mean has shrunk by a factor e.
  """

  topology: Topology
  round_seconds: float
  seconds: float


def plan_topology(links: npt.ArrayLike, *, seed: int, tries: int = 30_000) -> TopologyPlan:
  """Plans the graph that needs the fewest seconds until disagreement shrinks by a factor e.

  A worker sends its messages one after another, so a round takes max_i sum_j links[i, j] over the
  neighbours j of i; with the spectral gap g of the Metropolis weights the disagreement shrinks by e
  in 1 / -log(1 - g) rounds, and never in less than one. The candidates are rings, tori, stars,
  hypercubes, exponential and complete graphs, in the given numbering and along a short tour of the
  links, the minimum spanning tree, and graphs of the shortest links that fit into a given round; a
  local search adds, drops and swaps edges from the best of them and from the tree, and again after
  random changes. It is a heuristic: for up to 5 workers it nearly always finds the optimum.

  Args:
    links: [n, n] seconds that a message from i to j takes; inf where there is no link. An edge
      needs both directions. The diagonal does not count.
    seed: of the changes that the search tries.
    tries: how many graphs the search may look at.

  Raises:
    ValueError: links are not square, negative or nan, or do not connect all workers.

  >>> near, far = 1.0, 100.0
  >>> links = np.full((4, 4), near)
  >>> links[0, 1] = links[1, 0] = far
  >>> plan = plan_topology(links, seed=0)
  >>> plan.round_seconds, plan.topology.sends.tolist()
  (2.0, [[2, 2, 2, 2]])
  """
  links = _links(links)
  generator = np.random.default_rng(_checks.whole_number('plan_topology: seed', seed, least=0))
  tries = _checks.whole_number('plan_topology: tries', tries)
  n = len(links)
  usable = np.isfinite(links + links.T) & ~np.eye(n, dtype=bool)
  if len(lone := _checks.smallest_component(usable)) < n:
    raise ValueError(
      f'plan_topology: links must connect all workers; none join {reprlib.repr(lone)} to others'
    )
  costs = np.where(usable, links, 0.0)
  tree = _spanning_tree(links, usable)
  candidates = [tree, *(graph & usable for graph in _families(n, _tour(links)))]
  candidates += _short_graphs(tree, usable, costs)
  best = min(candidates, key=lambda graph: _seconds(graph[None], costs)[0])
  graph = _kicked_search([best, tree], usable, costs, generator, tries)
  topology = from_edges(n, np.argwhere(np.triu(graph)).tolist(), name='planned')
  return TopologyPlan(
    topology, float((graph * costs).sum(axis=1).max()), float(_seconds(graph[None], costs)[0])
  )


def _links(links: npt.ArrayLike) -> np.ndarray:
  links = np.array(links, float)
  if links.ndim != 2 or links.shape[0] != links.shape[1] or not links.size:
    raise ValueError(f'plan_topology: links must be square, not of shape {links.shape}')
  np.fill_diagonal(links, 0)
  _checks.refuse('plan_topology: link', links, ~(links >= 0), 'be >= 0 seconds, or inf')
  return links


def _seconds(graphs: np.ndarray, costs: np.ndarray) -> np.ndarray:
  """Seconds until disagreement shrinks by e, of graphs [b, n, n] bool; inf if not connected."""
  n = len(costs)
  degrees = graphs.sum(axis=2)
  weights = graphs / (1 + np.maximum(degrees[:, :, None], degrees[:, None, :]))
  weights[:, np.arange(n), np.arange(n)] = 1 - weights.sum(axis=2)
  values = np.linalg.eigvalsh(weights - 1 / n)
  sigma = np.clip(np.maximum(values[:, -1], -values[:, 0]), 1e-300, None)
  rounds = np.full(len(graphs), np.inf)
  mixes = sigma < 1 - 1e-12
  rounds[mixes] = np.maximum(1, -1 / np.log(sigma[mixes]))
  longest = (graphs * costs).sum(axis=2).max(axis=1)
  return np.where(mixes, longest * np.where(mixes, rounds, 1), np.inf)


def _spanning_tree(links: np.ndarray, usable: np.ndarray) -> np.ndarray:
  # The tree's weights must not be 0, which would be no edge.
  least = np.where(usable, np.maximum(links, links.T) + 1e-300, 0)
  tree = csgraph.minimum_spanning_tree(least).toarray() > 0
  return tree | tree.T


def _tour(links: np.ndarray) -> np.ndarray:
  """Workers in the order of a short tour: always to the nearest, from the best beginning."""
  both = np.maximum(links, links.T)

  def from_(start: int) -> tuple[float, list[int]]:
    order, left, length = [start], set(range(len(links))) - {start}, 0.0
    while left:
      nearest = min(left, key=lambda worker: (both[order[-1], worker], worker))
      length += both[order[-1], nearest]
      order.append(nearest)
      left.remove(nearest)
    return length + both[order[-1], start], order

  return np.array(min(map(from_, range(len(links))))[1])


def _families(n: int, tour: np.ndarray) -> Iterator[np.ndarray]:
  """Adjacency matrices of graphs with a name, in the given order and along the tour."""
  i, j = np.indices((n, n))
  apart = np.minimum((i - j) % n, (j - i) % n)
  powers = [2**t for t in range((n - 1).bit_length())]
  graphs = [apart == 1, apart > 0, np.isin(apart, powers)]
  if n & (n - 1) == 0:
    graphs.append(np.isin(i ^ j, powers))
  for rows in (rows for rows in range(2, n // 2 + 1) if n % rows == 0):
    columns = n // rows
    down, across = (i // columns - j // columns) % rows, (i - j) % columns
    beside = (down == 0) & np.isin(across, (1, columns - 1))
    graphs.append(beside | (across == 0) & np.isin(down, (1, rows - 1)))
  for graph, order in itertools.product(graphs, (np.arange(n), tour)):
    placed = np.zeros((n, n), bool)
    placed[np.ix_(order, order)] = graph & (i != j)
    yield placed
  for hub in range(n):
    yield (i != j) & ((i == hub) | (j == hub))


def _short_graphs(tree: np.ndarray, usable: np.ndarray, costs: np.ndarray) -> Iterator[np.ndarray]:
  """The tree, and in order of their length all links that keep a round within a bound."""
  pairs = np.argwhere(np.triu(usable & ~tree))
  pairs = pairs[np.argsort(np.maximum(costs, costs.T)[tuple(pairs.T)], kind='stable')]
  least, most = ((graph * costs).sum(axis=1).max() for graph in (tree, usable))
  for bound in np.linspace(least, most, 32):
    graph, loads = tree.copy(), (tree * costs).sum(axis=1)
    for i, j in pairs.tolist():
      if max(loads[i] + costs[i, j], loads[j] + costs[j, i]) <= bound:
        loads[i], loads[j] = loads[i] + costs[i, j], loads[j] + costs[j, i]
        graph[[i, j], [j, i]] = True
    yield graph


def _kicked_search(
  starts: list[np.ndarray],
  usable: np.ndarray,
  costs: np.ndarray,
  generator: np.random.Generator,
  tries: int,
) -> np.ndarray:
  """The best that local searches find from the starts, and then from it after random changes."""
  pairs, best, seconds, idle = np.argwhere(np.triu(usable)), starts[0], np.inf, 0
  whole = tries
  while tries > 0 and idle < _PATIENCE and len(pairs):
    if starts:
      start, most = starts.pop(0), whole // 3
    else:
      start, most = best.copy(), tries
      for i, j in generator.permutation(pairs)[: generator.integers(2, 5)].tolist():
        start[[i, j], [j, i]] ^= True
    graph, used = _search(start, pairs, costs, generator, most)
    tries -= used
    reached = _seconds(graph[None], costs)[0]
    idle += 1
    if reached < seconds * (1 - 1e-12):
      best, seconds, idle = graph, reached, 0
  return best


def _search(
  graph: np.ndarray,
  pairs: np.ndarray,
  costs: np.ndarray,
  generator: np.random.Generator,
  tries: int,
) -> tuple[np.ndarray, int]:
  """Adds, drops and swaps edges while that saves seconds; also returns how many it looked at."""
  seconds, improved, used = _seconds(graph[None], costs)[0], True, 0
  while improved and used < tries:
    improved, rest = False, _changes(graph, pairs, generator)
    while used < tries and not improved and (changes := list(itertools.islice(rest, _BATCH))):
      used += len(changes)
      graphs = np.repeat(graph[None], len(changes), axis=0)
      for changed, edges in zip(graphs, changes, strict=True):
        for i, j in edges:
          changed[[i, j], [j, i]] ^= True
      # A round alone may take too long already, and costs nothing to find.
      graphs = graphs[(graphs * costs).sum(axis=2).max(axis=1) < seconds]
      judged = _seconds(graphs, costs) if len(graphs) else np.array([np.inf])
      if judged.min() < seconds * (1 - 1e-12):
        graph, seconds, improved = graphs[judged.argmin()], judged.min(), True
  return graph, used


def _changes(
  graph: np.ndarray, pairs: np.ndarray, generator: np.random.Generator
) -> Iterator[tuple[tuple[int, int], ...]]:
  """Edges to toggle: each alone, in a random order, and then one in and one out of the graph."""
  edges = [tuple(pair) for pair in generator.permutation(pairs).tolist()]
  yield from ((edge,) for edge in edges)
  inside = [edge for edge in edges if graph[edge]]
  outside = [edge for edge in edges if not graph[edge]]
  # Far apart in both lists from one to the next, so that a search cut short has seen all edges.
  for turn in range(len(outside)):
    for place, edge in enumerate(inside):
      yield edge, outside[(place + turn) % len(outside)]
