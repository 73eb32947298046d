"""Models for data that comes in blocks, again and again: one average a block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_dsgd import collectives
from jax_dsgd.transforms._local import LocalStepsState

Block = Callable[[jax.Array], jax.Array]


class BlockAverageState(NamedTuple):
  """The state of `average_by_block`.

  Attributes:
    models: for each block the mean of its models, float32 with a leading axis of blocks.
    counts: rounds in each mean, int32 [blocks].
    inner: of the wrapped transform.
  """

  models: Any
  counts: jax.Array
  inner: LocalStepsState


def average_by_block(
  local: optax.GradientTransformation, block: Block, *, blocks: int
) -> optax.GradientTransformationExtraArgs:
  """Keeps for every block of data the mean of the models that its rounds ended with.

      at the end of a round of block m
          model_m <- r_m / (r_m + 1) model_m + params' / (r_m + 1);   r_m <- r_m + 1

  Training is that of `local`; the means are what is used on a block.

  Args:
    local: a `local_steps` transform.
    block: from the round (int32, from 0) to the number of its block.
    blocks: how many there are.

  Returns:
    A transform that needs `params`. Sends what `local` does. State: 4 bytes an entry and block, and
    that of `local`.

  Raises:
    ValueError: blocks below 1, or a `local` that is not `local_steps` (at init).
  """
  _require_blocks(blocks)
  local = optax.with_extra_args_support(local)

  def init(params: optax.Params) -> BlockAverageState:
    inner = _started(local, params)
    counts = collectives.vary_with(jnp.zeros(blocks, jnp.int32), params)
    return BlockAverageState(_rows(params, blocks), counts, inner)

  def update(
    updates: Any, state: Any, params: Any = None, **extra: Any
  ) -> tuple[Any, BlockAverageState]:
    updates, inner = _step(local, updates, state.inner, params, extra)
    model = jax.tree.map(jnp.add, collectives.crossing(params), collectives.crossing(updates))
    ended = inner.round > state.inner.round
    models, counts = _averaged(state.models, state.counts, model, block(state.inner.round), ended)
    return updates, BlockAverageState(models, counts, inner)

  return optax.GradientTransformationExtraArgs(init, update)


class ChainsState(NamedTuple):
  """The state of `choose_chain_by_block`.

  Attributes:
    models: for each block the mean of the better models, float32 with a leading axis of blocks.
    counts: rounds in each mean, int32 [blocks].
    chains: the parameters of each block's own chain, with a leading axis of blocks.
    mixed: of the transform on the chain through all blocks.
    separate: of the transforms on the blocks' own chains, with a leading axis of blocks.
  """

  models: Any
  counts: jax.Array
  chains: Any
  mixed: LocalStepsState
  separate: LocalStepsState


def choose_chain_by_block(
  local: optax.GradientTransformation, block: Block, *, blocks: int, axis_name: str
) -> optax.GradientTransformationExtraArgs:
  """Trains one chain of models through all blocks and one for each block, and keeps the better.

  At the end of a round of block m the mean of the block's models takes in that of the two chains
  whose loss over workers is lower. The difference of losses is read from gradients on this step's
  batch, `mean_w <(g_w(x) + g_w(y)) / 2, x - y>`: exact for quadratics, else to third order.

  Args:
    local: a `local_steps` transform, run on both chains.
    block: from the round (int32, from 0) to the number of its block.
    blocks: how many there are.
    axis_name: the workers' axis.

  Returns:
    A transform that needs `params` (the chain through all blocks) and `grad_fn`. Sends what `local`
    does, twice, and 4 bytes a step. State: three copies of the model a block, and one more.

  Raises:
    ValueError: blocks below 1, a `local` that is not `local_steps` (at init), no params, no
      grad_fn.
  """
  _require_blocks(blocks)
  local = optax.with_extra_args_support(local)

  def init(params: optax.Params) -> ChainsState:
    state = _started(local, params)
    counts = collectives.vary_with(jnp.zeros(blocks, jnp.int32), params)
    stack = lambda tree: jax.tree.map(lambda x: jnp.stack([x] * blocks), tree)  # noqa: E731
    return ChainsState(_rows(params, blocks), counts, stack(params), state, stack(state))

  def update(
    updates: Any, state: Any, params: Any = None, *, grad_fn: Any = None, **extra: Any
  ) -> tuple[Any, ChainsState]:
    if params is None or grad_fn is None:
      raise ValueError(
        'choose_chain_by_block trains a second model: call update(updates, state, params, '
        'grad_fn=grad_fn)'
      )
    m = block(state.mixed.round)
    extra = {**extra, 'grad_fn': grad_fn}
    updates, mixed = _step(local, updates, state.mixed, params, extra)
    chain, own = (_row(tree, m) for tree in (state.chains, state.separate))
    way, own = local.update(grad_fn(chain), own, chain, **extra)
    chain, through = _stepped(chain, way), _stepped(params, updates)
    x, y = collectives.crossing(through), collectives.crossing(chain)
    slopes = collectives.crossing(grad_fn(through)), collectives.crossing(grad_fn(chain))
    rise = jax.tree.map(lambda g, h, x, y: jnp.sum((g + h) / 2 * (x - y)), *slopes, x, y)
    rise = collectives.mean(sum(jax.tree.leaves(rise), jnp.zeros(())), axis_name)
    better = jax.tree.map(lambda x, y: jnp.where(rise > 0, y, x), x, y)
    ended = mixed.round > state.mixed.round
    models, counts = _averaged(state.models, state.counts, better, m, ended)
    chains = jax.tree.map(lambda rows, x: rows.at[m].set(x), state.chains, chain)
    separate = jax.tree.map(lambda rows, x: rows.at[m].set(x), state.separate, own)
    return updates, ChainsState(models, counts, chains, mixed, separate)

  return optax.GradientTransformationExtraArgs(init, update)


def _require_blocks(blocks: int) -> None:
  if isinstance(blocks, bool) or not isinstance(blocks, int) or blocks < 1:
    raise ValueError(f'blocks={blocks!r}; accepted are integers >= 1')


def _started(local: optax.GradientTransformationExtraArgs, params: Any) -> LocalStepsState:
  state = local.init(params)
  if not isinstance(state, LocalStepsState):
    raise ValueError(f'accepted are local_steps transforms, whose state is not {type(state)}')
  return state


def _step(
  local: optax.GradientTransformationExtraArgs,
  updates: Any,
  state: Any,
  params: Any,
  extra: dict[str, Any],
) -> tuple[Any, Any]:
  return local.update(updates, state, params, **extra)


def _rows(params: Any, blocks: int) -> Any:
  wide = collectives.widened(collectives.crossing(params))
  return jax.tree.map(lambda x: jnp.stack([jnp.zeros_like(x)] * blocks), wide)


def _stepped(params: Any, updates: Any) -> Any:
  step = lambda x, u: (x + u).astype(x.dtype) if collectives.is_crossing(x) else x  # noqa: E731
  return jax.tree.map(step, params, updates)


def _row(tree: Any, m: jax.Array) -> Any:
  return jax.tree.map(lambda rows: rows[m], tree)


def _averaged(
  models: Any, counts: jax.Array, model: Any, m: jax.Array, ended: jax.Array
) -> tuple[Any, jax.Array]:
  rounds = counts[m] + 1

  def take_in(rows: jax.Array, x: jax.Array) -> jax.Array:
    return rows.at[m].add(jnp.where(ended, (x - rows[m]) / rounds, 0))

  return jax.tree.map(take_in, models, model), counts.at[m].add(ended.astype(jnp.int32))
