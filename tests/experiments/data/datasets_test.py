"""Data sets: read as the files say, drawn by their law, refused where damaged."""

from __future__ import annotations

import gzip
import pathlib
import struct
import subprocess
import sys

import numpy as np
import pytest

from experiments.data import datasets

FILES = pathlib.Path(datasets.__file__).parent / 'files'
ALL_SMALL = [
  datasets.digits,
  lambda **kw: datasets.shakespeare(roles=2, **kw),
  lambda **kw: datasets.quadratics(clients=2, dimension=3, examples=4, **kw),
  lambda **kw: datasets.logistic(clients=2, dimension=3, examples=4, **kw),
]


@pytest.mark.parametrize('make', ALL_SMALL)
def test_shapes_types_and_repeatability(make):
  data, again = make(), make()
  assert len(data.inputs) == len(data.targets) == len(data.clients)
  assert len(data.test_inputs) == len(data.test_targets) > 0
  assert data.inputs.dtype == data.test_inputs.dtype
  assert data.inputs.dtype in (np.float32, np.int32)
  assert data.targets.dtype == (np.float32 if data.outputs == 1 else np.int32)
  assert data.clients.dtype == np.int32
  assert sorted(set(data.clients.tolist())) == list(range(len(data.client_names)))
  if data.outputs > 1:
    assert 0 <= data.targets.min() and data.targets.max() < data.outputs
  for field in ('inputs', 'targets', 'test_inputs', 'test_targets', 'clients'):
    np.testing.assert_array_equal(getattr(data, field), getattr(again, field))
    assert getattr(data, field).flags.c_contiguous


def test_public_names_are_the_constructors():
  assert set(datasets.__all__) == {
    'Dataset',
    'digits',
    'fashion_mnist',
    'logistic',
    'quadratics',
    'shakespeare',
  }
  assert all(hasattr(datasets, name) for name in datasets.__all__)


def test_data_does_not_import_jax():
  code = "import sys, experiments.data; sys.exit('jax' in sys.modules)"
  assert subprocess.run([sys.executable, '-c', code], check=False).returncode == 0


@pytest.mark.parametrize('value', [0, -1, 1.0, '3', True, None])
def test_whole_number_refuses(value):
  with pytest.raises(ValueError, match=r'^steps must be an int >= 1, got '):
    datasets.whole_number('steps', value, least=1)


def test_whole_number_accepts_numpy():
  assert type(datasets.whole_number('steps', np.int64(3), least=3)) is int


# digits


def test_digits_split_holds_every_image_once_and_is_stratified():
  with np.load(FILES / 'digits8x8.npz') as archive:
    images, labels = archive['images'], archive['labels']
  data = datasets.digits(test_fraction=0.2)
  joined = np.concatenate([data.inputs, data.test_inputs])[..., 0]
  np.testing.assert_array_equal(
    np.sort((joined * 8 + 8).reshape(1797, 64), axis=0), np.sort(images.reshape(1797, 64), axis=0)
  )
  assert data.inputs.min() == -1 and data.inputs.max() == 1
  # A fifth of 178 182 177 183 181 182 181 179 174 180, rounded.
  assert np.bincount(data.test_targets).tolist() == [36, 36, 35, 37, 36, 36, 36, 36, 35, 36]
  assert (np.bincount(data.targets) + np.bincount(data.test_targets) == np.bincount(labels)).all()


def test_digits_keeps_images_with_their_labels():
  with np.load(FILES / 'digits8x8.npz') as archive:
    of_image = {i.tobytes(): n for i, n in zip(archive['images'], archive['labels'], strict=True)}
  data = datasets.digits(seed=3)
  images = (data.inputs[..., 0] * 8 + 8).astype(np.uint8)
  assert [of_image[image.tobytes()] for image in images] == data.targets.tolist()


def test_digits_seed_changes_the_split():
  assert not np.array_equal(datasets.digits().inputs, datasets.digits(seed=1).inputs)


@pytest.mark.parametrize('fraction', [0.0, 1.0, -0.1, float('nan')])
@pytest.mark.parametrize('make', [datasets.digits, datasets.shakespeare])
def test_fraction_out_of_range(make, fraction):
  with pytest.raises(ValueError, match=r'test_fraction must be in \(0, 1\), got'):
    make(test_fraction=fraction)


def test_digits_fraction_that_empties_a_class():
  with pytest.raises(ValueError, match=r'test_fraction 0\.001 leaves class 0 out'):
    datasets.digits(test_fraction=0.001)


# shakespeare


def _roles() -> dict[str, str]:
  text = gzip.decompress((FILES / 'shakespeare_roles.txt.gz').read_bytes()).decode('ascii')
  return dict(record.split('\n', 1) for record in text.split('\x1e')[1:])


def test_shakespeare_windows_spell_the_text():
  roles = _roles()
  symbols = sorted(set(''.join(roles.values())))
  longest = sorted(roles, key=lambda role: len(roles[role]))[-3:]
  data = datasets.shakespeare(sequence_length=100, test_fraction=0.25, roles=3)
  assert data.outputs == len(symbols) == 79
  assert sorted(data.client_names) == sorted(longest)
  test_start = 0
  for client, name in enumerate(data.client_names):
    windows = (len(roles[name]) - 1) // 100
    test = windows // 4
    test_inputs, test_targets = (
      array[test_start : test_start + test] for array in (data.test_inputs, data.test_targets)
    )
    test_start += test
    inputs = np.concatenate([data.inputs[data.clients == client], test_inputs])
    targets = np.concatenate([data.targets[data.clients == client], test_targets])
    spelled = ''.join(symbols[i] for i in inputs.ravel())
    assert spelled == roles[name][: windows * 100]
    assert ''.join(symbols[i] for i in targets.ravel()) == roles[name][1 : windows * 100 + 1]
  assert test_start == len(data.test_inputs)


def test_shakespeare_whole_file():
  sizes = [len(text) for text in _roles().values()]
  data = datasets.shakespeare()
  assert len(data.client_names) == 598
  windows = [(size - 1) // 64 for size in sizes]
  assert len(data.test_inputs) == sum(n // 10 for n in windows)
  assert np.bincount(data.clients).tolist() == [n - n // 10 for n in windows]


def test_shakespeare_leaves_out_roles_shorter_than_a_window():
  sizes = [len(text) for text in _roles().values()]
  data = datasets.shakespeare(sequence_length=20000, test_fraction=0.5)
  assert len(data.client_names) == sum(size > 20000 for size in sizes) < 598


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ({'roles': 599}, 'roles must be at most 598'),
    ({'roles': -1}, 'roles must be an int >= 0'),
    ({'sequence_length': 0}, 'sequence_length must be an int >= 1, got 0'),
    ({'sequence_length': 10**6}, 'sequence_length 1000000 .* leave no test window in the 0 roles'),
    ({'sequence_length': 50000}, 'sequence_length 50000 .* leave no test window in the 1 roles'),
  ],
)
def test_shakespeare_refusals(arguments, message):
  with pytest.raises(ValueError, match=message):
    datasets.shakespeare(**arguments)


# fashion_mnist


def _idx(array: np.ndarray) -> bytes:
  return bytes([0, 0, 8, array.ndim]) + struct.pack(f'>{array.ndim}I', *array.shape) + bytes(array)


def _write_fashion(folder: pathlib.Path) -> None:
  folder.mkdir(parents=True, exist_ok=True)
  images = np.array([0, 51, 102, 255], np.uint8).repeat(6).reshape(2, 3, 4)
  for prefix, count in (('train', 2), ('t10k', 1)):
    labels = np.array([7, 9][:count], np.uint8)
    for kind, array in (('images-idx3', images[:count]), ('labels-idx1', labels)):
      (folder / f'{prefix}-{kind}-ubyte.gz').write_bytes(gzip.compress(_idx(array)))


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
  """No Fashion-MNIST on this machine, whatever is installed."""
  monkeypatch.delenv('JAX_DSGD_DATA', raising=False)
  monkeypatch.setenv('HOME', str(tmp_path / 'home'))
  monkeypatch.setattr(datasets, '_FASHION_SYSTEM', str(tmp_path / 'system'))
  return tmp_path


def test_fashion_mnist_reads_idx(nowhere):
  _write_fashion(nowhere / 'here')
  data = datasets.fashion_mnist(directory=str(nowhere / 'here'))
  assert data.inputs.shape == (2, 3, 4, 1) and data.inputs.dtype == np.float32
  np.testing.assert_allclose(data.inputs[0].ravel(), [-1] * 6 + [-0.6] * 6, rtol=1e-6)
  np.testing.assert_allclose(data.inputs[1].ravel(), [-0.2] * 6 + [1] * 6, rtol=1e-6)
  assert data.targets.tolist() == [7, 9] and data.targets.dtype == np.int32
  assert data.test_inputs.shape == (1, 3, 4, 1) and data.test_targets.tolist() == [7]
  assert data.outputs == 10 and data.clients.tolist() == [0, 0]


@pytest.mark.parametrize(
  'place', ['data/fashion-mnist', 'system', 'home/.keras/datasets/fashion-mnist']
)
def test_fashion_mnist_search_path(nowhere, monkeypatch, place):
  monkeypatch.setenv('JAX_DSGD_DATA', str(nowhere / 'data'))
  _write_fashion(nowhere / place)
  assert datasets.fashion_mnist(directory=str(nowhere / 'empty')).targets.tolist() == [7, 9]


def test_fashion_mnist_prefers_the_directory_given(nowhere):
  _write_fashion(nowhere / 'here')
  _write_fashion(nowhere / 'system')
  (nowhere / 'system' / 'train-labels-idx1-ubyte.gz').write_bytes(b'broken')
  assert datasets.fashion_mnist(directory=str(nowhere / 'here')).targets.tolist() == [7, 9]


def test_fashion_mnist_missing(nowhere):
  (nowhere / 'here').mkdir()
  with pytest.raises(
    FileNotFoundError, match='here.*apt-get install dataset-fashion-mnist.*JAX_DSGD_DATA'
  ) as error:
    datasets.fashion_mnist(directory=str(nowhere / 'here'))
  assert '\n' not in str(error.value)


LABELS = _idx(np.array([7, 9], np.uint8))


def _zip(content):
  return gzip.compress(content, mtime=0)  # the time would be a part of the test's name


@pytest.mark.parametrize(
  ('content', 'message'),
  [
    (_zip(LABELS)[:-9], 'truncated or damaged gzip'),
    (b'not gzip at all', 'truncated or damaged gzip'),
    (_zip(LABELS)[:12] + b'\xff' * 20, 'truncated or damaged gzip'),
    (b'', 'not an IDX file of uint8 with 1 dim'),
    (_zip(b'\0\0\x0d' + LABELS[3:]), 'not an IDX file of uint8 with 1 dim'),
    (_zip(LABELS[:6]), 'not an IDX file of uint8 with 1 dim'),
    (_zip(LABELS[:-1]), r'1 bytes of data, but its header says \(2,\)'),
    (_zip(LABELS + b'\1'), r'3 bytes of data, but its header says \(2,\)'),
  ],
  ids=['cut', 'text', 'damaged', 'empty', 'other-type', 'short-header', 'few', 'many'],
)
def test_fashion_mnist_damaged(nowhere, content, message):
  _write_fashion(nowhere)
  path = nowhere / 'train-labels-idx1-ubyte.gz'
  path.write_bytes(content)
  with pytest.raises(ValueError, match=f'{path}: .*{message}'):
    datasets.fashion_mnist(directory=str(nowhere))


@pytest.mark.parametrize('labels', [[1], [1, 2, 3], [1, 10]])
def test_fashion_mnist_labels_that_do_not_fit(nowhere, labels):
  _write_fashion(nowhere)
  path = nowhere / 'train-labels-idx1-ubyte.gz'
  path.write_bytes(gzip.compress(_idx(np.array(labels, np.uint8))))
  with pytest.raises(ValueError, match=f'{nowhere}: 2 images do not match {len(labels)} labels'):
    datasets.fashion_mnist(directory=str(nowhere))


# quadratics and logistic


def test_quadratics_floor_is_the_minimum():
  data = datasets.quadratics(clients=3, dimension=4, examples=20, noise=0.5)
  rows, targets = data.inputs.astype(float), data.targets.astype(float)
  best = np.linalg.inv(rows.T @ rows) @ rows.T @ targets
  assert data.floor == pytest.approx(0.5 * np.mean((rows @ best - targets) ** 2), rel=1e-9)
  assert data.floor > 0.1
  np.testing.assert_array_equal(data.inputs, data.test_inputs)
  np.testing.assert_array_equal(data.targets, data.test_targets)


def test_quadratics_clients_have_their_own_optimum():
  data = datasets.quadratics(clients=200, dimension=3, examples=5, heterogeneity=2.0)
  optima = []
  for client in range(200):
    rows, targets = data.inputs[data.clients == client], data.targets[data.clients == client]
    optimum, *_ = np.linalg.lstsq(rows, targets, rcond=None)
    np.testing.assert_allclose(rows @ optimum, targets, atol=1e-4)
    optima.append(optimum)
  np.testing.assert_allclose(np.std(optima, axis=0), 2.0, atol=0.4)


def test_quadratics_without_heterogeneity_or_noise_has_floor_zero():
  assert datasets.quadratics(heterogeneity=0.0).floor == pytest.approx(0, abs=1e-12)


def test_quadratics_noise_is_the_floor_of_many_examples():
  data = datasets.quadratics(clients=1, dimension=2, examples=20000, noise=0.3)
  assert data.floor == pytest.approx(0.5 * 0.3**2, rel=0.05)


def test_quadratics_condition_number():
  data = datasets.quadratics(clients=1, dimension=4, examples=20000)
  eigenvalues = np.linalg.eigvalsh(data.inputs.T @ data.inputs / 20000)
  np.testing.assert_allclose(eigenvalues, [0.1, 10 ** (-2 / 3), 10 ** (-1 / 3), 1], rtol=0.1)


def _logistic_regression(rows: np.ndarray, labels: np.ndarray) -> np.ndarray:
  """Newton's method for the maximum likelihood."""
  weights = np.zeros(rows.shape[1])
  for _ in range(20):
    p = 1 / (1 + np.exp(-rows @ weights))
    hessian = (rows * (p * (1 - p))[:, None]).T @ rows
    weights += np.linalg.solve(hessian, rows.T @ (labels - p))
  return weights


def test_logistic_labels_follow_the_model():
  data = datasets.logistic(clients=2, dimension=4, examples=10000)
  rows, labels = data.inputs.astype(float), data.targets
  masks = [data.clients == client for client in (0, 1)]
  weights = [_logistic_regression(rows[mask], labels[mask]) for mask in masks]
  test_rows, test_labels = data.test_inputs[:10000].astype(float), data.test_targets[:10000]
  own, other = (1 / (1 + np.exp(-test_rows @ w)) for w in weights)
  for low in (0.1, 0.4, 0.7):  # held-out frequencies match the fitted probabilities
    chosen = (low <= own) & (own < low + 0.2)
    assert np.mean(test_labels[chosen]) == pytest.approx(np.mean(own[chosen]), abs=0.05)
  accuracy, accuracy_of_other = (np.mean((p > 0.5) == test_labels) for p in (own, other))
  assert accuracy > accuracy_of_other + 0.02


def test_logistic_without_heterogeneity_has_one_model_and_logits_of_about_two():
  data = datasets.logistic(clients=2, dimension=64, examples=8000, heterogeneity=0.0)
  rows = data.inputs.astype(float)
  first, second = (
    _logistic_regression(rows[data.clients == c], data.targets[data.clients == c]) for c in (0, 1)
  )
  assert np.linalg.norm(first - second) < 0.4 * np.linalg.norm(first)
  assert 1.3 < np.std(rows @ first) < 2.7


def test_logistic_test_set_is_held_out():
  data = datasets.logistic(clients=2, dimension=2, examples=50)
  train = {row.tobytes() for row in data.inputs}
  assert not any(row.tobytes() in train for row in data.test_inputs)


@pytest.mark.parametrize('make', [datasets.quadratics, datasets.logistic])
@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ({'clients': 0}, 'clients must be an int >= 1, got 0'),
    ({'dimension': 2.0}, r'dimension must be an int >= 1, got 2\.0'),
    ({'examples': -3}, 'examples must be an int >= 1, got -3'),
    ({'heterogeneity': -1.0}, r'heterogeneity must be finite and >= 0, got -1\.0'),
    ({'seed': -1}, 'seed must be an int >= 0, got -1'),
  ],
)
def test_synthetic_refusals(make, arguments, message):
  with pytest.raises(ValueError, match=message):
    make(**arguments)


def test_quadratics_refuses_negative_noise():
  with pytest.raises(ValueError, match='noise must be finite and >= 0, got nan'):
    datasets.quadratics(noise=float('nan'))
