"""Transforms that average parameters with neighbours."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jax_dsgd import collectives, compressors, exchange, memories, topologies


def mix_neighbors(
  topology: topologies.Topology, *, axis_name: str
) -> optax.GradientTransformationExtraArgs:
  """Averages with neighbours where the step would lead: `x_i <- sum_j W_t[i, j] (x_j + u_j)`.

  An update in disguise: `u' = mix(params + u) - params`. It comes last in a chain (step, then
  average); first in a chain, or around zero updates, it averages and then steps.

  Args:
    topology: W_t; the round advances with each call.
    axis_name: the workers' axis.

  Returns:
    A transform that needs `params`. Sends each leaf, in its own dtype, once to each neighbour of
    the round; sums in float32. Keeps the mean over workers, to rounding, where W_t is doubly
    stochastic.

  Raises:
    ValueError: no params, a topology of another size than the axis (when traced), a complex leaf.

  >>> from jax_dsgd import topologies
  >>> tx = mix_neighbors(topologies.complete(2), axis_name='workers')
  >>> params = jnp.array([0.0, 4.0])
  >>> state = jax.vmap(tx.init)(params)
  >>> jax.vmap(tx.update, axis_name='workers')(jnp.zeros(2), state, params)[0].tolist()
  [2.0, -2.0]

  Reference: Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", arXiv
    1705.09056.
  """
  return mix_compressed(
    topology,
    compressors.identity(),
    axis_name=axis_name,
    consensus_rate=1.0,
    memory=memories.none(),
  )


def mix_compressed(
  topology: topologies.Topology,
  compressor: compressors.Compressor,
  *,
  axis_name: str,
  consensus_rate: float,
  memory: memories.Memory | None = None,
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
    compressor: the wire format of each leaf.
    axis_name: the workers' axis.
    consensus_rate: g, in (0, 1]; the stronger the compression, the smaller.
    memory: the reference memory if None.
    seed: of the key that random compressors draw from.

  Returns:
    A transform that needs `params`. Sends each payload once to each neighbour of the round.

  Raises:
    ValueError: no params, a consensus rate outside (0, 1], a varying topology under a reference, a
      topology of another size than the axis (when traced), a complex leaf.

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
  if topology.period > 1 and memory.name.startswith('reference'):
    raise ValueError(
      f'topology {topology.name!r} varies in time (period {topology.period}): the one buffer of a '
      'reference memory holds the mix of a fixed topology'
    )
  channel = exchange.mix_of_neighbors(topology, compressor, axis_name=axis_name)

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
    target = collectives.crossing(jax.tree.map(_moved, params, updates))
    here = collectives.crossing(params)
    own, received, state = exchange.send(
      optax.tree.cast_like(target, here), state, memory=memory, channel=channel
    )
    toward = lambda y, own, received, x: y + consensus_rate * (received - own) - x  # noqa: E731
    mixed = jax.tree.map(toward, target, own, received, here)
    # As precise as the parameters, of which the mean over workers is to stay.
    precise = lambda u, x, m: m.astype(jnp.promote_types(u.dtype, x.dtype))  # noqa: E731
    mixed = jax.tree.map(precise, collectives.crossing(updates), here, mixed)
    return collectives.fill(mixed, updates), state

  return optax.GradientTransformationExtraArgs(init, update)


def _moved(param: jax.Array, update: jax.Array) -> jax.Array:
  if not collectives.is_crossing(param):
    return param
  return param.astype(jnp.promote_types(param.dtype, jnp.float32)) + update
