"""Workers that walk: a transform called step after step on given updates."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_dsgd import runtime


@pytest.fixture(scope='session')
def walk():
  """Runs a transform from rows [W, ...] on updates [steps, W, ...], zeros if None.

  `control` is a tree of rows [steps, W]. Returns parameters after each step, [steps, W, ...], and
  the last state.
  """

  def walk(tx, rows, steps, *, updates=None, control=None, state=None):
    tx = optax.with_extra_args_support(tx)
    rows = jax.tree.map(jnp.asarray, rows)
    workers = runtime.simulate(jax.tree.leaves(rows)[0].shape[0])
    if updates is None:
      updates = jax.tree.map(lambda x: jnp.zeros((steps, *x.shape), x.dtype), rows)
    first = lambda tree: jax.tree.map(lambda x: jnp.moveaxis(jnp.asarray(x), 0, 1), tree)  # noqa: E731

    def worker(params, state, updates, control):
      def step(carry, given):
        params, state = carry
        update, row = given
        extra = {} if row is None else {'control': row}
        update, state = tx.update(update, state, params, **extra)
        params = optax.apply_updates(params, update)
        return (params, state), params

      (_, state), history = jax.lax.scan(step, (params, state), (updates, control), length=steps)
      return history, state

    if state is None:
      state = workers.spmd(tx.init)(rows)
    run = jax.jit(workers.spmd(worker))
    history, state = run(rows, state, first(updates), first(control))
    return jax.tree.map(lambda x: np.moveaxis(np.asarray(x), 1, 0), history), state

  return walk
