"""Edge colourings: any graph as few permutations."""

from __future__ import annotations

import itertools

import numpy as np


def cover(n: int, arrows: np.ndarray) -> np.ndarray:
  """Permutations of n workers in which each arrow, a pair of [m, 2], is found exactly once.

  By Koenig's theorem as many as the arrows of the busiest sender or receiver are enough, and no
  fewer are. Who has no arrow in a permutation has a self-loop, unless he has one in or out only:
  such chains are closed by one more arrow from their end to their beginning.

  Returns:
    [k, n] int, the destination of every sender.
  """
  most = max(np.bincount(ends, minlength=n).max() for ends in arrows.T) if arrows.size else 0
  shifts = np.unique((arrows[:, 1] - arrows[:, 0]) % n)
  if len(shifts) == most and len(arrows) == n * most:
    return (np.arange(n) + shifts[:, None]) % n
  # The colours of both arrows between a pair may be one, which then is a swap without a chain.
  ranks = np.lexsort((arrows[:, 0], arrows.max(axis=1), arrows.min(axis=1)))
  return np.array([_closed(row) for row in _koenig(n, most, arrows[ranks])], int).reshape(-1, n)


def _koenig(n: int, most: int, arrows: np.ndarray) -> list[list[int]]:
  """Colours arrows so that no sender and no receiver has a colour twice: [most, n] or -1."""
  targets = [[-1] * n for _ in range(most)]
  sources = [[-1] * n for _ in range(most)]
  for sender, receiver in arrows.tolist():
    at_sender = [c for c in range(most) if targets[c][sender] < 0]
    colour = next((c for c in at_sender if sources[c][receiver] < 0), at_sender[0])
    if sources[colour][receiver] >= 0:
      # The colour becomes free by a swap with one that is, along the path of both from here. It
      # ends before the sender, who has no arrow of the first colour.
      spare = next(c for c in range(most) if sources[c][receiver] < 0)
      path, here, along = [], receiver, itertools.cycle(((colour, sources), (spare, targets)))
      for shade, table in along:
        there = table[shade][here]
        if there < 0:
          break
        path.append((there, here, colour) if table is sources else (here, there, spare))
        here = there
      for giver, taker, shade in path:
        targets[shade][giver] = sources[shade][taker] = -1
      for giver, taker, shade in path:
        other = spare if shade == colour else colour
        targets[other][giver], sources[other][taker] = taker, giver
    targets[colour][sender], sources[colour][receiver] = receiver, sender
  return targets


def _closed(targets: list[int]) -> list[int]:
  """A full permutation from a partial one: chains are closed, the idle have self-loops."""
  for start in set(range(len(targets))) - set(targets):
    end = start
    while targets[end] >= 0:
      end = targets[end]
    targets[end] = start
  return targets


def edge_colours(n: int, edges: np.ndarray) -> np.ndarray:
  """Colours edges [m, 2] as Misra and Gries do, k <= max degree + 1 colours: [k, n] partners."""
  # Where a colour is free the partner is oneself, so colours are swapped by swapping rows.
  table = np.tile(np.arange(n), (np.bincount(edges.ravel(), minlength=n).max() + 1, 1))
  for hub, spoke in edges.tolist():
    # In a fan the colour of each edge (hub, end) is free at the end before. It grows as long as it
    # can, or until a colour is free at both the hub and the last end.
    fan, grown = [], [spoke]
    while grown and hub not in grown:
      fan.append(grown[0])
      free = np.flatnonzero(table[:, fan[-1]] == fan[-1])
      grown = [end for end in table[free, hub].tolist() if end not in fan]
    colour, spare = free[np.argmax(table[free, hub] == hub)], np.argmax(table[:, hub] == hub)
    # Free the colour at the hub too, by a swap on the path of both colours from there.
    path, along = [hub], itertools.cycle((colour, spare))
    while (end := int(table[next(along), path[-1]])) != path[-1]:
      path.append(end)
    table[np.ix_([spare, colour], path)] = table[np.ix_([colour, spare], path)]
    # Vizing's argument: up to the first end where the colour is free now, the fan is still a fan.
    fan = fan[: next(i for i, end in enumerate(fan) if table[colour, end] == end) + 1]
    for end, after in itertools.pairwise(fan):
      shade = np.flatnonzero(table[:, hub] == after)[0]
      table[shade, [hub, end, after]] = end, hub, after
    table[colour, [hub, fan[-1]]] = fan[-1], hub
  return table[(table != np.arange(n)).any(axis=1)]
