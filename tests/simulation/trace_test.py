"""What a trace accepts, counts and keeps in its file."""

import dataclasses

import numpy as np
import pytest

from jax_dsgd import simulation


def events(**changes):
  """Two workers: 0 pushes twice, then 1 pushes work that is two updates old."""
  fields = dict(
    seconds=[0, 0, 1, 2, 2.5, 3],
    worker=[0, 1, 0, 0, 1, 0],
    pushes=[False, False, True, True, True, False],
    pulls=[True, True, True, False, True, True],
    staleness=[0, 0, 0, 0, 2, 0],
    steps=[0, 0, 1, 1, 4, 0],
    examples=[0, 0, 8, 8, 16, 0],
    started=[0, 0, 0, 1, 0, 3],
    workers=2,
  )
  return simulation.EventTrace(**{**fields, **changes})


def rounds(**changes):
  """Three workers: 2 is called off in the first round, and late in the second."""
  fields = dict(
    seconds=[1, 3],
    active=[[True, True, False], [False, True, True]],
    steps=[[1, 2, 0], [0, 1, 1]],
    weight=[[0.5, 0.5, 0], [0, 0.3, 0.7]],
    staleness=[[0, 0, 0], [0, 0, 1]],
    group=[[0, 0, -1], [-1, 5, 5]],
    started=[[0, 0, 0], [np.nan, 1, 1]],
    finished=[[1, 1, 1], [np.nan, 2, 3]],
  )
  return simulation.RoundTrace(**{**fields, **changes})


def test_dtypes_are_those_of_the_format():
  trace = events()
  assert trace.shard.tolist() == trace.worker.tolist()
  dtypes = {field.name: getattr(trace, field.name) for field in dataclasses.fields(trace)}
  assert dtypes.pop('workers') == 2
  assert {name: str(array.dtype) for name, array in dtypes.items()} == {
    'seconds': 'float64',
    'worker': 'int32',
    'pushes': 'bool',
    'pulls': 'bool',
    'staleness': 'int32',
    'steps': 'int32',
    'examples': 'int32',
    'started': 'float64',
    'shard': 'int32',
  }
  assert rounds().weight.dtype == np.float32 and rounds().workers == 3
  with pytest.raises(ValueError, match='read-only'):
    trace.seconds[0] = 1


def test_bytes_by_hand():
  assert events().link_bytes(up=100, down=1).tolist() == [203, 102]
  assert rounds().server_bytes(up=100, down=1).tolist() == [101, 202, 102]
  # Groups {0, 1} and {1, 2}: in a pair each sends half of the bytes twice.
  assert rounds().pair_bytes(8).tolist() == [[0, 8, 0], [8, 0, 8], [0, 8, 0]]
  three = rounds(
    active=np.ones((2, 3)),
    steps=np.ones((2, 3)),
    group=np.zeros((2, 3)),
    started=np.zeros((2, 3)),
    finished=np.ones((2, 3)),
  )
  assert three.pair_bytes(3).tolist() == [[0, 8, 0], [0, 0, 8], [8, 0, 0]]


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'staleness': [0, 0, 0, 0, 1, 0]}, r'staleness\[4\] must be 2, the updates since worker 1'),
    ({'staleness': [0, 0, 0, 0, 3, 0]}, r'staleness\[4\] must be 2, .* not 3'),
    ({'staleness': [0, 0, 0, 0, 2, 1]}, r'staleness\[5\] must be 0'),
    ({'pulls': [True, True, False, True, True, True]}, r'pushes\[3\] must follow a pull'),
    ({'pushes': [False] * 6, 'pulls': [True] * 6}, r'must be >= 1 where pushes, 0 elsewhere'),
    ({'pulls': [True, False, True, False, True, True]}, r'pushes\[1\] must be true where pulls'),
    ({'seconds': [0, 1, 1, 2, 2.5, 3]}, r'pushes\[1\] must begin with a pull at time 0'),
    ({'seconds': [0, 0, 2, 1, 2.5, 3]}, r'seconds\[3\] must not decrease, not 1'),
    ({'worker': [0, 1, 0, 0, 2, 0]}, r'worker\[4\] must be from 0 to 1, not 2'),
    ({'shard': [0, 1, 0, 0, -1, 0]}, r'shard\[4\] must be from 0 to 1, not -1'),
    ({'steps': [0, 0, 0, 1, 4, 0]}, r'steps\[2\] must be >= 1 where pushes'),
    ({'examples': [0, 0, 8, 8, 16, 1]}, r'examples\[5\] must be'),
    ({'started': [0, 0, 0, 2.5, 0, 3]}, r'started\[3\] must be from 0 to seconds'),
    ({'steps': [0, 0, 1.5, 1, 4, 0]}, r'steps must be int32, not float64'),
    ({'steps': ['a'] * 6}, r'steps must be int32'),
    ({'steps': [1]}, r'steps must be of shape \[E\], not \[1\]'),
    ({'workers': 0}, r'workers must be an int >= 1, not 0'),
  ],
)
def test_events_that_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    events(**changes)


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'seconds': [3, 1]}, r'seconds\[1\] must not decrease'),
    ({'seconds': [1]}, r'seconds must be of shape'),
    ({'active': [True, False]}, r'must be of shape \[T, W\]'),
    ({'steps': [[1, 2, 1], [0, 1, 1]]}, r'steps\[0, 2\] must be >= 1 where active and 0 else'),
    ({'steps': [[0, 2, 0], [0, 1, 1]]}, r'steps\[0, 0\] must be >= 1'),
    ({'weight': [[0.5, -0.5, 0], [0, 0.3, 0.7]]}, r'weight\[0, 1\] must be finite and >= 0'),
    ({'weight': [[0.5, 0.5, 0], [0.1, 0.3, 0.7]]}, r'weight\[1, 0\] must be 0 where not active'),
    ({'weight': [[0.5, np.nan, 0], [0, 0.3, 0.7]]}, r'weight\[0, 1\] must be finite'),
    ({'staleness': [[0, -1, 0], [0, 0, 1]]}, r'staleness\[0, 1\] must be >= 0, not -1'),
    ({'group': [[0, -1, -1], [-1, 5, 5]]}, r'group\[0, 1\] must be >= 0 where active'),
    ({'group': [[0, 0, 0], [-1, 5, 5]]}, r'group\[0, 2\] must be .* -1 elsewhere'),
    ({'finished': [[1, 1, 1], [np.nan, 0.5, 3]]}, r'finished\[1, 1\] must be >= started'),
    ({'finished': [[1, 1, np.nan], [np.nan, 2, 3]]}, r'finished\[0, 2\] must be'),
  ],
)
def test_rounds_that_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    rounds(**changes)


@pytest.mark.parametrize('make', [events, rounds])
def test_a_file_keeps_everything(make, tmp_path):
  trace, path = make(), tmp_path / 'a_trace'
  trace.save(path)
  assert path.exists()
  back = type(trace).load(path, workers=trace.workers)
  for field in dataclasses.fields(trace):
    np.testing.assert_array_equal(getattr(back, field.name), getattr(trace, field.name))


def test_files_that_are_refused(tmp_path):
  path = tmp_path / 'trace.npz'
  events().save(path)
  with pytest.raises(ValueError, match=r'must hold a RoundTrace, not EventTrace'):
    simulation.RoundTrace.load(path)
  with pytest.raises(ValueError, match=r'must be of 3 workers, not 2'):
    simulation.EventTrace.load(path, workers=3)
  with np.load(path) as file:
    read = {name: file[name] for name in file.files}
  np.savez(path, **{**read, 'steps': read['steps'].astype(np.int64)})
  with pytest.raises(ValueError, match=r'steps must be int32, not int64'):
    simulation.EventTrace.load(path)
  np.savez(path, **{**read, 'staleness': read['staleness'] + 1})
  with pytest.raises(ValueError, match=r'staleness\[0\] must be 0'):
    simulation.EventTrace.load(path)
  del read['steps']
  np.savez(path, **read)
  with pytest.raises(ValueError, match=r'must hold seconds, .*steps'):
    simulation.EventTrace.load(path)
  np.savez(path, a=np.ones(2))
  with pytest.raises(ValueError, match=r'not a file without a kind'):
    simulation.EventTrace.load(path)
  path.write_text('no trace')
  with pytest.raises(ValueError, match=r'must be a file of EventTrace.save'):
    simulation.EventTrace.load(path)
  with pytest.raises(FileNotFoundError):
    simulation.EventTrace.load(tmp_path / 'none')
