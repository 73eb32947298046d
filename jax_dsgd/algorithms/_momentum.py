"""Methods whose momentum is chosen by a rule."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_dsgd import collectives, transforms


def scaled_momentum_sgd(
  learning_rate: optax.ScalarOrSchedule, *, axis_name: str, scale: float
) -> optax.GradientTransformationExtraArgs:
  """Synchronous SGD whose momentum follows the learning rate, for the fastest way to flat minima.

      b_t = 1 - scale lr_t^(2/3);   p <- b_t p - lr_t mean_w g_w;   x <- x + p

  Args:
    learning_rate: a float, or a schedule of the step.
    axis_name: the workers' axis.
    scale: of the problem; best momenta b at one rate give `(1 - b) / lr^(2/3)` for all others.

  Returns:
    A transform. Sends every gradient entry once a step in its own dtype. State: p, 4 bytes an
    entry.

  Raises:
    ValueError: a scale that is not positive.

  >>> tx = scaled_momentum_sgd(0.1, axis_name='workers', scale=0.5)

  Reference: Cowsik, Can, Glorioso, "Flatter, faster: scaling momentum for optimal speedup of SGD",
    arXiv 2210.16400.
  """
  momentum = transforms.momentum_from_learning_rate(learning_rate, scale=scale)
  return optax.chain(
    transforms.mean_over(axis_name),
    # Before the trace: what momentum carries keeps the rate at which it was made.
    optax.scale_by_learning_rate(learning_rate),
    _heavy_ball(momentum),
  )


class _HeavyBallState(NamedTuple):
  count: jax.Array
  momentum: Any


def _heavy_ball(decay: optax.ScalarOrSchedule) -> optax.GradientTransformation:
  """`p <- b_t p + u`, like `optax.trace`, which takes no b that changes from step to step."""

  def init(params: optax.Params) -> _HeavyBallState:
    count = collectives.vary_with(jnp.zeros((), jnp.int32), params)
    return _HeavyBallState(count, optax.tree.zeros_like(params, dtype=jnp.float32))

  def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, _HeavyBallState]:
    b = decay(state.count) if callable(decay) else decay
    momentum = jax.tree.map(lambda p, u: b * p + u, state.momentum, updates)
    return optax.tree.cast_like(momentum, updates), _HeavyBallState(state.count + 1, momentum)

  return optax.GradientTransformation(init, update)
