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
# # 4. Local updates
#
# Workers that take many steps between few averages send little. On data that differ between
# workers they also drift: each walks towards its own minimum. This notebook measures where local
# SGD ends and finds the point in closed form, shows that SlowMo is faster and ends at the same
# point, that SCAFFOLD ends at the right one, and what DiLoCo makes of the bytes of 60 means. It
# takes a minute.

# %%
import jax

try:
  import jax_dsgd as dsgd
except ImportError as missing:
  raise ImportError('install the library first: %pip install -q PATH_OF_THE_CHECKOUT') from missing

# Where there is no accelerator, eight virtual devices stand for as many chips. This comes before
# the first JAX computation; if it says otherwise, restart the runtime.
jax.config.update('jax_num_cpu_devices', 8)

import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax

W, axis_name = 8, 'workers'
devices = jax.devices()
print(f'jax {jax.__version__}, {len(devices)} {devices[0].platform} device(s), {W} workers')

# %% [markdown]
# ## Workers that disagree
#
# Worker i has the loss `(x - b_i) A_i (x - b_i) / 2`: a curvature and a minimum of its own. What we
# want is the minimum of the mean loss, `(mean A_i)^-1 mean A_i b_i`.

# %%
d, rate = 20, 0.2
keys = jax.random.split(jax.random.key(0), 3)
roots = jax.random.normal(keys[0], (W, d, d)) / d**0.5
A = roots @ roots.mT + 0.1 * jnp.eye(d)
b = jax.random.normal(keys[1], (W, d))
best = jnp.linalg.solve(A.mean(0), jnp.einsum('wij,wj->i', A, b) / W)

# %% [markdown]
# ## A round in one call
#
# A round of local steps is `Workers.scan` of one step: nothing leaves a worker before its end.

# %%
workers = dsgd.runtime.simulate(W)


def rounds(tx, period, count, workers=workers):
  """Distance from the minimum after each round, and where it ended."""

  def step(carry, problem):
    x, state = carry
    A, b = problem
    updates, state = tx.update(A @ (x - b), state, x)
    return (optax.apply_updates(x, updates), state), None

  run = workers.scan(step)
  x = workers.replicate(jnp.zeros(d))
  carry = x, workers.spmd(tx.init)(x)
  problems = workers.place(tuple(jnp.repeat(y[:, None], period, axis=1) for y in (A, b)))
  history = []
  for _ in range(count):
    carry, _ = run(carry, problems)
    mean = dsgd.runtime.average(carry[0])
    history.append(float(jnp.linalg.norm(mean - best)))  # waits: one program at a time on CPU
  return jnp.array(history), mean


# %% [markdown]
# ## Drift has a closed form
#
# With `M_i = I - (I - rate A_i)^period`, local gradient descent settles at
# `(mean M_i)^-1 mean M_i b_i`. With one step a round that is the minimum; with more it is not.


# %%
def settles_at(period):
  M = jnp.eye(d) - jax.vmap(lambda A: jnp.linalg.matrix_power(jnp.eye(d) - rate * A, period))(A)
  return jnp.linalg.solve(M.mean(0), jnp.einsum('wij,wj->i', M, b) / W)


for period in (1, 4, 16):
  tx = dsgd.algorithms.local_sgd(rate, period, axis_name=axis_name)
  _, x = rounds(tx, period, 1600 // period)
  expected = settles_at(period)
  print(
    f'period {period:2}: {jnp.linalg.norm(x - best):.4f} from the minimum, '
    f'{jnp.linalg.norm(expected - best):.4f} by the formula'
  )

# %% [markdown]
# ## What helps against it, and what does not
#
# SlowMo gives the means a momentum: faster, to the *same* wrong point. SCAFFOLD sends the model
# twice a round, and corrects each step by how a worker's gradient differs from the mean.

# %%
period = 16
methods = {
  'local SGD': dsgd.algorithms.local_sgd(rate, period, axis_name=axis_name),
  'SlowMo': dsgd.algorithms.slow_mo(rate, period, axis_name=axis_name, slow_momentum=0.5),
  'SCAFFOLD': dsgd.algorithms.scaffold(rate, period, axis_name=axis_name),
}
runs = {name: rounds(tx, period, 150) for name, tx in methods.items()}

figure, axis = plt.subplots(figsize=(6, 3.6), layout='constrained')
for (name, (distance, _)), style in zip(runs.items(), ('-', '--', '-.'), strict=True):
  axis.semilogy(distance, linestyle=style, label=name)
axis.axhline(
  jnp.linalg.norm(settles_at(period) - best), color='grey', linewidth=0.8, label='closed form'
)
axis.set(xlabel='round of 16 steps', ylabel='distance from the minimum')
axis.legend()
axis.grid(alpha=0.3)
plt.show()

apart = jnp.linalg.norm(runs['SlowMo'][1] - runs['local SGD'][1])
print(f'SlowMo ends {apart:.1e} from where local SGD does')
print(f'SCAFFOLD ends {runs["SCAFFOLD"][0][-1]:.1e} from the minimum')

# %% [markdown]
# ## Many workers, few devices
#
# `simulate(..., mesh=...)` spreads the rows of simulated workers over all devices of a mesh, and
# XLA makes each mean an all-reduce. The numbers stay the same.

# %%
if len(devices) in (1, 2, 4, 8):
  mesh = dsgd.runtime.make_mesh(devices=len(devices))
  spread = dsgd.runtime.simulate(W, mesh=mesh)
  _, x = rounds(methods['SCAFFOLD'], period, 20, workers=spread)
  _, same = rounds(methods['SCAFFOLD'], period, 20)
  print(f'spread over {len(devices)} devices: {jnp.max(jnp.abs(x - same)):.1e} apart')

# %% [markdown]
# ## DiLoCo against synchronous training, at equal bytes
#
# A small network learns a teacher's answers; each worker sees inputs around a place of its own. All
# send 60 models. Synchronous Adam takes 60 steps, each on the examples of a whole round; DiLoCo
# takes 60 rounds of 20 steps of AdamW, and puts Nesterov momentum on the means.

# %%
width, local, batch, count = 32, 20, 16, 60
centers = jax.random.normal(keys[2], (W, 8))
sizes = ((8, width), (width, width), (width, 1))
network = [
  jax.random.normal(key, size) * (2 / size[0]) ** 0.5
  for key, size in zip(jax.random.split(jax.random.key(1), 3), sizes, strict=True)
]
teacher = [
  2 * jax.random.normal(key, size) / size[0] ** 0.5
  for key, size in zip(jax.random.split(jax.random.key(2), 3), sizes, strict=True)
]


def answer(params, x):
  for kernel in params[:-1]:
    x = jnp.tanh(x @ kernel)
  return x @ params[-1]


def loss(params, x):
  return jnp.mean((answer(params, x) - answer(teacher, x)) ** 2)


def examples(key, steps, size):
  noise = jax.random.normal(key, (W, steps, size, 8))
  return centers[:, None, None] + noise


test = examples(jax.random.key(3), 1, 500).reshape(-1, 8)


def train(tx, steps, size):
  """Test loss and bytes after each of `count` means, each of `steps` steps of `size` examples."""

  def step(carry, x):
    params, state = carry
    updates, state = tx.update(jax.grad(loss)(params, x), state, params)
    return (optax.apply_updates(params, updates), state), None

  run = workers.scan(step)
  params = workers.replicate(network)
  carry = params, workers.spmd(tx.init)(params)
  history = []
  for i in range(count):
    carry, _ = run(carry, examples(jax.random.key(100 + i), steps, size))
    params, state = carry
    history.append((
      loss(dsgd.runtime.average(params), test), dsgd.ledger.bytes_sent(state)[0]
    ))  # fmt: skip
  return jnp.array(history).T


mean = dsgd.transforms.mean_over(axis_name)
contest = {
  'synchronous Adam': (optax.chain(mean, optax.adam(0.01)), 1, local * batch),
  'local AdamW': (
    dsgd.transforms.local_steps(optax.adamw(0.01), optax.chain(mean, optax.sgd(1.0)), local),
    local,
    batch,
  ),
  'DiLoCo': (dsgd.algorithms.diloco(optax.adamw(0.01), local, axis_name=axis_name), local, batch),
}

figure, axis = plt.subplots(figsize=(6, 3.6), layout='constrained')
for (name, (tx, steps, size)), style in zip(contest.items(), ('-', '--', '-.'), strict=True):
  losses, sent = train(tx, steps, size)
  axis.semilogy(sent / 1e3, losses, linestyle=style, label=name)
  print(f'{name:17} test loss {losses[-1]:.4f} after {sent[-1] / 1e3:.0f} kB')
axis.set(xlabel='kB sent by a worker', ylabel='test loss of the averaged model')
axis.legend()
axis.grid(alpha=0.3)
plt.show()
