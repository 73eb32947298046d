"""Momentum of which only the sign is used, and momentum that follows the learning rate."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

_BELOW_ONE = 1 - 2.0**-24  # the largest float32 there: where the rate is zero


def sign_momentum(b1: float = 0.9, b2: float = 0.99) -> optax.GradientTransformation:
  """The sign of a momentum: `u = sign(b1 m + (1 - b1) g)`, `m' = b2 m + (1 - b2) g`.

  With b1 = b2 it is Signum; after a mean it is Lion on averaged gradients; as the outer transform
  of `local_steps` it is sign momentum on pseudo-gradients. It is `optax.scale_by_lion` with a
  float32 momentum, under the name that the distributed field uses.

  Args:
    b1: weight of the momentum in what is signed, in [0, 1].
    b2: decay of the momentum, in [0, 1).

  Returns:
    A transform whose updates are -1, 0 or 1. State: 4 bytes an entry. Sends nothing.

  Raises:
    ValueError: a weight outside its interval.

  >>> import jax.numpy as jnp
  >>> tx = sign_momentum()
  >>> tx.update(jnp.array([2.0, -0.5, 0.0]), tx.init(jnp.zeros(3)))[0].tolist()
  [1.0, -1.0, 0.0]

  Reference: Bernstein et al., "signSGD", arXiv 1802.04434; Chen et al., "Symbolic Discovery of
    Optimization Algorithms", arXiv 2302.06675.
  """
  if not 0 <= b1 <= 1 or not 0 <= b2 < 1:
    raise ValueError(
      f'sign_momentum got b1={b1!r}, b2={b2!r}; accepted are b1 in [0, 1] and b2 in [0, 1)'
    )
  return optax.scale_by_lion(b1, b2, mu_dtype=jnp.float32)


def momentum_from_learning_rate(
  learning_rate: optax.ScalarOrSchedule, *, scale: float, exponent: float = 2 / 3
) -> optax.ScalarOrSchedule:
  """The momentum that belongs to a learning rate: `b = 1 - scale lr^exponent`.

  With noise in the labels, SGD drifts along a valley of minima towards a flat one, and over all
  momenta the drift is fastest at this one: `exponent` 2/3 makes the memory of momentum, 1 / (1 -
  b), as long as the drift, ((1 - b) / lr)^2. The way then takes lr^(-2/3) steps, instead of lr^-2.

  Args:
    learning_rate: a float, or a schedule of the step.
    scale: C > 0, of the problem: from the best momentum at one rate it gives that at all others.
    exponent: of the rate.

  Returns:
    A float, or a schedule of the step that follows that of the rate; clipped to [0, 1). For
    instance the momentum of `optax.inject_hyperparams(optax.sgd)`.

  Raises:
    ValueError: a scale or an exponent that is not positive, a negative rate.

  >>> round(momentum_from_learning_rate(0.008, scale=0.5), 6)
  0.98

  Reference: Cowsik, Can, Glorioso, "Flatter, faster: scaling momentum for optimal speedup of SGD",
    arXiv 2210.16400.
  """
  if not scale > 0 or not exponent > 0:
    raise ValueError(
      f'momentum_from_learning_rate got scale={scale!r}, exponent={exponent!r}; accepted are '
      'numbers > 0'
    )

  def momentum(rate: jax.typing.ArrayLike) -> jax.Array:
    return jnp.clip(1 - scale * jnp.asarray(rate) ** exponent, 0, _BELOW_ONE)

  if callable(learning_rate):
    rate_at = learning_rate
    return lambda count: momentum(rate_at(count))
  if isinstance(learning_rate, jax.Array):  # injected
    return momentum(learning_rate)
  if not learning_rate >= 0:
    raise ValueError(
      f'momentum_from_learning_rate got learning_rate={learning_rate!r}; accepted are numbers >= 0'
    )
  return min(max(1 - scale * float(learning_rate) ** exponent, 0.0), _BELOW_ONE)
