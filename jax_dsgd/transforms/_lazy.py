"""Means to which a worker contributes anew only when it has news."""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_dsgd import collectives, compressors, exchange, ledger, memories


class LazyState(NamedTuple):
  """The state of `lazy_mean`.

  Attributes:
    exchange: of the residual memory; its channel's state is the payload that was sent last.
    stale: the parameters at which it was made; None at leaves that do not cross.
    staleness: steps since, int32.
    steps: squared lengths of the last steps, float32 [window].
  """

  exchange: exchange.ExchangeState
  stale: Any
  staleness: jax.Array
  steps: jax.Array


def lazy_mean(
  compressor: compressors.Compressor,
  *,
  axis_name: str,
  weight: float,
  window: int = 10,
  seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """Replaces updates by the mean of what each worker sent last; it sends when its gradient changed.

      sends if |grad_fn(x) - grad_fn(x_stale)|^2 >= (weight / W^2) sum_{d < window} |step_d|^2
      or nothing was sent for `window` steps
      then s <- C(u + e),  e <- u + e - C(u + e),  x_stale <- x;   always u' = mean_w s_w

  Both gradients are of this step's batch, so noise does not trigger. It comes last in a chain: a
  step is what it returns.

  Args:
    compressor: the wire format of each leaf; not one with a shared key, since what is decoded later
      must not depend on the step's key.
    axis_name: the workers' axis.
    weight: how much the gradient may change, relative to how far the model moved: a curvature
      squared, times W^2 / window. 0 sends at every step.
    window: steps that the trigger looks back, and the longest silence.
    seed: of the key that random compressors draw from.

  Returns:
    A transform that needs `params` and the extra argument `grad_fn`, and evaluates a second
    gradient. State: a residual (4 bytes an entry), a copy of the parameters, the payload sent last.
    Counts a payload only on steps that send. In one SPMD program each worker's last payload crosses
    at every step all the same: what is counted is what a server that keeps it would receive.

  Raises:
    ValueError: weight < 0, window < 1, a compressor with a shared key, no params, no grad_fn.

  >>> from jax_dsgd import compressors
  >>> tx = lazy_mean(compressors.identity(), axis_name='workers', weight=1.0)
  >>> x = jnp.ones((2, 3))
  >>> step = lambda x: tx.update(x, tx.init(x), x, grad_fn=lambda x: x)[0]
  >>> jax.vmap(step, axis_name='workers')(x)[0].tolist()  # the first step is always sent
  [1.0, 1.0, 1.0]

  Reference: the trigger is LASG-WK2 of Chen, Sun, Yin, arXiv 2002.11360; with a sparsifier it is
    SASG, Deng, Li, Sun, Lu, arXiv 2112.04088.
  """
  _check(compressor, weight, window)
  memory = memories.residual()

  def init(params: optax.Params) -> LazyState:
    slots = _last_values(compressor, True, axis_name=axis_name)
    counters = jnp.full((), window, jnp.int32), jnp.zeros(window, jnp.float32)
    stale = jax.tree.map(jnp.copy, collectives.crossing(params))
    return LazyState(
      exchange.init(params, memory=memory, channel=slots, seed=seed),
      stale,
      *collectives.vary_with(counters, params),
    )

  def update(
    updates: Any, state: Any, params: Any = None, *, grad_fn: Any = None, **extra: Any
  ) -> tuple[Any, LazyState]:
    if params is None or grad_fn is None:
      raise ValueError(
        'lazy_mean compares gradients at two points: call update(updates, state, params, '
        'grad_fn=grad_fn)'
      )
    collectives.require_varying(collectives.crossing(updates), axis_name)
    here = collectives.crossing(params)
    collectives.require_same_leaves(here, state.stale, 'stale copy')
    now, then = (
      collectives.crossing(grad_fn(collectives.fill(at, params))) for at in (here, state.stale)
    )
    change = exchange.squared_length(jax.tree.map(jnp.subtract, now, then))
    limit = weight * jnp.sum(state.steps) / collectives.worker_count(axis_name) ** 2
    # Not `change >= limit`: a NaN is sent, where it is seen.
    sends = ~(change < limit) | (state.staleness >= window)
    slots = _last_values(compressor, sends, axis_name=axis_name)
    _, received, sent = exchange.send(updates, state.exchange, memory=memory, channel=slots)
    updates = optax.tree.cast_like(received, updates)
    step = exchange.squared_length(collectives.crossing(updates))
    after = LazyState(
      sent._replace(memory=_choose(sends, sent.memory, state.exchange.memory)),
      _choose(sends, here, state.stale),
      jnp.where(sends, 1, state.staleness + 1),
      state.steps.at[state.exchange.count % window].set(step),
    )
    return updates, after

  return optax.GradientTransformationExtraArgs(init, update)


def _check(compressor: compressors.Compressor, weight: float, window: int) -> None:
  if isinstance(weight, bool) or not isinstance(weight, numbers.Real) or not weight >= 0:
    raise ValueError(f'lazy_mean got weight={weight!r}; accepted are numbers >= 0')
  if isinstance(window, bool) or not isinstance(window, numbers.Integral) or window < 1:
    raise ValueError(f'lazy_mean got window={window!r}; accepted are integers >= 1')
  if compressor.shared_key:
    raise ValueError(
      f'lazy_mean got compressor={compressor!r}, which is decoded with the key of the step that '
      'sent it; accepted are compressors without a shared key'
    )


def _last_values(
  compressor: compressors.Compressor, sends: jax.Array | bool, *, axis_name: str
) -> exchange.Channel:
  """The mean over workers of what each sent last: the channel's state is this worker's payload."""

  def init(like: Any) -> list[Any]:
    key = jax.random.key(0)
    shapes = [jax.eval_shape(compressor.encode, key, x) for x in jax.tree.leaves(like)]
    return collectives.vary_with(jax.tree.map(jnp.zeros_like, shapes), like)

  def send(tree: Any, state: Any, key: jax.Array, time: jax.Array) -> exchange.Delivery:
    leaves, treedef = jax.tree.flatten(tree)
    key = collectives.worker_key(key, axis_name)
    keys = [jax.random.fold_in(key, i) for i in range(len(leaves))]
    payload = [compressor.encode(k, x) for k, x in zip(keys, leaves, strict=True)]
    likes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    own = [compressor.decode(p, x, k) for p, x, k in zip(payload, likes, keys, strict=True)]
    workers = collectives.worker_count(axis_name)
    nbytes = ledger.payload_bytes(payload) if workers > 1 else 0
    payload = _choose(sends, payload, state)
    gathered = collectives.vary(collectives.gather(payload, axis_name), axis_name)
    received = [
      compressors.sum_of_decoded(compressor, p, x, k, jnp.zeros_like(c)) / workers
      for p, x, k, c in zip(gathered, likes, keys, own, strict=True)
    ]
    own, received = (jax.tree.unflatten(treedef, x) for x in (own, received))
    return exchange.Delivery(
      own, received, payload, (np.array([0, nbytes]), jnp.asarray(sends, jnp.int32))
    )

  return exchange.Channel(init, send)


def _choose(condition: jax.Array | bool, then: Any, otherwise: Any) -> Any:
  return jax.tree.map(lambda x, y: jnp.where(condition, x, y), then, otherwise)
