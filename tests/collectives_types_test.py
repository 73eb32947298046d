"""Results fit beside per-worker state by type, and trees cross in one collective a dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from jax_dsgd import collectives, ledger, topologies

ROWS = PartitionSpec('w')


def devices_mesh(count):
  return Mesh(np.array(jax.devices()[:count]), ('w',), axis_types=(AxisType.Auto,))


def by_vmap(function, count):
  return jax.jit(jax.vmap(function, axis_name='w', axis_size=count))


def by_shard_map(function, count, check_vma=True):
  def one(*rows):
    return jax.tree.map(lambda x: x[None], function(*jax.tree.map(lambda x: x[0], rows)))

  mesh = devices_mesh(count)
  return jax.jit(jax.shard_map(one, mesh=mesh, in_specs=ROWS, out_specs=ROWS, check_vma=check_vma))


def by_shard_map_unchecked(function, count):
  return by_shard_map(function, count, check_vma=False)


def by_pmap(function, count):
  return jax.pmap(function, axis_name='w', devices=jax.devices()[:count])


both = pytest.mark.parametrize('run', [by_vmap, by_shard_map])
every_runtime = pytest.mark.parametrize(
  'run', [by_vmap, by_shard_map, by_shard_map_unchecked, by_pmap]
)


REDUCED = {
  'sum': lambda x: collectives.sum(x, 'w'),
  'mean': lambda x: collectives.mean(x, 'w'),
  'weighted mean': lambda x: collectives.mean(x, 'w', 1.0),
  'mean of a constant': lambda x: collectives.mean(jnp.ones(()), 'w'),
  'gather': lambda x: collectives.gather(x, 'w').sum(),
  'permute': lambda x: collectives.permute(x, [1, 0], 'w'),
  'mix': lambda x: collectives.mix(
    x, x, lambda p: p, topologies.complete(2), time=0, axis_name='w'
  ),
  'vary': lambda x: collectives.vary(jnp.ones(()), 'w'),
}


@both
@pytest.mark.parametrize('name', REDUCED)
def test_results_fit_carries_and_branches_beside_per_worker_state(run, name):
  function = REDUCED[name]

  def carry(x):
    scanned = jax.lax.scan(lambda c, _: (function(c), None), x, length=2)[0]
    chosen = jax.lax.cond(True, lambda: function(x), lambda: x)
    return scanned, chosen

  scanned, chosen = run(carry, 2)(jnp.array([1.0, 3.0]))
  direct = run(function, 2)
  np.testing.assert_allclose(chosen, direct(jnp.array([1.0, 3.0])))
  np.testing.assert_allclose(scanned, direct(direct(jnp.array([1.0, 3.0]))))


def test_a_constant_carry_needs_vary():
  """Without it shard_map refuses the carry: what `vary` is for."""

  def total(start):
    return lambda x: jax.lax.scan(lambda c, _: (c + x, None), start(), length=3)[0]

  x = jnp.array([1.0, 2.0])
  with pytest.raises(TypeError, match='varying'):
    by_shard_map(total(lambda: jnp.zeros(())), 2)(x)
  for run in (by_vmap, by_shard_map, by_shard_map_unchecked, by_pmap):
    varied = run(total(lambda: collectives.vary(jnp.zeros(()), 'w')), 2)
    assert varied(x).tolist() == [3.0, 6.0]


@both
def test_vary_like_matches_branches_leaf_by_leaf(run):
  def choose(flag, x):
    keep = lambda: {'varying': x, 'constant': jnp.zeros(())}  # noqa: E731
    reset = lambda: {'varying': jnp.zeros(()), 'constant': jnp.ones(())}  # noqa: E731
    chosen = jax.lax.cond(flag, keep, lambda: collectives.vary_like(reset(), keep()))
    return collectives.vary(chosen, 'w')

  chosen = run(choose, 2)(jnp.array([True, False]), jnp.array([5.0, 6.0]))
  assert jax.tree.map(lambda x: x.tolist(), chosen) == {
    'varying': [5.0, 0.0],
    'constant': [0.0, 1.0],
  }


def replicated_gradient(x, check_vma):
  """The mean over workers of the gradient of 0.5 (p x)^2 at a replicated p = 1."""

  def one(params, x):
    gradient = jax.grad(lambda p: 0.5 * jnp.sum(p['dense']['kernel'] * x[0]) ** 2)(params)
    collectives.require_varying(gradient, 'w')
    return collectives.mean(gradient, 'w')['dense']['kernel'][None]

  params = {'dense': {'kernel': jnp.ones(())}}
  specs = (PartitionSpec(), ROWS)
  mesh = devices_mesh(2)
  return jax.jit(
    jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=ROWS, check_vma=check_vma)
  )(params, x)


def test_gradients_that_are_summed_already_are_refused_by_name():
  x = jnp.array([1.0, 3.0])
  with pytest.raises(ValueError, match=r"leaf 'dense/kernel' do not vary over axis 'w'") as error:
    replicated_gradient(x, check_vma=True)
  assert '\n' not in str(error.value)
  # Where JAX does not sum them, the mean of 1 and 9 is right.
  assert replicated_gradient(x, check_vma=False).tolist() == [5.0, 5.0]


@every_runtime
def test_gradients_of_rows_are_accepted(run):
  def one(p, x):
    gradient = jax.grad(lambda p: 0.5 * (p * x) ** 2)(p)
    collectives.require_varying({'a': gradient}, 'w')
    return collectives.mean(gradient, 'w')

  assert run(one, 2)(jnp.ones(2), jnp.array([1.0, 3.0])).tolist() == [5.0, 5.0]


# How many


def fifty_leaves(*dtypes):
  return {f'{i}': jnp.ones((4, i % 5 + 1), dtypes[i % len(dtypes)]) for i in range(50)}


CROSSINGS = {
  'sum': (lambda t: collectives.sum(t, 'w'), 'all-reduce'),
  'mean': (lambda t: collectives.mean(t, 'w'), 'all-reduce'),
  'gather': (lambda t: collectives.gather(t, 'w'), 'all-gather'),
  'permute': (lambda t: collectives.permute(t, [1, 2, 3, 0], 'w'), 'collective-permute'),
}


@pytest.mark.parametrize('name', CROSSINGS)
def test_fifty_leaves_cross_in_one_collective_a_dtype(name):
  function, kind = CROSSINGS[name]
  floats = name in ('sum', 'mean')
  # No bfloat16 here: XLA on CPU moves it as float32.
  tree = fifty_leaves(*(['float32', 'float16'] if floats else ['float32', 'uint8', 'uint16']))
  hlo = by_shard_map(function, 4).lower(tree).compile().as_text()
  found = ledger.collectives(hlo)
  assert [x.kind for x in found] == [kind] * (2 if floats else 3)
  # 50 leaves, each of 1 to 5 entries a worker, ten of each size.
  entries = sorted(
    sum(leaf[0].size for leaf in tree.values() if leaf.dtype == d) * d.itemsize
    for d in {leaf.dtype for leaf in tree.values()}
  )
  assert sorted(x.nbytes for x in found) == entries


def test_a_mix_is_one_permute_a_permutation_and_dtype():
  tree = fifty_leaves('float32', 'uint8')
  decode = lambda t: jax.tree.map(lambda x: x.astype(jnp.float32), t)  # noqa: E731

  def mix(tree):
    return collectives.mix(decode(tree), tree, decode, topologies.ring(4), time=0, axis_name='w')

  found = ledger.collectives(by_shard_map(mix, 4).lower(tree).compile().as_text())
  assert [x.kind for x in found] == ['collective-permute'] * 4
