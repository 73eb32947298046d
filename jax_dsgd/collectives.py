"""The wire: the only file of the library that calls a `jax.lax` collective.

Every function takes per-worker values and the name of the axis that the workers lie on, and gives
the same numbers under `jax.vmap(axis_name=...)`, `jax.shard_map` and `jax.pmap`. Results vary over
the axis by type even when they agree by value, so that they fit loop carries and `lax.cond`
branches beside per-worker state.

Trees cross in as few collectives as possible: leaves that are gathered or permuted travel in one
flat buffer a word size (1, 2 or 4 bytes), and leaves that are summed in one variadic all-reduce a
dtype, which XLA builds without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_dsgd import topologies

Axes = str | Sequence[str]


def worker_count(axis_name: str) -> int:
  """The number of workers on the axis, a Python int.

  Raises:
    ValueError: no enclosing vmap, shard_map or pmap binds the axis.
  """
  try:
    return jax.lax.axis_size(axis_name)
  except NameError:
    raise ValueError(
      f'axis_name={axis_name!r} is not bound here: call this inside runtime.simulate(...).spmd, '
      'runtime.on_mesh(...).spmd, or a vmap, shard_map or pmap with that axis name'
    ) from None


def worker_index(axis_name: str) -> jax.Array:
  """This worker's place on the axis, an int32 scalar in [0, worker_count)."""
  worker_count(axis_name)
  return jax.lax.axis_index(axis_name)


def worker_key(key: jax.Array, axis_name: str) -> jax.Array:
  """A key of this worker's own, from one that all workers share."""
  return jax.random.fold_in(key, worker_index(axis_name))


def own_entry(table: np.ndarray, axis_name: str) -> jax.Array | float:
  """This worker's entry of a table of one number a worker; a plain number where all agree.

  Raises:
    ValueError: the table has not one entry a worker.
  """
  if table.shape != (worker_count(axis_name),):
    raise ValueError(
      f'a table of shape {table.shape} does not have one entry for each of '
      f'{worker_count(axis_name)} workers'
    )
  if (table == table[0]).all():
    return float(table[0])
  return jnp.asarray(table, jnp.float32)[worker_index(axis_name)]


def _tracked(axis_name: str) -> bool:
  """Whether types say which values vary over the axis (shard_map with check_vma=True)."""
  return axis_name in _varying_axes(worker_index(axis_name))


def _simulated(axis_name: str) -> bool:
  """Whether the axis is one of `vmap` (or `pmap`), and not of the mesh around."""
  return axis_name not in jax.sharding.get_abstract_mesh().axis_names


def _varying_axes(x: Any) -> frozenset[str]:
  return jax.typeof(x).mat.varying


def vary(tree: Any, axis_name: str) -> Any:
  """The same values, typed as varying over the axis where JAX keeps track of that."""
  if not _tracked(axis_name):
    return tree
  return jax.tree.map(
    lambda x: x if axis_name in _varying_axes(x) else jax.lax.pcast(x, axis_name, to='varying'),
    tree,
  )


def vary_like(tree: Any, like: Any) -> Any:
  """The same values, typed as varying over all axes that `like` varies over, leaf by leaf."""
  return jax.tree.map(vary_with, tree, like)


def vary_with(tree: Any, like: Any) -> Any:
  """The same values, typed as varying over every axis that any leaf of `like` varies over.

  For counters and keys that `init` makes beside per-worker parameters: `update` returns them so.
  """
  axes = frozenset().union(*(_varying_axes(x) for x in jax.tree.leaves(like)))

  def match(x: jax.Array) -> jax.Array:
    missing = axes - _varying_axes(x)
    return jax.lax.pcast(x, tuple(sorted(missing)), to='varying') if missing else x

  return jax.tree.map(match, tree)


def require_varying(updates: Any, axis_name: str) -> None:
  """Refuses gradients that are the same on every worker by type: shard_map has summed them already.

  Inside `shard_map` with `check_vma=True` the gradient with respect to a *replicated* value is the
  sum over the axis, so averaging it again would give a W-fold step. Per-worker parameters (rows, as
  in `runtime`) have per-worker gradients.

  Raises:
    ValueError: naming the first such leaf.
  """
  if not _tracked(axis_name):
    return
  for path, leaf in jax.tree_util.tree_leaves_with_path(updates):
    if axis_name not in _varying_axes(leaf):
      raise ValueError(
        f'updates of leaf {leaf_name(path)!r} do not vary over axis {axis_name!r}: inside '
        'shard_map the gradient with respect to a replicated value arrives summed over the axis. '
        'Carry one row of parameters a worker (runtime.on_mesh does), or '
        f"differentiate at jax.lax.pcast(params, {axis_name!r}, to='varying')"
      )


def leaf_name(path: Sequence[Any]) -> str:
  """A leaf's path as text, 'encoder/kernel'."""
  return jax.tree_util.keystr(tuple(path), simple=True, separator='/')


def require_same_leaves(tree: Any, kept: Any, keeper: str) -> None:
  """Refuses a tree whose leaves are not those of a tree that was kept for it, by name.

  Raises:
    ValueError: naming the first leaf that is more, less or of another shape.
  """
  now, then = (
    {leaf_name(path): x.shape for path, x in jax.tree_util.tree_leaves_with_path(part)}
    for part in (tree, kept)
  )
  for name in sorted(now.keys() | then.keys()):
    if now.get(name) != then.get(name):
      raise ValueError(
        f'the tree changed between calls: leaf {name!r} has shape {now.get(name, "none")} now, and '
        f'{then.get(name, "none")} in the {keeper}'
      )


def is_crossing(leaf: Any) -> bool:
  """Whether a leaf takes part in reductions: it has entries, and they are real or complex floats.

  Integer, boolean, float0, key and zero-size leaves stay as they are and cost no bytes.
  """
  return leaf.size > 0 and jnp.issubdtype(leaf.dtype, jnp.inexact)


def crossing(tree: Any) -> Any:
  """The tree with None in place of leaves that do not cross (see `is_crossing`)."""
  return jax.tree.map(lambda x: x if is_crossing(x) else None, tree)


def widened(tree: Any) -> Any:
  """The tree with its leaves in float32, or wider where they are: for sums and for what is kept."""
  return jax.tree.map(_wide, tree)


def fill(tree: Any, whole: Any) -> Any:
  """The tree with the leaves of `whole` in place of None: undoes `crossing`."""
  return jax.tree.map(lambda w, x: w if x is None else x, whole, tree, is_leaf=lambda x: x is None)


def sum(tree: Any, axis_name: Axes) -> Any:  # noqa: A001 (the field's word, always used qualified)
  """The sum over workers of every crossing leaf, in the leaf's own dtype.

  Sends each leaf once: `psum` of all leaves at once is one all-reduce a dtype.
  """
  leaves, treedef = jax.tree.flatten(tree)
  crossing = [x for x in leaves if is_crossing(x)]
  for axis in _axes(axis_name):
    crossing = vary(crossing, axis)
  summed = iter(jax.lax.psum(crossing, _axes(axis_name)) if crossing else [])
  leaves = [next(summed) if is_crossing(x) else x for x in leaves]
  for axis in _axes(axis_name):
    leaves = vary(leaves, axis)
  return jax.tree.unflatten(treedef, leaves)


def mean(tree: Any, axis_name: Axes, weight: jax.Array | float | None = None) -> Any:
  """The mean over workers of every crossing leaf, weighted where a weight is given.

  `sum_w weight_w x_w / sum_w weight_w`. A worker of weight zero contributes nothing, not even a
  NaN; when all weights are zero every worker keeps its own value. Over several axes at once it is
  the mean over all their workers.

  Args:
    tree: this worker's values.
    axis_name: one axis, or several for the mean over nested levels.
    weight: this worker's weight, a nonnegative scalar; None means that all count alike.

  Returns:
    The mean, in the leaves' dtypes; leaves that do not cross (see `is_crossing`) as they are.
  """
  if weight is None:
    workers = int(np.prod([worker_count(axis) for axis in _axes(axis_name)]))
    return jax.tree.map(lambda x: x / workers if is_crossing(x) else x, sum(tree, axis_name))
  weight = jnp.asarray(weight, jnp.float32)
  # Shares first: weights may be counts, and counts times values leave float16.
  total = sum(weight, axis_name)
  share = weight / jnp.where(total > 0, total, 1)
  scaled = jax.tree.map(
    lambda x: (share * jnp.where(weight > 0, x, 0)).astype(x.dtype) if is_crossing(x) else x, tree
  )
  return jax.tree.map(
    lambda s, x: jnp.where(total > 0, s, x) if is_crossing(x) else x, sum(scaled, axis_name), tree
  )


def mean_of_payloads(tree: Any, axis_name: str) -> Any:
  """The mean over workers of floats that need not keep their shapes: one all-reduce a dtype.

  Unlike `mean` it does not rely on the compiler to join them, but copies them into one buffer.
  """
  average = lambda buffer: mean(buffer, axis_name)  # noqa: E731
  return _through_flat_buffers(average, tree, word_of=lambda dtype: dtype)


def uniform(flag: jax.typing.ArrayLike, axis_name: str) -> jax.Array:
  """A flag or an integer that all workers agree on, known to be one value where that is free.

  Under `vmap` a condition on a value that has a row a worker is a selection: all branches are
  computed. This gives it without rows, so that one branch runs. Under `shard_map` it stays.
  """
  flag = jnp.asarray(flag)
  simulated = _simulated(axis_name)
  return jax.lax.pmax(flag.astype(jnp.int32), axis_name).astype(flag.dtype) if simulated else flag


def all_agree(flag: jax.Array, axis_name: str) -> jax.Array:
  """True on every worker if the flag is true on every worker. Sends 4 bytes."""
  votes = jax.lax.psum(vary(flag, axis_name).astype(jnp.int32), axis_name)
  return votes == worker_count(axis_name)


def gather(tree: Any, axis_name: str) -> Any:
  """Every worker's tree: each leaf gains a leading axis of workers. One all-gather a word size."""
  worker_count(axis_name)
  return _through_flat_buffers(lambda buffer: jax.lax.all_gather(buffer, axis_name), tree)


def trade_rows(tree: Any, axis_name: str) -> Any:
  """Row j of every leaf [W, ...] goes to worker j, and row i of the result came from worker i.

  One all-to-all a word size.
  """
  worker_count(axis_name)
  trade = lambda rows: jax.lax.all_to_all(rows, axis_name, 0, 0, tiled=True)  # noqa: E731
  return _through_flat_buffers(trade, tree, kept=1)


def permute(tree: Any, destinations: Sequence[int], axis_name: str) -> Any:
  """Worker i's tree goes to worker destinations[i], a full permutation. One permute a word size."""
  workers, destinations = worker_count(axis_name), list(destinations)
  if sorted(destinations) != list(range(workers)):
    raise ValueError(
      f'destinations={destinations} is not a permutation of {workers} workers: some would receive '
      'zeros'
    )
  pairs = [(source, int(target)) for source, target in enumerate(destinations)]
  move = lambda buffer: jax.lax.ppermute(buffer, axis_name, pairs)  # noqa: E731
  # Simulated workers send nothing, and copies into one buffer would be most of the cost.
  return jax.tree.map(move, tree) if _simulated(axis_name) else _through_flat_buffers(move, tree)


def mix(
  own: Any,
  payload: Any,
  decode: Callable[[Any], Any],
  topology: topologies.Topology,
  *,
  time: jax.Array | int,
  axis_name: str,
) -> Any:
  """One round of a topology: `sum_j W[i, j] x_j` on worker i, where only payloads cross.

  Args:
    own: what this worker's payload decodes to, a tree of arrays.
    payload: the arrays that cross, in one permute a word size for each permutation of the round.
    decode: from a payload to a tree like `own`.
    topology: who sends to whom.
    time: the round, an integer that all workers agree on.
    axis_name: the workers' axis.

  Returns:
    The mixed tree, accumulated in float32 or wider.
  """
  require_size(topology, axis_name)

  def one_round(round_: topologies.Round) -> Any:
    share = own_entry(round_.self_weights, axis_name)
    mixed = jax.tree.map(lambda x: share * _wide(x), own)
    for destinations, weights in zip(round_.destinations, round_.weights, strict=True):
      share = own_entry(weights, axis_name)
      arrived = decode(permute(payload, destinations.tolist(), axis_name))
      mixed = jax.tree.map(lambda m, x, share=share: m + share * _wide(x), mixed, arrived)
    return vary(mixed, axis_name)

  if topology.period == 1:
    return one_round(topology.rounds[0])
  branches = [lambda round_=round_: one_round(round_) for round_ in topology.rounds]
  return jax.lax.switch(uniform(time % topology.period, axis_name), branches)


def mix_by_matrix(tree: Any, matrix: jax.Array, axis_name: str) -> Any:
  """`sum_j matrix[i, j] x_j` on worker i, for a matrix [W, W] of numbers that all workers know.

  It may change every step. Each worker mixes a piece of all trees: two all-to-alls a word size, and
  the memory and bytes of an all-reduce, however dense the matrix is.
  """
  pieces = jax.tree.map(lambda x: cut(_wide(x), worker_count(axis_name)), tree)
  times = lambda rows: jnp.dot(matrix.astype(rows.dtype), rows, precision='highest')  # noqa: E731
  mixed = jax.tree.map(times, trade_rows(pieces, axis_name))
  return jax.tree.map(whole, tree, trade_rows(mixed, axis_name))


def cut(x: jax.Array, workers: int) -> jax.Array:
  """A leaf as one row a worker, filled up with zeros."""
  return jnp.pad(x.reshape(-1), (0, -x.size % workers)).reshape(workers, -1)


def whole(like: jax.Array, rows: jax.Array) -> jax.Array:
  """Undoes `cut`."""
  return rows.reshape(-1)[: like.size].reshape(like.shape)


def require_size(topology: topologies.Topology, axis_name: str) -> None:
  """Refuses a topology that was made for another number of workers.

  Raises:
    ValueError: naming both numbers.
  """
  if topology.size != worker_count(axis_name):
    raise ValueError(
      f'topology {topology.name!r} is for {topology.size} workers; axis {axis_name!r} has '
      f'{worker_count(axis_name)}'
    )


def _wide(x: jax.Array) -> jax.Array:
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _axes(axis_name: Axes) -> tuple[str, ...]:
  return (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)


_WORDS = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}


def _through_flat_buffers(
  collective: Callable[[jax.Array], jax.Array],
  tree: Any,
  *,
  kept: int = 0,
  word_of: Callable[[Any], Any] | None = None,
) -> Any:
  """Applies a collective that moves buffers, and may add leading axes, to one buffer a word size.

  The first `kept` axes of every leaf, alike in all of them, stay axes of the buffer. Numbers cross
  as the bits they are, in words of 1, 2 or 4 bytes: values and places of one size share a buffer,
  and no compiler widens a float on the way, as XLA does on CPU with bfloat16.
  """
  leaves, treedef = jax.tree.flatten(tree)
  words = [(word_of or _word)(x.dtype) for x in leaves]
  moved: list[jax.Array | None] = [None] * len(leaves)
  for word in dict.fromkeys(words):
    members = [i for i, w in enumerate(words) if w == word]
    bits = [jax.lax.bitcast_convert_type(leaves[i], word) for i in members]
    flat = [x.reshape(*x.shape[:kept], -1) for x in bits]
    buffer = collective(flat[0] if len(flat) == 1 else jnp.concatenate(flat, axis=-1))
    start = 0
    for i, part in zip(members, flat, strict=True):
      piece = buffer[..., start : start + part.shape[-1]]
      piece = piece.reshape(buffer.shape[:-1] + leaves[i].shape[kept:])
      moved[i] = jax.lax.bitcast_convert_type(piece, leaves[i].dtype)
      start += part.shape[-1]
  return jax.tree.unflatten(treedef, moved)


def _word(dtype: Any) -> Any:
  """The unsigned integer that a dtype crosses as; others than plain numbers as they are."""
  plain = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
  return _WORDS.get(jax.dtypes.itemsize_bits(dtype), dtype) if plain else dtype
