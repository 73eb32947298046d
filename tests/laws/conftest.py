"""Members that several law tests share, and how the members of a family are found."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from jax_dsgd import compressors, memories, runtime

# A new member needs one line here. The first example of each stands for it where a law compiles a
# program for every pair of two families.
COMPRESSORS = {
  'identity': [compressors.identity()],
  'cast': [
    compressors.cast('bfloat16'),
    compressors.cast('float8_e4m3fn'),
    compressors.cast('float8_e5m2'),
  ],
  'top_k': [compressors.top_k(0.1), compressors.top_k(k=3)],
  'random_k': [compressors.random_k(0.1), compressors.random_k(k=3, unbiased=True)],
  'scaled_sign': [
    compressors.scaled_sign(),
    compressors.scaled_sign(magnitude=compressors.unit_magnitude),
  ],
  'qsgd': [
    compressors.qsgd(7, block=16),
    compressors.qsgd(levels=1),
    compressors.qsgd(127, block=100),
  ],
  'block_top_k': [compressors.block_top_k(0.2, block=16), compressors.block_top_k(0.01)],
  'sampled_top_k': [compressors.sampled_top_k(0.1), compressors.sampled_top_k(0.2, sample=20)],
  'threshold': [compressors.threshold(0.5, capacity=0.5)],
  'importance_sampling': [
    compressors.importance_sampling(0.1),
    compressors.importance_sampling(k=3),
  ],
  'sign_top_k': [compressors.sign_top_k(0.1)],
  'ternary': [compressors.ternary()],
  'natural': [compressors.natural()],
  'scaled_blocks': [
    compressors.scaled_blocks(8, block=16),
    compressors.scaled_blocks(4, block=16, stochastic=True),
    compressors.scaled_blocks(2),
  ],
}
MEMORIES = {
  'none': [memories.none()],
  'residual': [memories.residual()],
  'reference': [memories.reference(), memories.reference(step=0.5)],
  'momentum_residual': [memories.momentum_residual(0.5)],
  'momentum_correction': [memories.momentum_correction(0.5)],
}


def flat(table: dict[str, list[Any]]) -> list[Any]:
  return [example for examples in table.values() for example in examples]


@pytest.fixture(params=flat(COMPRESSORS), ids=repr)
def compressor(request):
  """Every example of every compressor."""
  return request.param


@pytest.fixture(params=[examples[0] for examples in COMPRESSORS.values()], ids=repr)
def family(request):
  """One example of every compressor."""
  return request.param


@pytest.fixture(params=flat(MEMORIES), ids=repr)
def memory(request):
  """Every example of every memory."""
  return request.param


@pytest.fixture(scope='session')
def compressor_examples():
  return COMPRESSORS


@pytest.fixture(scope='session')
def memory_examples():
  return MEMORIES


@pytest.fixture(scope='session')
def require_examples() -> Callable[[Any, type, dict[str, Any]], None]:
  """Fails where a public function of a namespace that returns a `kind` has no row in the table."""

  def gives(function: Any, kind: type) -> bool:
    returned = typing.get_type_hints(function).get('return')
    return inspect.isclass(returned) and issubclass(returned, kind)

  def require(namespace: Any, kind: type, table: dict[str, Any]) -> None:
    public = {
      name
      for name, function in vars(namespace).items()
      if inspect.isfunction(function) and not name.startswith('_') and gives(function, kind)
    }
    missing = sorted(public - table.keys())
    assert not missing, f'{namespace.__name__}: add an example of {missing} to this table of laws'
    gone = sorted(table.keys() - public)
    assert not gone, f'{namespace.__name__} has no public {gone}; typed -> {kind.__name__}?'

  return require


@pytest.fixture(scope='session')
def eight():
  """Eight workers on a mesh of eight virtual devices."""
  return runtime.on_mesh(runtime.make_mesh(workers=8), 'workers')


@pytest.fixture(scope='session')
def run():
  """Runs a transform for every row of gradients, in a scan inside of the workers' SPMD region."""

  def run(tx: Any, workers: Any, params: Any, gradients: Any) -> Any:
    """Gives the final params and state, and all updates [T, W, ...], from gradients [T, W, ...]."""

    def all_steps(params: Any, state: Any, gradients: Any) -> Any:
      def step(carry: Any, gradient: Any) -> Any:
        params, state = carry
        updates, state = tx.update(gradient, state, params)
        moved = jax.tree.map(lambda x, u: (x + u).astype(x.dtype), params, updates)
        return (moved, state), updates

      (params, state), updates = jax.lax.scan(step, (params, state), gradients)
      return params, state, updates

    @jax.jit
    def whole(params: Any, gradients: Any) -> Any:
      return workers.spmd(all_steps)(params, workers.spmd(tx.init)(params), gradients)

    first = jax.tree.map(lambda x: np.moveaxis(np.asarray(x), 0, 1), gradients)
    params, state, updates = whole(params, first)
    return params, state, jax.tree.map(lambda x: np.moveaxis(np.asarray(x), 1, 0), updates)

  return run
