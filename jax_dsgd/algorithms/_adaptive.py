"""Adaptive methods in which every worker applies the same compressed mean."""

from __future__ import annotations

from collections.abc import Callable

import jax
import optax

from jax_dsgd import compressors, memories, transforms


def cd_adam(
  learning_rate: optax.ScalarOrSchedule,
  *,
  axis_name: str,
  compressor: compressors.Compressor | None = None,
  b1: float = 0.9,
  b2: float = 0.99,
  eps: float = 1e-8,
  seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """CD-Adam: AMSGrad on a gradient that went through Markov compression both ways.

      h_w <- h_w + C(g_w - h_w);   h = mean_w h_w;   q <- q + C(h - q)
      m <- b1 m + (1 - b1) q;   v <- b2 v + (1 - b2) q^2;   y <- max(y, v)
      x <- x - lr m / sqrt(y + eps)

  Differences vanish as training settles, so q tends to the mean gradient, which an adaptive step
  needs: error feedback sends bursts, whose squares stay in v.

  Args:
    learning_rate: a float, or a schedule of the step; memories hold gradients.
    axis_name: the workers' axis.
    compressor: C, contractive; `compressors.scaled_sign()` if None.
    b1: decay of m.
    b2: decay of v.
    eps: added under the root.
    seed: of random compressors.

  Returns:
    A transform. Sends a payload a step: with the sign, a bit an entry and 4 bytes a leaf. The
    server's answer, as large, is computed on every worker and not counted. State: 16 bytes an entry
    for memories and 12 for moments. No bias correction.

  Raises:
    ValueError: a compressor that is not contractive.

  >>> tx = cd_adam(1e-3, axis_name='workers')

  Reference: Wang, Lin, Chen, "Communication-Compressed Adaptive Gradient Method for Distributed
    Nonconvex Optimization", arXiv 2111.00705; defaults and recurrence as recalled, not re-checked.
  """
  compressor = compressors.scaled_sign() if compressor is None else compressor
  if compressor.delta is None:
    raise ValueError(
      f'cd_adam got compressor={compressor!r}; accepted are contractive compressors, which this '
      'one does not declare to be'
    )
  return optax.chain(
    transforms.compressed_mean(
      compressor, axis_name=axis_name, memory=memories.reference(), seed=seed
    ),
    transforms.recompress(compressor, memory=memories.reference(), seed=seed),
    optax.scale_by_amsgrad(
      b1, b2, eps=0.0, eps_root=eps, bias_correction_mu=False, bias_correction_nu=False
    ),
    optax.scale_by_learning_rate(learning_rate),
  )


def one_bit_adam(
  learning_rate: optax.ScalarOrSchedule,
  *,
  axis_name: str,
  refresh: Callable[[jax.Array], jax.Array],
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
) -> optax.GradientTransformationExtraArgs:
  """1-bit Adam: dense Adam at first, then a frozen variance and the sign of the momentum.

      refresh    g = mean_w g_w;   m <- b1 m + (1 - b1) g;   v <- b2 v + (1 - b2) g^2
      else       m_w = b1 m + (1 - b1) g_w;   m <- mean_w C(m_w + e_w);   e_w <- m_w + e_w - C(.)
      x <- x - lr m / (sqrt(v) + eps)

  Args:
    learning_rate: a float, or a schedule of the step.
    axis_name: the workers' axis.
    refresh: from the step (int32, from 0) to whether it is dense: `lambda t: t < warmup` for 1-bit
      Adam; true at steps further and further apart for a variance as in 0/1 Adam.
    b1: decay of m.
    b2: decay of v.
    eps: added to the root.

  Returns:
    A transform. Sends the gradient whole on dense steps, else a bit an entry and 4 bytes a leaf.
    State: 12 bytes an entry. No bias correction.

  >>> tx = one_bit_adam(1e-3, axis_name='workers', refresh=lambda step: step < 1000)

  Reference: Tang et al., "1-bit Adam", arXiv 2102.02888; Lu et al., "Maximizing Communication
    Efficiency for Large-scale Training via 0/1 Adam", arXiv 2202.06009, of which the local steps
    are not here. The way back is not compressed here.
  """
  adam = transforms.scale_by_frozen_adam(
    compressors.scaled_sign(), refresh, axis_name=axis_name, b1=b1, b2=b2, eps=eps
  )
  return optax.chain(adam, optax.scale_by_learning_rate(learning_rate))
