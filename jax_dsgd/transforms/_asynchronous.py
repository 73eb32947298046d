"""Transforms of parameter servers, and of the workers that come to them late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_dsgd import collectives

Prox = Callable[[Any, jax.typing.ArrayLike], Any]


class DelayedNesterovState(NamedTuple):
  """The state of `delayed_nesterov`: a count of pushes, their sum in the block, the momentum."""

  count: jax.Array
  total: Any
  momentum: Any


def delayed_nesterov(
  learning_rate: float, *, workers: int, momentum: float = 0.9, spread: float = 0.0
) -> optax.GradientTransformation:
  """Nesterov momentum for pseudo-gradients that come one worker at a time.

      D <- D + d                                                                at every push
      every N-th push   m <- b m + D / N;   x <- x - lr ((1 - c N + c) b m + d / N);   D <- 0
      else              x <- x - lr (c b m + d / N)

  With c = 0, N pushes of equal ways are one Nesterov step on their mean.

  Args:
    learning_rate: lr.
    workers: N.
    momentum: b, in [0, 1).
    spread: c, in [0, 1/N]: how much of the momentum is applied at each push.

  Returns:
    A transform of pseudo-gradients, for the server. State: two copies of the model.

  Raises:
    ValueError: a spread outside [0, 1/N], workers below 1.

  >>> tx, x = delayed_nesterov(1.0, workers=2), jnp.zeros(())
  >>> state = tx.init(x)
  >>> for _ in range(2):
  ...   updates, state = tx.update(jnp.ones(()), state)
  ...   x = x + updates
  >>> round(float(x), 6)  # as one step of Nesterov momentum: 1 + 0.9
  -1.9

  Reference: Liu, Chhaparia, Douillard, Kale, Rusu, Shen, Szlam, Ranzato, "Asynchronous Local-SGD
    Training for Language Modeling", arXiv 2401.09135, as in a public implementation of it.
  """
  if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
    raise ValueError(f'delayed_nesterov got workers={workers!r}; accepted are integers >= 1')
  if not 0 <= spread <= 1 / workers:
    raise ValueError(
      f'delayed_nesterov got spread={spread!r}; accepted are numbers from 0 to 1/{workers}'
    )

  def init(params: optax.Params) -> DelayedNesterovState:
    total, velocity = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
    return DelayedNesterovState(jnp.zeros((), jnp.int32), total, velocity)

  def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, DelayedNesterovState]:
    full = (state.count + 1) % workers == 0
    total = jax.tree.map(jnp.add, state.total, updates)
    m = jax.tree.map(
      lambda m, d: jnp.where(full, momentum * m + d / workers, m), state.momentum, total
    )
    share = jnp.where(full, 1 - spread * workers + spread, spread) * momentum
    way = jax.tree.map(lambda m, d: -learning_rate * (share * m + d / workers), m, updates)
    total = jax.tree.map(lambda d: jnp.where(full, 0, d), total)
    return way, DelayedNesterovState(state.count + 1, total, m)

  return optax.GradientTransformation(init, update)


def discount_staleness(power: float = 0.5) -> optax.GradientTransformationExtraArgs:
  """Shrinks what is late: `u (1 + staleness)^-power`, with the staleness of `control`.

  Args:
    power: >= 0.

  Returns:
    A transform of updates, for the server. State: none.

  Reference: Xie, Koyejo, Gupta, "Asynchronous Federated Optimization", arXiv 1903.03934.
  """
  if not power >= 0:
    raise ValueError(f'discount_staleness got power={power!r}; accepted are numbers >= 0')

  def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
    staleness = _told(extra, 'staleness', 'discount_staleness')
    scale = (1.0 + staleness) ** -power
    return jax.tree.map(lambda u: (scale * u).astype(u.dtype), updates), state

  return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def compensate_delay(strength: float) -> optax.GradientTransformationExtraArgs:
  """Corrects a late gradient to first order: `g + strength g g (x - x_then)`, entry by entry.

  The squared gradient stands for the diagonal of the Hessian.

  Args:
    strength: >= 0; 0 changes nothing.

  Returns:
    A transform of gradients, for the server, that needs `params` and the view of `control`. State:
    none.

  Reference: Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", arXiv
    1609.08326, with a constant strength.
  """
  if not strength >= 0:
    raise ValueError(f'compensate_delay got strength={strength!r}; accepted are numbers >= 0')

  def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
    view = _told(extra, 'view', 'compensate_delay')
    correct = lambda g, x, then: g + strength * g * g * (x - then)  # noqa: E731
    return jax.tree.map(correct, updates, params, view), state

  return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def _told(extra: dict[str, Any], field: str, name: str) -> Any:
  value = getattr(extra.get('control'), field, None)
  if value is None:
    raise ValueError(f'{name} needs control.{field}: call update(..., control=control)')
  return value


def proximal(prox: Prox, learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
  """Ends a step with a proximal operator: `u' = prox(x + u, lr) - x`.

  At the optimum of `f + h` it does not move. Placed at the worker it decouples the operator from
  the server, which only adds.

  Args:
    prox: `(x, lr) -> argmin_z h(z) + |z - x|^2 / (2 lr)`, on the whole tree.
    learning_rate: lr, a float or a schedule of the step.

  Returns:
    A transform that needs `params`; last in a chain. State: a count of steps.

  >>> soft = lambda x, lr: jax.tree.map(lambda x: jnp.sign(x) * jnp.maximum(abs(x) - lr, 0), x)
  >>> tx = optax.chain(optax.sgd(0.1), proximal(soft, 0.1))
  >>> x = jnp.array([0.05, 1.0])
  >>> [round(float(u), 3) for u in tx.update(jnp.zeros(2), tx.init(x), x)[0]]
  [-0.05, -0.1]

  Reference: Li, Xu, Zhong, Ling, "Make Workers Work Harder: Decoupled Asynchronous Proximal
    Stochastic Gradient Descent", arXiv 1605.06619.
  """

  def init(params: optax.Params) -> optax.ScaleByScheduleState:
    return optax.ScaleByScheduleState(collectives.vary_with(jnp.zeros((), jnp.int32), params))

  def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    if params is None:
      raise ValueError('proximal moves parameters: call update(updates, state, params)')
    rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
    there = prox(jax.tree.map(jnp.add, params, updates), rate)
    way = jax.tree.map(lambda z, x: (z - x).astype(x.dtype), there, params)
    return way, optax.ScaleByScheduleState(state.count + 1)

  return optax.GradientTransformation(init, update)


def soft_threshold(strength: float) -> Prox:
  """The proximal operator of `strength |x|_1`: entries move towards 0 by `strength lr`, and stop.

  Args:
    strength: >= 0.

  Returns:
    For `proximal`.

  >>> [round(float(x), 6) for x in soft_threshold(2.0)(jnp.array([1.0, -1.0, 0.1]), 0.1)]
  [0.8, -0.8, 0.0]
  """
  if not strength >= 0:
    raise ValueError(f'soft_threshold got strength={strength!r}; accepted are numbers >= 0')

  def prox(x: Any, rate: jax.typing.ArrayLike) -> Any:
    shrink = lambda x: jnp.sign(x) * jnp.maximum(jnp.abs(x) - strength * rate, 0)  # noqa: E731
    return jax.tree.map(shrink, x)

  return prox


class SvrgState(NamedTuple):
  """The state of `reduce_variance`: steps, the snapshot, and the full gradient there."""

  count: jax.Array
  snapshot: Any
  full: Any


def reduce_variance(
  full_gradient: Callable[[Any], Any], period: int
) -> optax.GradientTransformationExtraArgs:
  """SVRG: `g(x) - g(snapshot) + full gradient(snapshot)`, both g of this step's batch.

  Args:
    full_gradient: from parameters to the gradient over all data.
    period: steps from one snapshot to the next.

  Returns:
    A transform of gradients that needs `params` and `grad_fn`. State: two copies of the model.

  Raises:
    ValueError: a period below 1, no params, no grad_fn.

  Reference: Johnson, Zhang, "Accelerating stochastic gradient descent using predictive variance
    reduction", NIPS 2013; with delays it is DAP-SVRG, arXiv 1609.06804.
  """
  if isinstance(period, bool) or not isinstance(period, int) or period < 1:
    raise ValueError(f'reduce_variance got period={period!r}; accepted are integers >= 1')

  def init(params: optax.Params) -> SvrgState:
    count = collectives.vary_with(jnp.zeros((), jnp.int32), params)
    snapshot, full = jax.tree.map(jnp.copy, params), jax.tree.map(jnp.zeros_like, params)
    return SvrgState(count, snapshot, full)

  def update(
    updates: Any, state: Any, params: Any = None, *, grad_fn: Any = None, **extra: Any
  ) -> tuple[Any, SvrgState]:
    if params is None or grad_fn is None:
      raise ValueError(
        'reduce_variance compares gradients at two points: call update(updates, state, params, '
        'grad_fn=grad_fn)'
      )
    renew = lambda: collectives.vary_like((params, full_gradient(params)), keep())  # noqa: E731
    keep = lambda: (state.snapshot, state.full)  # noqa: E731
    snapshot, full = jax.lax.cond(state.count % period == 0, renew, keep)
    reduced = jax.tree.map(lambda g, h, f: g - h + f, updates, grad_fn(snapshot), full)
    return reduced, SvrgState(state.count + 1, snapshot, full)

  return optax.GradientTransformationExtraArgs(init, update)
