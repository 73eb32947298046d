"""Laws that every compressor obeys, over every example of `conftest.COMPRESSORS`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dsgd import compressors, ledger
from jax_dsgd.compressors import _bits, _places

SHAPES = [(), (1,), (7,), (13,), (3, 5, 7), (1025,)]
KEYS = 2000
# By n, the bytes that docstrings promise, counted by hand for float32.
BYTES = {
  'identity()': {1: 4, 13: 52, 1025: 4100},
  "cast('bfloat16')": {1: 2, 13: 26, 1025: 2050},
  "cast('float8_e4m3fn')": {1: 1, 13: 13, 1025: 1025},
  "cast('float8_e5m2')": {1: 1, 13: 13, 1025: 1025},
  # 13 x 0.1 is one entry, 1025 x 0.1 are 102; beyond 65,536 entries a place takes 4 bytes.
  'top_k(fraction=0.1)': {1: 4, 13: 6, 1025: 612, 65536: 6554 * 6, 65540: 6554 * 8},
  'top_k(k=3)': {1: 4, 3: 12, 13: 18, 1025: 18, 65540: 24},
  'random_k(fraction=0.1)': {1: 4, 13: 4, 1025: 408, 65540: 6554 * 4},
  'random_k(k=3, unbiased=True)': {1: 4, 3: 12, 13: 12, 1025: 12},
  'scaled_sign()': {1: 5, 8: 5, 9: 6, 13: 6, 1025: 129 + 4},
  'scaled_sign(magnitude=unit_magnitude)': {1: 5, 13: 6, 1025: 133},
  # A norm for each block of 16, and two entries a byte.
  'qsgd(levels=7, block=16)': {1: 5, 13: 7 + 4, 17: 9 + 8, 1025: 513 + 65 * 4},
  'qsgd(levels=1, block=512)': {1: 5, 13: 4 + 4, 1025: 257 + 3 * 4},
  'qsgd(levels=127, block=100)': {1: 5, 13: 17, 1025: 1025 + 11 * 4},
  # 3 of each 16 at 6 bytes; the last block of 17 has one entry and the room of the others.
  'block_top_k(fraction=0.2, block=16)': {1: 4, 13: 3 * 6, 17: 6 * 6, 1025: 65 * 18},
  'block_top_k(fraction=0.01, block=1024)': {1: 4, 1025: 2 * 60, 65540: 65 * 60},
  'sampled_top_k(fraction=0.1)': {1: 4, 13: 6, 1025: 612, 65540: 6554 * 8},
  'sampled_top_k(fraction=0.2, sample=20)': {1: 4, 13: 18, 1025: 205 * 6},
  'threshold(value=0.5, capacity=0.5)': {1: 4, 13: 6 * 6, 1025: 512 * 6, 65540: 32770 * 8},
  'importance_sampling(fraction=0.1)': {1: 4, 13: 6, 1025: 612, 65540: 6554 * 8},
  'importance_sampling(k=3)': {1: 4, 3: 12, 13: 18, 65540: 24},
  'sign_top_k(fraction=0.1)': {1: 5, 13: 2 + 1 + 4, 1025: 204 + 13 + 4, 65540: 26216 + 820 + 4},
  'ternary()': {1: 5, 4: 5, 5: 6, 1025: 257 + 4},
  'natural()': {1: 2, 8: 9, 9: 11, 1025: 1025 + 129},
  'scaled_blocks(bits=8, block=16)': {1: 5, 13: 17, 17: 25, 1025: 1025 + 65 * 4},
  'scaled_blocks(bits=4, block=16, stochastic=True)': {1: 5, 13: 7 + 4, 17: 9 + 8},
  'scaled_blocks(bits=2, block=256)': {1: 5, 13: 4 + 4, 1025: 257 + 5 * 4},
}
ABSOLUTE = 'threshold(value=0.5, capacity=0.5)'  # its value is in the units of x by design
NARROW_RANGE = ("cast('float8_e4m3fn')", "cast('float8_e5m2')")  # they say so
VOTE = 'scaled_sign(magnitude=unit_magnitude)'  # one of -1, 0 and 1 by design, whatever the scale


def through(compressor, key, x):
  like = jax.ShapeDtypeStruct(x.shape, x.dtype)
  return compressor.decode(compressor.encode(key, x), like, key)


@functools.cache
def _program(compressor):
  return jax.jit(jax.vmap(lambda key, x: through(compressor, key, x)))


def of_rows(compressor, rows, keys=None):
  """C of each row of 40 entries, by the one program that is compiled for it; float32 as it came."""
  rows = np.asarray(rows, np.float32)
  keys = jnp.stack([jax.random.key(0)] * len(rows)) if keys is None else keys
  repeats = -(-3 * KEYS // len(rows))
  all_keys, all_rows = jnp.tile(keys, repeats)[: 3 * KEYS], np.tile(rows, (repeats, 1))[: 3 * KEYS]
  return np.asarray(_program(compressor)(all_keys, all_rows))[: len(rows)]


def leaves(seed=0):
  rng = np.random.default_rng(seed)
  return [rng.normal(size=shape).astype(np.float32) for shape in SHAPES]


def vectors():
  """A random, a spiky and a flat one, [3, 40]."""
  rng = np.random.default_rng(1)
  spiky = 1e-3 * rng.normal(size=40)
  spiky[11] = -5.0
  return np.stack([rng.normal(size=40), spiky, np.full(40, 0.7)]).astype(np.float32)


def test_every_compressor_has_an_example(require_examples, compressor_examples):
  require_examples(compressors, compressors.Compressor, compressor_examples)


def test_round_trip_on_awkward_leaves(compressor):
  inputs = [*leaves(), leaves()[3].astype(jnp.bfloat16)]
  inputs[4].reshape(-1)[16:32] = 0  # a block of zeros in a leaf that is not zero
  rows = [np.stack([x, np.zeros_like(x)]) for x in inputs]
  round_trip = lambda xs: [through(compressor, jax.random.key(0), x) for x in xs]  # noqa: E731
  for x, (y, zeros) in zip(inputs, jax.jit(jax.vmap(round_trip))(rows), strict=True):
    assert y.shape == x.shape
    assert y.dtype in (jnp.float32, x.dtype)
    assert np.isfinite(np.asarray(y, np.float32)).all()
    assert not np.asarray(zeros, np.float32).any(), f'zeros of shape {x.shape} came back as {zeros}'
    if x.shape == SHAPES[4] and 'sign' not in compressor.name:  # one bit has no zero
      assert not np.asarray(y).reshape(-1)[16:32].any()


def test_tiny_and_huge_leaves_stay_finite(compressor):
  tiny, huge = of_rows(compressor, np.float32([1e-30, 1e30])[:, None] * vectors()[0])
  assert np.isfinite(tiny).all()
  if compressor.name not in NARROW_RANGE:
    assert np.isfinite(huge).all()
    assert np.abs(huge).max() > 0
    assert (np.abs(tiny).max() > 0) == (compressor.name != ABSOLUTE)


def test_padding_enters_neither_scale_nor_bytes():
  sign = compressors.scaled_sign()
  x = jnp.full((13,), 2.0)
  assert np.asarray(through(sign, jax.random.key(0), x)).tolist() == [2.0] * 13
  assert ledger.payload_bytes(sign.encode(jax.random.key(0), x)) == 6


def test_payload_bytes_are_those_of_the_docstring(compressor):
  assert compressor.name in BYTES, f'add the bytes of {compressor.name} to BYTES'
  for n, nbytes in BYTES[compressor.name].items():
    shape = jax.ShapeDtypeStruct((n,), jnp.float32)
    payload = jax.eval_shape(compressor.encode, jax.random.key(0), shape)
    assert ledger.payload_bytes(payload) == nbytes, f'n = {n}'


def test_identity_sends_a_leaf_in_its_own_dtype():
  shape = jax.ShapeDtypeStruct((13,), jnp.bfloat16)
  payload = jax.eval_shape(compressors.identity().encode, jax.random.key(0), shape)
  assert ledger.payload_bytes(payload) == 26


def errors_over_keys(compressor):
  """C(x) - x for 2000 keys and three vectors, float64 [KEYS, 3, 40]."""
  keys = jnp.repeat(jax.random.split(jax.random.key(3), KEYS), 3)
  rows = np.tile(vectors(), (KEYS, 1))
  return (of_rows(compressor, rows, keys).astype(np.float64) - rows).reshape(KEYS, 3, 40)


def test_declared_bias_and_error_are_met(compressor):
  x, errors = vectors().astype(np.float64), errors_over_keys(compressor)
  energy = (x**2).sum(-1)
  squares = (errors**2).sum(-1) / energy  # [KEYS, 3]
  mean_square, doubt = squares.mean(0), 4 * squares.std(0) / KEYS**0.5 + 1e-5
  bias = np.sqrt((errors.mean(0) ** 2).sum(-1) / energy)
  noise = np.sqrt((errors.var(0) / KEYS).sum(-1) / energy)
  if compressor.omega is not None:
    assert (mean_square <= compressor.omega(40) + doubt).all()
    assert (bias <= 4 * noise + 1e-6).all()
  elif compressor.delta is not None:
    assert (bias > 4 * noise + 1e-6).any(), 'it is unbiased and could say so'
  if compressor.delta is not None:
    assert 0 < compressor.delta(40) <= 1
    assert (mean_square <= 1 - compressor.delta(40) + doubt).all()


def test_scale_equivariance(compressor):
  if compressor.name == ABSOLUTE:
    scaled, x = compressors.threshold(1.0, capacity=0.5), vectors()
    np.testing.assert_array_equal(of_rows(scaled, 2 * x), 2 * of_rows(compressor, x))
    return
  rng = np.random.default_rng(5)
  x = (rng.uniform(0.5, 2, 40) * rng.choice([-1, 1], 40)).astype(np.float32)
  powers = (-4, 7) if compressor.name in NARROW_RANGE else (-60, -4, 7, 60)
  scales = [np.float32(2.0**power) for power in (0, *powers)]
  once, *scaled = of_rows(compressor, [s * x for s in scales])
  for s, y in zip(scales[1:], scaled, strict=True):
    expected = once if compressor.name == VOTE else np.asarray(once) * s
    np.testing.assert_array_equal(y, expected)


def test_jit_is_eager_and_vmap_is_a_loop(compressor):
  rng = np.random.default_rng(6)
  x = rng.normal(size=(3, 4, 5)).astype(np.float32)
  keys = jax.random.split(jax.random.key(1), 3)
  one = lambda key, x: through(compressor, key, x)  # noqa: E731
  eager = one(keys[0], jnp.asarray(x[0]))
  jitted = jax.jit(one)
  loop = np.stack([jitted(keys[i], x[i]) for i in range(3)])
  np.testing.assert_allclose(eager, loop[0], rtol=1e-6)
  np.testing.assert_allclose(jax.jit(jax.vmap(one))(keys, x), loop, rtol=1e-6)


def test_sums_of_payloads(compressor):
  """The sum of what workers sent, by `sum_of_decoded` and, where it is promised, on the way."""
  rng = np.random.default_rng(7)
  x = rng.normal(size=(5, 29)).astype(np.float32)
  x[:, 4] *= 50  # several workers send the same place
  like = jax.ShapeDtypeStruct((29,), jnp.float32)
  shared = jax.random.key(2)
  keys = jnp.stack([shared] * 5) if compressor.shared_key else jax.random.split(shared, 5)

  def sums(x, keys):
    payloads = jax.vmap(compressor.encode)(keys, x)
    parts = [jax.tree.map(lambda p, i=i: p[i], payloads) for i in range(5)]
    decoded = sum(compressor.decode(p, like, shared) for p in parts)
    start = jnp.full((29,), 10.0)
    total = compressors.sum_of_decoded(compressor, payloads, like, shared, start) - start
    added = jax.tree.map(lambda p: p.sum(0), payloads) if compressor.summable else None
    on_the_way = decoded if added is None else compressor.decode(added, like, shared)
    return decoded, total, on_the_way

  decoded, total, on_the_way = jax.jit(sums)(x, keys)
  np.testing.assert_allclose(total, decoded, rtol=1e-5, atol=1e-4)
  np.testing.assert_allclose(on_the_way, decoded, rtol=1e-5, atol=1e-5)


def test_keys_do_not_cross(compressor):
  """No key is in a payload; who does not declare a shared key decodes without one."""
  x = jnp.asarray(leaves()[3])
  like = jax.ShapeDtypeStruct(x.shape, x.dtype)
  payload = jax.jit(compressor.encode)(jax.random.key(0), x)
  for leaf in jax.tree.leaves(payload):
    assert jnp.issubdtype(leaf.dtype, jnp.number)
  decode = jax.jit(lambda p, k: compressor.decode(p, like, k))
  right = decode(payload, jax.random.key(0))
  if compressor.shared_key:
    others = [np.asarray(decode(payload, jax.random.key(k))) for k in range(1, 9)]
    assert any((other != right).any() for other in others)
  else:
    np.testing.assert_array_equal(
      jax.jit(lambda p: compressor.decode(p, like, None))(payload), right
    )


def test_nan_is_visible_after_decode(compressor):
  """Also in large inputs, where XLA's maximum over threads loses a NaN on CPU."""
  x = vectors()[0]
  x[9] = np.nan
  rows = np.stack([x] * 64 + [np.full(40, np.nan)])
  keys = jax.random.split(jax.random.key(0), 65)
  *one, everywhere = np.isnan(of_rows(compressor, rows, keys)).any(-1)
  # Who draws places sees an entry only when it is drawn; until then a memory keeps it.
  assert any(one) if compressor.shared_key else all(one)
  assert everywhere


def test_top_k_keeps_the_largest_and_clamps():
  x = jnp.array([1.0, -3.0, 2.0, 0.5])
  key = jax.random.key(0)
  assert through(compressors.top_k(k=2), key, x).tolist() == [0.0, -3.0, 2.0, 0.0]
  assert through(compressors.top_k(k=9), key, x).tolist() == x.tolist()
  assert through(compressors.random_k(k=9), key, x).tolist() == x.tolist()
  assert np.count_nonzero(through(compressors.top_k(0.25), key, jnp.arange(1.0, 101.0))) == 25
  assert np.count_nonzero(through(compressors.random_k(0.25), key, jnp.arange(1.0, 101.0))) == 25


def test_packed_signs_of_zero():
  x = jnp.array([0.0, -0.0, -2.0, 2.0])
  assert through(compressors.scaled_sign(), jax.random.key(0), x).tolist() == [1, 1, -1, 1]


@pytest.mark.parametrize('make', [compressors.top_k, compressors.random_k])
@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ({'fraction': 0}, 'fraction=0'),
    ({'fraction': -0.1}, 'fraction=-0.1'),
    ({'fraction': 1.5}, 'fraction=1.5.*sent/all'),
    ({'fraction': 100}, r'fraction=100.*fraction=0\.01'),
    ({'fraction': True}, 'fraction=True'),
    ({'fraction': 'a'}, "fraction='a'"),
    ({'fraction': float('nan')}, 'fraction=nan'),
    ({'fraction': float('inf')}, 'fraction=inf'),
    ({'k': 0}, 'k=0'),
    ({'k': 2.0}, r'k=2\.0'),
    ({'k': True}, 'k=True'),
    ({'k': 1, 'fraction': 0.1}, 'exactly one'),
    ({}, 'exactly one'),
  ],
  ids=str,
)
def test_refused_shares(make, arguments, message):
  with pytest.raises(ValueError, match=f'^{make.__name__}.*{message}') as error:
    make(**arguments)
  assert '\n' not in str(error.value)


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: compressors.qsgd(0), 'levels=0'),
    (lambda: compressors.qsgd(128), 'levels=128'),
    (lambda: compressors.qsgd(True), 'levels=True'),
    (lambda: compressors.qsgd(2.0), r'levels=2\.0'),
    (lambda: compressors.qsgd(7, block=0), 'block=0'),
    (lambda: compressors.block_top_k(0.1, block=0), 'block=0'),
    (lambda: compressors.block_top_k(0.1, block=65537), 'block=65537'),
    (lambda: compressors.block_top_k(2), 'fraction=2'),
    (lambda: compressors.sign_top_k(0), 'fraction=0'),
    (lambda: compressors.sampled_top_k(0.1, sample=0), 'sample=0'),
    (lambda: compressors.sampled_top_k(0), 'fraction=0'),
    (lambda: compressors.threshold(0, capacity=0.1), 'value=0'),
    (lambda: compressors.threshold(1.0, capacity=0), 'capacity=0'),
    (lambda: compressors.importance_sampling(k=0), 'k=0'),
    (lambda: compressors.scaled_blocks(3), 'bits=3'),
    (lambda: compressors.scaled_blocks(8, block=0), 'block=0'),
    (lambda: compressors.cast('float16'), "dtype='float16'.*bfloat16"),
    (lambda: compressors.cast(jnp.bfloat16), 'dtype='),
  ],
)
def test_refused_arguments(make, message):
  with pytest.raises(ValueError, match=message) as error:
    make()
  assert '\n' not in str(error.value)


@pytest.mark.parametrize('make', [compressors.top_k, compressors.random_k])
def test_leaves_beyond_the_indices_are_refused(make):
  shape = jax.ShapeDtypeStruct((3 * 10**9,), jnp.float32)
  with pytest.raises(ValueError, match='3000000000 entries'):
    jax.eval_shape(make(k=1).encode, jax.random.key(0), shape)


def test_nan_in_a_large_leaf_is_visible(family, compressor_examples):
  votes = compressor_examples['scaled_sign'][1]
  x = np.random.default_rng(0).normal(size=40_000).astype(np.float32)
  x[9] = np.nan
  for compressor in (family, votes) if 'sign' in family.name else (family,):
    y = jax.jit(lambda x, c=compressor: through(c, jax.random.key(0), x))(x)
    drawn = np.asarray(y)[9] != 0  # random places may miss it, and a memory keeps it
    assert np.isnan(y).any() or (compressor.shared_key and not drawn), compressor


def test_random_words_are_uniform_and_independent():
  n = 1 << 16
  keys = [*jax.random.split(jax.random.key(0), 2), jax.random.fold_in(jax.random.key(0), 1)]
  words = [np.asarray(_bits.random_words(key, n)) for key in keys]
  for word in words:
    assert np.unique(word).size > n - 20  # a birthday or two
    for part in (word >> 24, word & 255, (word >> 12) & 255):
      chi = ((np.bincount(part, minlength=256) - n / 256) ** 2).sum() / (n / 256)
      assert abs(chi - 255) < 5 * (2 * 255) ** 0.5
  u = [word / 2.0**32 - 0.5 for word in words]
  pairs = [(u[0], u[1]), (u[0], u[2]), (u[0][1:], u[0][:-1]), (u[0][1:], u[1][:-1])]
  pairs += [(u[0][lag:], u[0][:-lag]) for lag in (16, 256, 1024)]
  for a, b in pairs:
    assert abs(np.corrcoef(a, b)[0, 1]) < 5 / n**0.5
  assert not np.array_equal(np.sort(words[0]), np.sort(words[1]))


@pytest.mark.parametrize(('n', 'k'), [(7, 3), (8, 2), (5, 5), (10, 1)])
def test_draws_are_uniform_without_replacement(n, k):
  keys = jax.random.split(jax.random.key(1), 8000)
  places = np.asarray(jax.jit(jax.vmap(lambda key: _places.drawn(key, n, k)))(keys))
  assert all(len(set(row)) == k for row in places.tolist())
  share = np.bincount(places.reshape(-1), minlength=n) / 8000
  assert np.abs(share - k / n).max() <= 5 * (0.25 / 8000) ** 0.5


@pytest.mark.parametrize(('n', 'k'), [(40, 1), (40, 3), (1000, 7), (1001, 31), (130, 4)])
def test_the_largest_of_rows_in_two_steps(n, k):
  rows = np.random.default_rng(n).normal(size=(5, n)).astype(np.float32)
  rows[1] = np.round(rows[1])  # ties
  places = np.asarray(jax.jit(lambda x: _places.largest(x, k))(rows))
  for row, at in zip(np.abs(rows), places, strict=True):
    assert len(set(at.tolist())) == k
    np.testing.assert_array_equal(np.sort(row[at]), np.sort(row)[-k:])
  place = int(_places.largest_of_all(jnp.asarray(rows[0])))
  assert place == np.abs(rows[0]).argmax()


@pytest.mark.parametrize('n', [1, 31, 70, 520, 1300])
@pytest.mark.parametrize('block', [16, 100, 256, 512, 10**6])
def test_reductions_of_blocks(n, block):
  x = np.random.default_rng(n).uniform(size=n).astype(np.float32)
  parts = [x[i : i + block] for i in range(0, n, block)]
  largest = _bits.reduce_blocks(jnp.asarray(x), block, jnp.maximum)
  assert largest.tolist() == [part.max() for part in parts]
  sums = _bits.reduce_blocks(jnp.asarray(x), block, jnp.add)
  np.testing.assert_allclose(sums, [part.sum(dtype=np.float64) for part in parts], rtol=1e-5)


def test_marked_places_fill_the_slots():
  marks = np.random.default_rng(0).uniform(size=1000) < 0.1
  where = set(np.flatnonzero(marks).tolist())
  for seed in range(5):
    for slots in (10, len(where), 200):
      places, filled = _places.marked(jnp.asarray(marks), slots, jax.random.key(seed))
      found = np.asarray(places)[np.asarray(filled)].tolist()
      assert len(found) == len(set(found)) == min(slots, len(where))
      assert set(found) <= where


def test_draws_by_importance_send_large_entries_always_and_zeros_never():
  x = np.zeros(100, np.float32)
  x[:50] = 0.01
  x[7] = -9.0
  sampling = compressors.importance_sampling(k=11)
  for seed in range(20):
    y = np.asarray(through(sampling, jax.random.key(seed), jnp.asarray(x)))
    assert y[7] == -9
    assert 10 <= np.count_nonzero(y) <= 11
    assert not y[50:].any()
