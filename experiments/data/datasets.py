"""Data sets that need no network: arrays in memory, each example with its natural client.

A config names a constructor of this module (`__all__`) and its keyword arguments. All of them are
pure functions of their arguments and of the files they read, so every process of a run builds the
same arrays.
"""

from __future__ import annotations

import dataclasses
import gzip
import math
import os
import pathlib
import zlib

import numpy as np

__all__ = ('Dataset', 'digits', 'fashion_mnist', 'logistic', 'quadratics', 'shakespeare')

_FILES = pathlib.Path(__file__).parent / 'files'
_FASHION_SYSTEM = '/usr/share/datasets/fashion-mnist'
_FASHION_KERAS = '~/.keras/datasets/fashion-mnist'
_FASHION_NAMES = (
  'train-images-idx3-ubyte.gz',
  'train-labels-idx1-ubyte.gz',
  't10k-images-idx3-ubyte.gz',
  't10k-labels-idx1-ubyte.gz',
)


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
  """A training set, a test set and the natural clients of the training examples.

  Attributes:
    name: the constructor's name.
    inputs: `[N, ...]` float32 features, or int32 tokens `[N, T]`.
    targets: `[N]` or `[N, T]` int32 classes, or `[N]` float32 for regression.
    test_inputs: as `inputs`.
    test_targets: as `targets`.
    outputs: number of classes (or of symbols); 1 for regression.
    clients: `[N]` int32, the natural client of each training example; all 0 where there is none.
    client_names: one name a client.
    floor: the least achievable mean training loss where it is known, else 0: reports show
      loss - floor.
  """

  name: str
  inputs: np.ndarray
  targets: np.ndarray
  test_inputs: np.ndarray
  test_targets: np.ndarray
  outputs: int
  clients: np.ndarray
  client_names: tuple[str, ...]
  floor: float = 0.0


def whole_number(name: str, value: object, *, least: int) -> int:
  """Returns `value` as an int, refusing anything that is not a whole number of at least `least`.

  Args:
    name: the argument's name, for the message.
    value: what the caller passed.
    least: the smallest accepted value.

  Returns:
    `int(value)`.

  Raises:
    ValueError: naming the argument, the value and what is accepted.
  """
  if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
    raise ValueError(f'{name} must be an int >= {least}, got {value!r}')
  return int(value)


def digits(*, test_fraction: float = 0.2, seed: int = 0) -> Dataset:
  """The 1,797 handwritten digits of scikit-learn, 8 x 8 pixels, scaled to [-1, 1].

  The split is stratified: of a class with n examples, `round(test_fraction * n)` go to the test
  set.

  Args:
    test_fraction: share of each class that is held out, in (0, 1).
    seed: which examples are held out.

  Returns:
    Images `[N, 8, 8, 1]` float32, classes `[N]` int32.

  Raises:
    ValueError: on a fraction outside (0, 1), or one that leaves a class out of either set.

  >>> data = digits()
  >>> data.inputs.shape, data.test_inputs.shape, data.outputs
  ((1438, 8, 8, 1), (359, 8, 8, 1), 10)

  Reference: Alpaydin and Kaynak, "Cascading Classifiers", Kybernetika 34(4), 1998.
  """
  _check_fraction(test_fraction)
  with np.load(_FILES / 'digits8x8.npz') as archive:
    images, labels = archive['images'], archive['labels'].astype(np.int32)
  rng = np.random.default_rng(whole_number('seed', seed, least=0))
  is_test = np.zeros(labels.size, bool)
  for label in range(10):
    members = rng.permutation(np.flatnonzero(labels == label))
    held_out = round(test_fraction * members.size)
    if not 0 < held_out < members.size:
      raise ValueError(f'test_fraction {test_fraction} leaves class {label} out of one set')
    is_test[members[:held_out]] = True
  inputs = images[..., None].astype(np.float32) / 8 - 1
  return _ten_classes(
    'digits', inputs[~is_test], labels[~is_test], inputs[is_test], labels[is_test]
  )


def shakespeare(
  *, sequence_length: int = 64, test_fraction: float = 0.1, roles: int = 0
) -> Dataset:
  """Characters of the roles of Shakespeare's plays: predict the next one. A role is a client.

  The vocabulary is every symbol of the texts in sorted order, whatever `roles` is. A role's text is
  cut into windows of `sequence_length` inputs that do not overlap; the targets are the same window
  one character later. The last `floor(test_fraction * windows)` windows of each role are test.
  Roles shorter than one window are left out.

  Args:
    sequence_length: inputs a window, L.
    test_fraction: share of each role's windows that is held out, in (0, 1).
    roles: keep only this many roles, the longest; 0 keeps all.

  Returns:
    Tokens `[N, L]` int32 and next tokens `[N, L]` int32; `client_names` are `play/ROLE`.

  Raises:
    ValueError: on an argument out of range, or if no window is left for either set.

  >>> data = shakespeare(roles=2)
  >>> data.inputs.shape[1], data.outputs, data.client_names
  (64, 79, ('hamlet/HAM', 'othello/IAGO'))
  """
  _check_fraction(test_fraction)
  length = whole_number('sequence_length', sequence_length, least=1)
  names, texts, symbols = _read_roles()
  if whole_number('roles', roles, least=0) > len(names):
    raise ValueError(f'roles must be at most {len(names)}, the roles in the file, got {roles}')
  by_length = sorted(range(len(names)), key=lambda role: (-texts[role].size, role))
  kept = [role for role in sorted(by_length[: roles or None]) if texts[role].size > length]
  cuts = [_windows(texts[role], length) for role in kept]
  # The small number is for products such as 0.29 * 100, which is 28.99...
  train = [cut.shape[1] - math.floor(test_fraction * cut.shape[1] + 1e-9) for cut in cuts]
  if sum(train) == sum(cut.shape[1] for cut in cuts):
    raise ValueError(
      f'sequence_length {length} and test_fraction {test_fraction} leave no test window in the '
      f'{len(kept)} roles that are as long as one'
    )
  pairs = list(zip(cuts, train, strict=True))
  return Dataset(
    'shakespeare',
    *np.concatenate([cut[:, :n] for cut, n in pairs], axis=1),
    *np.concatenate([cut[:, n:] for cut, n in pairs], axis=1),
    outputs=symbols,
    clients=np.repeat(np.arange(len(kept), dtype=np.int32), train),
    client_names=tuple(names[role] for role in kept),
  )


def fashion_mnist(*, directory: str = '') -> Dataset:
  """Fashion-MNIST, 60,000 + 10,000 grey images of 28 x 28 pixels in 10 classes, scaled to [-1, 1].

  The four gzipped IDX files are taken from the first of these folders that has them all:
  `directory`, `$JAX_DSGD_DATA/fashion-mnist`, `/usr/share/datasets/fashion-mnist`,
  `~/.keras/datasets/fashion-mnist`.

  Args:
    directory: a folder to look in first.

  Returns:
    Images `[N, 28, 28, 1]` float32, classes `[N]` int32.

  Raises:
    FileNotFoundError: if no folder has the files.
    ValueError: if a file is damaged, with its path.

  Reference: Xiao, Rasul and Vollgraf, "Fashion-MNIST", arXiv:1708.07747.
  """
  folder = _fashion_folder(directory)
  train_images, train_labels, test_images, test_labels = (
    _read_idx(folder / name, ndim=3 if 'images' in name else 1) for name in _FASHION_NAMES
  )
  for images, labels in ((train_images, train_labels), (test_images, test_labels)):
    if len(images) != len(labels) or labels.max(initial=0) > 9:
      raise ValueError(f'{folder}: {len(images)} images do not match {len(labels)} labels in 0..9')
  scale = np.float32(127.5)
  return _ten_classes(
    'fashion_mnist',
    train_images[..., None] / scale - 1,
    train_labels.astype(np.int32),
    test_images[..., None] / scale - 1,
    test_labels.astype(np.int32),
  )


def quadratics(
  *,
  clients: int = 8,
  dimension: int = 32,
  examples: int = 64,
  heterogeneity: float = 1.0,
  noise: float = 0.0,
  seed: int = 0,
) -> Dataset:
  """Linear regression in which client i has its own optimum x_i: the test of heterogeneity.

  x* ~ N(0, I), x_i = x* + heterogeneity * N(0, I), rows a ~ N(0, D) with the eigenvalues of D from
  0.1 to 1, target = a . x_i + noise * N(0, 1). The loss of x is 0.5 (a . x - target)^2 and `floor`
  its least mean over all rows of all clients. The test set is the training set.

  Args:
    clients: number of clients.
    dimension: length of a row and of x, d.
    examples: rows a client.
    heterogeneity: distance of the clients' optima from x*, a coordinate; 0 gives all the same one.
    noise: standard deviation of a target around a . x_i.
    seed: of everything drawn.

  Returns:
    Rows `[clients * examples, d]` float32 and targets `[clients * examples]` float32.

  Raises:
    ValueError: on a count below 1 or a negative heterogeneity or noise.

  >>> data = quadratics(clients=2, dimension=3, examples=5, heterogeneity=0.0)
  >>> data.inputs.shape, data.clients.tolist(), round(data.floor, 6)
  ((10, 3), [0, 0, 0, 0, 0, 1, 1, 1, 1, 1], 0.0)
  """
  _check_nonnegative('noise', noise)
  rng, rows, optima = _client_problem(clients, dimension, examples, heterogeneity, seed)
  targets = np.einsum('cnd,cd->cn', rows, optima) + noise * rng.normal(size=rows.shape[:2])
  inputs = rows.reshape(-1, dimension).astype(np.float32)
  outputs = targets.reshape(-1).astype(np.float32)
  return Dataset(
    name='quadratics',
    inputs=inputs,
    targets=outputs,
    test_inputs=inputs,
    test_targets=outputs,
    outputs=1,
    clients=np.repeat(np.arange(clients, dtype=np.int32), examples),
    client_names=_numbered(clients),
    floor=_least_loss(inputs, outputs),
  )


def logistic(
  *,
  clients: int = 8,
  dimension: int = 32,
  examples: int = 128,
  heterogeneity: float = 1.0,
  seed: int = 0,
) -> Dataset:
  """Binary classification in which client i has its own weights x_i.

  Rows and x_i as in `quadratics`; P(label = 1) = sigmoid(3 a . x_i / sqrt(d)), so that with
  heterogeneity 0 the logits have a standard deviation of about 2. The test set has as many fresh
  examples of the same clients.

  Args:
    clients: number of clients.
    dimension: length of a row, d.
    examples: training examples a client.
    heterogeneity: distance of the clients' weights from the common ones, a coordinate.
    seed: of everything drawn.

  Returns:
    Rows `[clients * examples, d]` float32 and labels 0 or 1 `[clients * examples]` int32.

  Raises:
    ValueError: on a count below 1 or a negative heterogeneity.

  >>> data = logistic(clients=2, dimension=3, examples=5)
  >>> data.inputs.shape, data.test_inputs.shape, data.targets.dtype.name, data.outputs
  ((10, 3), (10, 3), 'int32', 2)
  """
  whole_number('examples', examples, least=1)
  rng, rows, optima = _client_problem(clients, dimension, 2 * examples, heterogeneity, seed)
  logits = 3 / math.sqrt(dimension) * np.einsum('cnd,cd->cn', rows, optima)
  labels = (rng.logistic(size=logits.shape) < logits).astype(np.int32)
  inputs = rows.astype(np.float32)
  return Dataset(
    name='logistic',
    inputs=inputs[:, :examples].reshape(-1, dimension),
    targets=labels[:, :examples].reshape(-1),
    test_inputs=inputs[:, examples:].reshape(-1, dimension),
    test_targets=labels[:, examples:].reshape(-1),
    outputs=2,
    clients=np.repeat(np.arange(clients, dtype=np.int32), examples),
    client_names=_numbered(clients),
  )


def _client_problem(
  clients: int, dimension: int, examples: int, heterogeneity: float, seed: int
) -> tuple[np.random.Generator, np.ndarray, np.ndarray]:
  """Draws rows `[clients, examples, d]` of condition number 10 and optima `[clients, d]`."""
  for name, value in (('clients', clients), ('dimension', dimension), ('examples', examples)):
    whole_number(name, value, least=1)
  _check_nonnegative('heterogeneity', heterogeneity)
  rng = np.random.default_rng(whole_number('seed', seed, least=0))
  shared = rng.normal(size=dimension)
  optima = shared + heterogeneity * rng.normal(size=(clients, dimension))
  scale = np.sqrt(np.geomspace(0.1, 1.0, dimension))
  return rng, scale * rng.normal(size=(clients, examples, dimension)), optima


def _least_loss(inputs: np.ndarray, targets: np.ndarray) -> float:
  """The least mean of 0.5 (a . x - b)^2 over the rounded numbers handed out, in float64."""
  a, b = inputs.astype(np.float64), targets.astype(np.float64)
  best = np.linalg.lstsq(a, b, rcond=None)[0]
  return float(0.5 * np.mean((a @ best - b) ** 2))


def _ten_classes(
  name: str,
  inputs: np.ndarray,
  targets: np.ndarray,
  test_inputs: np.ndarray,
  test_targets: np.ndarray,
) -> Dataset:
  clients = np.zeros(len(inputs), np.int32)
  return Dataset(name, inputs, targets, test_inputs, test_targets, 10, clients, ('all',))


def _numbered(clients: int) -> tuple[str, ...]:
  return tuple(f'client_{i}' for i in range(clients))


def _read_roles() -> tuple[list[str], list[np.ndarray], int]:
  """Returns the names `play/ROLE`, the texts as int32 tokens and the number of symbols."""
  records = gzip.decompress((_FILES / 'shakespeare_roles.txt.gz').read_bytes()).split(b'\x1e')[1:]
  pairs = [record.split(b'\n', 1) for record in records]
  texts = [np.frombuffer(text, np.uint8) for _, text in pairs]  # the file is plain ASCII
  symbols = np.unique(np.concatenate(texts))
  table = np.zeros(256, np.int32)
  table[symbols] = np.arange(symbols.size)
  return [name.decode() for name, _ in pairs], [table[text] for text in texts], symbols.size


def _windows(tokens: np.ndarray, length: int) -> np.ndarray:
  """Cuts a text into inputs and next tokens `[2, windows, length]`; the inputs do not overlap."""
  count = (tokens.size - 1) // length
  tokens = tokens[: count * length + 1]
  return np.stack([tokens[:-1], tokens[1:]]).reshape(2, count, length)


def _fashion_folder(directory: str) -> pathlib.Path:
  root = os.environ.get('JAX_DSGD_DATA', '')
  keras = os.path.expanduser(_FASHION_KERAS)
  candidates = (directory, root and os.path.join(root, 'fashion-mnist'), _FASHION_SYSTEM, keras)
  folders = [pathlib.Path(folder) for folder in candidates if folder]
  for folder in folders:
    if all((folder / name).is_file() for name in _FASHION_NAMES):
      return folder
  raise FileNotFoundError(
    f'Fashion-MNIST is in none of {", ".join(map(str, folders))}: install the Debian package '
    'dataset-fashion-mnist (apt-get install dataset-fashion-mnist) or set JAX_DSGD_DATA to a '
    'folder that holds fashion-mnist/'
  )


def _read_idx(path: pathlib.Path, *, ndim: int) -> np.ndarray:
  """Reads a gzipped IDX file: bytes 0, 0, 8 (uint8), ndim, big-endian uint32 sizes, data."""
  try:
    raw = gzip.decompress(path.read_bytes())
  except (EOFError, gzip.BadGzipFile, zlib.error) as error:
    raise ValueError(f'{path}: truncated or damaged gzip file ({error})') from error
  header = 4 + 4 * ndim
  if raw[:4] != bytes((0, 0, 8, ndim)) or len(raw) < header:
    raise ValueError(f'{path}: not an IDX file of uint8 with {ndim} dimensions')
  shape = tuple(int(size) for size in np.frombuffer(raw, '>u4', count=ndim, offset=4))
  if len(raw) - header != math.prod(shape):
    raise ValueError(f'{path}: {len(raw) - header} bytes of data, but its header says {shape}')
  return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)


def _check_fraction(value: float) -> None:
  if not 0 < value < 1:
    raise ValueError(f'test_fraction must be in (0, 1), got {value!r}')


def _check_nonnegative(name: str, value: float) -> None:
  if not 0 <= value < math.inf:
    raise ValueError(f'{name} must be finite and >= 0, got {value!r}')
