"""Methods that take many local steps between few averages."""

from __future__ import annotations

import numbers

import jax
import optax

from jax_dsgd import transforms
from jax_dsgd.transforms import AtMeeting, Period, Phases, keep


def local_sgd(
  learning_rate: optax.ScalarOrSchedule,
  period: Period,
  *,
  axis_name: str,
  momentum: float | None = None,
  at_meeting: AtMeeting = keep,
) -> optax.GradientTransformationExtraArgs:
  """Local SGD: `period` steps on each worker alone, then the mean of the models.

  On heterogeneous data it is biased: workers with Hessians A_i and minima b_i settle at
  `(mean_i M_i)^-1 mean_i M_i b_i`, `M_i = I - (I - lr A_i)^period`, and not at the common minimum.

  Args:
    learning_rate: a float, or a schedule of the local step.
    period: steps between means: an int, or a schedule of the round, as `growing_period` (few means
      for many steps), `listed_period` (one-shot averaging) and `post_local_period`.
    axis_name: the workers' axis.
    momentum: of local heavy-ball momentum, if any.
    at_meeting: what becomes of the local momentum at a mean; it stays each worker's own if nothing
      else is said.

  Returns:
    A transform that needs `params`. Sends the model once a round. State: one copy of the model
    besides the momentum.

  >>> tx = local_sgd(0.1, 8, axis_name='workers')

  Reference: Stich, "Local SGD Converges Fast and Communicates Little", arXiv 1805.09767; Gonzalez
    Ortiz, Frankle, Rabbat, Morcos, Ballas, "Trade-offs of Local SGD at Scale", arXiv 2110.08133;
    Spiridonoff, Olshevsky, Paschalidis, "Communication-efficient SGD: From Local SGD to One-Shot
    Averaging", arXiv 2106.04759.
  """
  outer = optax.chain(transforms.mean_over(axis_name), optax.sgd(1.0))
  inner = optax.sgd(learning_rate, momentum=momentum)
  return transforms.local_steps(inner, outer, period, at_meeting=at_meeting)


def slow_mo(
  learning_rate: optax.ScalarOrSchedule,
  period: Period,
  *,
  axis_name: str,
  slow_momentum: float = 0.5,
  slow_rate: float = 1.0,
  momentum: float | None = None,
  at_meeting: AtMeeting = keep,
) -> optax.GradientTransformationExtraArgs:
  """SlowMo: local SGD whose means move with a momentum of their own.

      u <- b u + (x_0 - mean x) / lr;   x_0 <- x_0 - a lr u

  It is faster than local SGD where lr is small, and has the same fixed point: the bias on
  heterogeneous data stays.

  Args:
    learning_rate: lr, a float or a schedule of the local step.
    period: steps a round: an int, or a schedule of the round.
    axis_name: the workers' axis.
    slow_momentum: b, in [0, 1).
    slow_rate: a.
    momentum: of local heavy-ball momentum, if any.
    at_meeting: what becomes of the local momentum at a mean.

  Returns:
    A transform that needs `params`. Sends the model once a round. State: two copies of the model
    besides the local momentum.

  >>> tx = slow_mo(0.1, 8, axis_name='workers', slow_momentum=0.7)

  Reference: Wang, Tantia, Ballas, Rabbat, "SlowMo", arXiv 1910.00643; compared in Gonzalez Ortiz et
    al., "Trade-offs of Local SGD at Scale", arXiv 2110.08133.
  """
  slow = optax.chain(optax.trace(slow_momentum), optax.scale(-slow_rate))
  outer = optax.chain(
    transforms.mean_over(axis_name), transforms.in_local_units(slow, learning_rate, period)
  )
  inner = optax.sgd(learning_rate, momentum=momentum)
  return transforms.local_steps(inner, outer, period, at_meeting=at_meeting)


def overlap_local_sgd(
  learning_rate: optax.ScalarOrSchedule,
  period: int = 2,
  *,
  axis_name: str,
  pull: float = 0.6,
  anchor_momentum: float = 0.7,
  momentum: float | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Overlap-Local-SGD: workers are pulled to a mean that is one period old, so nobody waits for it.

      at the end of a round   x_i <- x_i + a (z - x_i)          z was launched one period ago
                              v_i <- b v_i + (z - x_i) / lr;   launch z' = mean_i (z - lr v_i)

  Without anchor momentum `y = (1 - a) mean x + a z` moves by `-(1 - a) lr` times the sum of the
  mean gradients of the round: the effective step is (1 - a) lr, which any comparison must say.

  Args:
    learning_rate: lr, a float or a schedule of the local step.
    period: local steps a round.
    axis_name: the workers' axis.
    pull: a, in (0, 1).
    anchor_momentum: b, in [0, 1).
    momentum: of local heavy-ball momentum, if any.

  Returns:
    A transform that needs `params`. Sends the model once a round; nothing uses it before the end of
    the next. State: three copies of the model besides the local momentum.

  Raises:
    ValueError: a pull of 1, with which no worker would ever move on.

  >>> tx = overlap_local_sgd(0.1, 2, axis_name='workers')

  Reference: Wang, Liang, Joshi, "Overlap Local-SGD: An Algorithmic Approach to Hide Communication
    Delays in Distributed SGD", arXiv 2002.09539; v is divided by lr as in its code. Here the first
    pull comes after `period` steps, there after one more.
  """
  slow = optax.chain(optax.trace(anchor_momentum), optax.scale(-1.0))
  outer = optax.chain(
    transforms.in_local_units(slow, learning_rate, period), transforms.mean_over(axis_name)
  )
  inner = optax.sgd(learning_rate, momentum=momentum)
  return transforms.local_steps(inner, outer, period, delay=period, pull=pull)


def diloco(
  inner: optax.GradientTransformation,
  period: Period = 50,
  *,
  axis_name: str,
  outer_rate: float = 0.7,
  outer_momentum: float = 0.9,
) -> optax.GradientTransformationExtraArgs:
  """DiLoCo: an optimizer that trains locally, and Nesterov momentum on the mean of the ways gone.

  Args:
    inner: the local optimizer, AdamW in the paper; its state stays each worker's own.
    period: local steps a round: an int, or a schedule of the round.
    axis_name: the workers' axis.
    outer_rate: of the outer SGD.
    outer_momentum: of the outer SGD.

  Returns:
    A transform that needs `params`. Sends the model once a round. State: two copies of the model
    besides that of `inner`.

  >>> tx = diloco(optax.adamw(1e-3), 30, axis_name='workers')

  Reference: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
    arXiv 2311.08105.
  """
  outer = optax.chain(
    transforms.mean_over(axis_name), optax.sgd(outer_rate, momentum=outer_momentum, nesterov=True)
  )
  return transforms.local_steps(inner, outer, period)


def streaming_diloco(
  inner: optax.GradientTransformation,
  period: int,
  *,
  axis_name: str,
  fragment: Phases,
  fragments: int,
  delay: int = 1,
  pull: float = 0.5,
  outer_rate: float = 0.4,
) -> optax.GradientTransformationExtraArgs:
  """Streaming DiLoCo: fragments of the model meet at steps of their own, and nobody waits for them.

  Fragment f is sent after step `f period / fragments` of each round and arrives `delay` steps
  later, where the worker goes `pull` of the way to it.

  Args:
    inner: the local optimizer; its state stays each worker's own.
    period: local steps a round.
    axis_name: the workers' axis.
    fragment: from a leaf's path and shape to the fragments that it is in, each in [0, fragments).
    fragments: how many there are; they divide the period.
    delay: steps that a fragment is on its way, at most the period.
    pull: how far a worker goes to what arrives, in (0, 1].
    outer_rate: of the outer SGD, whose Nesterov momentum is 0.9.

  Returns:
    A transform that needs `params`. Sends every fragment once a round. State: three copies of the
    model besides that of `inner`.

  Raises:
    ValueError: fragments that do not divide the period; a leaf in no fragment, or in one that there
      is not (at init).

  >>> halves = lambda path, like: [int(path.startswith('decoder'))]
  >>> tx = streaming_diloco(optax.adamw(1e-3), 8, axis_name='w', fragment=halves, fragments=2)

  Reference: Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv 2501.18512.
  """
  if not isinstance(fragments, numbers.Integral) or fragments < 1 or period % fragments:
    raise ValueError(
      f'streaming_diloco got fragments={fragments!r}; accepted are divisors of period={period}'
    )

  def phases(path: str, like: jax.ShapeDtypeStruct) -> list[int]:
    own = list(fragment(path, like))
    if not own or not all(0 <= f < fragments for f in own):
      raise ValueError(
        f'streaming_diloco got fragments {own!r} for leaf {path!r}; accepted are some of 0 to '
        f'{fragments - 1}'
      )
    return [f * period // fragments for f in own]

  outer = optax.chain(
    transforms.mean_over(axis_name), optax.sgd(outer_rate, momentum=0.9, nesterov=True)
  )
  return transforms.local_steps(inner, outer, period, delay=delay, pull=pull, phases=phases)


def distributed_sign_momentum(
  inner: optax.GradientTransformation,
  learning_rate: optax.ScalarOrSchedule,
  period: Period = 12,
  *,
  axis_name: str,
  b1: float = 0.95,
  b2: float = 0.98,
  outer_rate: float = 1.0,
  weight_decay: float = 0.1,
) -> optax.GradientTransformationExtraArgs:
  """Sign momentum on the mean of local ways (DSM): Lion whose gradients are rounds.

      d = (x - mean_w x_w) / lr;   c = b1 m + (1 - b1) d;   m <- b2 m + (1 - b2) d
      x <- x - e lr (sign(c) + l x)

  One worker with SGD as inner and period 1 is `optax.lion(e lr, b1, b2, weight_decay=l)`.

  Args:
    inner: the local optimizer, AdamW in the paper; its moments stay each worker's own.
    learning_rate: lr, that of inner: a float, or a schedule of the local step.
    period: local steps a round: an int, or a schedule of the round.
    axis_name: the workers' axis.
    b1: weight of the momentum in what is signed.
    b2: decay of the momentum.
    outer_rate: e.
    weight_decay: l.

  Returns:
    A transform that needs `params`. Sends the model once a round, whole: the sign is taken of the
    mean. State: two copies of the model besides that of `inner`.

  >>> tx = distributed_sign_momentum(optax.adamw(1e-3), 1e-3, axis_name='workers')

  Reference: Yu, Zhou, Xie, Xu, Zhang, Liu, Kar, "Distributed Sign Momentum with Local Steps for
    Training Transformers", arXiv 2411.17866, as in its code.
  """
  lion = optax.chain(
    transforms.sign_momentum(b1, b2),
    optax.add_decayed_weights(weight_decay),
    optax.scale(-outer_rate),
  )
  outer = optax.chain(
    transforms.mean_over(axis_name), transforms.in_local_units(lion, learning_rate, period)
  )
  return transforms.local_steps(inner, outer, period)


def dream_ddp(
  inner: optax.GradientTransformation, period: int, *, axis_name: str, phases: Phases
) -> optax.GradientTransformationExtraArgs:
  """DreamDDP: each layer is averaged at steps of its own in a round, before the update is applied.

      x_l <- mean_w x_l + u_l   at steps of the round that are phases of leaf l
      x_l <- x_l + u_l          at the others

  Communication is spread over the round, so that backward passes can hide it. Workers are never as
  far apart as at the end of a round of local SGD, and never at one point.

  Args:
    inner: the local optimizer.
    period: steps a round.
    axis_name: the workers' axis.
    phases: from a leaf's path and shape to the steps of the round (from 0) at which it meets.

  Returns:
    A transform that needs `params`. Sends each leaf once a phase. State: a copy of the model
    besides that of `inner`.

  Raises:
    ValueError: a leaf without phases, or with one outside of the round (at init).

  >>> tx = dream_ddp(optax.sgd(0.1), 2, axis_name='workers', phases=lambda path, like: [1])

  Reference: Tang et al., "DreamDDP: Accelerating Data Parallel Distributed LLM Training with
    Layer-wise Scheduled Partial Synchronization", arXiv 2502.11058. A mean is in a loop of one
    lap or none, which XLA does not overlap with the backward pass: what that would save is priced
    (`planning.plan_phases`), not measured.
  """
  outer = optax.chain(transforms.mean_over(axis_name), optax.sgd(1.0))
  return transforms.local_steps(inner, outer, period, phases=phases, meet_before_step=True)
