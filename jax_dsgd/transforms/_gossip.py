"""Transforms that average parameters with neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jax_dsgd import collectives, compressors, exchange, memories, topologies


def mix_neighbors(
  topology: topologies.Topology, *, axis_name: str, rounds: Sequence[float] = (1.0,)
) -> optax.GradientTransformationExtraArgs:
  """Averages with neighbours where the step would lead: `x_i <- sum_j W_t[i, j] (x_j + u_j)`.

  An update in disguise: `u' = mix(params + u) - params`. It comes last in a chain: step, then
  average. `before_step` averages, then steps.

  Args:
    topology: W_t; its rounds advance with each call.
    axis_name: the workers' axis.
    rounds: one weight for each of the rounds of a call: ones are plain rounds, the weights of
      `chebyshev` mix faster than as many of them.

  Returns:
    A transform that needs `params`. Sends each leaf, in its own dtype, once to each neighbour of
    the first round, in float32 in the others; sums in float32. Keeps the mean over workers, to
    rounding, where W_t is doubly stochastic. State: counters.

  Raises:
    ValueError: no params, a topology that never mixes or whose rows do not sum to 1, one of another
      size than the axis (when traced), a complex leaf.

  >>> from jax_dsgd import topologies
  >>> tx = mix_neighbors(topologies.complete(2), axis_name='workers')
  >>> params = jnp.array([0.0, 4.0])
  >>> state = jax.vmap(tx.init)(params)
  >>> jax.vmap(tx.update, axis_name='workers')(jnp.zeros(2), state, params)[0].tolist()
  [2.0, -2.0]

  Reference: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", arXiv
    1705.09056.
  """
  require_rows(topology, 'mix_neighbors')
  channel = exchange.mix_of_neighbors(
    topology, compressors.identity(), axis_name=axis_name, rounds=rounds
  )
  return _mixed(channel, memories.none(), axis_name=axis_name)


def mix_compressed(
  topology: topologies.Topology,
  compressor: exchange.Choice,
  *,
  axis_name: str,
  consensus_rate: float,
  memory: memories.Memory | None = None,
  trigger: exchange.Trigger | None = None,
  seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """Averages with neighbours through a compressor.

      y = params + u;   x <- y + g (received - own)

  With the reference memory this is CHOCO gossip: the difference to the shared copy is sent,
  consensus is a fixed point, and the mean over workers is kept whatever the compressor drops. With
  the residual it is like DeepSqueeze, without memory it is naive.

  Args:
    topology: W_t; the round advances with each call. A reference memory needs one that does not
      vary in time.
    compressor: the wire format of each leaf, or a policy (`compressors.by_leaf`).
    axis_name: the workers' axis.
    consensus_rate: g, in (0, 1]; the stronger the compression, the smaller.
    memory: the reference memory if None.
    trigger: None, or when a worker sends: a function of the squared length of what it would send
      (with a reference, of how far it is from its copy) and of the count of calls. One that does
      not send is still heard of through its copy. In one program zeros cross; they are not counted.
    seed: of the key that random compressors draw from.

  Returns:
    A transform that needs `params`. Sends each payload once to each neighbour of the round. State:
    that of the memory.

  Raises:
    ValueError: no params, a consensus rate outside (0, 1], a topology that never mixes or whose
      rows do not sum to 1, a varying topology under a reference, a topology of another size than
      the axis (when traced), a complex leaf.

  Reference: Koloskova, Stich, Jaggi, "Decentralized Stochastic Optimization and Gossip Algorithms
    with Compressed Communication", arXiv 1902.00340; `received` is kept as one buffer, as there.
  """
  memory = memories.reference() if memory is None else memory
  if (
    isinstance(consensus_rate, bool)
    or not isinstance(consensus_rate, int | float)
    or not 0 < consensus_rate <= 1
  ):
    raise ValueError(
      f'mix_compressed got consensus_rate={consensus_rate!r}; accepted are numbers in (0, 1]'
    )
  require_rows(topology, 'mix_compressed')
  if topology.period > 1 and memory.kind == 'reference':
    raise ValueError(
      f'topology {topology.name!r} varies in time (period {topology.period}): the one buffer of a '
      'reference memory holds the mix of a fixed topology'
    )
  channel = exchange.mix_of_neighbors(topology, compressor, axis_name=axis_name)
  return _mixed(
    channel, memory, axis_name=axis_name, rate=consensus_rate, trigger=trigger, seed=seed
  )


def require_rows(topology: topologies.Topology, name: str) -> None:
  """Refuses a topology that never mixes, or under which agreement is not a fixed point."""
  topology.require_mixing()
  if not topology.row_stochastic:
    raise ValueError(
      f'{name} got topology {topology.name!r}, in which what a worker receives does not sum to 1; '
      'mix_push_sum is for directed graphs'
    )


def _mixed(
  channel: exchange.Channel,
  memory: memories.Memory,
  *,
  axis_name: str,
  rate: float = 1.0,
  trigger: exchange.Trigger | None = None,
  seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  def init(params: optax.Params) -> exchange.ExchangeState:
    return exchange.init(params, memory=memory, channel=channel, seed=seed)

  def update(
    updates: Any, state: Any, params: Any = None, **extra: Any
  ) -> tuple[Any, exchange.ExchangeState]:
    if params is None:
      raise ValueError(
        f'{memory!r} mixing averages parameters: call update(updates, state, params)'
      )
    collectives.require_varying(collectives.crossing(params), axis_name)
    target = moved(params, updates)
    here = collectives.crossing(params)
    own, received, state = exchange.send(
      optax.tree.cast_like(target, here), state, memory=memory, channel=channel, trigger=trigger
    )
    toward = lambda y, own, received, x: y + rate * (received - own) - x  # noqa: E731
    return as_updates(jax.tree.map(toward, target, own, received, here), updates, params), state

  return optax.GradientTransformationExtraArgs(init, update)


def moved(params: Any, updates: Any) -> Any:
  """The crossing parameters after the updates, in float32 or wider; None at other leaves."""
  return collectives.crossing(jax.tree.map(_moved, params, updates))


def as_updates(way: Any, updates: Any, params: Any) -> Any:
  """The ways that crossing parameters go, as the updates to return."""
  # As precise as the parameters, of which the mean over workers is to stay.
  precise = lambda u, x, m: m.astype(jnp.promote_types(u.dtype, x.dtype))  # noqa: E731
  way = jax.tree.map(precise, collectives.crossing(updates), collectives.crossing(params), way)
  return collectives.fill(way, updates)


def _moved(param: jax.Array, update: jax.Array) -> jax.Array:
  if not collectives.is_crossing(param):
    return param
  return param.astype(jnp.promote_types(param.dtype, jnp.float32)) + update
