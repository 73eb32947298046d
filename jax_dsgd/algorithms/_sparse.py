"""Sparse methods with a memory of their own: lazy senders, and velocities that wait."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax

from jax_dsgd import compressors, memories, transforms


def sasg(
  learning_rate: optax.ScalarOrSchedule,
  fraction: float = 0.01,
  *,
  axis_name: str,
  weight: float,
  window: int = 10,
) -> optax.GradientTransformationExtraArgs:
  """SASG: a worker sends its top-k entries only when its gradient has changed enough.

      sends if |g_w(x; b) - g_w(x_stale; b)|^2 >= (alpha / W^2) sum_{d <= D} |x_{t+1-d} - x_{t-d}|^2
      or after D silent steps
      then p_w = lr g_w + e_w;   s_w <- top_k(p_w);   e_w <- p_w - s_w
      x <- x - mean_w s_w, with the last s_w of those that are silent

  Args:
    learning_rate: a float, or a schedule of the step; the memory and the slots hold updates.
    fraction: entries sent of each leaf; 1 is LASG.
    axis_name: the workers' axis.
    weight: alpha; 0 sends at every step. It compares a change of gradients with a way gone, so it
      grows with W^2 / D times a curvature squared; the paper has O(1 / lr) (not checked).
    window: D, steps that the trigger looks back, and the longest silence.

  Returns:
    A transform that needs `params` and the extra argument `grad_fn`; it evaluates a second gradient
    a step. Sends, when it sends, `fraction n` values of 4 bytes and places of 2 (4 for leaves over
    65,536 entries); see `transforms.lazy_mean` for what one SPMD program moves. State: 8 bytes an
    entry and one payload.

  >>> tx = sasg(0.1, 0.01, axis_name='workers', weight=10.0)

  Reference: Deng, Li, Sun, Lu, "Communication-Efficient Distributed Learning via Sparse and
    Adaptive Stochastic Gradient", arXiv 2112.04088, with the trigger LASG-WK2 (recalled from Chen,
    Sun, Yin, arXiv 2002.11360, and not re-checked: constant alpha; here a tie sends).
  """
  mean = transforms.lazy_mean(
    compressors.top_k(fraction), axis_name=axis_name, weight=weight, window=window
  )
  return optax.chain(optax.sgd(learning_rate), mean)


def dgs_sgd(
  learning_rate: optax.ScalarOrSchedule,
  fraction: float = 0.01,
  *,
  axis_name: str,
  momentum: float = 0.7,
) -> optax.GradientTransformationExtraArgs:
  """The worker's side of DGS, in a synchronous mean: sparsification-aware momentum.

      u_w <- m u_w + lr g_w;   c_w = top_k(u_w);   x <- x - mean_w c_w
      u_w <- u_w / m where unsent

  At density 1 and one worker it is heavy-ball momentum. On heterogeneous data it settles away from
  the optimum: what is sent often counts up to 1 / (1 - m) times what waits. The paper's
  asynchronous server, which
  sparsifies its answers too, is not here.

  Args:
    learning_rate: a float, or a schedule of the step; the memory holds updates.
    fraction: entries sent of each leaf.
    axis_name: the workers' axis.
    momentum: m, in (0, 1).

  Returns:
    A transform. Sends `fraction n` values of 4 bytes and places of 2 (4 for leaves over 65,536
    entries) a step. State: 4 bytes an entry, momentum included.

  >>> tx = dgs_sgd(0.1, 0.01, axis_name='workers')

  Reference: Yan, Xiao, Chen, Zhou, Wu, arXiv 1910.10929 (m about 0.7 and 1 % there).
  """
  mean = transforms.compressed_mean(
    compressors.top_k(fraction), axis_name=axis_name, memory=memories.momentum_residual(momentum)
  )
  return optax.chain(optax.scale_by_learning_rate(learning_rate), mean)


def dgc_sgd(
  learning_rate: optax.ScalarOrSchedule,
  fraction: float = 0.001,
  *,
  axis_name: str,
  momentum: float = 0.9,
  warmup: Sequence[float] = (),
  warmup_steps: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """Deep gradient compression: momentum correction, momentum factor masking, a warm-up of k.

      v_w <- m v_w + lr g_w;   a_w <- a_w + v_w;   c_w = top_k(a_w);   x <- x - mean_w c_w
      a_w and v_w <- 0 where sent

  On heterogeneous data it settles away from the optimum: what is sent often loses its momentum,
  what waits keeps it.

  Args:
    learning_rate: a float, or a schedule of the step; memories hold updates.
    fraction: entries sent of each leaf after the warm-up.
    axis_name: the workers' axis.
    momentum: m, in (0, 1).
    warmup: fractions before that, of equal duration; the paper has (0.25, 0.0625, 0.015625, 0.004),
      an epoch each.
    warmup_steps: steps of the whole warm-up.

  Returns:
    A transform. Sends the fraction's values of 4 bytes and places of 2 (4 for leaves over 65,536
    entries) a step. State: 8 bytes an entry, momentum included.

  Raises:
    ValueError: warm-up fractions without steps, or steps without fractions.

  >>> tx = dgc_sgd(0.1, 0.001, axis_name='workers', warmup=(0.25, 0.06), warmup_steps=200)

  Reference: Lin, Han, Mao, Wang, Dally, "Deep Gradient Compression", arXiv 1712.01887; chain
    `optax.clip_by_global_norm` before it for its local clipping.
  """
  if bool(warmup) != (warmup_steps > 0):
    raise ValueError(
      f'dgc_sgd got warmup={warmup!r} and warmup_steps={warmup_steps!r}; accepted are both or '
      'neither'
    )

  def stage(count: jax.Array) -> jax.Array:
    done = count * len(warmup) // max(warmup_steps, 1)
    return jnp.where(count < warmup_steps, done, len(warmup))

  means = [
    transforms.compressed_mean(
      compressors.top_k(f), axis_name=axis_name, memory=memories.momentum_correction(momentum)
    )
    for f in (*warmup, fraction)
  ]
  mean = transforms.stages(means, stage) if warmup else means[0]
  return optax.chain(optax.scale_by_learning_rate(learning_rate), mean)
