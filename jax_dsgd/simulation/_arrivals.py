"""Rounds with one end for all: how many arrivals it takes, and what becomes of the late."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_dsgd.simulation import _checks
from jax_dsgd.simulation._policy import Meeting, Policy, Task, View


def bulk() -> Policy:
  """Bulk synchronous rounds: all who are up work, and the round ends with the last of them.

  >>> bulk().name
  'bulk'
  """
  return Policy('bulk', plays='rounds')


def fastest(k: int) -> Policy:
  """Rounds that end with the k-th arrival; the work of the others is called off.

  Args:
    k: arrivals, >= 1; fewer where fewer work.
  """
  k = _checks.whole_number('fastest: k', k)
  return Policy(f'fastest({k})', meet=lambda view: _first(view, k, goes_on=False), plays='rounds')


def _first(view: View, k: int, *, goes_on: bool) -> Meeting:
  """The k first to arrive meet; the others' work goes on into the next round, or is called off."""
  k = min(k, int(np.isfinite(view.arrivals).sum()))
  order = np.argsort(view.arrivals, kind='stable')
  end = view.arrivals[order[k - 1]]
  group = np.full(view.workers, -1)
  group[order[:k]] = 0
  return Meeting(group, np.where((group < 0) & goes_on, np.inf, end))


def elastic_norm(beta: float) -> Policy:
  """Norm-bounded elastic consistency: a step takes what arrived once its norm is beta of the whole.

  The late are folded into the round in which they arrive. Norms are not known to a simulation: it
  takes them as equal, so a round ends with arrival `ceil(beta * W)` of the W that work.

  Args:
    beta: over 0, and up to 1, which is bulk.

  Reference: Nadiradze et al., Elastic consistency, 2020, arXiv 2001.05918 (the norm-bounded
  scheduler, common knowledge of the paper).
  """
  if not 0 < beta <= 1:
    raise ValueError(f'elastic_norm: beta must be over 0 and up to 1, not {beta!r}')

  def meet(view: View) -> Meeting:
    working = int(np.isfinite(view.arrivals).sum())
    return _first(view, math.ceil(beta * working - 1e-9), goes_on=True)

  return Policy(f'elastic_norm({beta:g})', meet=meet, plays='rounds')


def elastic_variance(deadline: float) -> Policy:
  """Variance-bounded elastic consistency: a round takes `deadline` seconds, or less if all arrive.

  Who is late (not active) is to be replaced by one's own gradient, and corrected when it arrives.
  A round in which nobody arrived lasts until the first arrival.

  Args:
    deadline: seconds, > 0.

  Reference: Nadiradze et al., Elastic consistency, 2020, arXiv 2001.05918 (the variance-bounded
  scheduler).
  """
  deadline = _checks.number('elastic_variance: deadline', deadline, strict=True)

  def meet(view: View) -> Meeting:
    working = np.isfinite(view.arrivals)
    latest = view.arrivals[working].max()
    end = min(latest, max(view.time + deadline, view.arrivals.min()))
    on_time = view.arrivals <= end
    return Meeting(np.where(on_time, 0, -1), np.where(on_time | ~working, end, np.inf))

  return Policy(f'elastic_variance({deadline:g})', meet=meet, plays='rounds')


def adaptive_fastest(
  loads: Sequence[int], *, error: float, floor: float, contraction: float, draws: int = 500
) -> Policy:
  """The k fastest with load b, both chosen anew in each round from the bound on the error.

  With mu(k, b) the mean time of the k-th arrival of b examples and e(k, b) = floor / (k b), a round
  takes the pair of the largest `(E - e(k, b)) / mu(k, b)`; then `E <- E - contraction (E - e)`.
  So k and b begin small and grow as the error falls. The work of the others is called off. mu is
  the mean over `draws` draws from the laws, without messages.

  Args:
    loads: numbers of examples that a worker may be given, each >= 1.
    error: E of the first round, > 0.
    floor: eta L sigma^2 / (2 c), the error at which one example a round would stall, > 0.
    contraction: eta c, over 0 and below 1.
    draws: of each worker's time.

  Reference: Egger, Kas Hanna, Bitar, Fast and straggler-tolerant distributed SGD with reduced
  computation load, 2023, arXiv 2304.08589 (the bound is the usual one for strongly convex losses).
  """
  sizes = np.array([_checks.whole_number('adaptive_fastest: loads', load) for load in loads])
  if not sizes.size:
    raise ValueError(f'adaptive_fastest: loads must hold at least one load, not {loads!r}')
  error = _checks.number('adaptive_fastest: error', error, strict=True)
  floor = _checks.number('adaptive_fastest: floor', floor, strict=True)
  draws = _checks.whole_number('adaptive_fastest: draws', draws)
  if not 0 < contraction < 1:
    raise ValueError(f'adaptive_fastest: contraction must be between 0 and 1, not {contraction!r}')

  def memory(view: View) -> dict[str, Any]:
    seconds = np.stack([_order_means(view, load, draws) for load in sizes / view.batch])
    floors = floor / (sizes[:, None] * np.arange(1, view.workers + 1))
    return {'seconds': seconds, 'floors': floors, 'error': error, 'pair': (0, 0)}

  def choose(view: View) -> np.ndarray:
    state = view.memory
    slopes = (state['error'] - state['floors']) / state['seconds']
    # Below every floor nothing progresses: the pair of the lowest floor then keeps the error least.
    best = slopes.argmax() if slopes.max() > 0 else state['floors'].argmin()
    state['pair'] = pair = np.unravel_index(best, slopes.shape)
    state['error'] -= contraction * (state['error'] - state['floors'][pair])
    return np.ones(view.workers, bool)

  def amount(view: View, worker: int) -> Task:
    return Task(examples=int(sizes[view.memory['pair'][0]]))

  def meet(view: View) -> Meeting:
    return _first(view, int(view.memory['pair'][1]) + 1, goes_on=False)

  return Policy(
    'adaptive_fastest', choose=choose, amount=amount, meet=meet, memory=memory, plays='rounds'
  )


def _order_means(view: View, work: float, draws: int) -> np.ndarray:
  """Mean times of the first, second, ... arrival: [W]."""
  seed = np.random.SeedSequence(int(view.rng.integers(2**31)))
  samplers = view.cluster.samplers(seed)
  times = [[sampler(0.0, work) for _ in range(draws)] for sampler in samplers]
  return np.sort(np.array(times), axis=0).mean(axis=1)
