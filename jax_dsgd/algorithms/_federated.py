"""Methods with clients: some take part in a round, with weights by their examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_dsgd import collectives, transforms
from jax_dsgd.transforms import Period


def fed_avg(
  learning_rate: optax.ScalarOrSchedule,
  period: Period,
  *,
  axis_name: str,
  examples: Sequence[float] | None = None,
  client_fraction: float = 1.0,
  steps: Sequence[int] | None = None,
  seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """Federated averaging: drawn clients train alone, then the mean of their models by examples.

      S = max(C K, 1) clients drawn without replacement;   x_k = local steps of SGD from x
      x <- sum_{k in S} (n_k / n_S) x_k

  A client that was not drawn computes its local steps all the same (one program runs everywhere)
  but they weigh nothing, and it continues from the new average. Where there are many more clients
  than take part, let workers be the places in a round instead: give no examples, let the data of
  the drawn clients come in, and `control` with their weights (examples) and steps. With all
  clients, one step a round and full batches it is gradient descent on the weighted loss.

  Args:
    learning_rate: a float, or a schedule of the local step.
    period: local steps a round: E epochs of n_k / B batches each, of the largest client.
    axis_name: the clients' axis.
    examples: n_k, one positive number a client; None where all count alike, or `control` says.
    client_fraction: C, the share of clients drawn a round, in (0, 1].
    steps: local steps of each client, up to the period; None for the period, or where `control`
      says.
    seed: of the drawing.

  Returns:
    A transform that needs `params`. Sends the model once a round (the bytes of a client that was
    not drawn are counted too: in one program its zeros cross). State: one copy of the model.

  Raises:
    ValueError: examples that are not positive, a client fraction outside (0, 1], or below 1 without
      examples, steps that are not integers >= 0.

  >>> tx = fed_avg(0.1, 8, axis_name='workers', examples=[100, 300], client_fraction=0.5)

  Reference: McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-Efficient Learning of
    Deep Networks from Decentralized Data", arXiv 1602.05629.
  """
  mean = transforms.mean_over(axis_name, weights=_drawn(examples, client_fraction, seed))
  outer = optax.chain(mean, optax.sgd(1.0))
  tx = transforms.local_steps(optax.sgd(learning_rate), outer, period)
  return tx if steps is None else transforms.limit_local_steps(tx, steps, axis_name=axis_name)


def _drawn(
  examples: Sequence[float] | None, client_fraction: float, seed: int
) -> np.ndarray | Callable[[jax.Array], jax.Array] | None:
  """The weights of clients: a table, or a schedule from the round where some are drawn."""
  if not 0 < client_fraction <= 1:
    raise ValueError(
      f'fed_avg got client_fraction={client_fraction!r}; accepted are numbers in (0, 1]'
    )
  if examples is None:
    if client_fraction < 1:
      raise ValueError('fed_avg draws clients by their number: give examples, one a client')
    return None
  counts = np.asarray(examples, np.float32)
  if counts.ndim != 1 or not (counts > 0).all() or not np.isfinite(counts).all():
    raise ValueError(f'fed_avg got examples={examples!r}; accepted is one positive number a client')
  drawn = max(round(client_fraction * counts.size), 1)

  def weights(round_: jax.Array) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(seed), round_)
    place = jax.random.permutation(key, counts.size)
    return jnp.where(place < drawn, jnp.asarray(counts), 0)

  return counts if drawn == counts.size else weights


def fed_opt(
  learning_rate: optax.ScalarOrSchedule,
  outer: optax.GradientTransformation,
  period: Period,
  *,
  axis_name: str,
) -> optax.GradientTransformationExtraArgs:
  """FedOpt: local SGD, and any optimizer on the mean of the ways that clients went.

  `outer=optax.adam(1e-2, b2=0.99, eps=1e-3)` is FedAdam, `optax.yogi(...)` FedYogi,
  `optax.adagrad(...)` FedAdagrad, `optax.sgd(1.0, momentum=0.9)` FedAvgM.

  Args:
    learning_rate: of local SGD: a float, or a schedule of the local step.
    outer: the server's optimizer, on the pseudo-gradient; the paper's eps is 1e-3.
    period: local steps a round: an int, or a schedule of the round.
    axis_name: the clients' axis; `control` may weigh them.

  Returns:
    A transform that needs `params`. Sends the model once a round. State: a copy of the model and
    that of `outer`.

  >>> tx = fed_opt(0.1, optax.yogi(1e-2), 8, axis_name='workers')

  Reference: Reddi et al., "Adaptive Federated Optimization", arXiv 2003.00295; optax's Adam
    corrects its bias, the paper's does not.
  """
  chain = optax.chain(transforms.mean_over(axis_name), outer)
  return transforms.local_steps(optax.sgd(learning_rate), chain, period)


def fed_prox(
  learning_rate: optax.ScalarOrSchedule, period: Period, *, axis_name: str, strength: float
) -> optax.GradientTransformationExtraArgs:
  """FedProx: local SGD on `f_i(x) + strength/2 |x - x_0|^2`, x_0 where the round began.

  Args:
    learning_rate: of local SGD: a float, or a schedule of the local step.
    period: local steps a round: an int, or a schedule of the round.
    axis_name: the clients' axis; `control` may give them weights, and steps of their own.
    strength: mu >= 0; 0 is local SGD.

  Returns:
    A transform that needs `params`. Sends the model once a round. State: two copies of the model.

  >>> tx = fed_prox(0.1, 8, axis_name='workers', strength=0.1)

  Reference: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous
    Networks", arXiv 1812.06127.
  """
  inner = optax.chain(transforms.pull_to_start(strength), optax.sgd(learning_rate))
  outer = optax.chain(transforms.mean_over(axis_name), optax.sgd(1.0))
  return transforms.local_steps(inner, outer, period, at_meeting=transforms.renew_start)


def scaffold(
  learning_rate: optax.ScalarOrSchedule,
  period: Period,
  *,
  axis_name: str,
  outer_rate: float = 1.0,
) -> optax.GradientTransformationExtraArgs:
  """SCAFFOLD: local steps along `g - c_i + c`, which at the optimum is the mean gradient.

      c_i <- c_i - c + (x - y_i) / (K lr);   c <- mean over all clients;   x <- x + e mean (y_i - x)

  Args:
    learning_rate: lr, of local SGD: a float, or a schedule of the local step.
    period: K, local steps a round: an int, or a schedule of the round.
    axis_name: the clients' axis; `control` says which are active, the others keep their c_i.
    outer_rate: e.

  Returns:
    A transform that needs `params`. Sends the model twice a round. State: four copies of the model.

  >>> tx = scaffold(0.1, 8, axis_name='workers')

  Reference: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled
    Averaging for Federated Learning", arXiv 1910.06378, with option II and control variates that
    begin at 0.
  """
  inner = optax.chain(transforms.correct_drift(), optax.sgd(learning_rate))
  outer = optax.chain(transforms.mean_over(axis_name), optax.sgd(outer_rate))
  renew = transforms.renew_drift_correction(axis_name)
  return transforms.local_steps(inner, outer, period, at_meeting=renew)


def bvr_l_sgd(
  learning_rate: optax.ScalarOrSchedule,
  period: int,
  *,
  axis_name: str,
  stage: int,
  seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """BVR-L-SGD: local steps along recursive estimates of the mean gradient.

      a round begins   v <- v + mean_w [g_w(x) - g_w(x_start)]   (v = mean_w g_w(x) every stage)
      local step       u <- u + g_w(x_k) - g_w(x_k-1), from u = v;   x_k+1 = x_k - lr u
      a round ends     x <- x_K of one worker, drawn at random

  Where workers' Hessians agree, K local steps are K steps of gradient descent on the common loss,
  whatever their minima. Period 1 is minibatch SARAH.

  Args:
    learning_rate: a float, or a schedule of the local step.
    period: K, local steps a round.
    axis_name: the workers' axis.
    stage: rounds from one fresh mean gradient to the next; give large batches there.
    seed: of the drawing.

  Returns:
    A transform that needs `params` and `grad_fn`. Sends the model twice a round. State: five copies
    of the model.

  >>> tx = bvr_l_sgd(0.1, 16, axis_name='workers', stage=10)

  Reference: Murata, Suzuki, "Bias-Variance Reduced Local SGD for Less Heterogeneous Federated
    Learning", arXiv 2102.03198. Sizes of stages and rounds were not checked against the paper.
  """

  def one_of_all(round_: jax.Array) -> jax.Array:
    workers = collectives.worker_count(axis_name)
    chosen = jax.random.randint(jax.random.fold_in(jax.random.key(seed), round_), (), 0, workers)
    return (jnp.arange(workers) == chosen).astype(jnp.float32)

  estimate = transforms.recursive_gradients(axis_name=axis_name, stage=stage)
  inner = optax.chain(estimate, optax.sgd(learning_rate))
  outer = optax.chain(transforms.mean_over(axis_name, weights=one_of_all), optax.sgd(1.0))
  return transforms.local_steps(inner, outer, period, at_meeting=transforms.renew_recursion)
