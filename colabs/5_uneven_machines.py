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
# # 5. Uneven machines
#
# One of eight machines is four times slower. Who waits for whom, what does it cost, and how old do
# gradients become? A cluster and a policy give a trace, a trace is replayed exactly, and loss is
# drawn against seconds. All seconds here are simulated. Four figures, in less than a minute.

# %%
try:
  import jax_dsgd as dsgd
except ImportError as missing:
  raise ImportError('install the library first: %pip install -q PATH_OF_THE_CHECKOUT') from missing

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

W = 8
algorithms, clusters, simulation = dsgd.algorithms, dsgd.clusters, dsgd.simulation
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
# ## Who waits for whom
#
# A step takes a second, give or take a fifth, and four seconds on the last machine. BSP, PSP and
# ASP are barriers at a parameter server: everybody waits for all, for one other drawn at random,
# for nobody. Partial all-reduce has no server: machines meet in groups of three that are made on
# demand, and those that fall behind are left out of groups that others make.
#
# A bar is a step, a gap is waiting; a dot is a push, and a line joins those who average.

# %%
cluster = clusters.with_stragglers(W, fraction=1 / W, factor=4.0, law=clusters.log_normal(1.0, 0.2))
seconds, names = 60.0, ('BSP', 'PSP', 'ASP', 'partial all-reduce')
barriers = (simulation.bsp(), simulation.psp(1), simulation.asp())
traces = [simulation.simulate_events(cluster, policy, until=seconds) for policy in barriers]
groups = simulation.group_generator(3, threshold=2)
traces.append(simulation.simulate_rounds(cluster, groups, until=seconds))
traces = dict(zip(names, traces, strict=True))


def gantt(axis, trace):
  if isinstance(trace, simulation.EventTrace):
    pushes, worker = trace.pushes, trace.worker[trace.pushes]
    start, end = trace.started[pushes], trace.seconds[pushes]
    axis.plot(end, worker, 'o', color='#D55E00', markersize=3)
  else:
    worker = np.nonzero(trace.active)[1]
    start, end = trace.started[trace.active], trace.finished[trace.active]
    for active, finished in zip(trace.active, trace.finished, strict=True):
      members = np.flatnonzero(active)
      axis.plot(
        np.full(members.size, finished[members].max()), members, '.-', color='#D55E00', linewidth=1
      )
  axis.barh(worker, end - start, left=start, height=0.7, color='#9ecae1', edgecolor='white')


figure, axes = plt.subplots(4, 1, figsize=(9.5, 8.5), sharex=True, layout='constrained')
for axis, (name, trace) in zip(axes, traces.items(), strict=True):
  gantt(axis, trace)
  done = (trace.pushes if isinstance(trace, simulation.EventTrace) else trace.active).sum()
  axis.set(xlim=(0, 16), ylim=(W - 0.4, -0.6), ylabel='machine', yticks=range(0, W, 7))
  axis.set_title(f'{name}: {done} gradients in {seconds:.0f} s', loc='left')
  axis.grid(axis='y', visible=False)
axes[-1].set_xlabel('simulated seconds')
plt.show()

# %% [markdown]
# ## What it is worth
#
# Linear regression, each machine with its own examples and batches of eight. A push moves the
# server's model by an eighth of a step, so that a gradient moves every method equally far. Replay
# computes every gradient at the very parameters that its machine had pulled. Steps here are small
# against the threshold of the last section, so that old gradients cost little: who waits least is
# ahead, ASP before PSP. Models that meet in groups differ, and the line is their mean loss.

# %%
dimension, rate = 20, 0.05
rng = np.random.default_rng(0)
inputs = rng.normal(size=(W, 256, dimension)) * np.geomspace(0.3, 1.5, dimension)
targets = inputs @ rng.normal(size=dimension) + 0.5 * rng.normal(size=(W, 256))
rows, wanted = inputs.reshape(-1, dimension), targets.ravel()
best = np.linalg.lstsq(rows, wanted)[0]
hessian = jnp.float32(rows.T @ rows / len(rows))
inputs, targets, best = jnp.float32(inputs), jnp.float32(targets), jnp.float32(best)


def gradient(x, work):
  key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), work.shard), work.count)
  chosen = jax.random.randint(key, (8,), 0, 256)
  a, b = inputs[work.shard][chosen], targets[work.shard][chosen]
  return a.T @ (a @ x - b) / 8


def excess(x):
  return (x - best) @ hessian @ (x - best) / 2


def loss_of(trace):
  start = jnp.zeros(dimension)
  if isinstance(trace, simulation.EventTrace):
    method = algorithms.async_sgd(rate / W)
    return simulation.replay_events(trace, method, gradient, start, record=excess).history
  method = algorithms.prague_sgd(rate, axis_name='workers')
  workers = dsgd.runtime.simulate(W)
  return simulation.replay_rounds(trace, method, gradient, start, workers, record=excess)[2].mean(0)


figure, axis = plt.subplots(figsize=(8, 4), layout='constrained')
for name, trace in traces.items():
  axis.semilogy(trace.seconds, loss_of(trace), label=name, linewidth=1.6)
axis.set(xlabel='simulated seconds', ylabel='loss above the least', xlim=(0, seconds))
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# ## How old gradients are
#
# The age of a gradient is the number of updates between its pull and its push. Under BSP it is the
# place of the push in its round, and never more than seven. Without waiting most ages are near
# seven too, and those of the slow machine four times as large. PSP cuts some of both.

# %%
figure, axes = plt.subplots(1, 3, figsize=(9.5, 2.8), sharey=True, layout='constrained')
for axis, name in zip(axes, names, strict=False):
  trace = traces[name]
  slow = trace.worker[trace.pushes] == W - 1
  ages = trace.staleness[trace.pushes]
  axis.hist(
    [ages[~slow], ages[slow]], bins=np.arange(41) - 0.5, stacked=True, label=['others', 'slow one']
  )
  axis.set(title=f'{name}: mean {ages.mean():.1f}', xlabel='age in updates', yscale='log')
axes[0].set_ylabel('pushes')
axes[-1].legend(frameon=False)
plt.show()

# %% [markdown]
# ## Theory against replay
#
# Equal machines that never wait take turns: with four of them every gradient is three updates old.
# Then theory gives the factor by which the error shrinks in an update for every step h (the step
# size times the curvature), the best step, and the step from which nothing converges. Replay
# measures the same on x^2 / 2.

# %%
machines = 4
age = machines - 1
turns = simulation.simulate_events(clusters.uniform(machines), simulation.asp(), events=800)
print('ages seen after the start:', set(turns.staleness[turns.pushes][machines:].tolist()))
threshold, (best_h, best_rate) = simulation.stability_threshold(age), simulation.best_step(age)
steps = np.concatenate([np.linspace(0.02, 0.55, 12), [best_h]])


def measured(h):
  method = algorithms.async_sgd(float(h))
  done = simulation.replay_events(
    turns, method, lambda x, work: x, jnp.ones(()), record=lambda x: x
  )
  size = np.abs(np.asarray(done.history, np.float64))
  size = np.maximum.reduceat(size, np.arange(0, 800, 20))  # over a swing where the error swings
  use = np.flatnonzero((size > 1e-30) & (size < 1e30))[2:]
  return np.exp(np.polyfit(20 * use, np.log(size[use]), 1)[0])


grid = np.linspace(0.005, 0.56, 200)
law = np.eye(machines)[age]
figure, axis = plt.subplots(figsize=(7.5, 3.8), layout='constrained')
axis.plot(grid, [simulation.contraction(h, law) for h in grid], label='theory')
axis.plot(steps, [measured(h) for h in steps], 'o', color='#D55E00', label='replay')
axis.axhline(1, color='0.4', linewidth=1, linestyle=':')
axis.axvline(threshold, color='0.4', linewidth=1, linestyle='--')
axis.annotate(f'from h = {threshold:.3f} on\nit diverges', (threshold - 0.005, 0.8), ha='right')
axis.annotate(f'best: h = {best_h:.3f}, {best_rate:.2f}', (best_h + 0.03, best_rate + 0.005))
axis.set(xlabel='step h', ylabel='factor of the error in an update')
axis.legend(frameon=False, loc='upper center')
plt.show()

# %% [markdown]
# The slow machine is not the only question: where data differ between machines, those who push more
# often pull the model towards their own. `configs/stragglers.py` shows all six policies on digits.
