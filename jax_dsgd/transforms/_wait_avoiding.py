"""Group averages that wait for nobody, between means of all."""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_dsgd import collectives, compressors, exchange, memories, topologies
from jax_dsgd.transforms._control import told
from jax_dsgd.transforms._gossip import as_updates, moved, require_rows


class WaitAvoidingState(NamedTuple):
  """The state of `mix_without_waiting`: what is in this worker's send buffer, and the exchange."""

  buffer: Any
  exchange: exchange.ExchangeState


def mix_without_waiting(
  topology: topologies.Topology, *, axis_name: str, group_size: int, period: int
) -> optax.GradientTransformationExtraArgs:
  """Averages in groups that change each step, and over all workers every `period` steps.

      y = params + u
      every period-th step   x <- mean over all of y
      else                   z = mean over the group of b;   x <- z, if late (S z + y) / (S + 1)
                             b = y, if late the y of the step before

  A worker is late where `control.late` says so: the others took what was in its send buffer, and it
  adds what it has now to what it finds. Then y is in its buffer. Without `control` nobody is late.

  Args:
    topology: `one_peer_hypercube(W)`; log2 S of its rounds one after the other are the mean of a
      group, and its period makes the mean of all.
    axis_name: the workers' axis.
    group_size: S, a power of two.
    period: steps from one mean of all to the next.

  Returns:
    A transform that needs `params`; last in a chain. Sends the model log2 S times a step, the first
    in its own dtype and the others in float32, and once in an all-reduce every `period` steps.
    State: a copy of the parameters.

  Raises:
    ValueError: a group size that is not a power of two up to W, a topology whose rounds are not the
      means of such groups, a period below 1, no params.

  Reference: Li, Ben-Nun, Nadiradze, Di Girolamo, Dryden, Alistarh, Hoefler, "Breaking (Global)
    Barriers in Parallel Stochastic Optimization with Wait-Avoiding Group Averaging", arXiv
    2005.00124. The group formula was not checked against the paper. The official code averages
    before the step (`before_step`). In one program collectives wait for everybody: lateness comes
    from a trace.
  """
  require_rows(topology, 'mix_without_waiting')
  levels = _levels(group_size, topology.size)
  _require_groups(topology, levels)
  if isinstance(period, bool) or not isinstance(period, numbers.Integral) or period < 1:
    raise ValueError(f'mix_without_waiting got period={period!r}; accepted are integers >= 1')
  groups = exchange.mix_of_neighbors(
    topology, compressors.identity(), axis_name=axis_name, rounds=(1.0,) * levels
  )
  everybody = exchange.mean_of_workers(compressors.identity(), axis_name=axis_name)
  memory = memories.none()

  def init(params: optax.Params) -> WaitAvoidingState:
    buffer = jax.tree.map(jnp.copy, collectives.crossing(params))
    return WaitAvoidingState(buffer, exchange.init(params, memory=memory, channel=groups, seed=0))

  def update(
    updates: Any, state: Any, params: Any = None, **extra: Any
  ) -> tuple[Any, WaitAvoidingState]:
    if params is None:
      raise ValueError(
        'mix_without_waiting averages parameters: call update(updates, state, params)'
      )
    here = collectives.crossing(params)
    collectives.require_varying(here, axis_name)
    y = optax.tree.cast_like(moved(params, updates), here)
    late = told(extra, 'late')
    given = y if late is None else _where(late, state.buffer, y)

    def over(channel: exchange.Channel, values: Any) -> Any:
      return exchange.send(values, state.exchange, memory=memory, channel=channel)[1:]

    def in_group() -> Any:
      mixed, sent = over(groups, given)
      if late is not None:
        joined = lambda m, y: (group_size * m + y) / (group_size + 1)  # noqa: E731
        mixed = _where(late, jax.tree.map(joined, mixed, y), mixed)
      return collectives.vary_like((jax.tree.map(_wide_like, mixed, y), sent), like)

    def over_all() -> Any:
      mean, sent = over(everybody, y)
      return collectives.vary_like((jax.tree.map(_wide_like, mean, y), sent), like)

    like = jax.tree.map(_wide_like, y, y), state.exchange
    meets = collectives.uniform((state.exchange.count + 1) % period == 0, axis_name)
    mixed, sent = jax.lax.cond(meets, over_all, in_group)
    way = jax.tree.map(jnp.subtract, mixed, here)
    return as_updates(way, updates, params), WaitAvoidingState(y, sent)

  return optax.GradientTransformationExtraArgs(init, update)


def _where(late: jax.Array, then: Any, otherwise: Any) -> Any:
  return jax.tree.map(lambda x, y: jnp.where(late, x, y), then, otherwise)


def _wide_like(x: jax.Array, like: jax.Array) -> jax.Array:
  return x.astype(jnp.promote_types(like.dtype, jnp.float32))


def _levels(group_size: int, workers: int) -> int:
  power = isinstance(group_size, numbers.Integral) and group_size > 0
  if not power or group_size & (group_size - 1) or group_size > workers:
    raise ValueError(
      f'mix_without_waiting got group_size={group_size!r}; accepted are powers of two up to '
      f'{workers} workers'
    )
  return int(group_size).bit_length() - 1


def _require_groups(topology: topologies.Topology, levels: int) -> None:
  """Refuses a topology whose rounds, `levels` in a row, are not means of groups of 2^levels."""
  for start in {t * levels % topology.period for t in range(topology.period)}:
    product = np.eye(topology.size)
    for k in range(levels):
      product = topology.matrix(start + k) @ product
    means = np.allclose(product @ product, product)  # stochastic projections are means of groups
    if not means or not np.allclose(product.diagonal(), 1 / 2**levels):
      raise ValueError(
        f'mix_without_waiting got topology {topology.name!r}, whose rounds, {levels} in a row, are '
        f'not means of groups of {2**levels}; accepted is one_peer_hypercube(W)'
      )
