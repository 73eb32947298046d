"""Feeds: pure functions of the step; drawn clients with their weights and steps; blocks in turn."""

import dataclasses

import numpy as np
import pytest

from experiments.data import batches, datasets, feeds

# Client c has examples 100 c, 100 c + 1, ...
SIZES = (3, 5, 8, 1, 20)
CLIENTS = [100 * c + np.arange(size) for c, size in enumerate(SIZES)]


def _drawn(**fields):
  given = {'workers': 2, 'period': 4, 'epochs': 2, **fields}
  return feeds.drawn_clients(CLIENTS, 3, **given)


def _client_of(indices):
  """The client of each worker and step, which all examples of a batch share."""
  clients = indices // 100
  assert (clients == clients[..., :1]).all()
  return clients[..., 0]


def test_own_parts_are_batches_without_control():
  parts = CLIENTS[:2]
  feed = feeds.own_parts(parts, 3, workers=2, seed=4)
  expected = batches.Batches(parts, 3, seed=4).indices(5, 2)
  np.testing.assert_array_equal(feed.indices(5, 2), expected)
  assert feed.control(5, 2) is None
  with pytest.raises(ValueError, match='^own_parts: 2 parts for 3 workers; accepted is one each$'):
    feeds.own_parts(parts, 3, workers=3)


def test_clients_stay_for_a_round_and_differ_within_it():
  clients = _client_of(_drawn().indices(0, 80)).reshape(20, 4, 2)
  assert (clients == clients[:, :1]).all()
  assert (clients[..., 0] != clients[..., 1]).all()
  assert set(clients.ravel()) == set(range(5))


def test_every_client_is_as_likely():
  clients = _client_of(_drawn(period=1).indices(0, 4000))
  np.testing.assert_allclose(np.bincount(clients.ravel()), 1600, atol=160)  # five deviations


def test_control_says_examples_and_steps_of_the_client():
  feed = _drawn()
  clients, control = _client_of(feed.indices(0, 40)), feed.control(0, 40)
  # Two epochs in batches of 3, at most the 4 steps of a round.
  steps = {0: 2, 1: 4, 2: 4, 3: 1, 4: 4}
  assert control.steps.tolist() == [[steps[c] for c in row] for row in clients]
  assert control.weight.tolist() == [[float(SIZES[c]) for c in row] for row in clients]
  assert (control.weight.dtype, control.steps.dtype) == (np.float32, np.int32)
  assert control.active is None


def test_a_client_goes_through_its_examples_in_epochs():
  feed = _drawn(workers=5, period=8)
  first = feed.indices(0, 8)
  (place,) = np.flatnonzero(_client_of(first)[0] == 2)
  walk = first[:, place].ravel()
  for epoch in walk.reshape(3, 8):
    assert sorted(epoch) == CLIENTS[2].tolist()
  assert walk[:8].tolist() != walk[8:16].tolist()


@pytest.mark.parametrize('step', [0, 3, 4, 7])
def test_steps_do_not_depend_on_how_they_are_asked_for(step):
  data = datasets.digits()
  blocks = feeds.class_blocks(
    [np.arange(700), np.arange(700, 1438)], 3, dataset=data, workers=2, steps=3, number=5
  )
  for feed in (_drawn(), blocks):
    np.testing.assert_array_equal(feed.indices(step, 9), feed.indices(0, 20)[step : step + 9])
  weight = _drawn().control(0, 20).weight[step : step + 9]
  np.testing.assert_array_equal(_drawn().control(step, 9).weight, weight)


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'workers': 6}, '^drawn_clients: 5 clients with examples for 6 places'),
    ({'period': 0}, '^period must be an int >= 1, got 0$'),
    ({'epochs': 1.5}, '^epochs must be an int >= 1, got 1.5$'),
    ({'seed': -1}, '^seed must be an int >= 0'),
  ],
)
def test_drawn_clients_refuse(fields, message):
  with pytest.raises(ValueError, match=message):
    _drawn(**fields)


def test_blocks_come_in_turn_and_each_is_walked_on():
  data = datasets.digits()
  part = np.flatnonzero(data.targets < 4)[:20]
  data = dataclasses.replace(data, outputs=4)
  feed = feeds.class_blocks([part], 2, dataset=data, workers=1, steps=3, number=2)
  walk = feed.indices(0, 60)[:, 0]
  upper = data.targets[walk] >= 2
  assert (upper == (np.arange(60) // 3 % 2 == 1)[:, None]).all()
  for half in (False, True):
    own = part[(data.targets[part] >= 2) == half]
    lap = walk[upper[:, 0] == half].ravel()[: own.size]
    assert sorted(lap) == own.tolist()


def test_a_worker_without_a_block_is_refused():
  data = datasets.digits()
  part = np.flatnonzero(data.targets < 4)
  with pytest.raises(ValueError, match=r'parts\[0\] must be a non-empty vector'):
    feeds.class_blocks([part], 2, dataset=data, workers=1, steps=3, number=5)
