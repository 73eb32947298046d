"""Prices in closed form, where no clock needs to run."""

from __future__ import annotations

from jax_dsgd.simulation import _checks


def layered_seconds(*, compute: float, intra: float, inter: float, load: float) -> float:
  """Seconds of a step of layered SGD: `compute + intra + max(inter, load)`.

  The mean between nodes runs while the next batch is loaded; one after the other they take the sum
  of all four.
  Reference: Yu, Flynn, Yoo, D'Imperio, Layered SGD, 2019, arXiv 1906.05936.

  Args:
    compute: seconds of the gradient.
    intra: seconds of the mean inside a node and of the broadcast.
    inter: seconds of the mean between nodes.
    load: seconds of loading a batch.

  >>> layered_seconds(compute=1.0, intra=0.1, inter=0.5, load=0.3)
  1.6
  """
  given = {'compute': compute, 'intra': intra, 'inter': inter, 'load': load}
  for name, seconds in given.items():
    _checks.number(f'layered_seconds: {name}', seconds)
  return compute + intra + max(inter, load)


def overlapped_seconds(period: int, *, compute: float, communicate: float) -> float:
  """Seconds of a round whose mean is used a round later: `max(period compute, communicate)`.

  Nobody waits where `communicate <= period compute`; used at once, it takes their sum.
  Reference: Wang, Liang, Joshi, Overlap Local-SGD, 2020, arXiv 2002.09539.

  Args:
    period: local steps a round.
    compute: seconds of a local step.
    communicate: seconds of a mean.

  >>> overlapped_seconds(4, compute=0.5, communicate=1.5)
  2.0
  """
  period = _checks.whole_number('overlapped_seconds: period', period)
  compute = _checks.number('overlapped_seconds: compute', compute)
  return max(period * compute, _checks.number('overlapped_seconds: communicate', communicate))


def tap_throughput(workers: int, *, gradient: float, prox: float, add: float) -> float:
  """Updates a second of TAP-SGD, whose server does the proximal step: `min(p / g, 1 / (prox + a))`.

  Args:
    workers: p.
    gradient: g, seconds of a gradient.
    prox: seconds of a proximal step.
    add: a, seconds of adding an update at the server.

  >>> tap_throughput(64, gradient=1.0, prox=0.24, add=0.01)
  4.0
  """
  gradient, prox, add = _seconds('tap_throughput', workers, gradient, prox, add)
  return min(workers / gradient, 1 / (prox + add))


def dap_throughput(workers: int, *, gradient: float, prox: float, add: float) -> float:
  """Updates a second of DAP-SGD, whose workers do the proximal step: `min(p / (g + prox), 1 / a)`.

  With few workers it is less than that of TAP-SGD.
  Reference: Li, Xu, Zhong, Ling, Make workers work harder, 2016, arXiv 1605.06619.

  Args:
    workers: p.
    gradient: g, seconds of a gradient.
    prox: seconds of a proximal step.
    add: a, seconds of adding an update at the server.

  >>> dap_throughput(64, gradient=1.0, prox=0.25, add=0.01)
  51.2
  """
  gradient, prox, add = _seconds('dap_throughput', workers, gradient, prox, add)
  return min(workers / (gradient + prox), 1 / add)


def _seconds(
  where: str, workers: int, gradient: float, prox: float, add: float
) -> tuple[float, float, float]:
  _checks.whole_number(f'{where}: workers', workers)
  return (
    _checks.number(f'{where}: gradient', gradient, strict=True),
    _checks.number(f'{where}: prox', prox),
    _checks.number(f'{where}: add', add, strict=True),
  )
