"""What a sender and its receivers remember, so that compression loses nothing.

Let C be encode-then-decode and R a linear reduction (the mean over workers, or the mixing of a
topology). Only payloads cross:

    memory            own           received         state
    none              C(x)          R(C(x))          -
    residual e        C(x + e)      R(C(x + e))      e' = x + e - C(x + e)
    reference h, r    h + C(x - h)  r + R(C(x - h))  h' = h + a C(x - h), r' = r + a R(C(x - h))

Two more keep a velocity, so that momentum is right although most entries leave late:
`momentum_residual` sends C(v) and rescales what stays, `momentum_correction` sends C(sum of v) and
clears what left.

`own` is what every receiver now believes of this worker, `received` the reduction of what this
worker believes of the others. A mean uses `received`; gossip uses `x + g (received - own)`, which
keeps the mean over workers for every memory and every compressor.

Units: a memory holds the units of what it is given. Placed after the learning rate (as in
`algorithms`) it holds *updates*: what was held back under the old rate arrives as computed,
whatever the rate is now. Placed before, it holds *gradients*, and what is held back is scaled by
the rate at which it leaves. Memories are float32, or wider where the leaves are: bfloat16 loses
small residuals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_dsgd import collectives

Through = Callable[[Any], tuple[Any, Any]]


class Memory(NamedTuple):
  """A rule of memory.

  Attributes:
    name: as a reader would call it.
    init: from a tree shaped like what will be sent to the state of the memory.
    send: `(state, x, through) -> (own, received, state)`, where `through(y) = (C(y), R(C(y)))`
      crosses the wire.
    kind: 'none' (what C drops is lost), 'residual' (it is fed back: C must be contractive),
      'reference' (what arrives adds to what is kept: R must not change), or 'momentum'.
  """

  name: str
  init: Callable[[Any], Any]
  send: Callable[[Any, Any, Through], tuple[Any, Any, Any]]
  kind: str

  def __repr__(self) -> str:
    return self.name


class ResidualState(NamedTuple):
  """The state of `residual`."""

  residual: Any  # e: what was to be sent and was not, float32


class MomentumResidualState(NamedTuple):
  """The state of `momentum_residual`."""

  velocity: Any  # u, float32


class MomentumCorrectionState(NamedTuple):
  """The state of `momentum_correction`."""

  velocity: Any  # v, float32
  accumulated: Any  # a: the velocities that have not been sent, float32


class ReferenceState(NamedTuple):
  """The state of `reference`."""

  reference: Any  # h: what all receivers believe of this worker, float32
  received: Any  # r: the reduction of all references, float32; one buffer, not one a neighbour


def none() -> Memory:
  """Remembers nothing: what compression drops is lost. State: no bytes.

  For unbiased compressors and whole values.
  """
  return Memory('none()', lambda like: (), lambda state, x, through: (*through(x), state), 'none')


def residual() -> Memory:
  """Error feedback: what compression drops is added to what is sent next.

      p = x + e,   own = C(p),   received = R(C(p)),   e' = p - C(p)

  For every compressor `mean(e') + mean(C(p)) = mean(x + e)`: nothing is lost, only late. Needs a
  contractive compressor.

  State: e, 4 bytes an entry.

  Reference: Seide et al. 2014; Karimireddy et al., "Error Feedback Fixes SignSGD", arXiv
    1901.09847.
  """

  def send(state: ResidualState, x: Any, through: Through) -> tuple[Any, Any, ResidualState]:
    due = jax.tree.map(jnp.add, collectives.widened(x), state.residual)
    own, received = through(due)
    return own, received, ResidualState(jax.tree.map(jnp.subtract, due, own))

  return Memory('residual()', lambda like: ResidualState(_zeros(like)), send, 'residual')


def momentum_residual(momentum: float) -> Memory:
  """Momentum that forgets nothing of what waits: what is not sent is divided by m in advance.

      u = m u + x,   own = C(u),   received = R(C(u)),   u' = u where it was sent, else u / m

  An entry that is sent goes on as momentum. One that waits holds `m u' = sum of x` exactly, without
  decay. When every entry is sent it is heavy-ball momentum on each worker. Sent entries are those
  where C(u) is not 0, so C is a sparsifier.

  Args:
    momentum: m, in (0, 1).

  State: u, 4 bytes an entry, and no other momentum buffer.

  Raises:
    ValueError: a momentum outside (0, 1).

  Reference: Yan, Xiao, Chen, Zhou, Wu, the worker's side of DGS, arXiv 1910.10929.
  """
  _require_momentum('momentum_residual', momentum)

  def send(
    state: MomentumResidualState, x: Any, through: Through
  ) -> tuple[Any, Any, MomentumResidualState]:
    u = jax.tree.map(lambda u, x: momentum * u + x, state.velocity, collectives.widened(x))
    own, received = through(u)
    kept = jax.tree.map(lambda u, c: jnp.where(c != 0, u, u / momentum), u, own)
    return own, received, MomentumResidualState(kept)

  name = f'momentum_residual({momentum:g})'
  return Memory(name, lambda like: MomentumResidualState(_zeros(like)), send, 'momentum')


def momentum_correction(momentum: float) -> Memory:
  """Error feedback on velocities: both are cleared where they were sent.

      v = m v + x,   a = a + v,   own = C(a),   received = R(C(a))
      a' = a - C(a),   v' = 0 where it was sent, else v

  Clearing v (momentum factor masking) keeps stale momentum from pushing an entry on; when every
  entry is sent nothing is left of the momentum. Sent entries are those where C(a) is not 0, so C is
  a sparsifier.

  Args:
    momentum: m, in (0, 1).

  State: v and a, 8 bytes an entry, and no other momentum buffer.

  Raises:
    ValueError: a momentum outside (0, 1).

  Reference: Lin, Han, Mao, Wang, Dally, "Deep Gradient Compression", arXiv 1712.01887.
  """
  _require_momentum('momentum_correction', momentum)

  def send(
    state: MomentumCorrectionState, x: Any, through: Through
  ) -> tuple[Any, Any, MomentumCorrectionState]:
    v = jax.tree.map(lambda v, x: momentum * v + x, state.velocity, collectives.widened(x))
    due = jax.tree.map(jnp.add, state.accumulated, v)
    own, received = through(due)
    after = MomentumCorrectionState(
      jax.tree.map(lambda v, c: jnp.where(c != 0, 0, v), v, own),
      jax.tree.map(jnp.subtract, due, own),
    )
    return own, received, after

  return Memory(
    f'momentum_correction({momentum:g})',
    lambda like: MomentumCorrectionState(_zeros(like), _zeros(like)),
    send,
    'momentum',
  )


def reference(*, step: float | Callable[[int], float] = 1.0) -> Memory:
  """Differences to a shared copy: as x settles, they and what compression drops go to zero.

      c = C(x - h),   own = h + c,   received = r + R(c),   h' = h + a c,   r' = r + a R(c)

  In a mean it is EF21 and Markov compression (contractive C, a = 1) or DIANA (unbiased C, a <= 1 /
  (1 + omega)); in gossip it is CHOCO.

  Args:
    step: a, in (0, 1], or a function from a leaf's number of entries to it.

  State: h and r, 8 bytes an entry.

  Raises:
    ValueError: a step outside (0, 1].

  Reference: Richtarik et al., EF21, arXiv 2106.05203; Mishchenko et al., DIANA, arXiv 1901.09269;
    Koloskova et al., CHOCO, arXiv 1902.00340.
  """
  if not callable(step):
    _require_step(step)

  def send(state: ReferenceState, x: Any, through: Through) -> tuple[Any, Any, ReferenceState]:
    sent, arrived = through(jax.tree.map(jnp.subtract, collectives.widened(x), state.reference))
    own = jax.tree.map(jnp.add, state.reference, sent)
    received = jax.tree.map(jnp.add, state.received, arrived)
    if step == 1:
      return own, received, ReferenceState(own, received)
    move = lambda old, change: (  # noqa: E731
      old + (_require_step(step(old.size)) if callable(step) else step) * change
    )
    after = ReferenceState(
      jax.tree.map(move, state.reference, sent), jax.tree.map(move, state.received, arrived)
    )
    return own, received, after

  shown = 'a function of n' if callable(step) else f'{step:g}'
  name = 'reference()' if step == 1 else f'reference(step={shown})'
  return Memory(name, lambda like: ReferenceState(_zeros(like), _zeros(like)), send, 'reference')


def _require_step(step: float) -> float:
  if isinstance(step, bool) or not isinstance(step, int | float) or not 0 < step <= 1:
    raise ValueError(f'reference got step={step!r}; accepted are numbers in (0, 1]')
  return step


def _require_momentum(name: str, momentum: float) -> None:
  if isinstance(momentum, bool) or not isinstance(momentum, int | float) or not 0 < momentum < 1:
    raise ValueError(f'{name} got momentum={momentum!r}; accepted are numbers in (0, 1)')


def _zeros(like: Any) -> Any:
  wide = lambda x: jnp.promote_types(x.dtype, jnp.float32)  # noqa: E731
  return jax.tree.map(lambda x: jnp.zeros_like(x, wide(x)), like)
