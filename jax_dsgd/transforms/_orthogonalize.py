"""Several losses in order of priority, none of which undoes an earlier one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jax_dsgd import collectives

# What is left of a gradient below this share of its length is rounding, whose direction means
# nothing; two passes of float32 leave about 1e-7.
_ROUNDING = 1e-6


def orthogonalize() -> optax.GradientTransformation:
  """Adds up the gradients of several losses, each without what earlier ones have decided.

      h_i = g_i - sum_{j < i} (<g_i, h_j> / |h_j|^2) h_j;   u = sum_i h_i

  Leaf by leaf: `g_1, ..., g_n` are the rows of a leaf's leading axis, the most important loss
  first, as `jax.jacrev(losses)(params)` gives them. In each leaf `<u, g_1> = |g_1|^2`: to first
  order the first loss falls as if it were alone, where the plain sum may raise it. One loss, or
  orthogonal gradients, give the plain sum.

  Projection does not commute with the mean over workers. The faithful form projects the mean
  gradients, alike on all workers, and the means of all n losses cross at once:
  `optax.chain(mean_over(axis_name), orthogonalize(), optax.sgd(learning_rate))`.

  Returns:
    A transform from leaves `[n, ...]` to leaves `[...]`, in their dtype. It computes in float32, at
    any scale of gradients; zero gradients, and those that repeat earlier ones, add nothing.
    Integer and boolean leaves give their first row. No state. Sends nothing.

  Raises:
    ValueError: a leaf without the leading axis of the others (when traced).

  >>> tx = orthogonalize()
  >>> gradients = jnp.array([[1.0, 0.0], [-3.0, 2.0]])  # the second would undo the first
  >>> tx.update(gradients, tx.init(jnp.zeros(2)))[0].tolist()
  [1.0, 2.0]

  Reference: Wan, Hoffmann, Lu, Maire, "Orthogonalized SGD and Nested Architectures for Anytime
    Neural Networks", arXiv 2008.06635.
  """

  def update(updates: Any, params: Any = None) -> Any:
    _require_one_count(updates)
    return jax.tree.map(_sum_of_orthogonal, updates)

  return optax.stateless(update)


def _sum_of_orthogonal(rows: jax.Array) -> jax.Array:
  if not collectives.is_crossing(rows):
    return rows[0]
  wide = jnp.asarray(rows, jnp.promote_types(rows.dtype, jnp.float32))
  directions: list[jax.Array] = []
  total = jnp.zeros_like(wide[0])
  for g in wide:
    h = g
    # Once more on what is left: one pass on nearly parallel gradients leaves them far from
    # orthogonal.
    for q in directions * 2:
      h = h - jnp.vdot(q, h) * q
    h = jnp.where(jnp.max(jnp.abs(h)) > _ROUNDING * jnp.max(jnp.abs(g)), h, jnp.zeros_like(h))
    directions.append(_unit(h))
    total = total + h
  return total.astype(rows.dtype)


def _unit(h: jax.Array) -> jax.Array:
  """The direction h / |h|, or zero; scaled first, as the square of 1e-30 is no float32."""
  largest = jnp.max(jnp.abs(h))
  scaled = h / jnp.where(largest > 0, largest, 1).astype(h.dtype)
  norm = jnp.sqrt(jnp.sum(jnp.abs(scaled) ** 2))
  return scaled / jnp.where(norm > 0, norm, 1).astype(h.dtype)


def _require_one_count(updates: Any) -> None:
  count = None
  for path, leaf in jax.tree_util.tree_leaves_with_path(updates):
    lead = leaf.shape[0] if leaf.ndim else None
    count = lead if count is None else count
    if not lead or lead != count:
      raise ValueError(
        f'orthogonalize got leaf {collectives.leaf_name(path)!r} of shape {leaf.shape}; accepted '
        f'are leaves [n, ...] with one row a loss, the same n in all (here {count})'
      )
