"""Transforms around a residual memory: what it holds back tells where the model was meant to be."""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_dsgd import collectives, exchange, ledger, memories


def step_ahead(
  inner: optax.GradientTransformation, fraction: float = 1.0
) -> optax.GradientTransformationExtraArgs:
  """Takes the gradient where this worker's model would be if nothing had been held back.

      g = grad_fn(x + a e);   u, inner' = inner.update(g, inner, x)

  with e the residual in inner's state, in the units of updates: inner applies the learning rate
  before it compresses. With one worker and a = 1, x + e is exactly the uncompressed method,
  whatever the compressor; with a = 0 it is error feedback. The updates given are ignored.

  Args:
    inner: a chain with exactly one residual memory, e.g. `sgd` and a `compressed_mean`.
    fraction: a, in [0, 1].

  Returns:
    A transform that needs `params` and the extra argument `grad_fn`. Its state is that of inner; it
    sends what inner sends, and costs no second gradient: XLA drops the one that is ignored.

  Raises:
    ValueError: a fraction outside [0, 1], an inner state with no or several residuals, no params,
      no grad_fn.

  >>> from jax_dsgd import compressors, transforms
  >>> mean = transforms.compressed_mean(
  ...   compressors.top_k(k=1), axis_name='workers', memory=memories.residual())
  >>> tx = step_ahead(optax.chain(optax.sgd(0.5), mean))
  >>> x = jnp.array([[2.0, 1.0]])
  >>> state = jax.vmap(tx.init)(x)
  >>> grad_fn = lambda x: x
  >>> step = lambda x, state: tx.update(x, state, x, grad_fn=grad_fn)
  >>> for _ in range(2):
  ...   updates, state = jax.vmap(step, axis_name='workers')(x, state)
  ...   x = x + updates
  >>> (x + optax.tree.get(state, 'residual')).tolist()  # halved twice
  [[0.5, 0.25]]

  Reference: Xu, Huo, Huang, "Step-Ahead Error Feedback for Distributed Training with Compressed
    Gradient", arXiv 2008.05823.
  """
  if isinstance(fraction, bool) or not isinstance(fraction, numbers.Real) or not 0 <= fraction <= 1:
    raise ValueError(f'step_ahead got fraction={fraction!r}; accepted are numbers in [0, 1]')
  inner = optax.with_extra_args_support(inner)

  def init(params: optax.Params) -> Any:
    state = inner.init(params)
    _residual_in(state, 'step_ahead')
    return state

  def update(
    updates: Any, state: Any, params: Any = None, *, grad_fn: Any = None, **extra: Any
  ) -> tuple[Any, Any]:
    if params is None or grad_fn is None:
      raise ValueError(
        'step_ahead chooses where the gradient is taken: call update(updates, state, params, '
        'grad_fn=grad_fn)'
      )
    ahead = jax.tree.map(
      lambda x, e: x if e is None else (x + fraction * e).astype(x.dtype),
      params,
      _residual_in(state, 'step_ahead'),
      is_leaf=lambda x: x is None,
    )
    gradients = grad_fn(ahead)
    return inner.update(gradients, state, params, grad_fn=grad_fn, **extra)

  return optax.GradientTransformationExtraArgs(init, update)


class AverageResidualState(NamedTuple):
  """The state of `average_residual`."""

  count: jax.Array  # steps, int32
  inner: Any  # of the wrapped transform
  bytes_sent: jax.Array  # for residuals; see `ledger.bytes_sent`


def average_residual(
  inner: optax.GradientTransformation, every: int, *, axis_name: str
) -> optax.GradientTransformationExtraArgs:
  """Replaces the residual in a transform's state by its mean over workers, once in a while.

  After every p-th step, `e_w <- mean_w e_w`. The mean of what is held back stays as it is; the
  workers' different parts of it, which make their look-ahead points differ, vanish.

  Args:
    inner: a transform with exactly one residual memory.
    every: p, steps between means, an integer >= 1.
    axis_name: the workers' axis.

  Returns:
    A transform. Sends what inner sends and, every p steps, the residual: 4 bytes an entry, whole,
    in one all-reduce. Between, the compiled step runs no all-reduce of it.

  Raises:
    ValueError: every below 1 or not an integer, an inner state with no or several residuals.

  >>> from jax_dsgd import compressors, transforms
  >>> mean = transforms.compressed_mean(
  ...   compressors.top_k(k=1), axis_name='workers', memory=memories.residual())
  >>> tx = average_residual(mean, 1, axis_name='workers')
  >>> gradients = jnp.array([[1.0, 2.0], [5.0, 4.0]])
  >>> state = jax.vmap(tx.init)(gradients)
  >>> _, state = jax.vmap(tx.update, axis_name='workers')(gradients, state)
  >>> optax.tree.get(state, 'residual').tolist()
  [[0.5, 2.0], [0.5, 2.0]]

  Reference: Xu, Huo, Huang, "Step-Ahead Error Feedback for Distributed Training with Compressed
    Gradient", arXiv 2008.05823.
  """
  if isinstance(every, bool) or not isinstance(every, numbers.Integral) or every < 1:
    raise ValueError(f'average_residual got every={every!r}; accepted are integers >= 1')
  inner = optax.with_extra_args_support(inner)

  def init(params: optax.Params) -> AverageResidualState:
    state = inner.init(params)
    _residual_in(state, 'average_residual')
    count, meter = collectives.vary_with((jnp.zeros((), jnp.int32), ledger.new_meter()), params)
    return AverageResidualState(count, state, meter)

  def update(
    updates: Any, state: Any, params: Any = None, **extra: Any
  ) -> tuple[Any, AverageResidualState]:
    updates, inner_state = inner.update(updates, state.inner, params, **extra)
    residual = _residual_in(inner_state, 'average_residual')
    sent = ledger.payload_bytes(residual) if collectives.worker_count(axis_name) > 1 else 0

    def meet() -> tuple[Any, jax.Array]:
      met = collectives.mean(residual, axis_name), ledger.add(state.bytes_sent, sent)
      return collectives.vary_like(met, stay())

    def stay() -> tuple[Any, jax.Array]:
      return residual, state.bytes_sent

    count = state.count + 1
    residual, meter = jax.lax.cond(count % every == 0, meet, stay)
    inner_state = jax.tree.map(
      lambda x: x._replace(memory=memories.ResidualState(residual)) if _has_residual(x) else x,
      inner_state,
      is_leaf=_has_residual,
    )
    return updates, AverageResidualState(count, inner_state, meter)

  return optax.GradientTransformationExtraArgs(init, update)


def _has_residual(x: Any) -> bool:
  # By type: a field's name may be a layer's, and a channel may have a residual of its own.
  return isinstance(x, exchange.ExchangeState) and isinstance(x.memory, memories.ResidualState)


def _residual_in(state: Any, owner: str) -> Any:
  found = [x for x in jax.tree.leaves(state, is_leaf=_has_residual) if _has_residual(x)]
  if len(found) != 1:
    raise ValueError(
      f'{owner} found {len(found)} residual memories in the state of inner; accepted is exactly '
      'one, as of compressed_mean(..., memory=memories.residual())'
    )
  return found[0].memory.residual
