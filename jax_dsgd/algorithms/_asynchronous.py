"""Methods of asynchronous workers and a parameter server."""

from __future__ import annotations

import optax

from jax_dsgd import compressors, memories, servers, transforms
from jax_dsgd.transforms import Prox


def async_sgd(
  learning_rate: optax.ScalarOrSchedule, *, staleness_power: float = 0.0
) -> servers.ParameterServer:
  """Asynchronous SGD: `x <- x - lr (1 + staleness)^-p g(x_then)` at every push.

  Args:
    learning_rate: lr, a float or a schedule of the steps on a shard of data.
    staleness_power: p, 0 for no discount.

  Returns:
    A parameter server. One push and one pull of the model a step; nothing is kept.

  >>> server = async_sgd(0.1)

  Reference: Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012; the discount is that
    of Xie, Koyejo, Gupta, arXiv 1903.03934.
  """
  discount = transforms.discount_staleness(staleness_power)
  return servers.ParameterServer(optax.sgd(learning_rate), optax.chain(discount, optax.scale(-1.0)))


def dc_asgd(learning_rate: float, *, strength: float) -> servers.ParameterServer:
  """Asynchronous SGD with delay compensation: `x <- x - lr (g + s g g (x - x_then))`.

  Args:
    learning_rate: lr.
    strength: s, of the compensation.

  Returns:
    A parameter server. One push and one pull of the model a step; the server keeps every worker's
    view.

  >>> server = dc_asgd(0.1, strength=0.5)

  Reference: Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", arXiv
    1609.08326.
  """
  outer = optax.chain(transforms.compensate_delay(strength), optax.sgd(learning_rate))
  return servers.ParameterServer(optax.sgd(1.0), outer)


def async_local_sgd(
  inner: optax.GradientTransformation,
  workers: int,
  *,
  outer_rate: float = 0.7,
  momentum: float = 0.9,
  spread: float = 0.0,
) -> servers.ParameterServer:
  """Asynchronous local SGD with delayed Nesterov momentum (DN).

  Local steps come from the trace: `simulation.dynamic_local_updates` gives slow workers fewer
  (DyLU) and lets each task take the shard that was visited least, without which every asynchronous
  form settles at a biased point.

  Args:
    inner: the local optimizer; its state and step count belong to the shard of data.
    workers: N, pushes between two momentum steps.
    outer_rate: of the server.
    momentum: of the server.
    spread: c, see `transforms.delayed_nesterov`.

  Returns:
    A parameter server. One push and one pull of the model a task. The server keeps two copies more.

  >>> server = async_local_sgd(optax.adamw(1e-3), 4)

  Reference: Liu, Chhaparia, Douillard, Kale, Rusu, Shen, Szlam, Ranzato, "Asynchronous Local-SGD
    Training for Language Modeling", arXiv 2401.09135.
  """
  outer = transforms.delayed_nesterov(outer_rate, workers=workers, momentum=momentum, spread=spread)
  return servers.ParameterServer(inner, outer)


def fed_buff(
  inner: optax.GradientTransformation, buffer: int, *, outer: optax.GradientTransformation
) -> servers.ParameterServer:
  """FedBuff: the server steps once for each `buffer` pushes, along their mean.

  Args:
    inner: the local optimizer.
    buffer: pushes a step.
    outer: the server's optimizer, on mean pseudo-gradients.

  Returns:
    A parameter server. One push and one pull of the model a task; the server keeps one copy more.

  >>> server = fed_buff(optax.sgd(0.1), 4, outer=optax.sgd(1.0))

  Reference: Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba, "Federated Learning with Buffered
    Asynchronous Aggregation", arXiv 2106.06639.
  """
  return servers.ParameterServer(inner, optax.MultiSteps(outer, buffer).gradient_transformation())


def dap_sgd(
  learning_rate: optax.ScalarOrSchedule,
  prox: Prox,
  *,
  estimator: optax.GradientTransformation | None = None,
) -> servers.ParameterServer:
  """DAP-SGD: the proximal step is the worker's, and the server only adds.

      x' = prox(x_then - lr g(x_then));   x <- x + x' - x_then

  At the optimum nothing moves. Where prox sets entries to zero (l1), a constant rate with a delay
  may cycle for ever: an entry at zero obeys x+ = x - x_then.

  Args:
    learning_rate: lr, a float or a schedule of the steps on a shard of data.
    prox: of h, see `transforms.proximal`.
    estimator: None, or a transform of gradients; `transforms.reduce_variance` makes it DAP-SVRG.

  Returns:
    A parameter server. One push and one pull of the model a step; nothing is kept.

  >>> server = dap_sgd(0.1, lambda x, lr: x)

  Reference: Li, Xu, Zhong, Ling, "Make Workers Work Harder: Decoupled Asynchronous Proximal
    Stochastic Gradient Descent", arXiv 1605.06619; DAP-SVRG is arXiv 1609.06804.
  """
  inner = optax.chain(
    estimator or optax.identity(),
    optax.sgd(learning_rate),
    transforms.proximal(prox, learning_rate),
  )
  return servers.ParameterServer(inner, optax.scale(-1.0))


def tap_sgd(learning_rate: optax.ScalarOrSchedule, prox: Prox) -> servers.ParameterServer:
  """TAP-SGD: workers push gradients and the server carries the proximal step; see `dap_sgd`.

  Args:
    learning_rate: lr, a float or a schedule of the server's pushes.
    prox: of h, see `transforms.proximal`.

  Returns:
    A parameter server. One push and one pull of the model a step; nothing is kept.

  >>> server = tap_sgd(0.1, lambda x, lr: x)

  Reference: the baseline of Li, Xu, Zhong, Ling, arXiv 1605.06619.
  """
  outer = optax.chain(optax.sgd(learning_rate), transforms.proximal(prox, learning_rate))
  return servers.ParameterServer(optax.sgd(1.0), outer)


def dgs(
  learning_rate: optax.ScalarOrSchedule,
  fraction: float = 0.01,
  *,
  momentum: float = 0.7,
  answer_fraction: float | None = None,
) -> servers.ParameterServer:
  """DGS: sparse both ways, with momentum that forgets nothing of what waits.

      worker   u <- m u + lr g;   push top_k(u);   u <- u where it was sent, else u / m
      server   x <- x - push;   answer top_k(x - view_k);   view_k <- view_k + answer

  Args:
    learning_rate: lr, a float or a schedule of the steps on a shard of data.
    fraction: of entries pushed, of each leaf.
    momentum: m, in (0, 1).
    answer_fraction: of entries in an answer; `fraction` if None, 1 for dense answers.

  Returns:
    A parameter server. A push and an answer of some entries a step. A worker keeps u.

  >>> server = dgs(0.1, 0.01)

  Reference: Yan, Xiao, Chen, Zhou, Wu, "Dual-Way Gradient Sparsification for Asynchronous
    Distributed Deep Learning", arXiv 1910.10929, without its dense answer every 150 versions.
  """
  share = fraction if answer_fraction is None else answer_fraction
  return servers.ParameterServer(
    optax.sgd(learning_rate),
    optax.scale(-1.0),
    up=compressors.top_k(fraction),
    memory=memories.momentum_residual(momentum),
    down=compressors.identity() if share == 1 else compressors.top_k(share),
  )


def lsgd(
  learning_rate: optax.ScalarOrSchedule,
  *,
  axis_name: str,
  inner_axis_name: str,
  momentum: float | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Layered SGD: the mean inside each node, then the mean over nodes; synchronous SGD, in layers.

  The second mean may run while the next batch is loaded; `simulation.layered_seconds` prices that.

  Args:
    learning_rate: a float, or a schedule of the step.
    axis_name: the axis of nodes.
    inner_axis_name: the axis of workers in a node, equally many in each.
    momentum: of heavy-ball momentum, if any.

  Returns:
    A transform. Sends the gradient once inside the node and once between nodes, a step.

  >>> tx = lsgd(0.1, axis_name='nodes', inner_axis_name='workers')

  Reference: Yu, Flynn, Yoo, D'Imperio, "Layered SGD: A Decentralized and Synchronous SGD Algorithm
    for Scalable Deep Neural Network Training", arXiv 1906.05936.
  """
  return optax.chain(
    transforms.mean_over(inner_axis_name),
    transforms.mean_over(axis_name),
    optax.sgd(learning_rate, momentum=momentum),
  )


def prague_sgd(
  learning_rate: optax.ScalarOrSchedule, *, axis_name: str, momentum: float | None = None
) -> optax.GradientTransformationExtraArgs:
  """Prague: a local step, then a partial all-reduce in the group that the trace names.

  Workers in no group of a round stay. Groups come from `simulation.group_generator` or
  `static_groups`; fixed schedules need no trace (`dsgd` with `topologies.random_groups`).

  Args:
    learning_rate: a float, or a schedule of the worker's own step.
    axis_name: the workers' axis.
    momentum: of local heavy-ball momentum, if any.

  Returns:
    A transform that needs `params` and `control`. Sends the model as an all-reduce in the group.

  >>> tx = prague_sgd(0.1, axis_name='workers')

  Reference: Luo, He, Zhuo, Qian, "Prague: High-Performance Heterogeneity-Aware Asynchronous
    Decentralized Training", arXiv 1909.08029.
  """
  local = transforms.only_when_active(optax.sgd(learning_rate, momentum=momentum))
  return optax.chain(local, transforms.mix_groups(axis_name=axis_name))
