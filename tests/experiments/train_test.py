import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from absl import flags

from configs import base
from experiments import build, loop, metrics, train
from jax_dsgd import checkpoint

ROOT = pathlib.Path(__file__).parents[2]


def _config(**fields):
  config = base.get_base()
  config.update(workers=4, batch_size=32, steps=20, log_every=5, eval_every=10, checkpoint_every=10)
  config.split = {'name': 'dirichlet', 'alpha': 0.3, 'min_examples': 8}
  config.model = {'name': 'mlp', 'hidden': (8,)}
  config.algorithm = {
    'name': 'choco_sgd',
    'learning_rate': 0.1,
    'momentum': 0.9,
    'topology': {'name': 'ring'},
    'compressor': {'name': 'random_k', 'fraction': 0.5},
    'consensus_rate': 0.5,
  }
  with config.unlocked():
    for name, value in fields.items():
      config[name] = value
  return config


def _final_rows(config, workdir):
  like = loop.program(build.experiment(config)).init()
  with checkpoint.Checkpoints(os.path.join(workdir, 'checkpoints')) as checkpoints:
    return checkpoints.restore(like)


def _same_bits(left, right):
  leaves = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
  for a, b in leaves:
    if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
      a, b = jax.random.key_data(a), jax.random.key_data(b)
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_run_writes_everything(tmp_path):
  summary = train.run(_config(), str(tmp_path))
  there = {path.name for path in tmp_path.iterdir()}
  assert {'config.json', 'metrics.jsonl', 'summary.json', 'report.png', 'checkpoints'} <= there
  assert any(name.startswith('events.out.tfevents') for name in there)
  assert json.loads((tmp_path / 'config.json').read_text())['algorithm']['topology'] == {
    'name': 'ring'
  }
  lines = metrics.read(str(tmp_path))
  assert [line['step'] for line in lines] == [5, 10, 15, 20]
  assert [line['step'] for line in lines if 'accuracy' in line] == [10, 20]
  # random_k sends round(n / 2) values of 4 bytes a leaf of n to each of a ring's two neighbours.
  kept = sum(round(0.5 * n) for n in (64 * 8, 8, 8 * 10, 10))
  assert [line['bytes_sent'] for line in lines] == [2 * 4 * kept * step for step in (5, 10, 15, 20)]
  assert lines[-1]['loss'] < lines[0]['loss']
  assert lines[-1]['accuracy_worst'] <= lines[-1]['accuracy'] + 0.1
  assert lines[-1]['consensus_distance'] > 0
  assert all(a['seconds'] < b['seconds'] for a, b in zip(lines, lines[1:], strict=False))
  assert json.loads((tmp_path / 'summary.json').read_text()) == summary
  assert summary['steps'] == 20
  assert summary['entries'] == 64 * 8 + 8 + 8 * 10 + 10


def test_a_finished_run_is_not_run_again(tmp_path, monkeypatch):
  summary = train.run(_config(steps=5), str(tmp_path))
  monkeypatch.setattr(loop, 'train', None)
  assert train.run(_config(steps=5), str(tmp_path)) == summary


def test_an_interrupted_run_continues_to_the_same_bits(tmp_path, monkeypatch):
  train.run(_config(steps=25), str(tmp_path / 'whole'))

  # Killed while it writes the line of step 15, after the checkpoint of step 10.
  write = metrics.Writer.write

  def killed(writer, step, values):
    if step == 20:
      raise KeyboardInterrupt
    write(writer, step, values)

  with monkeypatch.context() as patch:
    patch.setattr(metrics.Writer, 'write', killed)
    with pytest.raises(KeyboardInterrupt):
      train.run(_config(steps=25), str(tmp_path / 'cut'))
  with open(tmp_path / 'cut' / 'metrics.jsonl', 'a') as file:
    file.write('{"step": 20, "loss"')
  assert not (tmp_path / 'cut' / 'summary.json').exists()
  assert [line['step'] for line in metrics.read(str(tmp_path / 'cut'))] == [5, 10, 15]
  train.run(_config(steps=25), str(tmp_path / 'cut'))

  whole, cut = (metrics.read(str(tmp_path / name)) for name in ('whole', 'cut'))
  assert [line['step'] for line in cut] == [5, 10, 15, 20, 25]
  for ours, theirs in zip(whole, cut, strict=True):
    assert {**ours, 'seconds': 0} == {**theirs, 'seconds': 0}
  _same_bits(*(_final_rows(_config(), tmp_path / name) for name in ('whole', 'cut')))


def test_a_longer_run_continues_a_finished_one_to_the_same_bits(tmp_path):
  for name, lengths in (('whole', [17]), ('longer', [7, 17])):
    for steps in lengths:
      train.run(_config(steps=steps), str(tmp_path / name))
  _same_bits(*(_final_rows(_config(), tmp_path / name) for name in ('whole', 'longer')))
  with pytest.raises(base.ConfigError, match='config.steps=7, but .* is at step 17 already'):
    train.run(_config(steps=7), str(tmp_path / 'longer'))


def test_a_mesh_gives_the_numbers_of_a_simulation(tmp_path):
  for name in ('simulate', 'mesh', 'spread'):
    config = _config(runtime=name, workers=8, steps=3, log_every=1, eval_every=3)
    train.run(config, str(tmp_path / name))
  simulated, *others = (
    metrics.read(str(tmp_path / name)) for name in ('simulate', 'mesh', 'spread')
  )
  for ours, theirs in [pair for lines in others for pair in zip(simulated, lines, strict=True)]:
    np.testing.assert_allclose(ours['loss'], theirs['loss'], rtol=1e-5)
    np.testing.assert_allclose(ours['consensus_distance'], theirs['consensus_distance'], rtol=1e-4)
    assert ours['bytes_sent'] == theirs['bytes_sent']
  for lines in others:
    assert simulated[-1]['accuracy'] == lines[-1]['accuracy']
    assert simulated[-1]['accuracy_worst'] == lines[-1]['accuracy_worst']


def test_a_round_of_drawn_clients_is_federated_averaging_by_hand():
  config = _config(
    clients=5,
    workers=2,
    batch_size=6,
    dataset={'name': 'quadratics', 'clients': 5, 'dimension': 4, 'examples': 9},
    split={'name': 'by_client'},
    model={'name': 'linear'},
    feed={'name': 'drawn_clients', 'period': 4},
    algorithm={'name': 'fed_avg', 'learning_rate': 0.1, 'period': 4},
  )
  experiment = build.experiment(config)
  feed = experiment.feed.indices(0, 4), experiment.feed.control(0, 4)
  assert feed[1].steps.tolist() == [[3, 3]] * 4  # an epoch of 9 in batches of 3
  rows, _, _ = (parts := loop.program(experiment)).advance(parts.init(), 0, 4)
  ends = []
  for client in range(2):
    x = np.zeros(4)
    for t in range(3):
      a = experiment.dataset.inputs[feed[0][t, client]]
      x -= 0.1 * a.T @ (a @ x - experiment.dataset.targets[feed[0][t, client]]) / 3
    ends.append(x)
  for row in np.asarray(rows['params']['layer_0']['kernel'])[..., 0]:
    np.testing.assert_allclose(row, np.mean(ends, axis=0), rtol=1e-5)


def test_one_program_serves_every_span_of_steps():
  config = _config(log_every=4, eval_every=7, checkpoint_every=100)
  experiment = build.experiment(config)
  parts = loop.program(experiment)
  rows = parts.init()
  rows, first, _ = parts.advance(rows, 0, 4)
  with NoCompilation():
    rows, second, _ = parts.advance(rows, 4, 3)
    parts.advance(rows, 7, 1)
  assert first.shape == (4, 4)
  assert second.shape == (3, 4)


class NoCompilation:
  def __enter__(self):
    self.events = []
    jax.monitoring.register_event_duration_secs_listener(self._listen)

  def _listen(self, event, duration, **_):
    if event == '/jax/core/compile/backend_compile_duration':
      self.events.append(event)

  def __exit__(self, *exception):
    jax.monitoring.unregister_event_duration_listener(self._listen)
    assert not self.events


def test_evaluation_is_that_of_the_averaged_and_of_the_worst_local_model():
  experiment = build.experiment(_config())
  parts = loop.program(experiment)
  rows, _, distance = parts.advance(parts.init(), 0, 5)
  measures = parts.evaluate(rows)

  def accuracy(params):
    x = experiment.dataset.test_inputs.reshape(-1, 64)
    x = np.maximum(x @ params['layer_0']['kernel'] + params['layer_0']['bias'], 0)
    logits = x @ params['layer_1']['kernel'] + params['layer_1']['bias']
    return np.mean(logits.argmax(1) == experiment.dataset.test_targets)

  params = jax.tree.map(np.asarray, rows['params'])
  each = [accuracy(jax.tree.map(lambda x: x[w], params)) for w in range(4)]  # noqa: B023
  mean = jax.tree.map(lambda x: x.mean(0), params)
  assert measures['accuracy'] == pytest.approx(accuracy(mean), abs=1e-6)
  assert measures['accuracy_worst'] == pytest.approx(min(each), abs=1e-6)
  assert min(each) < max(each)
  squares = sum(
    ((x - m) ** 2).sum() / 4
    for x, m in zip(jax.tree.leaves(params), jax.tree.leaves(mean), strict=True)
  )
  assert float(distance) == pytest.approx(np.sqrt(squares), rel=1e-4)


def test_a_diverged_run_names_its_step_and_keeps_its_lines(tmp_path):
  config = _config(algorithm={'name': 'allreduce_sgd', 'learning_rate': 1e30})
  with pytest.raises(FloatingPointError, match=r'loss of worker \d is nan at step \d+: '):
    train.run(config, str(tmp_path))
  assert not (tmp_path / 'summary.json').exists()
  for line in (tmp_path / 'metrics.jsonl').read_text().splitlines():
    assert np.isfinite(json.loads(line)['loss'])


def test_skipped_steps_are_counted(tmp_path, monkeypatch):
  real = build.datasets.digits

  def spoiled(*, test_fraction: float = 0.2, seed: int = 0) -> build.datasets.Dataset:
    dataset = real(test_fraction=test_fraction, seed=seed)
    dataset.inputs[7] = np.nan
    return dataset

  spoiled.__module__ = real.__module__
  monkeypatch.setattr(build.datasets, 'digits', spoiled)
  build.candidates.cache_clear()
  config = _config(steps=60, eval_every=60, checkpoint_every=60, skip_nonfinite=True)
  summary = train.run(config, str(tmp_path))
  build.candidates.cache_clear()
  indices = build.experiment(_config()).feed.indices(0, 60)
  assert summary['skipped'] == np.sum((indices == 7).any(axis=(1, 2))) > 0
  assert np.isfinite(summary['loss'])


def test_another_config_is_refused_by_its_first_field(tmp_path):
  train.run(_config(steps=5), str(tmp_path))
  before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob('*')}
  other = _config(steps=5)
  other.algorithm.compressor.fraction = 0.25
  other.seed = 1
  message = 'config.algorithm.compressor.fraction=0.5 and this one has 0.25; take another'
  with pytest.raises(base.ConfigError, match=message):
    train.run(other, str(tmp_path))
  with pytest.raises(base.ConfigError, match='config.model.hidden'):
    train.run(_config(steps=5, model={'name': 'mlp'}), str(tmp_path))
  assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob('*')}


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'batch_size': 33}, 'config.batch_size'),
    ({'algorithm': {'name': 'dsgd', 'learning_rate': 0.1}}, "needs the argument 'topology'"),
    ({'algorithm': {'name': 'allreduce_sgd', 'learning_rate': 0.1, 'momentum': 'x'}}, 'config: '),
  ],
)
def test_a_wrong_config_writes_nothing(tmp_path, fields, message):
  with pytest.raises(base.ConfigError, match=message):
    train.run(_config(**fields), str(tmp_path / 'new'))
  assert not (tmp_path / 'new').exists()


def test_a_workdir_that_is_a_file_is_refused(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(base.ConfigError, match='^--workdir=.*exists'):
    train.run(_config(), str(tmp_path / 'file'))


def test_regression_reports_the_loss_above_its_floor(tmp_path):
  config = _config(
    dataset={'name': 'quadratics', 'clients': 4, 'dimension': 3, 'examples': 8},
    split={'name': 'by_client'},
    model={'name': 'linear'},
    algorithm={'name': 'allreduce_sgd', 'learning_rate': 0.3},
    steps=300,
    log_every=100,
  )
  summary = train.run(config, str(tmp_path))
  assert 'accuracy' not in summary
  assert abs(summary['test_loss']) < 1e-5  # 1.4 above zero without the floor
  assert build.experiment(config).dataset.floor > 0.1


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (['--config=configs/digits.py:smok'], "config has no variant 'smok'; did you mean 'smoke'?"),
    (
      ['--config=configs/digits.py', '--config.algorithm.learning_rte=1'],
      "config.algorithm has no field 'learning_rte'; did you mean 'learning_rate'? accepted: ",
    ),
    (['--config=configs/digits.py', '--config.steps=abc'], '--config.steps=abc: invalid literal'),
    (['--config=configs/nope.py'], "No such file or directory: 'configs/nope.py'"),
    (['--config=configs/digits.py', '--nope=1'], "Unknown command line flag 'nope'"),
  ],
)
@pytest.mark.filterwarnings('ignore:the load_module:DeprecationWarning')  # of ml_collections
def test_a_wrong_command_is_refused_in_one_line(arguments, message, monkeypatch):
  argv = ['train', '--workdir=unused', *arguments]
  monkeypatch.chdir(ROOT)
  monkeypatch.setattr(sys, 'argv', argv)
  try:
    with pytest.raises(base.ConfigError) as caught:
      train.parse_flags(argv)
  finally:
    flags.FLAGS.unparse_flags()
  assert message in str(caught.value)
  assert '\n' not in str(caught.value)


def test_the_program_ends_with_one_line_and_no_traceback(tmp_path):
  command = [sys.executable, '-m', 'experiments.train', '--config=configs/digits.py:smoke']
  command += ['--config.nope=1', f'--workdir={tmp_path / "new"}']
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
  assert done.returncode == 1
  last = done.stderr.strip().splitlines()[-1]
  assert last.startswith("error: config has no field 'nope'; accepted: algorithm, batch_size, ")
  assert 'Traceback' not in done.stderr
  assert not (tmp_path / 'new').exists()


def test_the_program_trains(tmp_path):
  command = [sys.executable, '-m', 'experiments.train', '--config=configs/digits.py:smoke']
  command += ['--config.seed=1', f'--workdir={tmp_path}']
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
  assert done.returncode == 0, done.stderr
  first, last = done.stdout.splitlines()
  assert first.startswith('8 simulated workers, a model of ')
  assert first.endswith('B a worker a step')
  assert last.startswith('accuracy ')
  assert 'steps/s' in done.stderr
  assert 'checkpoint_manager' not in done.stderr
