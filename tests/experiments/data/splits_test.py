"""Splits: each a partition, repeatable, and skewed as it says."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from experiments.data import datasets, splits


def make_dataset(labels, clients=None, name='made') -> datasets.Dataset:
  labels = np.asarray(labels, np.int32)
  inputs = np.zeros((len(labels), 1), np.float32)
  clients = np.zeros(len(labels), np.int32) if clients is None else np.asarray(clients, np.int32)
  names = tuple(str(i) for i in range(clients.max() + 1))
  return datasets.Dataset(name, inputs, labels, inputs, labels, 10, clients, names)


BALANCED = make_dataset(np.arange(400) % 10, clients=np.arange(400) * 7 % 20)
ALL = {
  'iid': splits.iid,
  'dirichlet': splits.dirichlet,
  'dirichlet_sharp': functools.partial(splits.dirichlet, alpha=0.01, min_examples=3),
  'classes_per_worker': splits.classes_per_worker,
  'by_client': splits.by_client,
}
every_split = pytest.mark.parametrize('split', ALL.values(), ids=ALL)


def test_public_names():
  assert set(splits.__all__) == {'by_client', 'classes_per_worker', 'dirichlet', 'iid'}


@every_split
@pytest.mark.parametrize('workers', [1, 3, 7, 20])
def test_is_a_partition(split, workers):
  parts = split(BALANCED, workers, seed=1)
  assert len(parts) == workers
  assert all(part.size and part.dtype == np.int32 for part in parts)
  assert all((np.diff(part) > 0).all() for part in parts)
  assert sorted(np.concatenate(parts).tolist()) == list(range(400))


@every_split
def test_is_a_pure_function_of_its_arguments(split):
  first, again, other = split(BALANCED, 4), split(BALANCED, 4), split(BALANCED, 4, seed=1)
  assert [part.tolist() for part in first] == [part.tolist() for part in again]
  assert [part.tolist() for part in first] != [part.tolist() for part in other]


@every_split
@pytest.mark.parametrize('workers', [0, -2, 2.0, True])
def test_refuses_bad_workers(split, workers):
  with pytest.raises(ValueError, match='workers must be an int >= 1, got'):
    split(BALANCED, workers)


@every_split
def test_refuses_more_workers_than_examples(split):
  with pytest.raises(ValueError, match=r"401 workers .*the 400 examples of data set 'made'"):
    split(BALANCED, 401)


def test_iid_is_even_and_not_in_order():
  parts = splits.iid(make_dataset(np.zeros(10)), 4)
  assert [part.size for part in parts] == [3, 3, 2, 2]
  assert parts[0].tolist() != [0, 1, 2]


def _counts(parts, labels) -> np.ndarray:
  return np.array([np.bincount(labels[part], minlength=10) for part in parts])


def test_dirichlet_concentration():
  labels = np.repeat(np.arange(10), 1000)
  data = make_dataset(labels)
  near_iid = _counts(splits.dirichlet(data, 5, alpha=1e6), labels)
  np.testing.assert_allclose(near_iid, 200, atol=3)
  sharp = _counts(splits.dirichlet(data, 5, alpha=1e-3), labels)
  assert np.mean(sharp.max(axis=0)) > 990  # nearly every class has one owner
  middle = _counts(splits.dirichlet(data, 5, alpha=1.0), labels)
  assert 300 < np.mean(middle.max(axis=0)) < 700  # the mean largest of 5 uniform shares is 0.457


def test_dirichlet_proportions_have_the_variance_of_dirichlet():
  labels = np.repeat(np.arange(400), 1000)  # 400 draws of proportions over 4 workers
  parts = splits.dirichlet(make_dataset(labels), 4, alpha=0.5)
  shares = np.array([np.bincount(labels[part], minlength=400) for part in parts]) / 1000
  # Dirichlet(a, a, a, a): mean 1/4, variance (1/4)(3/4) / (4 a + 1).
  np.testing.assert_allclose(shares.mean(axis=1), 0.25, atol=0.05)
  np.testing.assert_allclose(shares.var(axis=1), 0.1875 / 3, rtol=0.2)


def test_dirichlet_repairs_small_parts():
  data = make_dataset(np.arange(40) % 2)
  before = splits.dirichlet(data, 8, alpha=0.01)
  assert min(part.size for part in before) == 1  # without repair some would be empty: 2 classes
  assert [part.size for part in splits.dirichlet(data, 8, alpha=0.01, min_examples=5)] == [5] * 8


@pytest.mark.parametrize('alpha', [0, -1.0, float('nan'), float('inf')])
def test_dirichlet_refuses_alpha(alpha):
  with pytest.raises(ValueError, match=f'alpha must be finite and > 0, got {alpha}'):
    splits.dirichlet(BALANCED, 4, alpha=alpha)


def test_dirichlet_refuses_too_large_a_minimum():
  with pytest.raises(ValueError, match='4 workers with at least 101 examples each need more than'):
    splits.dirichlet(BALANCED, 4, min_examples=101)
  with pytest.raises(ValueError, match='min_examples must be an int >= 1, got 0'):
    splits.dirichlet(BALANCED, 4, min_examples=0)


def test_classes_per_worker_with_aligned_shards():
  labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 20))
  parts = splits.classes_per_worker(make_dataset(labels), 5, classes=2)
  assert [part.size for part in parts] == [40] * 5
  owners = _counts(parts, labels)
  assert ((owners == 0) | (owners == 20)).all()  # ten shards, each a whole class
  assert (np.count_nonzero(owners, axis=1) == 2).all()


def test_classes_per_worker_splits_a_class_at_random():
  labels = np.repeat(np.arange(2), 50)
  parts = splits.classes_per_worker(make_dataset(labels), 4, classes=1)
  assert all(len(set(labels[part])) == 1 for part in parts)
  assert any((np.diff(part) > 1).any() for part in parts)


def test_classes_per_worker_refusals():
  with pytest.raises(ValueError, match='classes must be an int >= 1, got 0'):
    splits.classes_per_worker(BALANCED, 4, classes=0)
  with pytest.raises(ValueError, match='4 workers with at least 101 examples'):
    splits.classes_per_worker(BALANCED, 4, classes=101)


@pytest.mark.parametrize('split', [splits.dirichlet, splits.classes_per_worker])
def test_label_splits_refuse_sequences_and_regression(split):
  with pytest.raises(ValueError, match=r"one class label an example; data set 'shakespeare'"):
    split(datasets.shakespeare(roles=2), 2)
  with pytest.raises(ValueError, match=r"one class label an example; data set 'quadratics'"):
    split(datasets.quadratics(clients=2, dimension=2, examples=4), 2)


def test_by_client_balances_greedily():
  sizes = [6, 5, 4, 2, 1]
  clients = np.random.default_rng(0).permutation(np.repeat(np.arange(5), sizes))
  parts = splits.by_client(make_dataset(np.zeros(18), clients), 2)
  # 6 to the first, 5 to the second, 4 to the second (5 < 6), 2 and 1 to the first (6, 8 < 9).
  assert [sorted(set(clients[part].tolist())) for part in parts] == [[0, 3, 4], [1, 2]]


@pytest.mark.parametrize('seed', [0, 1, 2])
def test_by_client_with_a_worker_each_is_the_identity(seed):
  clients = np.array([3, 1, 0, 2, 1, 3])
  parts = splits.by_client(make_dataset(np.zeros(6), clients), 4, seed=seed)
  assert [part.tolist() for part in parts] == [[2], [1, 4], [3], [0, 5]]


def test_by_client_keeps_roles_whole_and_balanced():
  data = datasets.shakespeare()
  parts = splits.by_client(data, 16)
  owners = [set(data.clients[part].tolist()) for part in parts]
  assert sum(map(len, owners)) == len(set().union(*owners)) == 598
  assert max(part.size for part in parts) < 1.02 * min(part.size for part in parts)


def test_by_client_refuses_fewer_clients_than_workers():
  with pytest.raises(ValueError, match="'digits' has 1 clients for 2 workers"):
    splits.by_client(datasets.digits(), 2)
