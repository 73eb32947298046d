"""Decentralized optimization in the dual: each worker solves its own problem with a price."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_dsgd import collectives, compressors, exchange, memories, topologies


class DualState(NamedTuple):
  """The state of `ascend_dual`.

  Attributes:
    price: x, the dual variable; its sum over workers is 0.
    ahead: y, the dual variable before momentum.
    steps: squared lengths of the last dual steps, float32 [window].
    exchange: of the references, that is of what each worker sent last.
  """

  price: Any
  ahead: Any
  steps: jax.Array
  exchange: exchange.ExchangeState


def chebyshev(topology: topologies.Topology, rounds: int) -> tuple[float, ...]:
  """Weights with which `rounds` rounds of mixing do the work of their square.

      y_1 = W x,   y_{k+1} = y_{k-1} + weight_k (W y_k - y_{k-1})

  is the Chebyshev polynomial of W that is smallest where its eigenvalues are: on [-s, s] beside 1,
  with s = |lambda_2|. `1 / sqrt(gap)` rounds shrink differences by a constant.

  Args:
    topology: symmetric, of period 1.
    rounds: >= 1.

  Returns:
    One weight a round.

  Raises:
    ValueError: a topology that is not symmetric or varies in time, rounds below 1.

  >>> [round(a, 3) for a in chebyshev(topologies.ring(8), 3)]
  [1.0, 1.479, 1.315]

  Reference: Scaman, Bach, Bubeck, Lee, Massoulie, "Optimal Algorithms for Smooth and Strongly
    Convex Distributed Optimization in Networks", arXiv 1702.08704.
  """
  _require_symmetric('chebyshev', topology)
  if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
    raise ValueError(f'chebyshev got rounds={rounds!r}; accepted are integers >= 1')
  s = 1 - topology.spectral_gap()
  if s <= 0:
    return (1.0,) * rounds
  # weight_k = 2 T_k(1/s) / (s T_{k+1}(1/s)), by ratios: the polynomials themselves overflow.
  weights, ratio = [1.0], s  # T_0 / T_1
  for _ in range(rounds - 1):
    ratio = 1 / (2 / s - ratio)
    weights.append(2 * ratio / s)
  return tuple(weights)


def ascend_dual(
  topology: topologies.Topology,
  *,
  axis_name: str,
  convexity: float,
  smoothness: float,
  inner_steps: int,
  rounds: Sequence[float] = (1.0,),
  lazy: float = 0.0,
  window: int = 10,
) -> optax.GradientTransformationExtraArgs:
  """Accelerated dual ascent: workers solve their own problems, and prices make them agree.

      t_i = about argmin f_i(t) - <x_i, t>     `inner_steps` accelerated steps from the last t_i
      sends t_i if |t_i - s_i|^2 > lazy mean_d |x_d+1 - x_d|^2;  then s_i <- t_i
      y' = x - (m / l_max) sum_j L[i, j] s_j;   x = y' + b (y' - y);   y = y'

  with L = I - P(W), P the polynomial of `rounds`, l_max and l_2 its largest and its smallest
  positive eigenvalue, b = (q - 1) / (q + 1), q^2 = (smoothness / convexity) l_max / l_2.

  Args:
    topology: W, symmetric, of period 1.
    axis_name: the workers' axis.
    convexity: m > 0, of every f_i.
    smoothness: of every f_i.
    inner_steps: gradients a dual step. Too few diverge, see the reference.
    rounds: see `mix_neighbors`; `chebyshev(topology, k)` for k about `1 / sqrt(gap)` is MSDA.
    lazy: how much t_i may change unsent, relative to the last dual steps. 0 sends all changes.
    window: dual steps that the rule looks back.

  Returns:
    A transform that needs `params` (t_i) and `grad_fn`, and ignores `updates`. Sends the model once
    to each neighbour, if there is news, and again in each further round. State: 4 float32 copies.

  Raises:
    ValueError: a topology that is not symmetric or varies in time, constants that are not
      0 < convexity <= smoothness, inner_steps or window below 1, lazy < 0, no params, no grad_fn.

  Reference: Liu, Sun, Yin, "Decentralized Learning with Lazy and Approximate Dual Gradients", arXiv
    2008.01748, on SSDA and MSDA of Scaman et al., arXiv 1702.08704. The weights of the lazy rule
    were not checked against the paper: here all steps of the window count alike.
  """
  _require_symmetric('ascend_dual', topology)
  _require_constants(convexity, smoothness, inner_steps, window, lazy)
  largest, smallest = _spectrum(topology, rounds)
  step = convexity / largest
  q = math.sqrt(smoothness / convexity * largest / smallest)
  momentum = (q - 1) / (q + 1)
  memory = memories.reference()
  channel = exchange.mix_of_neighbors(
    topology, compressors.identity(), axis_name=axis_name, rounds=rounds
  )
  root = math.sqrt(smoothness / convexity)
  solver = optax.sgd(1 / smoothness, momentum=(root - 1) / (root + 1), nesterov=True)

  def init(params: optax.Params) -> DualState:
    here = collectives.crossing(params)
    price, ahead = (jax.tree.map(jnp.zeros_like, collectives.widened(here)) for _ in range(2))
    steps = collectives.vary_with(jnp.zeros(window), params)
    return DualState(
      price, ahead, steps, exchange.init(params, memory=memory, channel=channel, seed=0)
    )

  def update(
    updates: Any, state: Any, params: Any = None, *, grad_fn: Any = None, **extra: Any
  ) -> tuple[Any, DualState]:
    if params is None or grad_fn is None:
      raise ValueError(
        'ascend_dual solves an inner problem: call update(updates, state, params, grad_fn=grad_fn)'
      )
    start = collectives.crossing(params)
    collectives.require_varying(start, axis_name)

    slope = lambda t: jax.tree.map(  # noqa: E731
      lambda g, x: (g - x).astype(g.dtype),
      collectives.crossing(grad_fn(collectives.fill(t, params))),
      state.price,
    )
    t = _descended(start, slope, solver, inner_steps)
    limit = lazy * jnp.mean(state.steps)
    own, received, sent = exchange.send(
      t, state.exchange, memory=memory, channel=channel, trigger=lambda squared, _: squared > limit
    )
    ahead = jax.tree.map(lambda x, s, r: x - step * (s - r), state.price, own, received)
    price = jax.tree.map(lambda y, old: y + momentum * (y - old), ahead, state.ahead)
    change = [jnp.sum((a - b) ** 2) for a, b in zip(*map(jax.tree.leaves, (price, state.price)))]  # noqa: B905
    place = state.exchange.count % window
    after = DualState(price, ahead, state.steps.at[place].set(sum(change, jnp.zeros(()))), sent)
    way = jax.tree.map(jnp.subtract, t, start)
    return collectives.fill(way, updates), after

  return optax.GradientTransformationExtraArgs(init, update)


def _descended(
  start: Any, slope: Callable[[Any], Any], solver: optax.GradientTransformation, steps: int
) -> Any:
  def descend(carry: Any, _: Any) -> Any:
    t, inner = carry
    way, inner = solver.update(slope(t), inner)
    return (optax.apply_updates(t, way), inner), None

  return jax.lax.scan(descend, (start, solver.init(start)), None, length=steps)[0][0]


def _spectrum(topology: topologies.Topology, rounds: Sequence[float]) -> tuple[float, float]:
  """The largest and smallest positive eigenvalue of I - P(W); 1 and 1 where P(W) is the mean."""
  w = np.linalg.eigvalsh(topology.matrix())[:-1]  # all but that of the mean, which is 1
  before, mixed = np.ones_like(w), w
  for weight in rounds[1:]:
    before, mixed = mixed, before + weight * (w * mixed - before)
  return (float(np.max(1 - mixed)), float(np.min(1 - mixed))) if w.size else (1.0, 1.0)


def _require_symmetric(name: str, topology: topologies.Topology) -> None:
  topology.require_mixing()
  if not topology.symmetric or topology.period > 1:
    raise ValueError(
      f'{name} got topology {topology.name!r} of period {topology.period}; accepted are symmetric '
      'topologies that do not vary in time'
    )


def _require_constants(
  convexity: float, smoothness: float, inner_steps: int, window: int, lazy: float
) -> None:
  if not 0 < convexity <= smoothness:
    raise ValueError(
      f'ascend_dual got convexity={convexity!r}, smoothness={smoothness!r}; accepted are '
      '0 < convexity <= smoothness'
    )
  for name, value in (('inner_steps', inner_steps), ('window', window)):
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
      raise ValueError(f'ascend_dual got {name}={value!r}; accepted are integers >= 1')
  if not lazy >= 0:
    raise ValueError(f'ascend_dual got lazy={lazy!r}; accepted are numbers >= 0')
