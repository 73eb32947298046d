"""Methods without a center whose limit does not depend on how data lie on workers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import optax

from jax_dsgd import topologies, transforms


def gradient_tracking(
  learning_rate: optax.ScalarOrSchedule, topology: topologies.Topology, *, axis_name: str
) -> optax.GradientTransformationExtraArgs:
  """Gradient tracking: neighbours improve each worker's estimate of the mean gradient.

      x_i <- sum_j W[i, j] x_j - lr y_i;   y_i <- sum_j W[i, j] y_j + g_i' - g_i

  Args:
    learning_rate: a float, or a schedule of the step.
    topology: W, doubly stochastic.
    axis_name: the workers' axis.

  Returns:
    A transform that needs `params`. Sends the model and y once to each neighbour a step. State: one
    float32 copy of the model.

  Raises:
    ValueError: a topology that is not doubly stochastic.

  >>> tx = gradient_tracking(0.1, topologies.ring(8), axis_name='workers')

  Reference: Di Lorenzo, Scutari, "NEXT", arXiv 1602.00591; Nedic, Olshevsky, Shi, arXiv 1607.03218.
  """
  return momentum_tracking(learning_rate, topology, axis_name=axis_name, momentum=0.0)


def momentum_tracking(
  learning_rate: optax.ScalarOrSchedule,
  topology: topologies.Topology,
  *,
  axis_name: str,
  momentum: float = 0.9,
) -> optax.GradientTransformationExtraArgs:
  """Momentum Tracking: heavy-ball momentum whose rate does not depend on how data lie on workers.

      u_i <- b u_i + g_i;   x_i <- sum_j W[i, j] x_j - lr (u_i - c_i)
      c_i <- sum_j W[i, j] (c_j - u_j) + u_i

  The mean over workers is heavy ball on the mean gradient, and sum_i c_i = 0.

  Args:
    learning_rate: a float, or a schedule of the step.
    topology: W, doubly stochastic.
    axis_name: the workers' axis.
    momentum: b, in [0, 1).

  Returns:
    A transform that needs `params`. Sends the model, and u - c in float32, once to each neighbour a
    step. State: u and c, 8 bytes an entry.

  Raises:
    ValueError: a topology that is not doubly stochastic.

  >>> tx = momentum_tracking(0.1, topologies.ring(8), axis_name='workers')

  Reference: Takezawa, Bao, Niwa, Sato, Yamada, "Momentum Tracking: Momentum Acceleration for
    Decentralized Deep Learning on Heterogeneous Data", arXiv 2209.15505. There c and u begin at
    (g_i - mean g) / (1 - b), by one all-reduce; here at 0. Both sum to 0.
  """
  _require_doubly('momentum_tracking', topology)
  mix = transforms.mix_neighbors(topology, axis_name=axis_name)
  return optax.chain(
    optax.trace(momentum) if momentum else optax.identity(),
    transforms.track_gradients(mix),
    optax.scale_by_learning_rate(learning_rate),
    transforms.before_step(mix),
  )


def exact_diffusion(
  learning_rate: optax.ScalarOrSchedule, topology: topologies.Topology, *, axis_name: str
) -> optax.GradientTransformationExtraArgs:
  """Exact diffusion, or D2: DSGD corrected by what the last mix changed.

      y_i <- x_i - lr g_i;   x_i <- sum_j W[i, j] (y_j + x_j - y_j of the last step)

  The mean over workers keeps what rounding adds to it: in float32 the limit moves away by up to
  1e-7 |x| / lr a step, which gradient tracking does not.

  Args:
    learning_rate: a float, or a schedule of the step.
    topology: W, symmetric, of period 1, with no eigenvalue below -1/3.
    axis_name: the workers' axis.

  Returns:
    A transform that needs `params`. Sends the model once to each neighbour a step. State: one copy
    of the model.

  Raises:
    ValueError: a topology that is not symmetric, varies in time or has a smaller eigenvalue.

  >>> tx = exact_diffusion(0.1, topologies.ring(8), axis_name='workers')

  Reference: Yuan, Ying, Zhao, Sayed, "Exact diffusion for distributed optimization and learning",
    arXiv 1702.05122 (with `(I + W) / 2`); Tang, Lian, Yan, Zhang, Liu, "D2", arXiv 1803.07068.
  """
  if not topology.symmetric or topology.period > 1:
    raise ValueError(
      f'exact_diffusion got topology {topology.name!r} of period {topology.period}; accepted are '
      'symmetric topologies that do not vary in time'
    )
  least = np.linalg.eigvalsh(topology.matrix())[0]
  if least < -1 / 3 - 1e-9:
    raise ValueError(
      f'exact_diffusion got topology {topology.name!r} with eigenvalue {least:.3f}; accepted are '
      'none below -1/3, as in (I + W) / 2'
    )
  return optax.chain(
    optax.sgd(learning_rate),
    transforms.correct_diffusion(),
    transforms.mix_neighbors(topology, axis_name=axis_name),
  )


def decent_lam(
  learning_rate: optax.ScalarOrSchedule,
  topology: topologies.Topology,
  *,
  axis_name: str,
  momentum: float = 0.9,
) -> optax.GradientTransformationExtraArgs:
  """DecentLaM: momentum on the whole way that a DSGD step goes, mixing included.

      d_i = x_i - sum_j W[i, j] (x_j - lr g_j);   m_i <- b m_i + d_i;   x_i <- x_i - m_i

  Momentum does not amplify the bias of DSGD, as it does in `dsgd(momentum=)`; the bias stays.

  Args:
    learning_rate: a float, or a schedule of the step.
    topology: W.
    axis_name: the workers' axis.
    momentum: b, in [0, 1).

  Returns:
    A transform that needs `params`. Sends the model once to each neighbour a step. State: m, one
    copy of the model.

  >>> tx = decent_lam(0.1, topologies.ring(8), axis_name='workers')

  Reference: Yuan, Chen, Huang, Zhang, Pan, Xu, Yin, "DecentLaM: Decentralized Momentum SGD for
    Large-batch Deep Training", arXiv 2104.11981.
  """
  mix = transforms.mix_neighbors(topology, axis_name=axis_name)
  return optax.chain(optax.scale_by_learning_rate(learning_rate), mix, optax.trace(momentum))


def qg_dsgdm(
  learning_rate: optax.ScalarOrSchedule,
  topology: topologies.Topology,
  *,
  axis_name: str,
  momentum: float = 0.9,
) -> optax.GradientTransformationExtraArgs:
  """Quasi-global momentum: DSGD with a momentum of the ways that mixing left.

      x' = mix(x - lr (g + b m));   m <- b m + (1 - b) (x - x') / lr

  Args:
    learning_rate: a float, or a schedule of the step.
    topology: W.
    axis_name: the workers' axis.
    momentum: b, in [0, 1).

  Returns:
    A transform that needs `params`. Sends the model once to each neighbour a step. State: m, 4
    bytes an entry.

  >>> tx = qg_dsgdm(0.1, topologies.ring(8), axis_name='workers')

  Reference: Lin, Karimireddy, Stich, Jaggi, "Quasi-Global Momentum: Accelerating Decentralized Deep
    Learning on Heterogeneous Data", arXiv 2102.04761.
  """
  mix = transforms.mix_neighbors(topology, axis_name=axis_name)
  return transforms.quasi_global_momentum(mix, learning_rate, momentum=momentum)


def lazy_dual_ascent(
  topology: topologies.Topology,
  *,
  axis_name: str,
  convexity: float,
  smoothness: float,
  inner_steps: int = 10,
  rounds: int = 1,
  lazy: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
  """Accelerated dual ascent with few inner steps and sends only of news (DLAG; MDLAG with rounds).

  Exact inner solutions and no laziness are SSDA, and MSDA with Chebyshev rounds. For strongly
  convex losses. A fixed number of warm-started inner steps is enough if it is not too small: tried
  on quadratics of condition 10, 5 need no more dual steps than exact solutions, 3 need 1.6 times as
  many and 2 diverge; of condition 100, 20 are enough and 10 diverge. Too much laziness diverges as
  well.

  Args:
    topology: W, symmetric, of period 1.
    axis_name: the workers' axis.
    convexity: m > 0, of every worker's loss.
    smoothness: of every worker's loss.
    inner_steps: gradients a dual step.
    rounds: rounds of Chebyshev gossip a dual step; about `1 / sqrt(gap)` for MSDA.
    lazy: see `transforms.ascend_dual`.

  Returns:
    A transform that needs `params` and `grad_fn`. Sends the model once to each neighbour a dual
    step, if there is news, and again in each further round. State: four float32 copies of it.

  Raises:
    ValueError: a topology that is not symmetric or varies in time, constants out of range.

  >>> ring = topologies.ring(8)
  >>> tx = lazy_dual_ascent(ring, axis_name='workers', convexity=1.0, smoothness=10.0)

  Reference: Liu, Sun, Yin, "Decentralized Learning with Lazy and Approximate Dual Gradients", arXiv
    2008.01748. Names and weights of the lazy rule were not checked against the paper.
  """
  weights: Sequence[float] = (1.0,) if rounds == 1 else transforms.chebyshev(topology, rounds)
  return transforms.ascend_dual(
    topology,
    axis_name=axis_name,
    convexity=convexity,
    smoothness=smoothness,
    inner_steps=inner_steps,
    rounds=weights,
    lazy=lazy,
  )


def _require_doubly(name: str, topology: topologies.Topology) -> None:
  if not topology.doubly_stochastic:
    raise ValueError(
      f'{name} got topology {topology.name!r}; accepted are doubly stochastic ones, which keep the '
      'mean over workers'
    )
