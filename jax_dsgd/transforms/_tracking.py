"""Transforms that free gossip from the bias of heterogeneous data.

Each takes the mixing transform that carries it (`mix_neighbors`, `mix_compressed`), so any
topology, compressor and memory does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_dsgd import collectives
from jax_dsgd.transforms._gossip import as_updates


def before_step(mix: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
  """Averages with neighbours first, and then steps: `x_i <- mix(x)_i + u_i`.

  Combine, then adapt; a mixing transform by itself adapts, then combines.

  Args:
    mix: a mixing transform.

  Returns:
    A transform that needs `params`; last in a chain. Sends and keeps what `mix` does.

  >>> from jax_dsgd import topologies, transforms
  >>> tx = before_step(transforms.mix_neighbors(topologies.complete(2), axis_name='workers'))
  >>> x = jnp.array([0.0, 4.0])
  >>> state = jax.vmap(tx.init)(x)
  >>> jax.vmap(tx.update, axis_name='workers')(jnp.array([1.0, 0.0]), state, x)[0].tolist()
  [3.0, -2.0]
  """
  mix = optax.with_extra_args_support(mix)

  def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
    still = jax.tree.map(jnp.zeros_like, updates)
    way, state = mix.update(still, state, params, **extra)
    add = lambda w, u: w + u if collectives.is_crossing(u) else u  # noqa: E731
    return jax.tree.map(add, way, updates), state

  return optax.GradientTransformationExtraArgs(mix.init, update)


class TrackState(NamedTuple):
  """The state of `track_gradients`.

  Attributes:
    correction: c, what is taken from this worker's update, float32; its sum over workers is 0.
    mix: of the mixing transform.
  """

  correction: Any
  mix: Any


def track_gradients(mix: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
  """Replaces updates by an estimate of their mean over workers that neighbours improve.

      y_i = u_i - c_i;   c_i <- u_i - mix(y)_i            so y <- mix(y) + u' - u, and sum_i c_i = 0

  On gradients it is gradient tracking; after momentum it is Momentum Tracking. Where the updates
  settle, y settles at their mean, whatever the data of each worker.

  Args:
    mix: a mixing transform that keeps the mean over workers.

  Returns:
    A transform of updates, before the mix of parameters. Sends y, in float32, as `mix` sends.
    State: c, 4 bytes an entry, and that of `mix`.

  >>> from jax_dsgd import topologies, transforms
  >>> tx = track_gradients(transforms.mix_neighbors(topologies.complete(2), axis_name='workers'))
  >>> u = jnp.array([0.0, 4.0])
  >>> state = jax.vmap(tx.init)(u)
  >>> for _ in range(2):
  ...   updates, state = jax.vmap(tx.update, axis_name='workers')(u, state)
  >>> updates.tolist()
  [2.0, 2.0]

  Reference: Di Lorenzo, Scutari, "NEXT", arXiv 1602.00591; Nedic, Olshevsky, Shi, arXiv 1607.03218.
    c begins at 0, so the first y is the worker's own update.
  """
  mix = optax.with_extra_args_support(mix)
  wide = lambda tree: collectives.widened(collectives.crossing(tree))  # noqa: E731

  def init(params: optax.Params) -> TrackState:
    zeros = jax.tree.map(jnp.zeros_like, wide(params))
    return TrackState(zeros, mix.init(zeros))

  def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, TrackState]:
    u = wide(updates)
    collectives.require_same_leaves(u, state.correction, 'correction')
    y = jax.tree.map(jnp.subtract, u, state.correction)
    way, mixed = mix.update(jax.tree.map(jnp.zeros_like, y), state.mix, y, **extra)
    correction = jax.tree.map(lambda u, y, w: u - (y + w), u, y, way)
    tracked = optax.tree.cast_like(y, collectives.crossing(updates))
    return collectives.fill(tracked, updates), TrackState(correction, mixed)

  return optax.GradientTransformationExtraArgs(init, update)


class DiffusionState(NamedTuple):
  """previous: where the last step would have led before it was mixed, as wide as the parameters."""

  previous: Any


def correct_diffusion() -> optax.GradientTransformationExtraArgs:
  """Adds to each step what the last mix changed: exact diffusion, between a step and a mix.

      y = x + u;   u' = u + x - y_last        then  x <- sum_j W[i, j] (x_j + u'_j)

  The fixed points of step and mix are then those of the mean gradient, with a constant rate and
  without a second message. W is symmetric, with no eigenvalue below -1/3: `(I + W) / 2` always is.

  Returns:
    A transform that needs `params`. Sends nothing. State: y, one copy of the parameters.

  Reference: Yuan, Ying, Zhao, Sayed, "Exact diffusion", arXiv 1702.05122; with W itself it is D2,
    Tang, Lian, Yan, Zhang, Liu, arXiv 1803.07068.
  """

  def init(params: optax.Params) -> DiffusionState:
    return DiffusionState(jax.tree.map(jnp.copy, collectives.crossing(params)))

  def update(
    updates: Any, state: Any, params: Any = None, **extra: Any
  ) -> tuple[Any, DiffusionState]:
    if params is None:
      raise ValueError('correct_diffusion compares places: call update(updates, state, params)')
    here, way = collectives.crossing(params), collectives.crossing(updates)
    collectives.require_same_leaves(here, state.previous, 'previous step')
    corrected = jax.tree.map(lambda u, x, y: (u + x - y).astype(u.dtype), way, here, state.previous)
    there = jax.tree.map(lambda x, u: (x + u).astype(x.dtype), here, way)
    return collectives.fill(corrected, updates), DiffusionState(there)

  return optax.GradientTransformationExtraArgs(init, update)


class QuasiGlobalState(NamedTuple):
  """The state of `quasi_global_momentum`: count of steps, momentum in float32, and of the mix."""

  count: jax.Array
  momentum: Any
  mix: Any


def quasi_global_momentum(
  mix: optax.GradientTransformation,
  learning_rate: optax.ScalarOrSchedule,
  *,
  momentum: float = 0.9,
  decay: float | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Momentum of the way that the worker really went, mixing included.

      x' = mix(x - lr (g + b m));   m <- d m + (1 - d) (x - x') / lr

  Args:
    mix: a mixing transform.
    learning_rate: a float, or a schedule of the step.
    momentum: b, in [0, 1).
    decay: d, in [0, 1); b if None.

  Returns:
    A transform of gradients that needs `params`, and that steps and mixes. Sends what `mix` sends.
    State: m, 4 bytes an entry, and that of `mix`.

  Reference: Lin, Karimireddy, Stich, Jaggi, "Quasi-Global Momentum", arXiv 2102.04761.
  """
  decay = momentum if decay is None else decay
  mix = optax.with_extra_args_support(mix)

  def init(params: optax.Params) -> QuasiGlobalState:
    count = collectives.vary_with(jnp.zeros((), jnp.int32), params)
    zeros = jax.tree.map(jnp.zeros_like, collectives.widened(collectives.crossing(params)))
    return QuasiGlobalState(count, zeros, mix.init(params))

  def update(
    updates: Any, state: Any, params: Any = None, **extra: Any
  ) -> tuple[Any, QuasiGlobalState]:
    rate: Any = learning_rate(state.count) if callable(learning_rate) else learning_rate
    step = lambda g, m: -rate * (g + momentum * m)  # noqa: E731
    ahead = jax.tree.map(step, collectives.crossing(updates), state.momentum)
    way, mixed = mix.update(collectives.fill(ahead, updates), state.mix, params, **extra)
    gone = lambda m, v: decay * m - (1 - decay) * v / rate  # noqa: E731
    after = jax.tree.map(gone, state.momentum, collectives.crossing(way))
    return as_updates(collectives.crossing(way), updates, params), QuasiGlobalState(
      state.count + 1, after, mixed
    )

  return optax.GradientTransformationExtraArgs(init, update)
