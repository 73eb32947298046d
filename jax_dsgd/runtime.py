"""One step on three runtimes: simulated workers, workers on a mesh, and a user's own pmap.

The step is written for ONE worker; it calls transforms that were built with the workers' axis name.
Outside of it, everything that belongs to workers is carried as rows: leaves with a leading axis of
W entries, one a worker.

>>> import optax
>>> from jax_dsgd import algorithms
>>> workers = simulate(4)
>>> tx = algorithms.allreduce_sgd(0.5, axis_name=workers.axis_name)
>>> def step(params, state, target):
...   gradient = jax.grad(lambda x: 0.5 * (x - target) ** 2)(params)
...   updates, state = tx.update(gradient, state, params)
...   return optax.apply_updates(params, updates), state
>>> params = workers.replicate(jnp.zeros(()))
>>> state = workers.spmd(tx.init)(params)
>>> params, state = jax.jit(workers.spmd(step))(params, state, jnp.arange(4.0))
>>> params.tolist()
[0.75, 0.75, 0.75, 0.75]
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_dsgd import collectives


@dataclasses.dataclass(frozen=True)
class Workers:
  """W workers, simulated or on a mesh.

  Attributes:
    count: W.
    axis_name: the axis that transforms reduce over.
    mesh: the mesh whose axis of that name holds the workers; None when they are simulated.
    sharding: how rows lie on devices; None where JAX chooses.
  """

  count: int
  axis_name: str
  mesh: Mesh | None = None
  sharding: NamedSharding | None = None

  def spmd(self, function: Callable[..., Any], *, at_once: int | None = None) -> Callable[..., Any]:
    """The function of one worker as a function of all: arguments and results become W rows.

    It is jitted, so make it once, before the loop; wrap it in `jax.jit` once more to donate what it
    replaces. It also works inside `jax.lax.scan`.

    Args:
      function: of one worker.
      at_once: of a function that communicates nothing, such as a gradient: compute so many
        simulated workers at a time, so that their models stay in the cache; None for all. On a mesh
        workers are at once.

    Raises:
      ValueError: when called, an argument with a leaf that has not W rows, by name.
    """

    def per_worker(*rows: Any) -> Any:
      self._require_rows(rows)
      if self.mesh is None and at_once is not None and self.sharding is None:
        return jax.lax.map(lambda row: function(*row), rows, batch_size=at_once)
      if self.mesh is None:
        mapped = jax.vmap(function, axis_name=self.axis_name, axis_size=self.count)
        return self._spread(mapped(*self._spread(rows)))
      spec = PartitionSpec(self.axis_name)

      def one(*rows: Any) -> Any:
        results = function(*jax.tree.map(lambda x: x[0], rows))
        return jax.tree.map(lambda x: x[None], collectives.vary(results, self.axis_name))

      return jax.shard_map(
        one, mesh=self.mesh, in_specs=spec, out_specs=spec, axis_names={self.axis_name}
      )(*rows)

    return jax.jit(per_worker)

  def scan(self, step: Callable[[Any, Any], tuple[Any, Any]]) -> Callable[[Any, Any], Any]:
    """Several steps of every worker in one call, as a round of local steps.

    Args:
      step: of one worker: `(carry, x) -> (carry, y)`, as for `jax.lax.scan`.

    Returns:
      `(carry, xs) -> (carry, ys)`, jitted as `spmd` is; leaves of carry have W rows `[W, ...]`,
      those of xs and ys one entry a step besides `[W, T, ...]`.

    Raises:
      ValueError: when called, an argument with a leaf that has not W rows, by name.

    >>> workers = simulate(2)
    >>> total, sums = workers.scan(lambda total, x: (total + x, total + x))(
    ...   jnp.zeros(2), jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    ... )
    >>> total.tolist(), sums.tolist()
    ([6.0, 15.0], [[1.0, 3.0, 6.0], [4.0, 9.0, 15.0]])
    """
    return self.spmd(lambda carry, xs: jax.lax.scan(step, carry, xs))

  def replicate(self, tree: Any) -> Any:
    """W equal rows of a tree of arrays; on a mesh each worker holds its own."""
    return self.place(
      jax.tree.map(lambda x: jnp.broadcast_to(x, (self.count, *jnp.shape(x))), tree)
    )

  def place(self, rows: Any) -> Any:
    """Rows, put where the workers are."""
    self._require_rows(rows)
    if self.sharding is None:
      return jax.tree.map(jnp.asarray, rows)
    return jax.device_put(rows, self.sharding)

  def per_shard(
    self, tx: optax.GradientTransformation, specs: Any
  ) -> optax.GradientTransformationExtraArgs:
    """A transform that runs on each device's own shard of a worker that shards its model.

    The worker is a slice of the mesh, and its model lies over the other axes. Without it, a
    transform that flattens a sharded leaf makes XLA gather the leaf and send all of it from every
    device. With it, blocks, scales and k are those of a shard, each device sends its own shard's
    payload, and the state has one row a shard, along a second leading axis. Leaves that are
    replicated inside a worker are computed alike on all of its devices.

    Args:
      tx: transforms that treat leaves one by one (a norm over leaves would be a shard's norm).
      specs: for each leaf of the parameters (or a prefix) its PartitionSpec over the mesh's other
        axes.

    Raises:
      ValueError: simulated workers, or a mesh with no other axis.
    """
    inner = (
      tuple(name for name in self.mesh.axis_names if name != self.axis_name) if self.mesh else ()
    )
    if not inner:
      raise ValueError(
        'per_shard needs runtime.on_mesh with a mesh that has axes beside the workers: nothing is '
        'sharded here'
      )
    tx = optax.with_extra_args_support(tx)
    rows = PartitionSpec(inner)

    # check_vma=False: leaves replicated over the inner axes are computed alike on all shards, which
    # types cannot show. So what must vary over the workers is checked outside.
    def on_shards(function: Callable, in_specs: Any, out_specs: Any) -> Callable:
      return jax.shard_map(
        function, in_specs=in_specs, out_specs=out_specs, axis_names=set(inner), check_vma=False
      )

    def init(params: optax.Params) -> Any:
      local = lambda params: jax.tree.map(lambda x: x[None], tx.init(params))  # noqa: E731
      return on_shards(local, (specs,), rows)(params)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
      collectives.require_varying(updates, self.axis_name)

      def local(updates: Any, state: Any, params: Any, extra: Any) -> tuple[Any, Any]:
        updates, state = tx.update(updates, jax.tree.map(lambda x: x[0], state), params, **extra)
        return updates, jax.tree.map(lambda x: x[None], state)

      # Every shard sees the whole of the other arguments; a function of whole parameters stays out.
      extra = {name: x for name, x in extra.items() if not callable(x)}
      params_specs = specs if params is not None else PartitionSpec()
      in_specs = (specs, rows, params_specs, PartitionSpec())
      return on_shards(local, in_specs, (specs, rows))(updates, state, params, extra)

    return optax.GradientTransformationExtraArgs(init, update)

  def _spread(self, rows: Any) -> Any:
    return rows if self.sharding is None else jax.lax.with_sharding_constraint(rows, self.sharding)

  def _require_rows(self, rows: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(rows):
      if not jnp.shape(leaf) or jnp.shape(leaf)[0] != self.count:
        raise ValueError(
          f'leaf {collectives.leaf_name(path)!r} of shape {jnp.shape(leaf)} has not one row for '
          f'each of {self.count} workers (Workers.replicate makes rows)'
        )


def simulate(count: int, *, axis_name: str = 'workers', mesh: Mesh | None = None) -> Workers:
  """`count` workers on the devices at hand, by `jax.vmap`.

  They compute the same numbers as workers on a mesh, to float rounding.

  Args:
    count: W.
    axis_name: the axis that transforms reduce over.
    mesh: over all of its devices the rows are spread evenly, whatever its axes, so that workers may
      be many more than devices; XLA divides the work and makes means all-reduces. None for one
      device.

  Raises:
    ValueError: a count that is not an integer >= 1, or that the mesh's devices do not divide.
  """
  if isinstance(count, bool) or not isinstance(count, numbers.Integral) or count < 1:
    raise ValueError(f'simulate got count={count!r}; accepted are integers >= 1')
  if mesh is None:
    return Workers(int(count), axis_name)
  if count % mesh.size:
    raise ValueError(
      f'simulate got count={count} for a mesh of {mesh.size} devices; accepted are multiples of it'
    )
  sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
  return Workers(int(count), axis_name, sharding=sharding)


def on_mesh(mesh: Mesh, axis_name: str) -> Workers:
  """One worker a slice of the mesh along an axis, by `jax.shard_map`.

  The other axes stay with the compiler: a worker may be a slice that shards its model inside (see
  `Workers.per_shard`).

  Raises:
    ValueError: an axis that the mesh has not, or one that is not Auto.
  """
  if axis_name not in mesh.axis_names:
    raise ValueError(
      f'the mesh has no axis {axis_name!r}; its axes are {", ".join(map(repr, mesh.axis_names))}'
    )
  if any(kind != AxisType.Auto for kind in mesh.axis_types):
    raise ValueError(
      f'the mesh has axis types {mesh.axis_types}; make it with runtime.make_mesh, whose axes are '
      'Auto'
    )
  sharding = NamedSharding(mesh, PartitionSpec(axis_name))
  return Workers(mesh.shape[axis_name], axis_name, mesh, sharding)


def make_mesh(**sizes: int) -> Mesh:
  """A mesh with the named axes, all Auto: `make_mesh(workers=2, model=4)`.

  On virtual CPU devices wait for the result of a program before the next one is called
  (`jax.block_until_ready`): with many in flight XLA may lack threads for a collective, and abort.

  Raises:
    ValueError: more devices than there are; fewer is fine.
  """
  needed, present = math.prod(sizes.values()), jax.device_count()
  if needed > present:
    raise ValueError(
      f'a mesh of {sizes} needs {needed} devices and there are {present}; on CPU, '
      f"jax.config.update('jax_num_cpu_devices', {needed}) before the first JAX call makes them"
    )
  names = tuple(sizes)
  return jax.make_mesh(
    tuple(sizes.values()),
    names,
    axis_types=(AxisType.Auto,) * len(names),
    devices=jax.devices()[:needed],
  )


def average(rows: Any) -> Any:
  """The mean over rows of every float leaf, in its dtype; the first row of others."""
  return jax.tree.map(
    lambda x: x.mean(0).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else x[0], rows
  )


def consensus_distance(rows: Any) -> jax.Array:
  """How far workers are from their mean: `sqrt(mean_w |x_w - mean x|^2)` over all float leaves."""
  floats = [
    x.astype(jnp.float32) for x in jax.tree.leaves(rows) if jnp.issubdtype(x.dtype, jnp.inexact)
  ]
  squares = [jnp.sum((x - x.mean(0, keepdims=True)) ** 2) / x.shape[0] for x in floats]
  return jnp.sqrt(sum(squares, jnp.zeros(())))
