"""Methods in which every worker applies the same reduced update."""

from __future__ import annotations

import optax

from jax_dsgd import compressors, memories, transforms


def allreduce_sgd(
  learning_rate: optax.ScalarOrSchedule,
  *,
  axis_name: str,
  momentum: float | None = None,
  nesterov: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """Synchronous data-parallel SGD: `x <- x - lr mean_w g_w`, the baseline of everything here.

  Args:
    learning_rate: a float, or a schedule of the step.
    axis_name: the workers' axis.
    momentum: of heavy-ball momentum on the mean gradient, if any.
    nesterov: whether the momentum looks ahead.

  Returns:
    A transform. Sends every gradient entry once a step in its own dtype.

  >>> tx = allreduce_sgd(0.1, axis_name='workers', momentum=0.9)
  """
  return optax.chain(
    transforms.mean_over(axis_name), optax.sgd(learning_rate, momentum=momentum, nesterov=nesterov)
  )


def topk_sgd(
  learning_rate: optax.ScalarOrSchedule,
  fraction: float = 0.01,
  *,
  axis_name: str,
  momentum: float | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Top-k SGD with error feedback.

      acc_w = e_w + lr g_w;   c_w = top_k(acc_w);   e_w <- acc_w - c_w;   x <- x - mean_w c_w

  With y the iterate that is given every update at once, `x - y = mean_w e_w` holds at every step.

  Args:
    learning_rate: a float, or a schedule of the step; the memory holds updates, so a change of the
      rate leaves it as it is.
    fraction: entries sent of each leaf.
    axis_name: the workers' axis.
    momentum: of local heavy-ball momentum before compression, if any (not in the paper).

  Returns:
    A transform. Sends `fraction n` values of 4 bytes and as many places of 2 (4 for leaves over
    65,536 entries) a step.

  >>> tx = topk_sgd(0.1, 0.01, axis_name='workers')

  Reference: Alistarh, Hoefler, Johansson, Khirirat, Konstantinov, Renggli, "The Convergence of
    Sparsified Gradient Methods", arXiv 1809.10505. There k is 0.1 to 1 %, with a warm-up of k and
    the rate in practice; here k is per leaf and constant.
  """
  return optax.chain(
    optax.sgd(learning_rate, momentum=momentum),
    transforms.compressed_mean(
      compressors.top_k(fraction), axis_name=axis_name, memory=memories.residual()
    ),
  )


def ef_sign_sgd(
  learning_rate: optax.ScalarOrSchedule, *, axis_name: str, momentum: float | None = None
) -> optax.GradientTransformationExtraArgs:
  """Sign SGD with error feedback.

      p_w = lr g_w + e_w;   c_w = mean|p_w| sign(p_w);   e_w <- p_w - c_w;   x <- x - mean_w c_w

  Args:
    learning_rate: a float, or a schedule of the step; the memory holds updates.
    axis_name: the workers' axis.
    momentum: of local heavy-ball momentum before compression, if any.

  Returns:
    A transform. Sends a bit an entry and 4 bytes a leaf a step.

  >>> tx = ef_sign_sgd(0.1, axis_name='workers')

  Reference: Karimireddy, Rebjock, Stich, Jaggi, "Error Feedback Fixes SignSGD and other Gradient
    Compression Schemes", arXiv 1901.09847, in its distributed form with the mean of all messages.
  """
  return optax.chain(
    optax.sgd(learning_rate, momentum=momentum),
    transforms.compressed_mean(
      compressors.scaled_sign(), axis_name=axis_name, memory=memories.residual()
    ),
  )


def signum(
  learning_rate: optax.ScalarOrSchedule, *, axis_name: str, momentum: float = 0.9
) -> optax.GradientTransformationExtraArgs:
  """Sign momentum SGD with majority vote.

      m_w <- b m_w + (1 - b) g_w;   x <- x - lr sign(sum_w sign(m_w))

  The vote is not the sign of the mean: on skewed data the majority overrules a minority with large
  gradients, and the method may settle away from the optimum. Ties do not move.

  Args:
    learning_rate: the length of every entry's step; a float, or a schedule of the step.
    axis_name: the workers' axis.
    momentum: b, in [0, 1).

  Returns:
    A transform. Sends a bit an entry and 4 bytes a leaf a step.

  >>> tx = signum(1e-3, axis_name='workers')

  Reference: Bernstein, Zhao, Azizzadenesheli, Anandkumar, "signSGD with Majority Vote is
    Communication Efficient And Fault Tolerant", arXiv 1810.05291; without its weight decay.
  """
  return optax.chain(
    optax.ema(momentum, debias=False),
    transforms.vote_majority(axis_name=axis_name),
    optax.scale_by_learning_rate(learning_rate),
  )


def power_sgd(
  learning_rate: optax.ScalarOrSchedule,
  rank: transforms.Rank = 4,
  *,
  axis_name: str,
  momentum: float | None = 0.9,
  seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """PowerSGD: low-rank gradients by one warm-started power iteration a step, with error feedback.

      D_w = g_w + e_w;   P = orth(mean D_w Q);   Q <- mean D_w^T P;   e_w <- D_w - P (D_w^T P)^T
      m <- b m + P Q^T;   x <- x - lr m

  Args:
    learning_rate: a float, or a schedule of the step; the memory holds gradients.
    rank: of the approximation, or a function from a leaf's path and shape to it; vectors and small
      matrices are sent whole.
    axis_name: the workers' axis.
    momentum: b, after the mean.
    seed: of the first Q.

  Returns:
    A transform. Sends `4 rank (n + m)` bytes a matrix [n, m] and whole vectors, in two all-reduces.

  >>> tx = power_sgd(0.1, 2, axis_name='workers')

  Reference: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
    Distributed Optimization", arXiv 1905.13727. There the step is `lr (P Q^T + m)`.
  """
  return optax.chain(
    transforms.low_rank_mean(rank, axis_name=axis_name, memory=memories.residual(), seed=seed),
    optax.sgd(learning_rate, momentum=momentum),
  )
