"""Methods with clients: some take part in a round, with weights by their examples."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_dsgd import transforms
from jax_dsgd.transforms import Period


def fed_avg(
  learning_rate: optax.ScalarOrSchedule,
  period: Period,
  *,
  axis_name: str,
  examples: Sequence[float],
  client_fraction: float = 1.0,
  seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """Federated averaging: drawn clients train alone, then the mean of their models by examples.

      S = max(C K, 1) clients drawn without replacement;   x_k = `period` steps of SGD from x
      x <- sum_{k in S} (n_k / n_S) x_k

  A client that was not drawn computes its local steps all the same (one program runs everywhere)
  but they weigh nothing, and it continues from the new average. With all clients, one step a round
  and full batches it is gradient descent on the weighted loss.

  Args:
    learning_rate: a float, or a schedule of the local step.
    period: local steps a round: E epochs of n_k / B batches each.
    axis_name: the clients' axis.
    examples: n_k, one positive number a client.
    client_fraction: C, the share of clients drawn a round, in (0, 1].
    seed: of the drawing.

  Returns:
    A transform that needs `params`. Sends the model once a round (the bytes of a client that was
    not drawn are counted too: in one program its zeros cross). State: one copy of the model.

  Raises:
    ValueError: examples that are not positive, a client fraction outside (0, 1].

  >>> tx = fed_avg(0.1, 8, axis_name='workers', examples=[100, 300], client_fraction=0.5)

  Reference: McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-Efficient Learning of
    Deep Networks from Decentralized Data", arXiv 1602.05629. Every client takes the same number of
    steps a round here; there it is E passes over its own examples.
  """
  counts = np.asarray(examples, np.float32)
  if counts.ndim != 1 or not (counts > 0).all() or not np.isfinite(counts).all():
    raise ValueError(f'fed_avg got examples={examples!r}; accepted is one positive number a client')
  if not 0 < client_fraction <= 1:
    raise ValueError(
      f'fed_avg got client_fraction={client_fraction!r}; accepted are numbers in (0, 1]'
    )
  drawn = max(round(client_fraction * counts.size), 1)

  def weights(round_: jax.Array) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(seed), round_)
    place = jax.random.permutation(key, counts.size)
    return jnp.where(place < drawn, jnp.asarray(counts), 0)

  mean = transforms.mean_over(axis_name, weights=counts if drawn == counts.size else weights)
  return transforms.local_steps(optax.sgd(learning_rate), optax.chain(mean, optax.sgd(1.0)), period)
