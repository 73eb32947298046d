"""Saving and restoring everything that workers keep: exactly, or on another number of workers.

Memories, counters, keys and schedules are ordinary leaves of the state, so a run that is saved,
restored in a fresh process and continued is bit-identical to one that was never interrupted.
"""

from __future__ import annotations

import numbers
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jax_dsgd import collectives


class Checkpoints:
  """The checkpoints of one run, in one directory, through Orbax.

  Saving is asynchronous: the state may be donated to the next step as soon as `save` returns. A
  checkpoint appears under its final name only when it is whole. Use it as a context manager, or
  call `close`.

  >>> import tempfile
  >>> state = {'x': jnp.arange(3.0), 'key': jax.random.key(7), 'none': None}
  >>> with Checkpoints(tempfile.mkdtemp()) as checkpoints:
  ...   checkpoints.save(10, state)
  ...   restored = checkpoints.restore(jax.eval_shape(lambda: state))
  >>> restored['x'].tolist()
  [0.0, 1.0, 2.0]
  """

  def __init__(self, directory: str | os.PathLike[str], *, keep: int = 2):
    """Opens the directory, which need not exist; keeps the last `keep` checkpoints."""
    options = ocp.CheckpointManagerOptions(max_to_keep=keep)
    self._manager = ocp.CheckpointManager(os.path.abspath(directory), options=options)

  def save(self, step: int, state: Any) -> None:
    """Saves any tree of arrays, with typed keys, None, empty containers and zero-size leaves."""
    leaves = _named_leaves(state)
    manifest = {name: _kind(leaf) for name, leaf in leaves.items()}
    items = ocp.args.Composite(
      state=ocp.args.StandardSave(leaves),
      leaves=ocp.args.JsonSave(manifest),
    )
    self._manager.save(step, args=items)

  def latest_step(self) -> int | None:
    """The step of the newest whole checkpoint; None where there is none."""
    self._manager.wait_until_finished()
    return self._manager.latest_step()

  def restore(self, like: Any, step: int | None = None) -> Any:
    """The state of a step (the newest by default), in the structure, types and shardings of `like`.

    Args:
      like: a tree of arrays or `jax.ShapeDtypeStruct`s; its containers, None and zero-size leaves
        are used as they are.
      step: which checkpoint.

    Raises:
      ValueError: no such checkpoint, or a leaf that is missing, left over, or of another shape or
        dtype: no value is ever cast.
    """
    step = self.latest_step() if step is None else step
    if step is None or step not in self._manager.all_steps():
      raise ValueError(
        f'there is no checkpoint of step {step} in {self._manager.directory}: it has '
        f'{list(self._manager.all_steps())}'
      )
    leaves = _named_leaves(like)
    saved = self._manager.restore(step, args=ocp.args.Composite(leaves=ocp.args.JsonRestore()))[
      'leaves'
    ]
    for name in sorted(saved.keys() | leaves.keys()):
      expected = _kind(leaves[name]) if name in leaves else 'absent'
      if saved.get(name, 'absent') != expected:
        raise ValueError(
          f'checkpoint of step {step}: leaf {name!r} is {saved.get(name, "absent")} in '
          f'{self._manager.directory} and {expected} in the state to restore'
        )
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, leaves)
    restored = self._manager.restore(
      step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
    )['state']

    def fill(path: Any, x: Any) -> jax.Array:
      if x.size:
        return restored[collectives.leaf_name(path)]
      return jnp.zeros(x.shape, x.dtype, device=x.sharding)

    return jax.tree_util.tree_map_with_path(fill, like)

  def close(self) -> None:
    """Waits for what is being saved."""
    self._manager.wait_until_finished()
    self._manager.close()

  def __enter__(self) -> Checkpoints:
    return self

  def __exit__(self, *exception: object) -> None:
    self.close()


def resize_workers(rows: Any, count: int) -> Any:
  """The state of W workers for another number of workers, keeping what matters in sum and in mean.

  * Float leaves (parameters, momenta, memories, references): every new row is the mean over the old
    rows, so each mean over workers stays, `mean(memory)` that is still to be applied included, and
    a sum over workers changes by count / W, as it should for weights that sum to W. A reference and
    its reduction stay equal, whatever the new topology.
  * Counters and other integers: the greatest row (of a two-limb meter: the greatest number), so
    that no schedule goes back.
  * Keys: where workers shared one, they still do; where each had its own, old workers keep theirs
    and new ones fold their place in.

  Args:
    rows: a tree whose leaves have a leading axis of W rows.
    count: how many rows the result has.

  Raises:
    ValueError: a count that is not an integer >= 1.
  """
  if isinstance(count, bool) or not isinstance(count, numbers.Integral) or count < 1:
    raise ValueError(f'resize_workers got count={count!r}; accepted are integers >= 1')
  if all(leaf.shape[0] == count for leaf in jax.tree.leaves(rows)):
    return rows

  def resize(leaf: jax.Array) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      return _resize_keys(leaf, count)
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
      row = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)).mean(0).astype(leaf.dtype)
    else:
      row = jnp.asarray(max(np.asarray(leaf), key=lambda row: tuple(np.ravel(row))))
    return jnp.broadcast_to(row, (count, *leaf.shape[1:]))

  return jax.tree.map(resize, rows)


def _resize_keys(keys: jax.Array, count: int) -> jax.Array:
  old = keys.shape[0]
  words = jax.random.key_data(keys)
  if bool((words == words[:1]).all()):
    return jnp.broadcast_to(keys[0], (count, *keys.shape[1:]))
  added = [jax.random.fold_in(keys[i % old], i) for i in range(old, count)]
  return jnp.concatenate([keys[:count], jnp.stack(added)]) if added else keys[:count]


def _named_leaves(tree: Any) -> dict[str, Any]:
  """Leaves by path, without those of no entries, which Orbax does not take."""
  named: dict[str, Any] = {}
  for path, x in jax.tree_util.tree_leaves_with_path(tree):
    name = collectives.leaf_name(path)
    if name in named:
      raise ValueError(f'two leaves have the name {name!r}: rename one, or its container')
    if x.size:
      named[name] = x
  return named


def _kind(leaf: Any) -> str:
  return f'{leaf.dtype}{list(leaf.shape)}'
