"""Models as pure functions, and the losses: by hand, by reference, under every transformation."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import models
from experiments.data import datasets
from experiments.models import losses


@pytest.fixture(autouse=True)
def strict():
  with jax.numpy_rank_promotion('raise'), jax.numpy_dtype_promotion('strict'):
    yield


def _images(height: int, width: int, channels: int = 1) -> datasets.Dataset:
  rng = np.random.default_rng(0)
  inputs = rng.normal(size=(6, height, width, channels)).astype(np.float32)
  targets = np.arange(6, dtype=np.int32) % 3
  clients = np.zeros(6, np.int32)
  return datasets.Dataset('images', inputs, targets, inputs, targets, 3, clients, ('all',))


def _random(shapes):
  """Parameters from NumPy: the compilation of `init` is most of a test's time."""
  normal = np.random.default_rng(0).normal
  return jax.tree.map(lambda x: normal(0, 0.3, x.shape).astype(np.float32), shapes)


DIGITS = datasets.digits()
TEXT = datasets.shakespeare(sequence_length=8, roles=1)
QUADRATICS = datasets.quadratics(clients=2, dimension=5, examples=20)
LOGISTIC = datasets.logistic(clients=2, dimension=5, examples=20)
CASES = {
  'linear-quadratics': (models.linear, QUADRATICS, {}, ()),
  'linear-logistic': (models.linear, LOGISTIC, {'bias': True}, (2,)),
  'mlp-quadratics': (models.mlp, QUADRATICS, {'hidden': (4, 3)}, ()),
  'mlp-digits': (models.mlp, DIGITS, {}, (10,)),
  'cnn-digits': (models.cnn, DIGITS, {'channels': (3, 4), 'hidden': 5}, (10,)),
  'transformer': (models.transformer, TEXT, {'width': 8, 'depth': 1, 'heads': 2}, (8, 79)),
}


@pytest.mark.parametrize(('make', 'data', 'arguments', 'shape'), CASES.values(), ids=CASES)
def test_smoke(make, data, arguments, shape):
  model = make(data, **arguments)
  key, inputs, targets = jax.random.key(1), data.inputs[:6], data.targets[:6]
  params = jax.eval_shape(model.init, key)
  for path, leaf in jax.tree.leaves_with_path(params):
    assert all(isinstance(k, jax.tree_util.DictKey) and isinstance(k.key, str) for k in path)
    assert leaf.dtype == jnp.float32

  # Two workers with parameters of their own, each on its half of the batch.
  shapes = jax.eval_shape(jax.vmap(model.init), jax.random.split(key, 2))
  stacked = _random(shapes)
  halves = jax.tree.map(lambda x: x.reshape(2, 3, *x.shape[1:]), (inputs, targets))

  def gradients(p, x, y):
    return jax.value_and_grad(lambda p: losses.loss(model, p, x, y))(p)

  def step(p, x, y):
    value, gradient = gradients(p, x, y)
    return value, gradient, jax.lax.pmean(gradient, 'workers'), model.apply(p, x)

  workers = jax.jit(jax.vmap(step, axis_name='workers'))(stacked, *halves)
  value, gradient, mean, outputs = jax.device_get(workers)
  assert value.shape == (2,) and np.isfinite(value).all() and outputs.shape == (2, 3, *shape)
  assert jax.tree.structure(gradient) == jax.tree.structure(params)
  assert any(leaf.any() for leaf in jax.tree.leaves(gradient))
  first = jax.tree.map(lambda x: x[0], (stacked, *halves))
  alone = jax.jit(gradients)(*first)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b[0], atol=1e-5), alone, (value, gradient)
  )
  jax.tree.map(
    lambda m, g: np.testing.assert_allclose(m[0], (g[0] + g[1]) / 2, atol=1e-6), mean, gradient
  )


def test_public_names_are_the_constructors():
  assert set(models.__all__) == {'cnn', 'linear', 'mlp', 'transformer'}
  assert all(callable(getattr(models, name)) for name in models.__all__)


def test_init_depends_on_the_key_alone():
  model = models.mlp(QUADRATICS)
  init = jax.jit(model.init)
  one, again, other = (init(jax.random.key(seed)) for seed in (0, 0, 1))
  kernel = one['layer_0']['kernel']
  assert jnp.array_equal(kernel, again['layer_0']['kernel'])
  assert not jnp.array_equal(kernel, other['layer_0']['kernel'])


def test_linear_by_hand():
  model = models.linear(QUADRATICS, bias=True)
  params = model.init(jax.random.key(0))
  assert not any(jnp.any(leaf) for leaf in jax.tree.leaves(params))
  weights = np.arange(5, dtype=np.float32)
  params = {'layer_0': {'kernel': weights[:, None], 'bias': np.array([2.0], np.float32)}}
  expected = QUADRATICS.inputs @ weights + 2
  np.testing.assert_allclose(model.apply(params, QUADRATICS.inputs), expected, rtol=1e-5)


def test_linear_reaches_the_floor_of_quadratics():
  model = models.linear(QUADRATICS)

  def objective(params):
    return losses.loss(model, params, QUADRATICS.inputs, QUADRATICS.targets)

  def descend(params, _):
    return jax.tree.map(lambda p, g: p - 0.5 * g, params, jax.grad(objective)(params)), None

  start = model.init(jax.random.key(0))
  end = jax.jit(lambda p: jax.lax.scan(descend, p, length=400)[0])(start)
  assert objective(start) > 1.1 * QUADRATICS.floor > 0
  assert float(objective(end)) == pytest.approx(QUADRATICS.floor, rel=1e-4)


def test_mlp_by_hand():
  model = models.mlp(QUADRATICS, hidden=(4, 3))
  params = jax.device_get(jax.jit(model.init)(jax.random.key(0)))
  x = QUADRATICS.inputs
  for i in range(3):
    x = x @ params[f'layer_{i}']['kernel'] + params[f'layer_{i}']['bias']
    x = np.maximum(x, 0) if i < 2 else x[:, 0]
  np.testing.assert_allclose(model.apply(params, QUADRATICS.inputs), x, rtol=1e-4, atol=1e-5)


def _reference_cnn(params, x):
  layout = ('NHWC', 'HWIO', 'NHWC')
  for i in range(2):
    layer = params[f'conv_{i}']
    kernel = layer['kernel'].reshape(3, 3, x.shape[-1], -1)
    x = jax.lax.conv_general_dilated(x, kernel, (1, 1), 'SAME', dimension_numbers=layout)
    x = jnp.maximum(x + layer['bias'].reshape(1, 1, 1, -1), 0.0)
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), 'VALID')
  for i in range(2):
    layer = params[f'dense_{i}']
    x = x.reshape(6, -1) @ layer['kernel'] + layer['bias'].reshape(1, -1)
    x = jnp.maximum(x, 0.0) if i == 0 else x
  return x


@pytest.mark.parametrize('size', [(8, 8, 1), (28, 28, 1), (5, 7, 3)])
def test_cnn_is_a_convolutional_network(size):
  data = _images(*size)
  model = models.cnn(data, channels=(3, 4), hidden=5)
  params = _random(jax.eval_shape(model.init, jax.random.key(0)))
  expected = jax.jit(_reference_cnn)(params, data.inputs)
  assert expected.shape == (6, 3) and jnp.std(expected) > 0.1
  np.testing.assert_allclose(jax.jit(model.apply)(params, data.inputs), expected, atol=1e-4)


def test_cnn_starts_with_outputs_of_the_order_of_one():
  model = models.cnn(DIGITS)
  logits = jax.jit(lambda key, x: model.apply(model.init(key), x))(
    jax.random.key(0), DIGITS.inputs[:64]
  )
  assert 0.1 < jnp.std(logits) < 2


@pytest.fixture(scope='module')
def transformer():
  model = models.transformer(TEXT, width=8, depth=2, heads=2)
  return jax.jit(model.apply), jax.jit(model.init)(jax.random.key(0))


def test_transformer_is_causal(transformer):
  apply, params = transformer
  tokens = TEXT.inputs[:1]
  before = apply(params, tokens)
  for place in range(8):
    changed = tokens.copy()
    changed[0, place] = (changed[0, place] + 1) % 79
    moved = np.abs(apply(params, changed) - before).max(axis=(0, 2))
    assert not moved[:place].any()  # exactly: nothing earlier sees it
    assert (moved[place:] > 1e-7).all()  # everything later does


def test_transformer_knows_positions(transformer):
  apply, params = transformer
  logits = apply(params, np.full((1, 8), 7, np.int32))[0]  # the same token everywhere
  assert (np.abs(np.diff(logits, axis=0)).max(axis=1) > 1e-4).all()


def test_transformer_takes_shorter_sequences(transformer):
  apply, params = transformer
  whole, part = apply(params, TEXT.inputs[:2]), apply(params, TEXT.inputs[:2, :5])
  np.testing.assert_allclose(part, whole[:, :5], atol=1e-5)


def test_transformer_starts_at_the_uniform_loss(transformer):
  apply, params = transformer
  logits = np.asarray(apply(params, TEXT.inputs[:16]), np.float64)
  chosen = np.take_along_axis(logits, TEXT.targets[:16, :, None], axis=2)[..., 0]
  value = np.mean(np.log(np.exp(logits).sum(axis=2)) - chosen)
  assert value == pytest.approx(np.log(79), abs=0.05)


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda: models.mlp(TEXT), "mlp takes float features; data set 'shakespeare' has int32"),
    (lambda: models.linear(TEXT), "linear takes float features; data set 'shakespeare'"),
    (lambda: models.cnn(TEXT), "cnn takes float features; data set 'shakespeare'"),
    (lambda: models.cnn(LOGISTIC), r"takes images \[N, H, W, C\]; data set 'logistic' has shape"),
    (lambda: models.cnn(DIGITS, channels=(2,) * 4), 'halve the image 4 times, but it is 8 x 8'),
    (lambda: models.cnn(DIGITS, hidden=0), 'hidden must be an int >= 1, got 0'),
    (lambda: models.mlp(DIGITS, hidden=cast(Any, 64)), 'hidden must be a tuple of ints .*got 64'),
    (lambda: models.mlp(DIGITS, hidden=(8, 0)), 'hidden must be an int >= 1, got 0'),
    (lambda: models.transformer(DIGITS), r"takes tokens \[N, T\].*data set 'digits'"),
    (lambda: models.transformer(TEXT, heads=3), 'heads must divide width, got heads 3 and'),
    (lambda: models.transformer(TEXT, depth=0), 'depth must be an int >= 1, got 0'),
  ],
)
def test_refusals(make, message):
  with pytest.raises(ValueError, match=message) as error:
    make()
  assert '\n' not in str(error.value)


# losses

TABLE = models.Model(init=lambda key: jnp.zeros((4, 3)), apply=lambda params, x: params[x])
LOGITS = np.log(np.array([[6, 3, 1], [1, 8, 1], [2, 2, 6], [5, 3, 2]], np.float32) / 10)


def test_cross_entropy_by_hand():
  x, y = np.array([0, 1, 2, 3]), np.array([0, 1, 2, 1], np.int32)
  expected = -np.log([0.6, 0.8, 0.6, 0.3]).mean()
  assert float(losses.loss(TABLE, LOGITS, x, y)) == pytest.approx(expected, rel=1e-6)
  expected = -np.log([[0.6, 0.8], [0.6, 0.3]]).mean()  # and over positions
  value = losses.loss(TABLE, LOGITS, x.reshape(2, 2), y.reshape(2, 2))
  assert float(value) == pytest.approx(expected, rel=1e-6)


def test_squared_error_by_hand():
  square = models.Model(init=lambda key: (), apply=lambda params, x: jnp.square(x))
  x, y = np.array([1, 2, 3], np.float32), np.array([0, 6, 9], np.float32)
  assert float(losses.loss(square, (), x, y)) == pytest.approx((0.5 + 2 + 0) / 3)
  sums = losses.evaluate(square, (), x, y, np.array([1, 1, 0], np.float32))
  assert {name: float(value) for name, value in sums.items()} == {
    'loss': 2.5,
    'correct': 0.0,
    'count': 2.0,
  }


def test_evaluate_by_hand():
  x, y = np.array([0, 1, 2, 3]), np.array([0, 1, 2, 1], np.int32)  # the last is wrong
  sums = losses.evaluate(TABLE, LOGITS, x, y, np.array([1, 0, 1, 1], np.float32))
  assert float(sums['loss']) == pytest.approx(-np.log([0.6, 0.6, 0.3]).sum(), rel=1e-6)
  assert float(sums['correct']) == 2 and float(sums['count']) == 3
  sums = losses.evaluate(
    TABLE, LOGITS, x.reshape(2, 2), y.reshape(2, 2), np.array([0, 1], np.float32)
  )
  assert float(sums['loss']) == pytest.approx(-np.log([0.6, 0.3]).sum(), rel=1e-6)
  assert float(sums['correct']) == 1 and float(sums['count']) == 2


@pytest.mark.parametrize('targets', [np.zeros((4, 1), np.int32), np.zeros(3, np.int32)])
def test_refuses_targets_that_do_not_fit(targets):
  with pytest.raises(ValueError, match=r'outputs of shape \(4, 3\) do not fit int32 targets'):
    losses.loss(TABLE, LOGITS, np.arange(4), targets)


def test_refuses_regression_targets_for_logits():
  with pytest.raises(ValueError, match=r'outputs of shape \(4, 3\) do not fit float32 targets'):
    losses.loss(TABLE, LOGITS, np.arange(4), np.zeros(4, np.float32))
