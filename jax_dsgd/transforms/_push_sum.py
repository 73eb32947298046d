"""Gossip on directed graphs: push-sum."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_dsgd import collectives, compressors, exchange, memories, topologies
from jax_dsgd.transforms._gossip import as_updates, moved


class PushSumState(NamedTuple):
  """The state of `mix_push_sum`: this worker's weight, float32, and that of the exchange."""

  weight: jax.Array
  exchange: exchange.ExchangeState


def mix_push_sum(
  topology: topologies.Topology, *, axis_name: str
) -> optax.GradientTransformationExtraArgs:
  """Averages with neighbours who need not answer: each sends shares of its value and of its weight.

      z_i = w_i x_i + u_i;   z <- A z;   w <- A w;   x_i = z_i / w_i

  The parameters are the de-biased x: what gradients and evaluation see. The columns of A sum to 1,
  so sum_i w_i stays W and sum_i z_i moves by sum_i u_i; with doubly stochastic A all w_i are 1, and
  it is `mix_neighbors`.

  Args:
    topology: A_t, column stochastic; the round advances with each call.
    axis_name: the workers' axis.

  Returns:
    A transform that needs `params`; last in a chain. Sends each leaf, in its own dtype, and 4 bytes
    once to each receiver of the round. State: one number a worker. Keeps the weighted mean
    `sum_i w_i x_i / W`.

  Raises:
    ValueError: no params, a topology that never mixes or whose columns do not sum to 1, or one of
      another size than the axis (when traced), a complex leaf.

  Reference: Kempe, Dobra, Gehrke, "Gossip-based computation of aggregate information", FOCS 2003;
    Assran, Loizou, Ballas, Rabbat, "Stochastic Gradient Push", arXiv 1811.10792.
  """
  topology.require_mixing()
  if not topology.column_stochastic:
    raise ValueError(
      f'mix_push_sum got topology {topology.name!r}, in which what a worker sends does not sum to 1'
    )
  channel = exchange.mix_of_neighbors(topology, compressors.identity(), axis_name=axis_name)

  def init(params: optax.Params) -> PushSumState:
    weight = collectives.vary_with(jnp.ones(()), params)
    both = collectives.crossing(params), weight
    return PushSumState(
      weight, exchange.init(both, memory=memories.none(), channel=channel, seed=0)
    )

  def update(
    updates: Any, state: Any, params: Any = None, **extra: Any
  ) -> tuple[Any, PushSumState]:
    if params is None:
      raise ValueError('mix_push_sum averages parameters: call update(updates, state, params)')
    collectives.require_varying(collectives.crossing(params), axis_name)
    here = collectives.crossing(params)
    # w x + u, of which the second term is all that is not a multiple of x.
    z = jax.tree.map(lambda y, x: y + (state.weight - 1) * x, moved(params, updates), here)
    both = optax.tree.cast_like(z, here), state.weight
    _, (mixed, weight), sent = exchange.send(
      both, state.exchange, memory=memories.none(), channel=channel
    )
    way = jax.tree.map(lambda z, x: z / weight - x, mixed, here)
    return as_updates(way, updates, params), PushSumState(weight, sent)

  return optax.GradientTransformationExtraArgs(init, update)
