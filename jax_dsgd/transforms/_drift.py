"""What keeps local steps from drifting apart: control variates, a pull, and recursive gradients.

Each is a transform of gradients for the inner chain of `local_steps`, and a function for its
`at_meeting` that renews the state of it, wherever in the inner state that is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_dsgd import collectives, ledger
from jax_dsgd.transforms._control import told
from jax_dsgd.transforms._meeting import AtMeeting


class DriftState(NamedTuple):
  """The state of `correct_drift`.

  Attributes:
    own: c_i, this worker's control variate, float32.
    shared: c, the mean of all, float32.
    total: the sum of this round's corrected gradients, float32.
    steps: gradients in it, int32.
    active: whether the worker takes part in this round.
    bytes_sent: see `ledger.bytes_sent`.
  """

  own: Any
  shared: Any
  total: Any
  steps: jax.Array
  active: jax.Array
  bytes_sent: jax.Array


def correct_drift() -> optax.GradientTransformationExtraArgs:
  """Adds to each local gradient how the mean gradient differs from this worker's: `g - c_i + c`.

  Returns:
    A transform of gradients, to come first in `inner` of `local_steps`, whose `at_meeting` is
    `renew_drift_correction`. State: three float32 copies of the parameters. Reads `control.active`.

  Reference: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD", arXiv 1910.06378.
  """

  def init(params: optax.Params) -> DriftState:
    zeros = jax.tree.map(jnp.zeros_like, collectives.widened(collectives.crossing(params)))
    counters = jnp.zeros((), jnp.int32), jnp.array(True), ledger.new_meter()
    return DriftState(zeros, zeros, zeros, *collectives.vary_with(counters, params))

  def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, DriftState]:
    active = told(extra, 'active')
    active = state.active if active is None else jnp.asarray(active, bool)
    correct = lambda g, own, shared: g - own + shared  # noqa: E731
    corrected = jax.tree.map(correct, collectives.crossing(updates), state.own, state.shared)
    total = jax.tree.map(jnp.add, state.total, corrected)
    corrected = optax.tree.cast_like(corrected, collectives.crossing(updates))
    after = state._replace(total=total, steps=state.steps + 1, active=active)
    return collectives.fill(corrected, updates), after

  return optax.GradientTransformationExtraArgs(init, update)


def renew_drift_correction(axis_name: str) -> AtMeeting:
  """The control variates of the next round, from the mean gradients of this one.

      c_i <- c_i - c + (1/K) sum of corrected gradients     of active workers, by option II
      c   <- mean over all workers of c_i

  With SGD of rate lr the fraction is `(x - y_i) / (K lr)`.

  Args:
    axis_name: the workers' axis.

  Returns:
    `(state, params) -> state`, for `at_meeting`. Sends a float32 copy of the model once a round.
  """

  def renew(state: DriftState) -> DriftState:
    steps = jnp.maximum(state.steps, 1)

    def fresh(own: jax.Array, shared: jax.Array, total: jax.Array) -> jax.Array:
      return jnp.where(state.active, own - shared + total / steps, own)

    own = jax.tree.map(fresh, state.own, state.shared, state.total)
    workers = collectives.worker_count(axis_name)
    sent = ledger.payload_bytes(own) if workers > 1 else 0
    meter = ledger.add(state.bytes_sent, sent)
    total = jax.tree.map(jnp.zeros_like, state.total)
    shared = collectives.mean(own, axis_name)
    return DriftState(own, shared, total, jnp.zeros_like(state.steps), state.active, meter)

  return lambda state, params: _each(DriftState, renew, state)


class ProximalState(NamedTuple):
  """start: where this round began."""

  start: Any


def pull_to_start(strength: float) -> optax.GradientTransformationExtraArgs:
  """Adds the gradient of a proximal term: `g + strength (x - x_start)`.

  Args:
    strength: mu >= 0, of `mu/2 |x - x_start|^2`.

  Returns:
    A transform of gradients for `inner` of `local_steps`, whose `at_meeting` is `renew_start`.
    State: one copy of the parameters.

  Reference: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous
    Networks" (FedProx), arXiv 1812.06127.
  """
  if not strength >= 0:
    raise ValueError(f'pull_to_start got strength={strength!r}; accepted are numbers >= 0')

  def init(params: optax.Params) -> ProximalState:
    return ProximalState(jax.tree.map(jnp.copy, collectives.crossing(params)))

  def update(
    updates: Any, state: Any, params: Any = None, **extra: Any
  ) -> tuple[Any, ProximalState]:
    pull = lambda g, x, start: (g + strength * (x - start)).astype(g.dtype)  # noqa: E731
    here, given = collectives.crossing(params), collectives.crossing(updates)
    return collectives.fill(jax.tree.map(pull, given, here, state.start), updates), state

  return optax.GradientTransformationExtraArgs(init, update)


def renew_start(state: Any, params: Any) -> Any:
  """The start of the next round for `pull_to_start`: where the meeting led to. For `at_meeting`."""
  # By path: a mask leaves holes in the state.
  here = dict(jax.tree_util.tree_leaves_with_path(params))
  return _each(
    ProximalState,
    lambda s: jax.tree_util.tree_map_with_path(lambda path, old: here[path[1:]], s),
    state,
  )


class RecursiveState(NamedTuple):
  """The state of `recursive_gradients`.

  Attributes:
    rounds: since the stage began, int32.
    fresh: whether a round begins.
    shared: v, the estimate of the mean gradient where this round began, float32.
    own: u, this worker's estimate where it was last, float32.
    start: where this round began.
    previous: where this worker was last.
    bytes_sent: see `ledger.bytes_sent`.
  """

  rounds: jax.Array
  fresh: jax.Array
  shared: Any
  own: Any
  start: Any
  previous: Any
  bytes_sent: jax.Array


def recursive_gradients(*, axis_name: str, stage: int) -> optax.GradientTransformationExtraArgs:
  """Estimates the mean gradient recursively, between rounds and between local steps (SARAH).

      a stage begins   v = u = mean_w g_w(x)
      a round begins   v <- v + mean_w [g_w(x) - g_w(x_start)],   u = v,   x_start = x
      else             u <- u + g_w(x) - g_w(x_previous)

  Both gradients of a difference are of this step's batch. A stage begins with the mean gradient of
  the batches at hand: make them large there.

  Args:
    axis_name: the workers' axis.
    stage: rounds a stage.

  Returns:
    A transform of gradients that needs `params` and `grad_fn`, for `inner` of `local_steps`, whose
    `at_meeting` is `renew_recursion`. Sends the model once a round. State: four copies of the
    parameters.

  Raises:
    ValueError: a stage below 1, no params, no grad_fn.
  """
  if isinstance(stage, bool) or not isinstance(stage, int) or stage < 1:
    raise ValueError(f'recursive_gradients got stage={stage!r}; accepted are integers >= 1')

  def init(params: optax.Params) -> RecursiveState:
    here = collectives.crossing(params)
    zeros = jax.tree.map(jnp.zeros_like, collectives.widened(here))
    counters = jnp.zeros((), jnp.int32), jnp.array(True), ledger.new_meter()
    rounds, fresh, meter = collectives.vary_with(counters, params)
    start, previous = (jax.tree.map(jnp.copy, here) for _ in range(2))
    return RecursiveState(rounds, fresh, zeros, zeros, start, previous, meter)

  def update(
    updates: Any, state: Any, params: Any = None, *, grad_fn: Any = None, **extra: Any
  ) -> tuple[Any, RecursiveState]:
    if params is None or grad_fn is None:
      raise ValueError(
        'recursive_gradients compares gradients at two points: call update(updates, state, params, '
        'grad_fn=grad_fn)'
      )
    here = collectives.crossing(params)
    collectives.require_varying(here, axis_name)
    before = jax.tree.map(
      lambda start, x: jnp.where(state.fresh, start, x), state.start, state.previous
    )
    then = collectives.crossing(grad_fn(collectives.fill(before, params)))
    now = collectives.crossing(updates)
    change = jax.tree.map(jnp.subtract, collectives.widened(now), then)

    def begin() -> Any:
      anew = state.rounds % stage == 0
      base = jax.tree.map(lambda v, d, g: jnp.where(anew, g, v + d), state.shared, change, now)
      # The mean of v + d is v plus the mean of d: v is the same on all workers.
      shared = collectives.mean(base, axis_name)
      sent = ledger.payload_bytes(shared) if collectives.worker_count(axis_name) > 1 else 0
      same = shared, shared, here, ledger.add(state.bytes_sent, sent)
      return collectives.vary_like(same, go_on())

    def go_on() -> Any:
      own = jax.tree.map(jnp.add, state.own, change)
      return state.shared, own, state.start, state.bytes_sent

    fresh = collectives.uniform(state.fresh, axis_name)
    shared, own, start, meter = jax.lax.cond(fresh, begin, go_on)
    after = RecursiveState(
      state.rounds, jnp.zeros_like(state.fresh), shared, own, start, here, meter
    )
    return collectives.fill(optax.tree.cast_like(own, now), updates), after

  return optax.GradientTransformationExtraArgs(init, update)


def renew_recursion(state: Any, params: Any) -> Any:
  """Tells `recursive_gradients` that a round begins. For `at_meeting` of `local_steps`."""
  renew = lambda s: s._replace(rounds=s.rounds + 1, fresh=jnp.ones_like(s.fresh))  # noqa: E731
  return _each(RecursiveState, renew, state)


def _each(kind: type, renew: Callable[[Any], Any], state: Any) -> Any:
  """The state with every part of a kind renewed."""
  is_kind = lambda x: isinstance(x, kind)  # noqa: E731
  return jax.tree.map(lambda x: renew(x) if is_kind(x) else x, state, is_leaf=is_kind)
