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
# # 2. Compression
#
# What does a compressor lose for the bytes that it saves, why does it matter what a worker
# remembers of that loss, and do the bytes on the wire agree with the count? Three figures, in less
# than a minute.

# %%
import jax

try:
  import jax_dsgd as dsgd
except ImportError as missing:
  raise ImportError('install the library first: %pip install -q PATH_OF_THE_CHECKOUT') from missing

# Where there is no accelerator, eight virtual devices let the same code run on a mesh. This comes
# before the first JAX computation; if it says otherwise, restart the runtime.
jax.config.update('jax_num_cpu_devices', 8)

import functools

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

W, axis_name = 8, 'workers'
simulated = dsgd.runtime.simulate(W)
compressors, memories, transforms = dsgd.compressors, dsgd.memories, dsgd.transforms
plt.rcParams.update(
  {
    'figure.dpi': 110,
    'axes.grid': True,
    'grid.alpha': 0.25,
    'axes.spines.top': False,
    'axes.spines.right': False,
  }
)

# %% [markdown]
# ## Error against bytes, on one gradient
#
# The gradient is that of the first layer of a small network, 256 x 512 entries on a batch of 64.
# The error is `|C(g) - g| / |g|`; bytes are those of the payload, counted from its shapes. Filled
# marks are biased and contractive (never above 1): they need a memory. Open marks are unbiased:
# their errors average out over workers and steps, but may be larger than what they compress.
# (`sampled_top_k` lies on `top_k`: it sends almost the same entries, and never sorts them all.)

# %%
keys = jax.random.split(jax.random.key(0), 5)
x = jax.random.normal(keys[0], (64, 256)) * jnp.geomspace(0.1, 3, 256)
teacher = jax.random.normal(keys[1], (256, 8)) / 16
first = jax.random.normal(keys[2], (256, 512)) / 16
second = jax.random.normal(keys[3], (512, 8)) / 512**0.5


def student_loss(first):
  return jnp.mean((jnp.tanh(x @ first) @ second - jnp.tanh(x @ teacher)) ** 2)


g = jax.grad(student_loss)(first)
fractions = (0.001, 0.01, 0.1)
families = {
  'top_k': [compressors.top_k(f) for f in fractions],
  'block_top_k': [compressors.block_top_k(f) for f in fractions],
  'sampled_top_k': [compressors.sampled_top_k(f) for f in fractions],
  'sign_top_k': [compressors.sign_top_k(f) for f in fractions],
  'random_k': [compressors.random_k(f) for f in fractions],
  'threshold': [compressors.threshold(float(jnp.quantile(jnp.abs(g), 0.99)), capacity=0.02)],
  'scaled_sign': [compressors.scaled_sign()],
  'scaled_blocks': [compressors.scaled_blocks(bits) for bits in (2, 4, 8)],
  'cast': [compressors.cast('float8_e4m3fn'), compressors.cast('bfloat16')],
  'importance_sampling': [compressors.importance_sampling(f) for f in fractions],
  'qsgd': [compressors.qsgd(levels) for levels in (1, 7, 127)],
  'ternary': [compressors.ternary()],
  'natural': [compressors.natural()],
}


def measure(compressor):
  def apply(key, g):
    payload = compressor.encode(key, g)
    like = jax.ShapeDtypeStruct(g.shape, g.dtype)
    return payload, compressor.decode(payload, like, key)

  payload, decoded = jax.jit(apply)(keys[4], g)
  error = jnp.linalg.norm(decoded - g) / jnp.linalg.norm(g)
  return dsgd.ledger.payload_bytes(payload), float(error)


def low_rank(rank):
  """A few warm-started rounds of PowerSGD's mean, by two workers that have the same gradient."""
  tx = transforms.low_rank_mean(rank, axis_name=axis_name, memory=memories.none())
  rows = jnp.stack([g, g])
  spmd = dsgd.runtime.simulate(2).spmd
  state, rounds = spmd(tx.init)(rows), 4
  for _ in range(rounds):
    decoded, state = spmd(tx.update)(rows, state)
  error = jnp.linalg.norm(decoded[0] - g) / jnp.linalg.norm(g)
  return dsgd.ledger.bytes_sent(state)[0] / rounds, float(error)


points = {name: [measure(c) for c in members] for name, members in families.items()}
points['low_rank_mean'] = [low_rank(rank) for rank in (1, 4, 16)]
unbiased = {name for name, members in families.items() if members[0].omega is not None}

# %%
figure, axis = plt.subplots(figsize=(9.5, 5.2), layout='constrained')
colors, marks = plt.get_cmap('tab10').colors, 'osD^vPX<>*'
for i, (name, values) in enumerate(points.items()):
  nbytes, errors = np.array(sorted(values)).T
  color = colors[i % 10]
  axis.plot(
    g.nbytes / nbytes,
    errors,
    color=color,
    linestyle='-' if i < 10 else '--',
    linewidth=1.2,
    marker=marks[i % len(marks)],
    markersize=11 if name == 'top_k' else 7,
    markerfacecolor='white' if name in unbiased else color,
    label=name,
  )
axis.axhline(1, color='0.4', linewidth=1, linestyle=':')
axis.annotate('sending nothing', (0.01, 1.07), xycoords=('axes fraction', 'data'))
axis.set(
  xscale='log',
  yscale='log',
  xlabel='times fewer bytes than float32',
  ylabel='relative error of one message',
  title='What compression costs, on one gradient of 131,072 entries',
)
figure.legend(loc='outside right center', frameon=False, title='open: unbiased')
plt.show()

# %% [markdown]
# ## Why memory matters
#
# Eight workers with quadratics whose optima are far apart, full gradients, a constant rate. Each
# sends a tenth of its entries. There is no noise: whatever is left at the end is the method's own.
#
# * `none`: unbiased random entries, and what is dropped is lost. The gradients at the optimum
#   differ between workers and stay large, so the noise of compression does.
# * `residual` (error feedback): what is dropped comes later. It stalls where what is held back
#   balances what is sent.
# * `reference`: differences to what receivers already know are sent, and those go to zero.
# * `residual` with a *shared* random choice: compression is linear, what is sent of the mean is the
#   mean of what is sent, and it is as if the workers agreed.
#
# The floors at 1e-10 and below are float32's.

# %%
dimension, steps = 50, 1500
rng = np.random.default_rng(0)
curvature = rng.uniform(0.5, 1.5, (W, dimension))
directions = rng.normal(size=(W, dimension))
tenth = 0.1
memory_runs = {
  'none, random-k, unbiased': (compressors.importance_sampling(tenth), memories.none()),
  'residual, top-k': (compressors.top_k(tenth), memories.residual()),
  'residual, random-k, shared key': (compressors.random_k(tenth), memories.residual()),
  'reference, top-k': (compressors.top_k(tenth), memories.reference()),
}


@functools.partial(jax.jit, static_argnums=0)
def distances(tx, optima):
  best = (curvature * optima).sum(0) / curvature.sum(0)

  def worker(curvature, optimum):
    def step(carry, _):
      z, state = carry
      updates, state = tx.update(curvature * (z - optimum), state, z)
      return (z + updates, state), jnp.sum((z - best) ** 2)

    z = jnp.ones(dimension)
    return jax.lax.scan(step, (z, tx.init(z)), length=steps)[1]

  return simulated.spmd(worker)(jnp.float32(curvature), optima)[0]


def chain(compressor, memory):
  mean = transforms.compressed_mean(compressor, axis_name=axis_name, memory=memory)
  return optax.chain(optax.sgd(0.05), mean)


figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True, layout='constrained')
for axis, spread in zip(axes, (0, 5), strict=True):
  optima = jnp.float32(spread * directions)
  for (name, parts), color in zip(memory_runs.items(), colors, strict=False):
    axis.semilogy(distances(chain(*parts), optima), color=color, linewidth=1.6, label=name)
  axis.set(xlabel='step', title='workers agree' if spread == 0 else 'optima apart (spread 5)')
axes[0].set(ylabel='squared distance to the optimum', ylim=(1e-16, 1e4))
figure.legend(
  *axes[0].get_legend_handles_labels(), loc='outside lower center', ncols=4, frameon=False
)
plt.show()

# %% [markdown]
# ## The wire
#
# The ledger counts payload shapes. The compiled program says what its collectives carry. Here one
# step of each method is compiled for a mesh of eight devices and read.
#
# Payloads that do not sum are gathered: every worker hands over few bytes but receives those of all
# others. The library warns where that puts more on a link than a dense all-reduce would, as with
# eight workers at 8 bits; `server=` then sends in two phases.

# %%
wire = {
  'all-reduce, float32': transforms.mean_over(axis_name),
  'cast to bfloat16': chain(compressors.cast(), memories.residual()),
  '8-bit blocks': chain(compressors.scaled_blocks(8), memories.residual()),
  'natural': chain(compressors.natural(), memories.none()),
  'qsgd, 7 levels': chain(compressors.qsgd(7), memories.none()),
  'packed signs': chain(compressors.scaled_sign(), memories.residual()),
  'low rank 4': transforms.low_rank_mean(4, axis_name=axis_name, memory=memories.residual()),
  'top 1 %': chain(compressors.top_k(0.01), memories.residual()),
  'random 1 %, shared key': chain(compressors.random_k(0.01), memories.residual()),
}


def on_the_wire(tx):
  """Bytes of a step: as the ledger counts, and as the compiled program says."""
  workers = dsgd.runtime.on_mesh(dsgd.runtime.make_mesh(workers=W), axis_name)
  rows = workers.replicate(g)
  state = workers.spmd(tx.init)(rows)
  step = jax.jit(workers.spmd(tx.update)).lower(rows, state).compile()
  crossing = dsgd.ledger.collectives(step.as_text())
  _, after = step(rows, state)
  return dsgd.ledger.bytes_sent(after)[0], sum(c.nbytes for c in crossing)


if len(jax.devices()) >= W:
  table = {name: on_the_wire(tx) for name, tx in wire.items()}
  for name, (counted, compiled) in table.items():
    print(f'{name:24} {counted:8,} bytes counted, {compiled:8,} in the program')
  counted, compiled = np.array(list(table.values())).T
  places = np.arange(len(table))
  figure, axis = plt.subplots(figsize=(9, 3.9), layout='constrained')
  axis.barh(places, counted, height=0.6, color='#9ecae1', label='the ledger')
  axis.plot(compiled, places, 'D', color='#08519c', markersize=6, label='the compiled program')
  for place, nbytes in zip(places, counted, strict=True):
    axis.text(nbytes * 1.15, place, f'{g.nbytes / nbytes:.0f} x', va='center', color='0.3')
  axis.set(
    xscale='log',
    xlim=(1e3, 2e6),
    xlabel='bytes that a worker hands to the network in a step',
    title='One step on a mesh of eight devices',
  )
  axis.set_yticks(places, list(table))
  axis.invert_yaxis()
  axis.grid(axis='y', visible=False)
  axis.legend(loc='lower right', frameon=False)
  plt.show()
else:
  print(f'the wire needs {W} devices')
