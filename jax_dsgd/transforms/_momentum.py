"""Momentum of which only the sign is used."""

from __future__ import annotations

import jax.numpy as jnp
import optax


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
    Optimization Algorithms",
  arXiv 2302.06675.
  """
  if not 0 <= b1 <= 1 or not 0 <= b2 < 1:
    raise ValueError(
      f'sign_momentum got b1={b1!r}, b2={b2!r}; accepted are b1 in [0, 1] and b2 in [0, 1)'
    )
  return optax.scale_by_lion(b1, b2, mu_dtype=jnp.float32)
