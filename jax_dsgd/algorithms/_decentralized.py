"""Methods without a center: workers average their models with neighbours."""

from __future__ import annotations

import optax

from jax_dsgd import compressors, topologies, transforms


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
    topology: who mixes with whom.
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
