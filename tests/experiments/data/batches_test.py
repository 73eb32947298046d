"""Batches: a pure function of the step; evaluation that counts every example once."""

from __future__ import annotations

import time

import numpy as np
import pytest

from experiments.data import batches as batches_lib

PARTS = [np.arange(0, 10), np.arange(10, 13), np.array([20])]


def test_shape_and_type():
  result = batches_lib.Batches(PARTS, 4).indices(3, 5)
  assert result.shape == (5, 3, 4) and result.dtype == np.int32


def test_each_worker_walks_its_own_part_in_whole_epochs():
  walk = batches_lib.Batches(PARTS, 4).indices(0, 15)  # 60 places: 6, 20 and 60 epochs
  for worker, part in enumerate(PARTS):
    epochs = walk[:, worker].reshape(-1, part.size)
    np.testing.assert_array_equal(np.sort(epochs, axis=1), np.tile(part, (len(epochs), 1)))


def test_epochs_workers_and_seeds_have_different_orders():
  parts = [np.arange(50), np.arange(50)]
  first, second = batches_lib.Batches(parts, 50).indices(0, 2)
  other = batches_lib.Batches(parts, 50, seed=1).indices(0)[0]
  orders = [*first.tolist(), *second.tolist(), *other.tolist(), list(range(50))]
  assert len({tuple(order) for order in orders}) == 7


def test_every_order_is_as_likely():
  walk = batches_lib.Batches([np.arange(3)], 3).indices(0, 6000)[:, 0]
  _, counts = np.unique(walk, axis=0, return_counts=True)
  assert len(counts) == 6
  np.testing.assert_allclose(counts, 1000, atol=150)  # five standard deviations


@pytest.mark.parametrize('batch_size', [1, 3, 4, 10, 25])
def test_steps_do_not_depend_on_how_they_are_asked_for(batch_size):
  whole = batches_lib.Batches(PARTS, batch_size, seed=5).indices(0, 12)
  one_by_one = batches_lib.Batches(PARTS, batch_size, seed=5)
  for step in (5, 6, 7, 0, 11, 3):  # out of order, through the cache
    np.testing.assert_array_equal(one_by_one.indices(step)[0], whole[step])
  np.testing.assert_array_equal(one_by_one.indices(5, 3), whole[5:8])
  resumed = batches_lib.Batches(PARTS, batch_size, seed=5)
  np.testing.assert_array_equal(resumed.indices(7, 5), whole[7:])


def test_a_worker_does_not_depend_on_the_parts_of_others():
  alone = batches_lib.Batches(PARTS[:1], 4).indices(0, 9)
  np.testing.assert_array_equal(alone[:, 0], batches_lib.Batches(PARTS, 4).indices(0, 9)[:, 0])


@pytest.mark.parametrize(('batch_size', 'steps'), [(1, 10), (3, 4), (5, 2), (10, 1), (11, 1)])
def test_epoch_steps(batch_size, steps):
  assert batches_lib.Batches(PARTS, batch_size).epoch_steps == steps


def test_is_fast():
  batches = batches_lib.Batches([np.arange(w * 500, w * 500 + 500) for w in range(64)], 16)
  start = time.perf_counter()
  for step in range(0, 300, 10):
    batches.indices(step, 10)
  assert time.perf_counter() - start < 2  # about 0.1 s: 19,200 batches


@pytest.mark.parametrize('batch_size', [0, -1, 2.0, None, True])
def test_refuses_batch_size(batch_size):
  message = f'batch_size must be an int >= 1, got {batch_size}'
  with pytest.raises(ValueError, match=message):
    batches_lib.Batches(PARTS, batch_size)
  with pytest.raises(ValueError, match=message):  # at the call, before the first batch is drawn
    batches_lib.evaluation_batches(np.zeros(3), np.zeros(3), batch_size)


def test_refuses_parts_and_steps():
  with pytest.raises(ValueError, match='parts must hold one index array a worker, got none'):
    batches_lib.Batches([], 1)
  with pytest.raises(ValueError, match=r'parts\[1\] must be a non-empty vector, got shape \(0,\)'):
    batches_lib.Batches([np.arange(2), np.arange(0)], 1)
  with pytest.raises(ValueError, match=r'parts\[0\] must be a non-empty vector'):
    batches_lib.Batches([np.zeros((2, 2))], 1)
  with pytest.raises(ValueError, match='seed must be an int >= 0, got -1'):
    batches_lib.Batches(PARTS, 1, seed=-1)
  with pytest.raises(ValueError, match='step must be an int >= 0, got -1'):
    batches_lib.Batches(PARTS, 1).indices(-1)
  with pytest.raises(ValueError, match='steps must be an int >= 1, got 0'):
    batches_lib.Batches(PARTS, 1).indices(0, 0)


def test_evaluation_counts_ten_examples_in_fours():
  targets = np.array([1, 1, 1, 0, 1, 0, 1, 1, 0, 1], np.int32)  # 7 of 10 are 1
  right = count = 0.0
  for inputs, labels, mask in batches_lib.evaluation_batches(np.ones(10), targets, 4):
    assert inputs.shape == labels.shape == mask.shape == (4,) and mask.dtype == np.float32
    right += float(((labels == inputs) * mask).sum())  # padding: 0 == 0 would count as right
    count += float(mask.sum())
  assert right / count == 0.7


@pytest.mark.parametrize('batch_size', [1, 2, 5, 9])
def test_evaluation_keeps_order_shape_and_type(batch_size):
  inputs = np.arange(5 * 2 * 3, dtype=np.float32).reshape(5, 2, 3) + 1
  targets = np.arange(10, dtype=np.int32).reshape(5, 2) + 1
  triples = list(batches_lib.evaluation_batches(inputs, targets, batch_size))
  assert len(triples) == -(-5 // batch_size)
  assert all(x.shape == (batch_size, 2, 3) and x.dtype == np.float32 for x, _, _ in triples)
  assert all(y.shape == (batch_size, 2) and y.dtype == np.int32 for _, y, _ in triples)
  x, y, mask = (np.concatenate(arrays) for arrays in zip(*triples, strict=True))
  assert mask.tolist() == [1.0] * 5 + [0.0] * (len(mask) - 5)
  np.testing.assert_array_equal(x[:5], inputs)
  np.testing.assert_array_equal(y[:5], targets)
  assert not x[5:].any() and not y[5:].any()


def test_evaluation_refuses_lengths_that_differ():
  with pytest.raises(ValueError, match='got 3 inputs, but 4 targets'):
    batches_lib.evaluation_batches(np.zeros(3), np.zeros(4), 2)


def test_worker_batch():
  assert batches_lib.worker_batch(12, 4) == 3
  with pytest.raises(ValueError, match='global_batch 10 is not divisible by 4 .*; take 8 or 12$'):
    batches_lib.worker_batch(10, 4)
  with pytest.raises(ValueError, match='global_batch 3 is not divisible by 4 workers; take 4$'):
    batches_lib.worker_batch(3, 4)
  with pytest.raises(ValueError, match='global_batch must be an int >= 1, got 0'):
    batches_lib.worker_batch(0, 4)
