"""Transforms of rounds in which not every worker takes part, or takes part in time."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_dsgd import codes, collectives, ledger
from jax_dsgd.transforms._control import told
from jax_dsgd.transforms._gossip import as_updates, moved


def _required(extra: dict[str, Any], field: str, name: str) -> jax.Array:
  value = told(extra, field)
  if value is None:
    raise ValueError(f'{name} follows a trace: call update(..., control=control) with its {field}')
  return value


def only_when_active(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
  """Runs a local transform on workers that are active; the others stay, and their state too.

  Args:
    tx: a transform that sends nothing.

  Returns:
    A transform that follows `control.active`; without `control` everybody is active.
  """
  tx = optax.with_extra_args_support(tx)

  def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
    stepped, after = tx.update(updates, state, params, **extra)
    active = told(extra, 'active')
    if active is None:
      return stepped, after
    rests = jax.tree.map(jnp.zeros_like, stepped), state
    return jax.tree.map(lambda x, y: jnp.where(active, x, y), (stepped, after), rests)

  return optax.GradientTransformationExtraArgs(tx.init, update)


class GroupsState(NamedTuple):
  """bytes_sent: see `ledger.bytes_sent`."""

  bytes_sent: jax.Array


def mix_groups(*, axis_name: str) -> optax.GradientTransformationExtraArgs:
  """Averages parameters in the groups that `control.group` names: partial all-reduce.

      x_i <- sum_{j in group of i} w_j (x_j + u_j) / sum_{j in group of i} w_j

  Groups may change every step and be of any sizes. A worker in no group steps alone. The weights
  are those of `control.weight`, or equal.

  Args:
    axis_name: the workers' axis.

  Returns:
    A transform that needs `params` and `control`; last in a chain. In one program the model crosses
    twice in pieces, as in an all-reduce; counted is a ring all-reduce inside the group,
    `2 (g - 1) / g` models.

  Raises:
    ValueError: no params, no control.

  Reference: Luo, He, Zhuo, Qian, "Prague: High-Performance Heterogeneity-Aware Asynchronous
    Decentralized Training", arXiv 1909.08029.
  """

  def init(params: optax.Params) -> GroupsState:
    return GroupsState(collectives.vary_with(ledger.new_meter(), params))

  def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, GroupsState]:
    if params is None:
      raise ValueError('mix_groups averages parameters: call update(updates, state, params)')
    group = _required(extra, 'group', 'mix_groups')
    weight = told(extra, 'weight')
    here = collectives.crossing(params)
    collectives.require_varying(here, axis_name)
    target = moved(params, updates)
    matrix, size = _group_matrix(group, weight, axis_name)
    mixed = collectives.mix_by_matrix(target, matrix, axis_name)
    alone = jnp.asarray(group) < 0
    mixed = jax.tree.map(lambda m, y: jnp.where(alone, y, m), mixed, target)
    workers, nbytes = collectives.worker_count(axis_name), ledger.payload_bytes(here)
    table = np.array([0] + [2 * (g - 1) * nbytes // g for g in range(1, workers + 1)])
    meter = ledger.add(state.bytes_sent, table, jnp.where(alone, 0, size))
    way = jax.tree.map(jnp.subtract, mixed, here)
    return as_updates(way, updates, params), GroupsState(meter)

  return optax.GradientTransformationExtraArgs(init, update)


def _group_matrix(
  group: jax.Array, weight: jax.Array | None, axis_name: str
) -> tuple[jax.Array, jax.Array]:
  """The mixing matrix [W, W] of the groups, known to all, and the size of this worker's group."""
  own = jnp.ones(()) if weight is None else jnp.asarray(weight, jnp.float32)
  groups, weights = collectives.gather((jnp.asarray(group, jnp.int32), own), axis_name)
  together = groups[:, None] == groups[None, :]
  shares = jnp.where(together, weights, 0)
  total = shares.sum(axis=1, keepdims=True)
  equal = together / together.sum(axis=1, keepdims=True)
  matrix = jnp.where(total > 0, shares / jnp.where(total > 0, total, 1), equal)
  return matrix, (groups == group).sum()


class LateState(NamedTuple):
  """The state of `fold_late` and `substitute_missing`: what comes next, and bytes sent."""

  late: Any
  bytes_sent: jax.Array


def fold_late(*, axis_name: str) -> optax.GradientTransformationExtraArgs:
  """The mean of those who are in time, and of the late ones of the step before.

      u' = (1/W) sum_{in time} u_j + (1/W) sum_{late in the last step} u_j

  Norm-bounded elastic consistency: a step goes on once enough has arrived.

  Args:
    axis_name: the workers' axis.

  Returns:
    A transform that follows `control.active` (false of a late worker). Sends the updates twice in
    one all-reduce; a network carries them once, some of them later. State: one copy of the updates.

  Reference: Nadiradze, Markov, Chatterjee, Kungurtsev, Alistarh, "Elastic Consistency", arXiv
    2001.05918.
  """

  def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, LateState]:
    in_time, late, _ = _arrivals(updates, extra, 'fold_late', axis_name)
    given = jax.tree.map(jnp.add, in_time, state.late)
    return _given(given, updates), LateState(late, _sent(state, updates, axis_name))

  return optax.GradientTransformationExtraArgs(_nothing_late, update)


def substitute_missing(*, axis_name: str) -> optax.GradientTransformationExtraArgs:
  """The mean of all, with one's own update in place of each that is missing, put right afterwards.

      u_i' = (1/W) [sum_{in time} u_j + sum_{late} u_i] + c_i;   c_i <- (1/W) sum_{late} (u_j - u_i)

  Variance-bounded elastic consistency. Workers differ by what is missing until the next step.

  Args:
    axis_name: the workers' axis.

  Returns:
    A transform that follows `control.active` (false of a late worker). Sends the updates twice in
    one all-reduce; a network carries them once, some of them later. State: one copy of the updates.

  Reference: Nadiradze, Markov, Chatterjee, Kungurtsev, Alistarh, "Elastic Consistency", arXiv
    2001.05918.
  """

  def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, LateState]:
    in_time, late, missing = _arrivals(updates, extra, 'substitute_missing', axis_name)
    own = collectives.widened(collectives.crossing(updates))
    given = jax.tree.map(lambda a, u, c: a + missing * u + c, in_time, own, state.late)
    after = jax.tree.map(lambda late, u: late - missing * u, late, own)
    return _given(given, updates), LateState(after, _sent(state, updates, axis_name))

  return optax.GradientTransformationExtraArgs(_nothing_late, update)


def _nothing_late(params: optax.Params) -> LateState:
  zeros = jax.tree.map(jnp.zeros_like, collectives.widened(collectives.crossing(params)))
  return LateState(zeros, collectives.vary_with(ledger.new_meter(), params))


def _sent(state: LateState, updates: Any, axis_name: str) -> jax.Array:
  nbytes = ledger.payload_bytes(collectives.crossing(updates))
  return ledger.add(state.bytes_sent, nbytes if collectives.worker_count(axis_name) > 1 else 0)


def _arrivals(
  updates: Any, extra: dict[str, Any], name: str, axis_name: str
) -> tuple[Any, Any, jax.Array]:
  """Shares of the mean: of those in time, of the late ones, and how large a part is late."""
  active = _required(extra, 'active', name)
  own = collectives.widened(collectives.crossing(updates))
  collectives.require_varying(own, axis_name)
  in_time = jax.tree.map(lambda u: jnp.where(active, u, 0), own)
  late = jax.tree.map(lambda u: jnp.where(active, 0, u), own)
  return collectives.mean((in_time, late, jnp.where(active, 0.0, 1.0)), axis_name)


def _given(given: Any, updates: Any) -> Any:
  return collectives.fill(optax.tree.cast_like(given, collectives.crossing(updates)), updates)


class CodedState(NamedTuple):
  """The state of `coded_sum`: steps in which too many were missing, int32, and bytes sent."""

  failures: jax.Array
  bytes_sent: jax.Array


def coded_sum(code: codes.GradientCode, *, axis_name: str) -> optax.GradientTransformationExtraArgs:
  """The sum over parts of the data, from coded updates of any n - s of n workers.

      worker i gives u_i = sum_p B[i, p] g_p;   u' = sum_{i alive} a_i u_i = sum_p g_p

  a are the decoding weights of those who are alive, out of a table of all patterns. With more
  missing than the code can bear, updates are NaN on every worker and the step counts as a failure:
  what comes after it in the chain belongs into `skip_nonfinite`.

  Args:
    code: of the workers; its matrix B says which parts each computes.
    axis_name: the workers' axis.

  Returns:
    A transform that follows `control.active`; without `control` everybody is alive. Sends the
    updates once, in an all-reduce.

  Reference: Tandon, Lei, Dimakis, Karampatziakis, "Gradient Coding", arXiv 1612.03301; one level of
    a tree of CodedReduce, arXiv 1902.01981, see `weighted_sum`.
  """
  table = codes.decode_table(code)

  def init(params: optax.Params) -> CodedState:
    zero = CodedState(jnp.zeros((), jnp.int32), ledger.new_meter())
    return collectives.vary_with(zero, params)

  def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, CodedState]:
    collectives.require_varying(collectives.crossing(updates), axis_name)
    active = told(extra, 'active')
    alive = collectives.vary(jnp.asarray(True if active is None else active, bool), axis_name)
    everybody = collectives.gather(alive, axis_name)[None]
    match = (jnp.asarray(table.alive) == everybody).all(axis=1)
    row = jnp.asarray(table.weights, jnp.float32)[jnp.argmax(match)]
    share = jnp.where(match.any(), row[collectives.worker_index(axis_name)], jnp.nan)
    # Nothing of a straggler counts, not even a NaN.
    own = jax.tree.map(
      lambda u: jnp.where(alive | ~match.any(), u, 0), collectives.crossing(updates)
    )
    total = _weighted_sum(own, share, axis_name)
    sent = ledger.payload_bytes(own) + 1 if collectives.worker_count(axis_name) > 1 else 0
    failures = state.failures + (1 - match.any().astype(jnp.int32))
    after = CodedState(failures, ledger.add(state.bytes_sent, sent))
    return collectives.fill(total, updates), after

  return optax.GradientTransformationExtraArgs(init, update)


def weighted_sum(*, axis_name: str) -> optax.GradientTransformationExtraArgs:
  """The sum over workers with the weights of `control`, which may be negative.

      u' = sum_i weight_i u_i

  With the weights `codes.tree_weights(code, alive).in_total` it is CodedReduce: the sum over all
  data from the workers of a tree of which some are missing.

  Args:
    axis_name: the workers' axis.

  Returns:
    A transform that needs `control.weight`. Sends the updates once, in an all-reduce.

  Reference: Reisizadeh, Prakash, Pedarsani, Avestimehr, "CodedReduce: A Fast and Robust Framework
    for Gradient Aggregation in Distributed Learning", arXiv 1902.01981. There partial sums go up a
    tree; in one program they are one all-reduce.
  """

  def init(params: optax.Params) -> GroupsState:
    return GroupsState(collectives.vary_with(ledger.new_meter(), params))

  def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, GroupsState]:
    collectives.require_varying(collectives.crossing(updates), axis_name)
    weight = _required(extra, 'weight', 'weighted_sum')
    own = jax.tree.map(lambda u: jnp.where(weight != 0, u, 0), collectives.crossing(updates))
    total = _weighted_sum(own, weight, axis_name)
    sent = ledger.payload_bytes(own) if collectives.worker_count(axis_name) > 1 else 0
    return collectives.fill(total, updates), GroupsState(ledger.add(state.bytes_sent, sent))

  return optax.GradientTransformationExtraArgs(init, update)


def _weighted_sum(own: Any, weight: jax.Array, axis_name: str) -> Any:
  return collectives.sum(jax.tree.map(lambda u: (weight * u).astype(u.dtype), own), axis_name)
