"""What local steps cost, and what a round of many clients takes.

  python -m experiments.benchmarks.local

First, a step of `local_sgd` that does not meet beside the same step of plain optax: one worker on a
mesh, so that the condition is a real one, donated. For a small transformer on 16 lines of text, and
for 4 and 400 leaves whose gradient is one pass over the parameters: there every pass more is seen.
The two take turns, so that both see the same machine; the figure is the median of the ratios of
neighbouring measurements. Goal: at most 1.05.

Then, in a process each, a round of FedAvg for 250, 500 and 1,000 clients drawn by `control`, each
with a small convolutional network, simulated on one device: seconds a round, and the most memory
that the process ever had. Goals: 4 GiB, and seconds that grow as the clients do.
"""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

from experiments import models
from experiments.benchmarks import overhead
from experiments.data import datasets
from experiments.models import losses
from jax_dsgd import algorithms, runtime, transforms

_NEVER = 2**30  # steps a round: no step that is measured meets
_BATCH = 8


def text() -> tuple[Any, Callable[..., Any], Any]:
  """A transformer: its parameters, the gradient of its loss, and a batch."""
  dataset = datasets.shakespeare(roles=1)
  model = models.transformer(dataset)
  batch = jnp.asarray(dataset.inputs[:16]), jnp.asarray(dataset.targets[:16])
  gradient = jax.grad(lambda params, batch: losses.loss(model, params, *batch))
  return model.init(jax.random.key(0)), gradient, batch


def one_pass(leaves: int, entries: int) -> tuple[Any, Callable[..., Any], Any]:
  """Leaves whose gradient costs one pass over them, as in `overhead`."""
  model = {f'leaf_{i:03d}': jnp.ones(entries // leaves) for i in range(leaves)}
  return model, overhead.gradient, jnp.zeros(())


def ratio(
  params: Any, gradient: Callable[..., Any], batch: Any, *, rounds: int
) -> tuple[float, float, float]:
  """Median seconds of a plain step, of a local step, and the median ratio."""
  workers = runtime.on_mesh(runtime.make_mesh(workers=1), 'workers')
  plain = optax.sgd(0.1, momentum=0.9)
  local = algorithms.local_sgd(0.1, _NEVER, axis_name='workers', momentum=0.9)
  batch = workers.replicate(batch)

  def step_of(tx: optax.GradientTransformation) -> overhead.Step:
    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any]:
      updates, state = tx.update(gradient(params, batch), state, params)
      return optax.apply_updates(params, updates), state

    return jax.jit(workers.spmd(step), donate_argnums=(0, 1))

  steps = [step_of(tx) for tx in (plain, local)]
  trained = [workers.replicate(params) for _ in steps]
  states = [workers.spmd(tx.init)(trained[0]) for tx in (plain, local)]
  taken = np.zeros((rounds + 2, 2))
  for row in taken:
    for i, step in enumerate(steps):
      row[i], trained[i], states[i] = overhead.seconds(step, trained[i], states[i], batch)
  difference = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), *trained)
  if max(jax.tree.leaves(difference)) > 1e-5:
    raise AssertionError('the two steps do not compute the same parameters')
  by_optax, by_library = taken[2:].T
  return (
    float(np.median(by_optax)),
    float(np.median(by_library)),
    float(np.median(by_library / by_optax)),
  )


def federated_round(clients: int, steps: int, rounds: int) -> dict[str, float]:
  """Seconds of the fastest round of FedAvg, and the most GiB that this process had."""
  dataset = datasets.digits()
  model = models.cnn(dataset, channels=(8, 16), hidden=64)
  places = runtime.simulate(clients)
  tx = algorithms.fed_avg(0.1, steps, axis_name='workers')
  inputs, targets = jnp.asarray(dataset.inputs), jnp.asarray(dataset.targets)

  def step(carry: Any, x: Any) -> tuple[Any, jax.Array]:
    params, state = carry
    indices, weight, own_steps = x
    batch = inputs[indices], targets[indices]
    loss, gradient = jax.value_and_grad(lambda p: losses.loss(model, p, *batch))(params)
    control = transforms.Control(weight=weight, steps=own_steps)
    updates, state = tx.update(gradient, state, params, control=control)
    return (optax.apply_updates(params, updates), state), loss

  params = places.replicate(model.init(jax.random.key(0)))
  carry = params, places.spmd(tx.init)(params)
  whole_round = jax.jit(places.scan(step), donate_argnums=0)
  rng = np.random.default_rng(0)
  taken = []
  for _ in range(rounds + 1):
    drawn = (
      rng.integers(len(inputs), size=(clients, steps, _BATCH)),
      np.repeat(rng.uniform(1, 9, (clients, 1)).astype(np.float32), steps, axis=1),
      np.repeat(rng.integers(1, steps, (clients, 1), endpoint=True), steps, axis=1),
    )
    start = time.perf_counter()
    carry, _ = jax.block_until_ready(whole_round(carry, drawn))
    taken.append(time.perf_counter() - start)
  # Not getrusage, whose maximum begins with that of the process that started this one.
  (kib,) = re.findall(r'VmHWM:\s+(\d+) kB', pathlib.Path('/proc/self/status').read_text())
  return {'seconds': float(np.min(taken[1:])), 'gib': int(kib) / 2**20}


def main(argv: Sequence[str]) -> None:
  """Prints one line a model, then one line a number of clients."""
  if len(argv) > 1:
    raise app.UsageError(f'unexpected arguments {argv[1:]}')
  if flags.FLAGS.clients:
    print(json.dumps(federated_round(flags.FLAGS.clients, flags.FLAGS.steps, flags.FLAGS.rounds)))
    return
  problems = {'transformer': text()}
  problems |= {f'{n} leaves': one_pass(n, flags.FLAGS.entries) for n in (4, 400)}
  print(f'{"model":>12} {"optax, ms":>10} {"local step, ms":>15} {"ratio":>6}')
  for name, problem in problems.items():
    plain, local, share = ratio(*problem, rounds=flags.FLAGS.measurements)
    print(f'{name:>12} {1e3 * plain:>10.2f} {1e3 * local:>15.2f} {share:>6.3f}', flush=True)
  print(f'\n{"clients":>8} {"s a round":>10} {"ms a client":>12} {"peak, GiB":>10}')
  for clients in (250, 500, 1000):
    command = [sys.executable, '-m', 'experiments.benchmarks.local', f'--clients={clients}']
    command += [f'--steps={flags.FLAGS.steps}', f'--rounds={flags.FLAGS.rounds}']
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    each = 1e3 * found['seconds'] / clients
    print(f'{clients:>8} {found["seconds"]:>10.2f} {each:>12.2f} {found["gib"]:>10.2f}', flush=True)


if __name__ == '__main__':
  flags.DEFINE_integer('entries', 4_000_000, 'Entries of the model.')
  flags.DEFINE_integer('measurements', 40, 'Of each step.')
  flags.DEFINE_integer('clients', 0, 'Measure a round of so many clients in this process, alone.')
  flags.DEFINE_integer('steps', 5, 'Local steps a round.')
  flags.DEFINE_integer('rounds', 3, 'Rounds that are timed.')
  app.run(main)
