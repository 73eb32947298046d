import gzip
import pathlib
import re

import numpy as np
import pytest

from configs import base
from experiments import build, metrics, sweep, train

ROOT = pathlib.Path(__file__).parents[2]
NAMES = sorted(
  path.stem for path in (ROOT / 'configs').glob('*.py') if path.stem not in ('base', '__init__')
)


def _path(name):
  return str(ROOT / 'configs' / f'{name}.py')


def _write_idx(path, array):
  header = bytes((0, 0, 8, array.ndim)) + np.array(array.shape, '>u4').tobytes()
  path.write_bytes(gzip.compress(header + array.tobytes()))


@pytest.fixture(scope='session')
def fashion(tmp_path_factory):
  """A folder like Fashion-MNIST's with few images, of class c bright in row c."""
  folder = tmp_path_factory.mktemp('fashion')
  for part, count in (('train', 320), ('t10k', 40)):
    labels = np.arange(count, dtype=np.uint8) % 10
    images = np.zeros((count, 28, 28), np.uint8)
    images[np.arange(count), labels] = 255
    _write_idx(folder / f'{part}-images-idx3-ubyte.gz', images)
    _write_idx(folder / f'{part}-labels-idx1-ubyte.gz', labels)
  return str(folder)


def test_all_are_found():
  assert NAMES == [
    *('async_local_sgd', 'block_cyclic', 'compression', 'digits', 'fashion', 'fed_avg', 'gossip'),
    *('local_updates', 'quadratics', 'shakespeare', 'stragglers'),
  ]


@pytest.mark.parametrize('name', NAMES)
def test_smoke_variant_runs(name, tmp_path, fashion):
  config = base.load(_path(name)).get_config('smoke')
  if config.dataset.name == 'fashion_mnist':
    config.dataset.directory = fashion
  summary = train.run(config, str(tmp_path))
  assert summary['steps'] == config.steps
  assert np.isfinite(summary['test_loss'])
  assert summary['bytes_sent'] > 0
  assert (tmp_path / 'report.png').is_file()
  assert metrics.read(str(tmp_path))[-1]['step'] == config.steps


@pytest.mark.parametrize('name', NAMES)
def test_every_setting_of_the_sweep_builds(name, fashion):
  runs = sweep.settings(_path(name))
  assert len({run.name for run in runs}) == len(runs) >= 3
  for run in runs:
    if run.config.dataset.name == 'fashion_mnist':
      run.config.dataset.directory = fashion
    build.experiment(run.config)


def test_digits_sweeps_every_kind_of_method_and_majority_vote_without_the_skew():
  runs = sweep.settings(_path('digits'))
  assert [run.variant for run in runs] == [
    *('allreduce', 'topk', 'ef_sign', 'signum', 'choco', 'dsgd', 'local_sgd', 'fed_avg'),
    'signum_iid',
  ]
  assert len({run.config.algorithm.name for run in runs}) == 8
  assert {run.config.split.name for run in runs[:-1]} == {'dirichlet'}
  assert {run.config.split.alpha for run in runs[:-1]} == {0.3}
  assert runs[-1].config.split.name == 'iid'


@pytest.mark.parametrize('name', NAMES)
def test_docstring_says_what_to_expect_and_how(name):
  text = base.load(_path(name)).__doc__
  assert text is not None
  for word in ('Claim:', 'Expected', 'Time:', 'Command:'):
    assert word in text
  command = re.search(r'Command: `python -m experiments.sweep --config=(\S+) --workdir=\S+`', text)
  assert command is not None
  assert command[1] == f'configs/{name}.py'


@pytest.mark.parametrize('name', NAMES)
def test_schedules_follow_the_number_of_steps(name):
  config = base.load(_path(name)).get_config()
  config.steps = 77
  algorithm = config.to_dict()['algorithm']
  rate = algorithm.get('inner', algorithm)['learning_rate']
  assert rate['decay_steps'] == 77 if isinstance(rate, dict) else rate > 0


@pytest.mark.parametrize('name', NAMES)
def test_an_unknown_variant_is_refused_with_the_list(name):
  variant = sweep.settings(_path(name))[0].variant
  message = f"no variant '{variant}x'; did you mean '{variant}'\\? accepted: "
  with pytest.raises(base.ConfigError, match=message):
    base.load(_path(name)).get_config(f'{variant}x')


def test_base_is_locked_and_its_objects_are_open():
  config = base.get_base()
  with pytest.raises(AttributeError):
    config.log_evry = 1
  config.algorithm = {'name': 'dsgd', 'topology': {'name': 'ring'}}
  assert config.algorithm.topology.name == 'ring'


@pytest.mark.parametrize(
  ('values', 'message'),
  [
    ({'sed': 1}, "^config has no field 'sed'; did you mean 'seed'"),
    ({'algorithm.rate': 1}, "^config.algorithm has no field 'rate'; accepted: learning_rate, name"),
    ({'seed.x': 1}, "^config.seed has no field 'x'; accepted: none$"),
    ({'steps': 'many'}, '^config.steps: '),
  ],
)
def test_overrides_are_checked(values, message):
  with pytest.raises(base.ConfigError, match=message):
    base.override(base.get_base(), values)


def test_overrides_set_fields():
  config = base.get_base()
  base.override(config, {'steps': 3, 'split.name': 'dirichlet'})
  assert (config.steps, config.split.name) == (3, 'dirichlet')
