"""Transforms that work locally and meet rarely."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_dsgd import collectives
from jax_dsgd.transforms._meeting import AtMeeting, keep

Period = int | Callable[[jax.Array], jax.Array]
Phases = Callable[[str, jax.ShapeDtypeStruct], Sequence[int]]


class LocalStepsState(NamedTuple):
  """The state of `local_steps`.

  Attributes:
    step: local steps done in this round, int32.
    round: rounds done, int32.
    anchor: where the last meeting led to; None at leaves that do not cross.
    pending: what is on its way, where it arrives late, else ().
    inner: the state of the inner transform; its counts are steps.
    outer: the state of the outer transform; its counts are meetings. With phases, a tuple of them,
      one for all leaves of the same phases, in the order of these.
  """

  step: jax.Array
  round: jax.Array
  anchor: Any
  pending: Any
  inner: Any
  outer: Any


def local_steps(
  inner: optax.GradientTransformation,
  outer: optax.GradientTransformation,
  period: Period,
  *,
  delay: int = 0,
  pull: float = 1.0,
  phases: Phases | None = None,
  meet_before_step: bool = False,
  at_meeting: AtMeeting = keep,
) -> optax.GradientTransformationExtraArgs:
  """Steps locally with one transform, and at the end of each round applies another to the way gone.

      every step       u, inner' = inner.update(g, inner, params);   y = params + u
      end of a round   delta = anchor - y           a pseudo-gradient: it points like a gradient
                       v, outer' = outer.update(delta, outer, anchor)
                       anchor' = anchor + v;   params' = y + pull (anchor' - y)

  Outer reduces, compresses, mixes, accelerates. A mean and `sgd(1)` is local SGD; with Nesterov
  momentum it is DiLoCo. Period 1 with a mean and `sgd(1)` is synchronous SGD. Workers begin at one
  point where outer is a mean: it reduces ways gone, not places.

  With a delay of d steps, v is on its way for so long: it is computed at the end of a round and
  reaches anchor and params d steps later. If that is the end of the next round, params are pulled
  first, and what they are then is the way that is sent. Nothing reads v before it arrives, but a
  loop or a condition is a barrier to XLA's scheduler, and so is the end of a program: what a delay
  saves is priced (`simulation.overlapped_seconds`), not measured.

  With phases, each leaf meets at steps of its own in a round, not at its end.

  Where `control` is given, its `steps` is how many of the round's first steps this worker takes: in
  the others it stays where it is, and its inner state too.

  Args:
    inner: the local optimizer.
    outer: applied to delta at each meeting; its `params` are the anchor.
    period: steps a round, an int >= 1, or a schedule from the round (int32, from 0) to its steps
      (below 1 counts as 1).
    delay: steps that v is on its way, from 0 to the period.
    pull: how far workers go to the anchor, in (0, 1]; below 1 with a delay of a whole period.
    phases: from a leaf's path and shape to the steps of the round (from 0) after which it meets.
    meet_before_step: whether workers meet where they are, and then apply u: delta = anchor - params
      and params' = params + pull (anchor' - params) + u.
    at_meeting: what becomes of the inner state at the end of a round: `keep`,
      `average_state(axis_name)`, `reset_state(inner)`, or a function
      `(inner_state, params') -> inner_state`.

  Returns:
    A transform that needs `params`. Sends what outer sends, at meetings; between, the compiled step
    runs no collective and nothing of outer. A step has no reverse derivative. State: a copy of the
    parameters, another where there is a delay, and what inner and outer keep.

  Raises:
    ValueError: a period below 1 or not an integer, a delay outside [0, period], a pull outside
      (0, 1] or one of 1 with a delay of a whole period, a delay or phases with a period that is a
      schedule; a leaf without phases, or with one outside of the round (at init, naming the leaf);
      no params.

  >>> from jax_dsgd import transforms
  >>> outer = optax.chain(transforms.mean_over('workers'), optax.sgd(1.0))
  >>> tx = local_steps(optax.sgd(0.5), outer, 2)
  >>> params = jnp.zeros(2)
  >>> state = jax.vmap(tx.init)(params)
  >>> for _ in range(2):  # worker w minimises (x - w)^2 / 2 from 0
  ...   gradients = params - jnp.arange(2.0)
  ...   updates, state = jax.vmap(tx.update, axis_name='workers')(gradients, state, params)
  ...   params = params + updates
  >>> params.tolist()
  [0.375, 0.375]
  """
  _check(period, delay, pull, phases)
  inner, outer = optax.with_extra_args_support(inner), optax.with_extra_args_support(outer)
  when = _When(period, delay, phases)
  meet = _Meet(outer, delay, pull, meet_before_step)

  def init(params: optax.Params) -> LocalStepsState:
    # A copy: donating the parameters must not take the anchor with them.
    anchor = jax.tree.map(jnp.copy, collectives.crossing(params))
    zero = collectives.vary_with(jnp.zeros((), jnp.int32), params)
    outers = tuple(outer.init(part(anchor)) for _, part in when.fragments(anchor))
    pending = jax.tree.map(jnp.zeros_like, anchor) if delay else ()
    return LocalStepsState(
      zero, zero, anchor, pending, inner.init(params), outers if phases else outers[0]
    )

  def update(
    updates: Any, state: Any, params: Any = None, **extra: Any
  ) -> tuple[Any, LocalStepsState]:
    if params is None:
      raise ValueError('local_steps moves parameters: call update(updates, state, params)')
    stepped, inner_state = inner.update(updates, state.inner, params, **extra)
    stepped, inner_state = _in_time(stepped, inner_state, state, extra.get('control'))
    here, way = collectives.crossing(params), collectives.crossing(stepped)
    collectives.require_same_leaves(here, state.anchor, 'anchor')
    # As precise as the parameters: the way back to the anchor must end there, on all workers.
    way = jax.tree.map(lambda u, x: u.astype(jnp.promote_types(u.dtype, x.dtype)), way, here)

    pieces = []
    states = state.outer if phases else (state.outer,)
    for (own, part), outer_state in zip(when.fragments(here), states, strict=True):
      moved = part(way), part(state.anchor), part(state.pending) if delay else (), outer_state
      at = when.launches(state, own), when.arrives(state, own)
      pieces.append(meet(part(here), moved, *at, extra))
    ways, anchors, pendings, outers = zip(*pieces, strict=True)
    way, anchor = _joined(ways, way), _joined(anchors, state.anchor)
    pending = _joined(pendings, state.pending) if delay else ()

    ends = when.ends(state)
    if at_meeting is not keep:
      there = jax.tree.map(lambda x, u: (x + u).astype(x.dtype), here, way)
      there = collectives.fill(there, params)
      (inner_state,) = _once(ends, lambda old: (at_meeting(old, there),), inner_state)
    counters = jnp.where(ends, 0, state.step + 1), state.round + ends.astype(jnp.int32)
    kept = anchor, pending, inner_state, outers if phases else outers[0]
    return collectives.fill(way, stepped), LocalStepsState(*counters, *kept)

  return optax.GradientTransformationExtraArgs(init, update)


def _in_time(
  stepped: Any, inner_state: Any, state: LocalStepsState, control: Any
) -> tuple[Any, Any]:
  """The step and the inner state after it, or no step where the worker has no time for it."""
  steps = getattr(control, 'steps', None)
  if steps is None:
    return stepped, inner_state
  works = lambda x, y: jnp.where(state.step < steps, x, y)  # noqa: E731
  rests = jax.tree.map(jnp.zeros_like, stepped), state.inner
  return jax.tree.map(works, (stepped, inner_state), rests)


class _When:
  """At which local steps the leaves meet."""

  def __init__(self, period: Period, delay: int, phases: Phases | None):
    self._period, self._delay, self._phases = period, delay, phases
    self._steps = 0 if callable(period) else int(period)

  def fragments(self, tree: Any) -> list[tuple[tuple[int, ...], Callable[[Any], Any]]]:
    """The leaves that meet together: their phases, and what takes them out of a tree."""
    if self._phases is None:
      return [((), lambda tree: tree)]
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    own = [self._checked(self._phases, collectives.leaf_name(path), x) for path, x in paths]

    def part(key: tuple[int, ...]) -> Callable[[Any], Any]:
      def take(tree: Any) -> Any:
        leaves, treedef = jax.tree.flatten(tree)
        kept = [x if k == key else None for x, k in zip(leaves, own, strict=True)]
        return jax.tree.unflatten(treedef, kept)

      return take

    return [(key, part(key)) for key in sorted(set(own))]

  def _checked(self, phases: Phases, path: str, x: Any) -> tuple[int, ...]:
    given = phases(path, jax.ShapeDtypeStruct(x.shape, x.dtype))
    own = tuple(sorted(set(given)))
    if not own or not all(isinstance(p, numbers.Integral) and 0 <= p < self._steps for p in own):
      raise ValueError(
        f'local_steps got phases {given!r} for leaf {path!r}; accepted are one or more steps of '
        f'the round, from 0 to {self._steps - 1}: a leaf without any would never meet'
      )
    gaps = np.diff([*own, own[0] + self._steps])
    if self._delay > gaps.min():
      raise ValueError(
        f'local_steps got phases {given!r} for leaf {path!r} and delay={self._delay}: it would '
        'meet again before what it sent has arrived'
      )
    return own

  def ends(self, state: LocalStepsState) -> jax.Array:
    period = self._period
    steps = jnp.maximum(period(state.round), 1) if callable(period) else period
    return state.step + 1 >= steps

  def launches(self, state: LocalStepsState, own: tuple[int, ...]) -> jax.Array:
    return _is_among(state.step, own) if own else self.ends(state)

  def arrives(self, state: LocalStepsState, own: tuple[int, ...]) -> jax.Array:
    """Whether something arrives: a whole period late, the first is where the workers began."""
    if not self._delay:
      return self.launches(state, own)
    sent = state.step - self._delay
    due = _is_among(sent % self._steps, own or (self._steps - 1,))
    return due & ((state.round * self._steps + sent >= 0) | (self._delay == self._steps))


def _is_among(step: jax.Array, steps: Sequence[int]) -> jax.Array:
  return (step == jnp.asarray(steps, jnp.int32)).any()


class _Meet:
  """What a part of the leaves does when its result arrives and when it sends anew."""

  def __init__(self, outer: Any, delay: int, pull: float, before_step: bool):
    self._outer, self._delay, self._pull, self._before_step = outer, delay, pull, before_step

  def __call__(
    self, here: Any, moved: Any, launches: jax.Array, arrives: jax.Array, extra: dict[str, Any]
  ) -> Any:
    """Gives `(way, anchor, pending, outer state)` after this step, from those before."""
    way, anchor, pending, outer_state = moved
    if not jax.tree.leaves(way):
      return moved

    def launch(there: Any, anchor: Any, outer_state: Any) -> tuple[Any, Any]:
      delta = jax.tree.map(lambda a, y: (a - y).astype(a.dtype), anchor, there)
      v, outer_state = self._outer.update(delta, outer_state, anchor, **extra)
      return jax.tree.map(lambda v, a: v.astype(a.dtype), v, anchor), outer_state

    add = lambda anchor, v: jax.tree.map(jnp.add, anchor, v)  # noqa: E731
    # Loops see where the worker is, and not the parameters, whose buffer may be donated.
    at = lambda way: here if self._before_step else add(here, way)  # noqa: E731
    if not self._delay:
      there = at(way)

      def at_once(anchor: Any, outer_state: Any) -> tuple[Any, Any]:
        v, outer_state = launch(there, anchor, outer_state)
        return add(anchor, v), outer_state

      anchor, outer_state = _once(launches, at_once, anchor, outer_state)
      return self._towards(launches, here, way, anchor), anchor, (), outer_state
    (anchor,) = _once(arrives, lambda anchor: (add(anchor, pending),), anchor)
    way = self._towards(arrives, here, way, anchor)
    there = at(way)
    send = lambda _, outer_state: launch(there, anchor, outer_state)  # noqa: E731
    return way, anchor, *_once(launches, send, pending, outer_state)

  def _towards(self, arrives: jax.Array, here: Any, way: Any, anchor: Any) -> Any:
    def one(x: jax.Array, u: jax.Array, a: jax.Array) -> jax.Array:
      y, later = (x, u) if self._before_step else (x + u, 0)
      back = (a - x) if self._pull == 1 else (y + self._pull * (a - y)) - x
      return jnp.where(arrives, (back + later).astype(u.dtype), u)

    return jax.tree.map(one, here, way, anchor)


def _once(condition: jax.Array, step: Callable[..., Any], *kept: Any) -> Any:
  """What is kept after one step, or as it is.

  A loop of at most one lap: it changes buffers in place, where a condition copies them, and under
  `vmap` the lap that no worker takes is not computed.
  """
  lap = lambda carry: (carry[0] & False, collectives.vary_like(step(*carry[1]), carry[1]))  # noqa: E731
  return jax.lax.while_loop(lambda carry: carry[0], lap, (condition, kept))[1]


def _joined(parts: Sequence[Any], like: Any) -> Any:
  """The tree of which each part holds some leaves, and None for the others."""
  is_gap = lambda x: x is None  # noqa: E731
  leaves = [jax.tree.leaves(part, is_leaf=is_gap) for part in parts]
  picked = [next((x for x in xs if x is not None), None) for xs in zip(*leaves, strict=True)]
  return jax.tree.unflatten(jax.tree.structure(like, is_leaf=is_gap), picked)


def _check(period: Period, delay: int, pull: float, phases: Phases | None) -> None:
  if not callable(period) and (
    isinstance(period, bool) or not isinstance(period, numbers.Integral) or period < 1
  ):
    raise ValueError(
      f'local_steps got period={period!r}; accepted are integers >= 1, or a schedule from the '
      'round to its steps'
    )
  if callable(period) and (delay or phases):
    raise ValueError(
      'local_steps got a period that is a schedule; delay and phases need an integer'
    )
  if isinstance(delay, bool) or not isinstance(delay, numbers.Integral) or delay < 0:
    raise ValueError(f'local_steps got delay={delay!r}; accepted are integers from 0 to the period')
  if not callable(period) and delay > period:
    raise ValueError(f'local_steps got delay={delay!r}; accepted are at most period={period} steps')
  if isinstance(pull, bool) or not isinstance(pull, numbers.Real) or not 0 < pull <= 1:
    raise ValueError(f'local_steps got pull={pull!r}; accepted are numbers in (0, 1]')
  if pull == 1 and delay == period:
    raise ValueError(
      f'local_steps got pull={pull!r} and delay={delay!r} of a whole period: workers would go back '
      'to where the round began; accepted is a pull in (0, 1)'
    )
