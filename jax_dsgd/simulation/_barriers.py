"""Barriers at a parameter server: who waits for whom."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from jax_dsgd.simulation import _checks
from jax_dsgd.simulation._policy import Policy, View


def asp() -> Policy:
  """Asynchronous parallel: nobody waits.

  >>> asp().waits(None, 0)
  -1
  """
  return Policy('asp')


def bsp() -> Policy:
  """Bulk synchronous parallel: nobody begins a step before all have pushed the one before."""
  return ssp(0)._replace(name='bsp')


def ssp(slack: int) -> Policy:
  """Stale synchronous parallel: who is more than `slack` steps ahead of the slowest waits.

  Args:
    slack: steps, >= 0; 0 is BSP.

  Reference: Ho et al., More effective distributed ML via a stale synchronous parallel parameter
  server, NeurIPS 2013.
  """
  slack = _checks.whole_number('ssp: slack', slack, least=0)

  def waits(view: View, worker: int) -> int:
    slowest = int(view.counts.argmin())
    return slowest if view.counts.item(slowest) < view.counts.item(worker) - slack else -1

  return Policy(f'ssp({slack})', waits)


def psp(sample: int, slack: int = 0) -> Policy:
  """Probabilistic synchronous parallel: a worker looks at a few others, drawn without replacement.

  It waits if any of them is more than `slack` steps behind it; when that one has pushed, it draws
  again. `sample = 0` is ASP, and `sample = W - 1` is BSP, or SSP with this slack. It does not draw
  before: a server that lets the waiting draw at every push of anyone lets them pass sooner, so
  that small samples come nearer to ASP than here.

  Args:
    sample: how many others, from 0 to W - 1.
    slack: steps, >= 0.

  Reference: Wang, Catterall, Mortier, Probabilistic synchronous parallel, 2017, arXiv 1709.07772.
  """
  sample = _checks.whole_number('psp: sample', sample, least=0)
  slack = _checks.whole_number('psp: slack', slack, least=0)

  def waits(view: View, worker: int) -> int:
    counts, limit = view.counts, view.counts.item(worker) - slack
    for other in view.memory(worker):
      if counts.item(other) < limit:
        return other
    return -1

  def memory(view: View) -> Callable[[int], list[int]]:
    _checks.whole_number('psp: sample', sample, least=0, most=view.workers - 1)
    return _others(view.rng, view.workers, sample)

  return Policy(f'psp({sample}, {slack})', waits, memory=memory)


def _others(rng: np.random.Generator, workers: int, size: int) -> Callable[[int], list[int]]:
  """A function that draws `size` workers other than the one given, without replacement."""

  def rows() -> Iterator[list[int]]:
    while size**2 <= workers:
      block = rng.integers(max(workers - 1, 1), size=(1024, size))
      # Draws that name one twice are thrown away, which leaves all others equally likely.
      yield from block[(np.diff(np.sort(block, axis=1), axis=1) > 0).all(axis=1)].tolist()
    while True:
      yield rng.permutation(workers - 1)[:size].tolist()

  draws = rows()
  return lambda worker: [other + (other >= worker) for other in next(draws)]
