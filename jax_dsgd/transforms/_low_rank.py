"""A mean of low-rank factors."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jax_dsgd import collectives, exchange, ledger, memories
from jax_dsgd.transforms._reduce import exchanged_mean

Rank = int | Callable[[str, jax.ShapeDtypeStruct], int]


def low_rank_mean(
  rank: Rank, *, axis_name: str, memory: memories.Memory, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
  """Replaces the updates by a low-rank approximation of their mean over workers.

  For each leaf as a matrix M [n, m] (all axes but the last together), with Q [m, rank] kept from
  the step before:

      P = orthonormalise(mean_w M_w Q);   Q' = mean_w M_w^T P;   u' = P Q'^T

  It is linear in the gradients given Q, so splitting a batch over workers changes nothing. Vectors,
  and matrices for which `rank (n + m) >= n m`, are sent whole.

  Args:
    rank: columns of P and Q, or a function from a leaf's path and shape to them; 0 sends it whole.
    axis_name: the workers' axis.
    memory: `memories.residual()`, as in the paper, or another. Its `own` is `P (M_w^T P)^T`, so
      that a worker keeps what the subspace misses of its own gradient; the paper's code keeps what
      the mean misses. Their mean over workers is the same.
    seed: of the first Q.

  Returns:
    A transform. Sends `4 rank (n + m)` bytes a matrix and whole vectors, in two all-reduces, one
    after the other. State: Q, `4 rank m` bytes a matrix, besides the memory.

  Raises:
    ValueError: a rank that is not an integer >= 1, a complex leaf, a tree that changed between
      calls.

  >>> from jax_dsgd import memories
  >>> tx = low_rank_mean(1, axis_name='workers', memory=memories.none())
  >>> ones = jnp.ones((2, 4, 4))
  >>> updates, _ = jax.vmap(tx.update, axis_name='workers')(ones, jax.vmap(tx.init)(ones))
  >>> bool(jnp.allclose(updates, 1.0))
  True

  Reference: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
    Distributed Optimization", arXiv 1905.13727.
  """
  if not callable(rank):
    _require_rank(rank, least=1)

  def columns(path: Any, x: jax.Array) -> int:
    """Columns of the factors of a leaf; 0 where it is sent whole."""
    r, (n, m) = rank, _matrix_shape(x)
    if callable(r):
      like = jax.ShapeDtypeStruct(x.shape, x.dtype)
      r = _require_rank(r(collectives.leaf_name(path), like), least=0)
    return r if r * (n + m) < n * m else 0

  def init(like: Any) -> Any:
    ranks = jax.tree_util.tree_map_with_path(columns, like)
    leaves, treedef = jax.tree.flatten(like)
    keys = jax.random.split(jax.random.key(seed), max(len(leaves), 1))
    factors = [
      jax.random.normal(key, (_matrix_shape(x)[1], r)) if r else None
      for key, x, r in zip(keys, leaves, jax.tree.leaves(ranks), strict=False)
    ]
    return collectives.vary_with(jax.tree.unflatten(treedef, factors), like)

  def send(tree: Any, state: Any, key: jax.Array, time: jax.Array) -> exchange.Delivery:
    leaves, treedef = jax.tree.flatten(tree)
    factored = [bool(r) for r in jax.tree.leaves(jax.tree_util.tree_map_with_path(columns, tree))]
    whole = [x for x, f in zip(leaves, factored, strict=True) if not f]
    wide = [x.astype(jnp.float32) for x, f in zip(leaves, factored, strict=True) if f]
    matrices = [x.reshape(_matrix_shape(x)) for x in wide]
    left = [m @ q for m, q in zip(matrices, jax.tree.leaves(state), strict=True)]
    left, mean = collectives.mean_of_payloads((left, whole), axis_name)
    left = [_orthonormal(p) for p in left]
    right = [m.T @ p for m, p in zip(matrices, left, strict=True)]
    mean_right = collectives.mean_of_payloads(right, axis_name)

    def assemble(right: list[jax.Array], whole: list[jax.Array]) -> Any:
      products = (p @ q.T for p, q in zip(left, right, strict=True))
      rest = iter(whole)
      parts = [
        next(products).reshape(x.shape) if f else next(rest)
        for x, f in zip(leaves, factored, strict=True)
      ]
      return jax.tree.unflatten(treedef, parts)

    state = jax.tree.unflatten(jax.tree.structure(state), mean_right)
    nbytes = ledger.payload_bytes((left, right, whole))
    sent = nbytes if collectives.worker_count(axis_name) > 1 else 0
    return exchange.Delivery(assemble(right, whole), assemble(mean_right, mean), state, (sent,))

  return exchanged_mean(exchange.Channel(init, send), memory, axis_name=axis_name, seed=seed)


def _require_rank(rank: int, *, least: int) -> int:
  if isinstance(rank, bool) or not isinstance(rank, numbers.Integral) or rank < least:
    raise ValueError(f'low_rank_mean got rank={rank!r}; accepted are integers >= {least}')
  return int(rank)


def _matrix_shape(x: jax.Array) -> tuple[int, int]:
  """All axes but the last as rows: a kernel's inputs against its outputs."""
  return (x.size // x.shape[-1], x.shape[-1]) if x.ndim > 1 else (x.size, 1)


def _orthonormal(p: jax.Array) -> jax.Array:
  """An orthonormal basis of the columns, at any scale; zero columns get some direction."""
  largest = jnp.max(jnp.abs(p))
  return jnp.linalg.qr(p / jnp.where(largest > 0, largest, 1))[0]
