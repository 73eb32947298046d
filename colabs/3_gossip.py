# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 3. Gossip
#
# Training without a center: each worker averages its model with a few neighbours. This notebook
# draws who talks to whom, predicts from that how fast workers agree and measures it, and shows what
# heterogeneous data does to gossip with momentum, and a method to which it does nothing. It takes a
# minute.

# %%
import jax

try:
  import jax_dsgd as dsgd
except ImportError as missing:
  raise ImportError('install the library first: %pip install -q PATH_OF_THE_CHECKOUT') from missing

import jax.numpy as jnp
import matplotlib.pyplot as plt
import networkx as nx
import numpy as np
import optax

W, axis_name = 16, 'workers'
workers = dsgd.runtime.simulate(W)
print(f'jax {jax.__version__}, {W} workers on {jax.devices()[0].platform}')

# %% [markdown]
# ## Who talks to whom
#
# A topology is a table of permutations and weights, one row a round. Its matrix `W[i, j]` is what
# worker i gives to the value of worker j. The last of these changes from round to round: each
# worker sends to one other, at a distance of 1, 2, 4 and 8.

# %%
graphs = {
  'ring': dsgd.topologies.ring(W),
  'torus': dsgd.topologies.torus(4, 4),
  'star': dsgd.topologies.star(W),
  'random_regular': dsgd.topologies.random_regular(W, 3, seed=0),
  'hypercube': dsgd.topologies.hypercube(W),
  'one_peer_exponential': dsgd.topologies.one_peer_exponential(W),
}
figure, axes = plt.subplots(2, 3, figsize=(10, 6.4), layout='constrained')
for axis, (name, topology) in zip(axes.flat, graphs.items(), strict=True):
  drawn = nx.DiGraph()
  drawn.add_nodes_from(range(W))
  for t in range(topology.period):
    receivers, senders = np.nonzero(topology.matrix(t) * (1 - np.eye(W)))
    drawn.add_edges_from(zip(senders.tolist(), receivers.tolist(), strict=True))
  symmetric = topology.symmetric
  lines = drawn.to_undirected() if symmetric else drawn
  nx.draw_networkx(
    lines,
    nx.circular_layout(drawn),
    ax=axis,
    node_size=130,
    font_size=7,
    node_color='#9ecae1',
    edge_color='#777777',
    arrows=True,
    arrowsize=7,
  )
  axis.set_title(f'{name}, gap {topology.spectral_gap():.3f}')
  axis.set_axis_off()
plt.show()

# %% [markdown]
# ## How fast they agree
#
# The spectral gap is what a round takes off the distance to the mean, for the worst values: after t
# rounds it is at most `(1 - gap)^t` of the first. What it costs is another matter: messages a
# worker a round.

# %%
print(f'{"":22}{"gap":>8}{"rounds to 1e-3":>16}{"messages a worker":>19}')
for name, topology in graphs.items():
  gap, sends = topology.spectral_gap(), topology.sends.mean(0)
  rounds = np.log(1e-3) / np.log1p(-gap) if gap < 1 else topology.period
  print(f'{name:22}{gap:8.3f}{np.ceil(rounds):16.0f}{sends.min():12.0f} to {sends.max():3.0f}')


# %%
def distances(topology, rounds=40):
  """Gossip is a transform: with no step to take, it only averages."""
  tx = dsgd.transforms.mix_neighbors(topology, axis_name=axis_name)
  step = workers.spmd(lambda x, state: tx.update(jnp.zeros_like(x), state, x))
  x = jax.random.normal(jax.random.key(0), (W, 100))
  state, found = workers.spmd(tx.init)(x), []
  for _ in range(rounds):
    found.append(dsgd.runtime.consensus_distance(x))
    updates, state = step(x, state)
    x = x + updates
  return np.array(found) / found[0]


plt.figure(figsize=(7, 4), layout='constrained')
for index, (name, topology) in enumerate(graphs.items()):
  plt.plot(np.maximum(distances(topology), 1e-7), color=f'C{index}', label=name)
  if (gap := topology.spectral_gap()) < 1:
    plt.plot((1 - gap) ** np.arange(40), color=f'C{index}', linestyle=':', linewidth=1)
plt.yscale('log')
plt.xlabel('round')
plt.ylabel('distance to the mean (dotted: the promise)')
plt.legend()
plt.grid(alpha=0.3)
plt.show()

# %% [markdown]
# ## Heterogeneous data
#
# Logistic regression: each worker's labels were drawn around a direction of its own, so each wants
# another model. DSGD with a constant rate then stops at a distance from the best model that is in
# proportion to the rate; momentum makes that distance larger. Momentum Tracking lets neighbours
# improve each worker's estimate of the mean momentum, for one more message, and that distance is
# gone.

# %%
dimension, examples = 50, 64
keys = jax.random.split(jax.random.key(1), 3)
truth = jax.random.normal(keys[0], (1, dimension)) + 2 * jax.random.normal(keys[1], (W, dimension))
inputs = jax.random.normal(keys[2], (W, examples, dimension)) / dimension**0.5
labels = jnp.sign(jnp.einsum('wnd,wd->wn', inputs, truth))


def loss(x, inputs, labels):
  return jnp.mean(jnp.logaddexp(0.0, -labels * (inputs @ x))) + 0.01 * jnp.sum(x**2)


def mean_loss(x):
  return jnp.mean(jax.vmap(loss, in_axes=(None, 0, 0))(x, inputs, labels))


ring, rate = graphs['ring'], 0.3
methods = {
  'all-reduce, momentum': dsgd.algorithms.allreduce_sgd(rate, axis_name=axis_name, momentum=0.9),
  'DSGD': dsgd.algorithms.dsgd(rate, ring, axis_name=axis_name),
  'DSGD, momentum': dsgd.algorithms.dsgd(rate, ring, axis_name=axis_name, momentum=0.9),
  'quasi-global momentum': dsgd.algorithms.qg_dsgdm(rate, ring, axis_name=axis_name),
  'Momentum Tracking': dsgd.algorithms.momentum_tracking(rate, ring, axis_name=axis_name),
}


def train(tx, steps=600):
  """The models after each step, [workers, steps, dimension]."""

  def worker(inputs, labels):
    def step(carry, _):
      x, state = carry
      updates, state = tx.update(jax.grad(loss)(x, inputs, labels), state, x)
      x = optax.apply_updates(x, updates)
      return (x, state), x

    x = jnp.zeros(dimension)
    return jax.lax.scan(step, (x, tx.init(x)), length=steps)[1]

  return workers.spmd(worker)(inputs, labels)


runs = {name: train(tx) for name, tx in methods.items()}

# %% [markdown]
# The loss of the averaged model hides a part of it: what a worker has is its own model. On the
# right is the worst of them.

# %%
best = mean_loss(train(methods['all-reduce, momentum'], steps=5000)[0, -1])
figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True, layout='constrained')
for (name, models), style in zip(runs.items(), ('-', '--', '-.', ':', '-'), strict=True):
  of_average = jax.vmap(mean_loss)(models.mean(0))
  of_worst = jax.vmap(jax.vmap(mean_loss))(models).max(0)
  for axis, losses in zip(axes, (of_average, of_worst), strict=True):
    axis.plot(jnp.maximum(losses - best, 1e-7), linestyle=style, label=name)
  print(f'{name:22} average {of_average[-1] - best:9.1e}   worst {of_worst[-1] - best:9.1e}')
axes[0].set(xlabel='step', yscale='log', ylabel='mean loss above the best', title='averaged model')
axes[1].set(xlabel='step', title='worst local model')
axes[1].legend(loc='center right')
for axis in axes:
  axis.grid(alpha=0.3)
plt.show()

# %% [markdown]
# ## Less on every line
#
# CHOCO sends to each neighbour a compressed difference to a copy of the model that all of them
# keep. The mean over workers stays exactly that of plain gossip, whatever the compressor drops, and
# the ledger counts what crossed.

# %%
choco = dsgd.algorithms.choco_sgd(
  rate, ring, dsgd.compressors.scaled_sign(), axis_name=axis_name, consensus_rate=0.3
)
for name, tx in {'DSGD': methods['DSGD'], 'CHOCO, signs': choco}.items():
  step = workers.spmd(lambda x, state, *data, tx=tx: tx.update(jax.grad(loss)(x, *data), state, x))
  x = jnp.zeros((W, dimension))
  state = workers.spmd(tx.init)(x)
  for _ in range(600):
    updates, state = step(x, state, inputs, labels)
    x = x + updates
  above = mean_loss(x.mean(0)) - best
  apart = dsgd.runtime.consensus_distance(x)
  sent = dsgd.ledger.bytes_sent(state)[0]
  print(f'{name:14} average {above:.1e} above, {apart:.2f} apart, {sent / 600:.0f} bytes a step')
