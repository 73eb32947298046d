"""Methods without a center: workers average their models with neighbours."""

from __future__ import annotations

import jax
import optax

from jax_dsgd import compressors, memories, topologies, transforms


def dsgd(
  learning_rate: optax.ScalarOrSchedule,
  topology: topologies.Topology,
  *,
  axis_name: str,
  momentum: float | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Decentralized SGD: a local step, then a mix with neighbours.

      x_i <- sum_j W[i, j] (x_j - lr g_j(x_j))

  The mean over workers follows the mean gradient. With a constant rate on heterogeneous data the
  workers' models keep a distance that is proportional to the rate.

  Args:
    learning_rate: a float, or a schedule of the step.
    topology: who mixes with whom, in every round: `ring`, `one_peer_exponential`, random pairs as
      in AD-PSGD (`random_pairs`), or groups as in Prague's partial all-reduce (`random_groups`,
      `one_peer_hypercube`, `inter_intra`).
    axis_name: the workers' axis.
    momentum: of local heavy-ball momentum, if any.

  Returns:
    A transform that needs `params`. Sends the model once to each neighbour a step.

  >>> from jax_dsgd import topologies
  >>> tx = dsgd(0.1, topologies.ring(8), axis_name='workers')

  Reference: Lian, Zhang, Zhang, Hsieh, Zhang, Liu, "Can Decentralized Algorithms Outperform
    Centralized Algorithms?", arXiv 1705.09056, with the step before the mix (adapt, then combine)
    and gradients at the mixed model.
  """
  return optax.chain(
    optax.sgd(learning_rate, momentum=momentum),
    transforms.mix_neighbors(topology, axis_name=axis_name),
  )


def d_psgd(
  learning_rate: optax.ScalarOrSchedule,
  topology: topologies.Topology,
  *,
  axis_name: str,
  momentum: float | None = None,
) -> optax.GradientTransformationExtraArgs:
  """D-PSGD: a mix with neighbours, then a local step: `x_i <- sum_j W[i, j] x_j - lr g_i(x_i)`.

  Gradient and mix do not wait for each other, as they do in `dsgd`.

  Args:
    learning_rate: a float, or a schedule of the step.
    topology: who mixes with whom.
    axis_name: the workers' axis.
    momentum: of local heavy-ball momentum, if any.

  Returns:
    A transform that needs `params`. Sends the model once to each neighbour a step.

  >>> from jax_dsgd import topologies
  >>> tx = d_psgd(0.1, topologies.ring(8), axis_name='workers')

  Reference: Lian, Zhang, Zhang, Hsieh, Zhang, Liu, "Can Decentralized Algorithms Outperform
    Centralized Algorithms?", arXiv 1705.09056.
  """
  mix = transforms.mix_neighbors(topology, axis_name=axis_name)
  return optax.chain(optax.sgd(learning_rate, momentum=momentum), transforms.before_step(mix))


def hierarchical_dsgd(
  learning_rate: optax.ScalarOrSchedule,
  topology: topologies.Topology,
  *,
  axis_name: str,
  inner_axis_name: str,
  momentum: float | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Hierarchical gossip: the exact mean gradient inside a slice, a mix between slices.

  Args:
    learning_rate: a float, or a schedule of the step.
    topology: which slices mix.
    axis_name: the axis of slices.
    inner_axis_name: the axis of workers inside a slice, who begin at one point.
    momentum: of heavy-ball momentum in each slice, if any.

  Returns:
    A transform that needs `params`. Sends the gradient once inside a slice, and the model once to
    each neighbour slice, a step.

  >>> from jax_dsgd import topologies
  >>> tx = hierarchical_dsgd(0.1, topologies.ring(4), axis_name='slices', inner_axis_name='chips')
  """
  mean = transforms.mean_over(inner_axis_name)
  return optax.chain(mean, dsgd(learning_rate, topology, axis_name=axis_name, momentum=momentum))


def stochastic_gradient_push(
  learning_rate: optax.ScalarOrSchedule,
  topology: topologies.Topology,
  *,
  axis_name: str,
  momentum: float | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Stochastic gradient push: DSGD on directed graphs, with push-sum weights.

      z <- A (z - lr g(x));   w <- A w;   x_i = z_i / w_i

  Args:
    learning_rate: a float, or a schedule of the step.
    topology: A, column stochastic: `directed_ring`, `from_arrows`, `one_peer_exponential`.
    axis_name: the workers' axis.
    momentum: of local heavy-ball momentum, if any.

  Returns:
    A transform that needs `params`, which are the de-biased x. Sends the model and 4 bytes once to
    each receiver a step. State: a number a worker, besides the momentum.

  >>> from jax_dsgd import topologies
  >>> tx = stochastic_gradient_push(0.1, topologies.directed_ring(8), axis_name='workers')

  Reference: Assran, Loizou, Ballas, Rabbat, "Stochastic Gradient Push for Distributed Deep
    Learning", arXiv 1811.10792.
  """
  push = transforms.mix_push_sum(topology, axis_name=axis_name)
  return optax.chain(optax.sgd(learning_rate, momentum=momentum), push)


def wagma_sgd(
  learning_rate: optax.ScalarOrSchedule,
  topology: topologies.Topology,
  *,
  axis_name: str,
  group_size: int,
  period: int = 10,
  momentum: float | None = None,
) -> optax.GradientTransformationExtraArgs:
  """WAGMA-SGD: a local step, then the mean of a group that changes each step and waits for nobody.

  Every `period` steps the mean is over all workers. Lateness comes from `control`; see
  `mix_without_waiting`.

  Args:
    learning_rate: a float, or a schedule of the step.
    topology: `one_peer_hypercube(W)`.
    axis_name: the workers' axis.
    group_size: S, a power of two near sqrt(W).
    period: steps from one mean of all to the next.
    momentum: of local heavy-ball momentum, if any.

  Returns:
    A transform that needs `params`. Sends the model log2 S times a step. State: a copy of the model
    besides the momentum.

  >>> from jax_dsgd import topologies
  >>> cube = topologies.one_peer_hypercube(16)
  >>> tx = wagma_sgd(0.1, cube, axis_name='workers', group_size=4)

  Reference: Li, Ben-Nun, Nadiradze, Di Girolamo, Dryden, Alistarh, Hoefler, "Breaking (Global)
    Barriers in Parallel Stochastic Optimization with Wait-Avoiding Group Averaging", arXiv
    2005.00124.
  """
  mix = transforms.mix_without_waiting(
    topology, axis_name=axis_name, group_size=group_size, period=period
  )
  return optax.chain(optax.sgd(learning_rate, momentum=momentum), mix)


def choco_sgd(
  learning_rate: optax.ScalarOrSchedule,
  topology: topologies.Topology,
  compressor: compressors.Compressor,
  *,
  axis_name: str,
  consensus_rate: float,
  momentum: float | None = None,
  seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """CHOCO-SGD: a local step, then gossip of compressed differences to copies that neighbours keep.

      y_i = x_i - lr g_i;   q_i = C(y_i - h_i);   h_j <- h_j + q_j for every copy held;   x_i = y_i
      + g sum_j W[i, j] (h_j - h_i)

  The mean over workers is kept whatever the compressor drops.

  Args:
    learning_rate: a float, or a schedule of the step.
    topology: W, fixed in time.
    compressor: C, the wire format of each leaf.
    axis_name: the workers' axis.
    consensus_rate: g, in (0, 1]. It shrinks with the compressor's delta and must be tuned: too
      large a rate drives the workers' models apart while their mean still looks well.
    momentum: of local heavy-ball momentum, if any (as in the paper's deep-learning experiments).
    seed: of random compressors.

  Returns:
    A transform that needs `params`. Sends one payload to each neighbour a step. State: two float32
    copies of the model.

  >>> from jax_dsgd import compressors, topologies
  >>> ring, tenth = topologies.ring(8), compressors.top_k(0.1)
  >>> tx = choco_sgd(0.1, ring, tenth, axis_name='workers', consensus_rate=0.3)

  Reference: Koloskova, Stich, Jaggi, "Decentralized Stochastic Optimization and Gossip Algorithms
    with Compressed Communication", arXiv 1902.00340; Koloskova, Lin, Stich, Jaggi, arXiv
    1907.09356.
  """
  mix = transforms.mix_compressed(
    topology, compressor, axis_name=axis_name, consensus_rate=consensus_rate, seed=seed
  )
  return optax.chain(optax.sgd(learning_rate, momentum=momentum), mix)


def deep_squeeze(
  learning_rate: optax.ScalarOrSchedule,
  topology: topologies.Topology,
  compressor: compressors.Compressor,
  *,
  axis_name: str,
  consensus_rate: float,
  seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """DeepSqueeze: a local step, then gossip of compressed models with error feedback.

      y_i = x_i - lr g_i;   c_i = C(y_i + e_i);   e_i <- y_i + e_i - c_i
      x_i <- y_i + a sum_j W[i, j] (c_j - c_i)

  Whole models are compressed, so consensus stays as rough as the compressor; `choco_sgd` sends
  differences. Topologies may vary in time.

  Args:
    learning_rate: a float, or a schedule of the step.
    topology: W.
    compressor: C, a contractive wire format of each leaf.
    axis_name: the workers' axis.
    consensus_rate: a, in (0, 1].
    seed: of random compressors.

  Returns:
    A transform that needs `params`. Sends one payload to each neighbour a step. State: one float32
    copy of the model.

  >>> from jax_dsgd import compressors, topologies
  >>> ring, signs = topologies.ring(8), compressors.scaled_sign()
  >>> tx = deep_squeeze(0.1, ring, signs, axis_name='workers', consensus_rate=0.2)

  Reference: Tang, Lian, Qiu, Yuan, Zhang, Zhang, Liu, "DeepSqueeze: Decentralization Meets
    Error-Compensated Compression", arXiv 1907.07346.
  """
  mix = transforms.mix_compressed(
    topology,
    compressor,
    axis_name=axis_name,
    consensus_rate=consensus_rate,
    memory=memories.residual(),
    seed=seed,
  )
  return optax.chain(optax.sgd(learning_rate), mix)


def squarm_sgd(
  learning_rate: optax.ScalarOrSchedule,
  topology: topologies.Topology,
  compressor: compressors.Compressor,
  period: int = 5,
  *,
  axis_name: str,
  consensus_rate: float,
  threshold: optax.ScalarOrSchedule = 0.0,
  momentum: float = 0.9,
) -> optax.GradientTransformationExtraArgs:
  """SQuARM-SGD: local Nesterov steps, then gossip of compressed differences, where there is news.

      v <- b v + g;   x <- x - lr (b v + g)                                        at every step
      q_i = C(x_i - h_i) if |x_i - h_i|^2 > c_t lr_t^2, else 0                     every H steps
      h_j <- h_j + q_j for every copy held;   x_i <- x_i + a sum_j W[i, j] (h_j - h_i)

  Without momentum, threshold and compression, with H = 1 and a = 1, it is `dsgd`.

  Args:
    learning_rate: lr, a float or a schedule of the step.
    topology: W, fixed in time.
    compressor: C, the wire format of each leaf; `sign_top_k` in the paper.
    period: H.
    axis_name: the workers' axis.
    consensus_rate: a, in (0, 1].
    threshold: c_t, a float or a schedule of the step that grows slower than t.
    momentum: b, in [0, 1).

  Returns:
    A transform that needs `params`. Sends one payload to each neighbour a round, if there is news.
    State: three copies of the model and the momentum.

  >>> from jax_dsgd import compressors, topologies
  >>> ring, one = topologies.ring(8), compressors.sign_top_k(0.01)
  >>> tx = squarm_sgd(0.1, ring, one, axis_name='workers', consensus_rate=0.1, threshold=10.0)

  Reference: Singh, Data, George, Diggavi, "SQuARM-SGD: Communication-Efficient Momentum SGD for
    Decentralized Optimization", arXiv 2005.07041. It decides for the whole model, not leaf by leaf.
  """

  def at(value: optax.ScalarOrSchedule, step: jax.Array) -> jax.typing.ArrayLike:
    return value(step) if callable(value) else value

  def news(squared: jax.Array, round_: jax.Array) -> jax.Array:
    last = (round_ + 1) * period - 1
    return squared > at(threshold, last) * at(learning_rate, last) ** 2

  mix = transforms.mix_compressed(
    topology, compressor, axis_name=axis_name, consensus_rate=consensus_rate, trigger=news
  )
  inner = optax.sgd(learning_rate, momentum=momentum or None, nesterov=bool(momentum))
  return transforms.local_steps(inner, optax.chain(optax.scale(-1.0), mix), period)
