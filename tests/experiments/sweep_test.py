import pathlib
import shlex
import subprocess
import sys

import pytest

from configs import base
from experiments import sweep, train

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = """
from configs import base

def get_config(variant='dense'):
  config = base.get_base()
  config.update(steps=2, log_every=1, eval_every=2, batch_size=16, workers=2)
  config.model = {'name': 'mlp', 'hidden': (4,)}
  algorithms = {
    'dense': {'name': 'allreduce_sgd', 'learning_rate': 0.1},
    'sign': {'name': 'signum', 'learning_rate': 0.01},
  }
  variants = {name: {'algorithm': value} for name, value in algorithms.items()}
  return base.select(config, variants, variant)
"""
SWEEP = """
def sweep(add):
  add()
  add(variant='sign')
  add(variant='sign', **{'algorithm.learning_rate': 0.02, 'split.name': 'iid'})
"""


@pytest.fixture
def path(tmp_path):
  file = tmp_path / 'tiny.py'
  file.write_text(CONFIG + SWEEP)
  return str(file)


def test_settings_are_in_order_with_their_names(path):
  runs = sweep.settings(path)
  names = ['00_default', '01_variant=sign']
  names += ['02_variant=sign,algorithm.learning_rate=0.02,split.name=iid']
  assert [run.name for run in runs] == names
  assert [run.config.algorithm.name for run in runs] == ['allreduce_sgd', 'signum', 'signum']
  assert [run.config.algorithm.learning_rate for run in runs] == [0.1, 0.01, 0.02]


def test_common_overrides_reach_every_run(path):
  runs = sweep.settings(path, {'seed': 5})
  assert [run.config.seed for run in runs] == [5, 5, 5]
  assert all('--config.seed=5' in run.command(path, 'd') for run in runs)


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    (CONFIG, r'defines no sweep\(add\)$'),
    ('x = 1\n', r'defines no get_config\(variant\)$'),
    (CONFIG + "def sweep(add):\n  add(variant='sgn')\n", "no variant 'sgn'; did you mean 'sign'"),
    (CONFIG + 'def sweep(add):\n  add(sed=1)\n', "config has no field 'sed'; did you mean 'seed'"),
    (CONFIG + "def sweep(add):\n  add(seed='x')\n", '^config.seed: '),
  ],
)
def test_wrong_sweeps_are_refused_in_one_line(tmp_path, text, message):
  (tmp_path / 'wrong.py').write_text(text)
  with pytest.raises(base.ConfigError, match=message) as caught:
    sweep.settings(str(tmp_path / 'wrong.py'))
  assert '\n' not in str(caught.value)


def test_a_missing_file_is_refused():
  with pytest.raises(base.ConfigError, match='no such Python file'):
    sweep.settings('configs/nope.py')


def test_runs_are_done_compared_and_not_done_again(path, tmp_path, capsys, monkeypatch):
  runs, workdir = sweep.settings(path), tmp_path / 'runs'
  sweep.run(runs, str(workdir))
  printed = capsys.readouterr().out
  assert '[3/3] 02_variant=sign' in printed
  table = (workdir / 'table.txt').read_text()
  assert printed.count(table) == 1
  assert len(table.splitlines()) == 2 + 3
  assert (workdir / 'compare.png').stat().st_size > 10_000
  monkeypatch.setattr(train.build, 'experiment', None)
  sweep.run(runs, str(workdir))
  assert (workdir / 'table.txt').read_text() == table


def test_a_run_that_diverges_does_not_stop_the_others(path, tmp_path, capsys):
  runs = sweep.settings(path, {'algorithm.learning_rate': 1e30})[:1] + sweep.settings(path)[1:2]
  sweep.run(runs, str(tmp_path / 'runs'))
  assert 'stopped: the loss of worker 0 is nan at step 2' in capsys.readouterr().out
  table = (tmp_path / 'runs' / 'table.txt').read_text().splitlines()
  assert [row.split()[0] for row in table[2:]] == ['sign']
  with pytest.raises(base.ConfigError, match='none of the 1 runs came to its end'):
    sweep.run(runs[:1], str(tmp_path / 'runs'))


def test_dry_run_prints_commands_that_do_the_same(path, tmp_path):
  command = [sys.executable, '-m', 'experiments.sweep', f'--config={path}', '--config.seed=3']
  command += [f'--workdir={tmp_path / "runs"}', '--dry_run', '--index=2']
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
  assert done.returncode == 0, done.stderr
  (line,) = done.stdout.splitlines()
  workdir = tmp_path / 'runs' / '02_variant=sign,algorithm.learning_rate=0.02,split.name=iid'
  assert shlex.split(line) == [
    *('python', '-m', 'experiments.train', f'--config={path}:sign', '--config.seed=3'),
    *('--config.algorithm.learning_rate=0.02', '--config.split.name=iid', f'--workdir={workdir}'),
  ]
  assert not (tmp_path / 'runs').exists()
