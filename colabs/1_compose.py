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
# # 1. Compose
#
# In `jax_dsgd` a distributed training method is an optax transform whose text does not know how
# many machines there are. This notebook builds five methods from parts, runs them on simulated
# workers and on a mesh, compares their loss against the bytes that they send, reads those bytes
# from the compiled program, and ends with a compressor of your own. It takes a minute.

# %%
import jax

try:
  import jax_dsgd as dsgd
except ImportError as missing:
  raise ImportError('install the library first: %pip install -q PATH_OF_THE_CHECKOUT') from missing

# Where there is no accelerator, eight virtual devices let the same code run on a mesh. This comes
# before the first JAX computation; if it says otherwise, restart the runtime.
jax.config.update('jax_num_cpu_devices', 8)

import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax

W = 8
devices = jax.devices()
print(f'jax {jax.__version__}, {len(devices)} {devices[0].platform} device(s), {W} workers')

# %% [markdown]
# ## A problem that workers disagree on
#
# Each worker has its own data: logistic regression whose labels were drawn around a different
# direction on every worker. What we want is the minimum of the *mean* loss.

# %%
dimension, examples = 400, 64
keys = jax.random.split(jax.random.key(0), 3)
truth = jax.random.normal(keys[0], (1, dimension)) + jax.random.normal(keys[1], (W, dimension))
inputs = jax.random.normal(keys[2], (W, examples, dimension)) / dimension**0.5
labels = jnp.sign(jnp.einsum('wnd,wd->wn', inputs, truth))


def loss(x, inputs, labels):
  return jnp.mean(jnp.logaddexp(0.0, -labels * (inputs @ x))) + 1e-3 * jnp.sum(x**2)


def mean_loss(x):
  return jnp.mean(jax.vmap(loss, in_axes=(None, 0, 0))(x, inputs, labels))


# %% [markdown]
# ## Five sentences
#
# A transform that averages, compresses or mixes stands in a chain like any other. `axis_name` says
# which workers; nothing says how many.

# %%
axis_name = 'workers'
sgd = optax.sgd(20.0)

methods = {
  'all-reduce': optax.chain(dsgd.transforms.mean_over(axis_name), sgd),
  'top 5 %, reference': optax.chain(
    dsgd.transforms.compressed_mean(
      dsgd.compressors.top_k(0.05), axis_name=axis_name, memory=dsgd.memories.reference()
    ),
    sgd,
  ),
  'signs, residual': optax.chain(
    sgd,
    dsgd.transforms.compressed_mean(
      dsgd.compressors.scaled_sign(), axis_name=axis_name, memory=dsgd.memories.residual()
    ),
  ),
  '8 local steps': dsgd.transforms.local_steps(
    inner=sgd, outer=optax.chain(dsgd.transforms.mean_over(axis_name), optax.sgd(1.0)), period=8
  ),
  'ring gossip': optax.chain(
    sgd, dsgd.transforms.mix_neighbors(dsgd.topologies.ring(W), axis_name=axis_name)
  ),
}

# %% [markdown]
# ## One step, two runtimes
#
# The step is written for one worker. `simulate` runs W of them on the device at hand; `on_mesh`
# gives each a slice of a mesh, a pod included. Everything that belongs to workers is carried as
# rows, one a worker.


# %%
def one_step(tx):
  def step(x, state, inputs, labels):
    gradient = jax.grad(loss)(x, inputs, labels)
    updates, state = tx.update(gradient, state, x)
    return optax.apply_updates(x, updates), state

  return step


def train(workers, tx, steps=150):
  step = workers.spmd(one_step(tx))
  x = workers.replicate(jnp.zeros(dimension))
  state = workers.spmd(tx.init)(x)
  data = workers.place((inputs, labels))
  history = []
  for _ in range(steps):
    x, state = step(x, state, *data)
    history.append((mean_loss(dsgd.runtime.average(x)), dsgd.ledger.bytes_sent(state)[0]))
  return x, jnp.array(history).T


simulated = dsgd.runtime.simulate(W)
runs = {name: train(simulated, tx) for name, tx in methods.items()}

if len(devices) >= W:
  on_mesh = dsgd.runtime.on_mesh(dsgd.runtime.make_mesh(workers=W), axis_name)
  for name, tx in methods.items():
    x, _ = train(on_mesh, tx, steps=20)
    same, _ = train(simulated, tx, steps=20)
    print(f'{name:20} mesh and simulation differ by {jnp.max(jnp.abs(x - same)):.1e}')

# %% [markdown]
# ## Loss against steps, and against bytes

# %%
figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout='constrained')
styles = ('-', '--', '-.', ':', (0, (5, 1, 1, 1, 1, 1)))
for (name, (_, (losses, sent))), style in zip(runs.items(), styles, strict=True):
  axes[0].plot(losses, linestyle=style, label=name)
  axes[1].plot(sent / 1e3, losses, linestyle=style)
axes[0].set(xlabel='step', ylabel='mean loss of the averaged model', title='against steps')
axes[1].set(
  xlabel='kB sent by a worker', xscale='log', title='against bytes (of the same program on a mesh)'
)
axes[0].legend()
for axis in axes:
  axis.grid(alpha=0.3)
plt.show()

# %% [markdown]
# ## What really crosses
#
# `ledger.bytes_sent` counts payload shapes. `ledger.collectives` reads the compiled program. They
# agree, and the signs really are packed eight to a byte.

# %%
if len(devices) >= W:
  tx = methods['signs, residual']
  x = on_mesh.replicate(jnp.zeros(dimension))
  state = on_mesh.spmd(tx.init)(x)
  program = jax.jit(on_mesh.spmd(one_step(tx))).lower(x, state, *on_mesh.place((inputs, labels)))
  for collective in dsgd.ledger.collectives(program.compile().as_text()):
    print(collective.kind, collective.operands, collective.nbytes, 'bytes')

# %% [markdown]
# ## Your own compressor
#
# A compressor is two pure functions. This one flips signs at random, alike on all workers, and
# sends the mean of each four entries. It is linear with a shared key, so payloads are summed on the
# way; and since every entry gets its turn, a residual memory brings what was dropped later.


# %%
def sketch(size=4):
  def signs(key, n):
    return jax.random.rademacher(key, (n,), jnp.float32)

  def encode(key, x):
    return (signs(key, x.size) * x.reshape(-1)).reshape(-1, size).mean(axis=1)

  def decode(payload, like, key):
    return (signs(key, like.size) * jnp.repeat(payload, size)).reshape(like.shape)

  return dsgd.compressors.Compressor(
    f'sketch(size={size})', encode, decode, summable=True, shared_key=True, delta=lambda n: 1 / size
  )


tx = optax.chain(
  sgd,
  dsgd.transforms.compressed_mean(sketch(), axis_name=axis_name, memory=dsgd.memories.residual()),
)
x, (losses, sent) = train(simulated, tx)
print(f'loss {losses[0]:.3f} -> {losses[-1]:.3f}, all-reduce {runs["all-reduce"][1][0][-1]:.3f}')
print(f'{sent[-1] / len(sent):.0f} bytes a step instead of {4 * dimension}')
