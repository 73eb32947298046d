"""What theory says of stale gradients, to set beside what a simulation measures.

Along an eigenvector of curvature c a step of size eta with gradients of age d is
x_{k+1} = x_k - h x_{k-d}, h = eta c. All steps here are such products h.
Reference: Yu, Chen and Poor, Distributed SGD with staleness: a stochastic delay differential
equation based framework, 2024, arXiv 2406.11159; the closed forms for a fixed delay are derived
from its characteristic equation.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy import typing as npt

from jax_dsgd.simulation import _checks


class BestStep(NamedTuple):
  """The fastest step for a fixed delay.

  Attributes:
    step: h, the step size times the curvature.
    rate: the factor by which the error shrinks an update, in the long run.
  """

  step: float
  rate: float


class WorkerCount(NamedTuple):
  """How many workers are best.

  Attributes:
    count: the number with the greatest speed.
    speeds: [most] float64, -log of the error's factor during one computation of a gradient, with 1,
      2, ... workers; negative where the iteration diverges.
  """

  count: int
  speeds: np.ndarray


def stability_threshold(delay: int) -> float:
  """Returns 2 cos(delay pi / (2 delay + 1)): from this step on a fixed delay does not converge.

  Reference: Yu, Chen and Poor, Distributed SGD with staleness: a stochastic delay differential
  equation based framework, 2024, arXiv 2406.11159 (there in continuous time).

  Args:
    delay: the age of every gradient, in updates.

  >>> [round(stability_threshold(delay), 3) for delay in (0, 1, 2, 5)]
  [2.0, 1.0, 0.618, 0.285]
  """
  delay = _checks.whole_number('stability_threshold: delay', delay, least=0)
  return 2 * math.cos(delay * math.pi / (2 * delay + 1))


def best_step(delay: int) -> BestStep:
  """Returns h = delay^delay / (delay + 1)^(delay + 1) and its rate delay / (delay + 1).

  There two roots of the characteristic equation meet; any other h is slower.

  Args:
    delay: the age of every gradient, in updates.

  >>> best_step(1)
  BestStep(step=0.25, rate=0.5)
  """
  delay = _checks.whole_number('best_step: delay', delay, least=0)
  rate = delay / (delay + 1)
  return BestStep(rate**delay / (delay + 1), rate)


def contraction(step: float, law: npt.ArrayLike) -> float:
  """Returns the factor an update of the mean E[x], where each gradient draws its age from a law.

  It is the spectral radius of the companion matrix of x_{k+1} = x_k - h sum_d law[d] x_{k-d}; from
  1 on the iteration does not converge.

  Args:
    step: h >= 0.
    law: [ages] the probabilities of the ages 0, 1, ...

  >>> [round(contraction(0.25, np.eye(7)[delay]), 2) for delay in (0, 1, 2, 6)]
  [0.75, 0.5, 0.77, 1.0]
  """
  step, law = _checks.number('contraction: step', step), _law('contraction: law', law)
  companion = np.diag(np.ones(len(law) - 1), -1)
  companion[0] = -step * law
  companion[0, 0] += 1
  return float(np.abs(np.linalg.eigvals(companion)).max())


def dominant_root(
  gain: float, delays: npt.ArrayLike, *, law: npt.ArrayLike | None = None
) -> complex:
  """Returns the rightmost root of s + gain E[exp(-s D)] = 0, for a delay D in continuous time.

  Then dx/dt = -gain x(t - D) decays as exp(Re(s) t), and is stable if Re(s) < 0. The roots are the
  eigenvalues of the equation's generator on Chebyshev points, the rightmost of them polished by
  Newton's method.
  Reference: Yu, Chen and Poor, Distributed SGD with staleness: a stochastic delay differential
  equation based framework, 2024, arXiv 2406.11159; the root is found as in
  Breda, Maset and Vermiglio, Pseudospectral differencing methods for characteristic roots of delay
  differential equations, 2005.

  Args:
    gain: a = step size x curvature x updates a second, > 0.
    delays: [m] seconds, the values of D, or samples of it.
    law: [m] their probabilities; alike if None.

  >>> dominant_root(1.0, [0.0])
  (-1+0j)
  >>> [bool(dominant_root(gain, [2.0]).real < 0) for gain in (0.99 * np.pi / 4, 1.01 * np.pi / 4)]
  [True, False]
  """
  gain = _checks.number('dominant_root: gain', gain, strict=True)
  delays = np.atleast_1d(np.asarray(delays, float))
  if delays.ndim != 1 or not delays.size or not ((delays >= 0) & (delays < np.inf)).all():
    raise ValueError(
      f'dominant_root: delays must be a row of finite seconds >= 0, not {delays.tolist()}'
    )
  law = np.full(delays.size, 1 / delays.size) if law is None else law
  law = _law('dominant_root: law', law)
  if law.size != delays.size:
    raise ValueError(f'dominant_root: law must have {delays.size} entries, not {law.size}')
  if not delays.any():
    return complex(-gain)
  root = _rightmost(gain, delays, law)
  for _ in range(20):
    decay = law * np.exp(-root * delays)
    slope = 1 - gain * (decay @ delays)
    # Near a double root the slope vanishes, and the eigenvalue is as good as it gets.
    if abs(slope) < 1e-6:
      break
    root -= (root + gain * decay.sum()) / slope
  return complex(root.real, abs(root.imag))


def best_worker_count(step: float, most: int) -> WorkerCount:
  """Returns how many workers that take turns make an asynchronous server fastest.

  With M workers a gradient has the age M - 1 and M updates fall into the time of one computation,
  so the speed is -M log(contraction). More workers are not always faster: their updates are more,
  and older.

  Reference: Yu, Chen and Poor, Distributed SGD with staleness: a stochastic delay differential
  equation based framework, 2024, arXiv 2406.11159.

  Args:
    step: h > 0, the step size times the curvature.
    most: the greatest number considered.

  >>> best_worker_count(0.25, 8).count
  2
  """
  step = _checks.number('best_worker_count: step', step, strict=True)
  most = _checks.whole_number('best_worker_count: most', most, least=1)
  factors = [contraction(step, np.eye(count)[-1]) for count in range(1, most + 1)]
  # A factor of 0 is the exact solution after one update.
  with np.errstate(divide='ignore'):
    speeds = -np.arange(1, most + 1) * np.log(factors)
  return WorkerCount(int(np.argmax(speeds)) + 1, speeds)


def elastic_constant(
  views: npt.ArrayLike, iterate: npt.ArrayLike, *, learning_rate: float
) -> float:
  """Returns max_i |x - v_i|^2 / learning_rate^2, the B^2 that a step of elastic consistency shows.

  Where it stays bounded, SGD whose gradients are taken at the views v_i converges as if it were
  consistent, up to terms in B^2. Synchronous SGD has 0.
  Reference: Nadiradze, Markov, Chatterjee, Kungurtsev and Alistarh, Elastic consistency, 2020,
  arXiv 2001.05918.

  Args:
    views: [workers, ...] the point at which each worker takes its gradient.
    iterate: [...] the point x that stands for all: the server's, or the mean.
    learning_rate: > 0.

  >>> elastic_constant([[1.0, 0.0], [1.0, 3.0]], [1.0, 1.0], learning_rate=0.5)
  16.0
  """
  views, iterate = np.asarray(views, float), np.asarray(iterate, float)
  if not views.ndim or not len(views) or views.shape[1:] != iterate.shape:
    raise ValueError(
      f'elastic_constant: views must be [workers, *{iterate.shape}], not {views.shape}'
    )
  rate = _checks.number('elastic_constant: learning_rate', learning_rate, strict=True)
  distances = np.square(views - iterate).reshape(len(views), -1).sum(axis=1)
  return float(distances.max() / rate**2)


def error_feedback_bound(kept: float, gradient_norm: float) -> float:
  """Returns a B^2 that error feedback never exceeds.

  If |C(x) - x| <= sqrt(kept) |x| and |g| <= M, the memory e' = e + lr g - C(e + lr g) obeys
  |e'| <= sqrt(kept) (|e| + lr M), and so |e| / lr <= M sqrt(kept) / (1 - sqrt(kept)).

  Args:
    kept: the fraction of the squared norm that compression leaves out, 0 <= kept < 1.
    gradient_norm: M >= 0.

  >>> error_feedback_bound(0.25, 2.0)
  4.0
  """
  kept = _checks.number('error_feedback_bound: kept', kept)
  if kept >= 1:
    raise ValueError(f'error_feedback_bound: kept must be less than 1, not {kept}')
  norm = _checks.number('error_feedback_bound: gradient_norm', gradient_norm)
  return (norm * math.sqrt(kept) / (1 - math.sqrt(kept))) ** 2


def staleness_bound(missing: int, gradient_norm: float) -> float:
  """Returns the B^2 of views that lack at most `missing` updates lr g with |g| <= M.

  By the triangle inequality |x - v| <= lr missing M.

  Args:
    missing: how many updates a view may lack.
    gradient_norm: M >= 0.

  >>> staleness_bound(3, 2.0)
  36.0
  """
  missing = _checks.whole_number('staleness_bound: missing', missing, least=0)
  return (missing * _checks.number('staleness_bound: gradient_norm', gradient_norm)) ** 2


def _rightmost(gain: float, delays: np.ndarray, law: np.ndarray) -> complex:
  """The rightmost eigenvalue of the generator on Chebyshev points of [-max delay, 0]."""
  longest = delays.max()
  # Roots of interest lie within gain of 0, and a polynomial must follow exp of them.
  degree = int(min(200, 20 + 2 * gain * longest))
  angles = np.pi * np.arange(degree + 1) / degree
  points = np.cos(angles)  # from 1, the present, to -1, the longest delay
  signs = (-1.0) ** np.arange(degree + 1) * np.where(np.arange(degree + 1) % degree, 1, 2)
  apart = points[:, None] - points + np.eye(degree + 1)
  derivative = np.outer(signs, 1 / signs) / apart
  derivative -= np.diag(derivative.sum(axis=1))
  generator = derivative * (2 / longest)
  # The value at a delay, by barycentric interpolation; what lies on a point is that point's.
  offsets = (1 - 2 * delays / longest)[:, None] - points
  hit = np.abs(offsets) < 1e-14
  basis = (1 / signs) / np.where(hit, 1, offsets)
  basis = np.where(hit.any(axis=1, keepdims=True), hit, basis)
  generator[0] = -gain * (law @ (basis / basis.sum(axis=1, keepdims=True)))
  values = np.linalg.eigvals(generator)
  return complex(values[np.argmax(values.real)])


def _law(where: str, law: npt.ArrayLike) -> np.ndarray:
  law = np.asarray(law, float)
  if law.ndim != 1 or not law.size or not (law >= 0).all() or abs(law.sum() - 1) > 1e-9:
    raise ValueError(f'{where} must be a row of probabilities that sum to 1, not {law.tolist()}')
  return law
