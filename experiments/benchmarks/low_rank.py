"""What PowerSGD's reduction costs beside a plain copy of the gradients, on one core.

  python -m experiments.benchmarks.low_rank

One step of `low_rank_mean` with a residual, the state donated, on the leaves of a ResNet-18 and of
a GPT with 6 layers of width 512; gradient bytes a second, as a share of what `numpy.copyto` does in
the same run. Goal: 0.08 at rank 4. Nothing crosses here: it is one worker's arithmetic.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from jax_dsgd import ledger, memories, runtime, transforms

Shapes = dict[str, tuple[int, ...]]


def resnet18() -> Shapes:
  """Convolutions [height, width, in, out], scales and biases of norms, and the classifier."""
  shapes: Shapes = {'stem': (7, 7, 3, 64)}
  width = 64
  for stage, out in enumerate((64, 128, 256, 512)):
    for block in range(2):
      name = f'stage{stage}_block{block}'
      shapes[f'{name}_conv0'] = (3, 3, width, out)
      shapes[f'{name}_conv1'] = (3, 3, out, out)
      if width != out:
        shapes[f'{name}_shortcut'] = (1, 1, width, out)
      for norm in range(2):
        shapes[f'{name}_norm{norm}_scale'] = shapes[f'{name}_norm{norm}_bias'] = (out,)
      width = out
  return shapes | {'head_kernel': (512, 1000), 'head_bias': (1000,)}


def gpt(depth: int = 6, width: int = 512, vocabulary: int = 8192) -> Shapes:
  """Embeddings, and per layer attention, a wide part of four times the width, and norms."""
  shapes: Shapes = {'embedding': (vocabulary, width)}
  for layer in range(depth):
    shapes |= {
      f'layer{layer}_qkv': (width, 3 * width),
      f'layer{layer}_out': (width, width),
      f'layer{layer}_up': (width, 4 * width),
      f'layer{layer}_down': (4 * width, width),
      f'layer{layer}_norm0': (width,),
      f'layer{layer}_norm1': (width,),
    }
  return shapes


def seconds(function: Callable[[], Any], rounds: int) -> float:
  """The best of several timings."""

  def timings() -> Iterator[float]:
    for _ in range(rounds):
      start = time.perf_counter()
      jax.block_until_ready(function())
      yield time.perf_counter() - start

  return min(timings())


def measure(shapes: Shapes, rank: int, rounds: int) -> tuple[int, float, float, int]:
  """Gradient bytes, seconds a step and of a copy, bytes that one of several workers sends."""
  rng = np.random.default_rng(0)
  host = {name: rng.normal(size=(1, *shape)).astype(np.float32) for name, shape in shapes.items()}
  worker = runtime.simulate(1)
  memory = memories.residual()
  tx = transforms.low_rank_mean(rank, axis_name=worker.axis_name, memory=memory)
  gradients = jax.tree.map(jnp.asarray, host)
  carried = {'state': worker.spmd(tx.init)(gradients)}

  def step(gradients: Any, state: Any) -> Any:
    return worker.spmd(tx.update)(gradients, state)

  compiled = jax.jit(step, donate_argnums=1)

  def once() -> Any:
    updates, carried['state'] = compiled(gradients, carried['state'])
    return updates

  jax.block_until_ready(once())
  taken = seconds(once, rounds)
  target = {name: np.empty_like(x) for name, x in host.items()}
  copy = seconds(lambda: [np.copyto(target[name], x) for name, x in host.items()], rounds)
  two = runtime.simulate(2)
  pair = {name: jax.ShapeDtypeStruct((2, *shape), jnp.float32) for name, shape in shapes.items()}
  sent = two.spmd(lambda g: tx.update(g, tx.init(g))[1])
  state = jax.jit(lambda: sent(jax.tree.map(lambda x: jnp.zeros(x.shape), pair)))()
  return ledger.payload_bytes(host), taken, copy, int(np.max(ledger.bytes_sent(state)))


def main(argv: Sequence[str]) -> None:
  """Prints one line a model."""
  if len(argv) > 1:
    raise app.UsageError(f'unexpected arguments {argv[1:]}')
  print(f'{"model":>10} {"MB":>7} {"sent, MB":>9} {"ms":>8} {"GB/s":>6} {"of a copy":>10}')
  for name, shapes in (('resnet18', resnet18()), ('gpt 6x512', gpt())):
    nbytes, taken, copy, sent = measure(shapes, flags.FLAGS.rank, flags.FLAGS.rounds)
    print(
      f'{name:>10} {nbytes / 1e6:>7.1f} {sent / 1e6:>9.3f} {1e3 * taken:>8.1f} '
      f'{nbytes / taken / 1e9:>6.2f} {copy / taken:>10.3f}',
      flush=True,
    )


if __name__ == '__main__':
  flags.DEFINE_integer('rank', 4, 'Columns of the factors.')
  flags.DEFINE_integer('rounds', 7, 'Measurements, of which the best counts.')
  os.sched_setaffinity(0, {0})  # one core, before JAX makes its threads
  app.run(main)
