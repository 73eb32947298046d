"""Methods in which every worker applies the same compressed mean, by what they remember."""

from __future__ import annotations

from typing import Any

import optax

from jax_dsgd import compressors, memories, transforms


def saef_sgd(
  learning_rate: optax.ScalarOrSchedule,
  compressor: compressors.Compressor,
  *,
  axis_name: str,
  step_ahead: float = 1.0,
  average_every: int | None = None,
  momentum: float | None = None,
  server_compressor: compressors.Compressor | None = None,
  seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """Step-ahead error feedback: gradients are taken where the model would be without compression.

      z_w = x + a e_w;   p_w = e_w - lr m(g_w(z_w));   c_w = C(p_w);   e_w <- p_w - c_w
      x <- x + mean_w c_w;   every p steps e_w <- mean_w e_w

  With one worker and a = 1, x + e is exactly uncompressed SGD. The gain shows as the rate decays:
  at a constant one, x itself stays mean_w e_w away. Two-way, the mean goes through a compressor and
  a residual s of the server's:

      b = C'(mean_w c_w + s);   s <- mean_w c_w + s - b;   x <- x + b

  Args:
    learning_rate: a float, or a schedule of the step; memories hold updates.
    compressor: C, a contractive wire format of each leaf.
    axis_name: the workers' axis.
    step_ahead: a, in [0, 1]; 0 is plain error feedback.
    average_every: p, steps between means of the residuals; None for never.
    momentum: of local heavy-ball momentum before compression, if any.
    server_compressor: C', for the way back; None sends it whole.
    seed: of random compressors.

  Returns:
    A transform that needs `params` and the extra argument `grad_fn`. Sends a payload a step and,
    every p steps, 4 bytes an entry; the server's answer is computed on every worker and not
    counted. State: 4 bytes an entry for e, and as many for s and the momentum where there are such.

  >>> tx = saef_sgd(0.1, compressors.scaled_sign(), axis_name='workers', average_every=20)

  Reference: Xu, Huo, Huang, "Step-Ahead Error Feedback for Distributed Training with Compressed
    Gradient", arXiv 2008.05823. The official code averages every 20 steps on ImageNet and uses
    momentum 0.9; a between 0 and 1 is from later work. A weight decay would act at x here, at z
    there.
  """
  tx = optax.chain(
    optax.sgd(learning_rate, momentum=momentum),
    transforms.compressed_mean(
      compressor, axis_name=axis_name, memory=memories.residual(), seed=seed
    ),
  )
  if average_every is not None:
    tx = transforms.average_residual(tx, average_every, axis_name=axis_name)
  tx = transforms.step_ahead(tx, step_ahead)
  if server_compressor is None:
    return tx
  answer = transforms.recompress(server_compressor, memory=memories.residual(), seed=seed)
  return optax.chain(tx, answer)


def d_qsgd(
  learning_rate: optax.ScalarOrSchedule,
  compressor: compressors.Compressor,
  *,
  axis_name: str,
  momentum: float | None = None,
  seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """Distributed quantised SGD: `x <- x - lr mean_w Q(g_w)` with an unbiased Q.

  The noise of Q is relative to each g_w. On heterogeneous data these are not zero at the optimum,
  and a constant rate stays away from it, in proportion to omega and to their size. The exception is
  `random_k`, whose places all workers share: it is linear, and so sees only the mean gradient.

  Args:
    learning_rate: a float, or a schedule of the step.
    compressor: Q, an unbiased wire format of each leaf.
    axis_name: the workers' axis.
    momentum: of heavy-ball momentum on the mean, if any.
    seed: of random compressors.

  Returns:
    A transform. Sends a payload a step. State: none but the momentum.

  Raises:
    ValueError: a compressor that is not unbiased.

  >>> tx = d_qsgd(0.1, compressors.qsgd(7), axis_name='workers')

  Reference: Alistarh et al., arXiv 1610.02132; as compared in Stich, "On Communication Compression
    for Distributed Optimization on Heterogeneous Data", arXiv 2009.02388.
  """
  _require('d_qsgd', compressor, 'unbiased', compressor.omega)
  mean = transforms.compressed_mean(
    compressor, axis_name=axis_name, memory=memories.none(), seed=seed
  )
  return optax.chain(mean, optax.sgd(learning_rate, momentum=momentum))


def d_ef_sgd(
  learning_rate: optax.ScalarOrSchedule,
  compressor: compressors.Compressor,
  *,
  axis_name: str,
  momentum: float | None = None,
  seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """Distributed SGD with error feedback on each worker.

      p_w = e_w + lr g_w;   c_w = C(p_w);   e_w <- p_w - c_w;   x <- x - mean_w c_w

  On heterogeneous data it is far less affected than `d_qsgd`, yet a constant rate stays away from
  the optimum.

  Args:
    learning_rate: a float, or a schedule of the step; the memory holds updates.
    compressor: C, a contractive wire format of each leaf.
    axis_name: the workers' axis.
    momentum: of local heavy-ball momentum before compression, if any.
    seed: of random compressors.

  Returns:
    A transform. Sends a payload a step. State: 4 bytes an entry.

  Raises:
    ValueError: a compressor that is unbiased and not contractive.

  >>> tx = d_ef_sgd(0.1, compressors.top_k(0.1), axis_name='workers')

  Reference: Stich, "On Communication Compression for Distributed Optimization on Heterogeneous
    Data", arXiv 2009.02388.
  """
  mean = transforms.compressed_mean(
    compressor, axis_name=axis_name, memory=memories.residual(), seed=seed
  )
  return optax.chain(optax.sgd(learning_rate, momentum=momentum), mean)


def linear_ef_sgd(
  learning_rate: optax.ScalarOrSchedule,
  fraction: float = 0.1,
  *,
  axis_name: str,
  momentum: float | None = None,
  seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """Error feedback with a linear compressor: entries at places that all workers draw alike.

      mean_w C(p_w) = C(mean_w p_w),   so x moves as one worker with the mean gradient would

  Heterogeneity of the data does not matter: at the optimum the mean gradient is zero.

  Args:
    learning_rate: a float, or a schedule of the step; the memory holds updates.
    fraction: entries sent of each leaf.
    axis_name: the workers' axis.
    momentum: of local heavy-ball momentum before compression, if any.
    seed: of the places.

  Returns:
    A transform. Sends `4 fraction n` bytes a step, in one all-reduce. State: 4 bytes an entry.

  >>> tx = linear_ef_sgd(0.1, 0.1, axis_name='workers')

  Reference: Stich, "On Communication Compression for Distributed Optimization on Heterogeneous
    Data", arXiv 2009.02388.
  """
  return d_ef_sgd(
    learning_rate,
    compressors.random_k(fraction),
    axis_name=axis_name,
    momentum=momentum,
    seed=seed,
  )


def diana(
  learning_rate: optax.ScalarOrSchedule,
  compressor: compressors.Compressor,
  *,
  axis_name: str,
  memory_step: float | None = None,
  momentum: float | None = None,
  seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """DIANA: quantised differences to a copy of each worker's gradient that is learned.

      c_w = Q(g_w - h_w);   x <- x - lr mean_w (h_w + c_w);   h_w <- h_w + a c_w

  At the optimum h_w is g_w, nothing is left to quantise, and a constant rate converges whatever the
  data.

  Args:
    learning_rate: a float, or a schedule of the step; memories hold gradients.
    compressor: Q, an unbiased wire format of each leaf.
    axis_name: the workers' axis.
    memory_step: a, in (0, 1]; None for 1 / (1 + omega) of each leaf.
    momentum: of heavy-ball momentum on what arrives, if any.
    seed: of random compressors.

  Returns:
    A transform. Sends a payload a step. State: 8 bytes an entry.

  Raises:
    ValueError: a compressor that is not unbiased, a step outside (0, 1].

  >>> tx = diana(0.1, compressors.random_k(0.1, unbiased=True), axis_name='workers')

  Reference: Mishchenko, Gorbunov, Takac, Richtarik, arXiv 1901.09269; the difference method in
    Stich, "On Communication Compression for Distributed Optimization on Heterogeneous Data", arXiv
    2009.02388, whose exact form was not checked.
  """
  omega = _require('diana', compressor, 'unbiased', compressor.omega)
  step = (lambda n: 1 / (1 + omega(n))) if memory_step is None else memory_step
  mean = transforms.compressed_mean(
    compressor, axis_name=axis_name, memory=memories.reference(step=step), seed=seed
  )
  return optax.chain(mean, optax.sgd(learning_rate, momentum=momentum))


def ef21_sgd(
  learning_rate: optax.ScalarOrSchedule,
  compressor: compressors.Compressor,
  *,
  axis_name: str,
  seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """EF21: `h_w <- h_w + C(g_w - h_w);  x <- x - lr mean_w h_w` with a contractive C.

  With exact gradients a constant rate converges whatever the data; noise of stochastic gradients
  is amplified by 1 / delta, see `ef21_momentum_sgd`.

  Args:
    learning_rate: a float, or a schedule of the step; memories hold gradients.
    compressor: C, a contractive wire format of each leaf.
    axis_name: the workers' axis.
    seed: of random compressors.

  Returns:
    A transform. Sends a payload a step. State: 8 bytes an entry.

  Raises:
    ValueError: a compressor that is not contractive.

  >>> tx = ef21_sgd(0.1, compressors.top_k(0.1), axis_name='workers')

  Reference: Richtarik, Sokolov, Fatkhullin, "EF21", arXiv 2106.05203, with copies that begin at 0.
  """
  return ef21_momentum_sgd(learning_rate, compressor, axis_name=axis_name, momentum=0.0, seed=seed)


def ef21_momentum_sgd(
  learning_rate: optax.ScalarOrSchedule,
  compressor: compressors.Compressor,
  *,
  axis_name: str,
  momentum: float = 0.9,
  seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """EF21 with momentum: each worker averages its stochastic gradients over time, then compresses.

      v_w <- m v_w + (1 - m) g_w;   h_w <- h_w + C(v_w - h_w);   x <- x - lr mean_w h_w

  Args:
    learning_rate: a float, or a schedule of the step; memories hold gradients.
    compressor: C, a contractive wire format of each leaf.
    axis_name: the workers' axis.
    momentum: m, in [0, 1).
    seed: of random compressors.

  Returns:
    A transform. Sends a payload a step. State: 8 bytes an entry, and 4 for v.

  Raises:
    ValueError: a compressor that is not contractive.

  >>> tx = ef21_momentum_sgd(0.1, compressors.top_k(0.1), axis_name='workers')

  Reference: Fatkhullin, Tyurin, Richtarik, "Momentum Provably Improves Error Feedback!", arXiv
    2305.15155, with v and the copies that begin at 0.
  """
  _require('ef21', compressor, 'contractive', compressor.delta)
  mean = transforms.compressed_mean(
    compressor, axis_name=axis_name, memory=memories.reference(), seed=seed
  )
  average = [optax.ema(momentum, debias=False)] if momentum else []
  return optax.chain(*average, mean, optax.scale_by_learning_rate(learning_rate))


def _require(name: str, compressor: compressors.Compressor, kind: str, constant: Any) -> Any:
  if constant is None:
    raise ValueError(
      f'{name} got compressor={compressor!r}; accepted are {kind} compressors, which this one does '
      'not declare to be'
    )
  return constant
