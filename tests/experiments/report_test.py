import json

import numpy as np
import pytest
from matplotlib import image

from configs import base
from experiments import report


@pytest.fixture
def workdirs(tmp_path):
  """Two runs as they are on disk: the second sends a quarter and is evaluated once more."""
  made = []
  for i, (name, share) in enumerate((('dense', 4.0), ('sparse,split.name=iid', 1.0))):
    folder = tmp_path / f'0{i}_variant={name}'
    folder.mkdir()
    config = base.get_base().to_dict()
    (folder / 'config.json').write_text(json.dumps(config))
    lines = []
    for step in (10, 20, 30):
      line = {'step': step, 'seconds': step / 8, 'bytes_sent': share * 1e6 * step}
      line |= {'loss': 1 / step, 'consensus_distance': 0.0}
      if step != 10:
        line |= {'accuracy': 0.5 + step / 100, 'accuracy_worst': 0.25}
        line |= {'test_loss': 0.2, 'test_loss_worst': None}
      lines.append(json.dumps(line))
    (folder / 'metrics.jsonl').write_text('\n'.join(lines) + '\n{"step": 4')
    made.append(str(folder))
  return made


def test_load_reads_what_is_whole(workdirs):
  run = report.load(workdirs[1])
  assert run.name == 'sparse, split.name=iid'
  assert [line['step'] for line in run.lines] == [10, 20, 30]
  assert run.measure == 'accuracy'
  steps, accuracy = run.column('accuracy')
  assert steps.tolist() == [20, 30]
  assert accuracy.tolist() == [0.7, 0.8]
  assert np.isnan(run.column('test_loss_worst')[1]).all()


def test_table_has_a_row_a_run(workdirs):
  head, rule, dense, sparse = report.table(workdirs).splitlines()
  assert set(rule) == {'-'}
  assert head.split() == 'run test accuracy worst local MB a worker fewer steps seconds'.split()
  assert dense.split() == 'dense 80.00% 25.00% 120.000 1.0 x 30 3.8'.split()
  assert sparse.split()[-7:] == '80.00% 25.00% 30.000 4.0 x 30 3.8'.split()
  assert len({len(line) for line in (head, rule, dense, sparse)}) == 1


def test_table_says_when_a_target_was_reached(workdirs):
  head, _, dense, sparse = report.table(workdirs, target=0.75).splitlines()
  assert head.split()[-4:] == ['steps', 'to', '0.75', 'MB']
  assert dense.split()[-2:] == ['30', '120.000']
  assert sparse.split()[-2:] == ['30', '30.000']
  assert report.table(workdirs, target=0.9).splitlines()[2].split()[-2:] == ['-', '-']
  run = report.load(workdirs[0])
  assert run.reached(0.7) == (20, 8e7)
  falling = run._replace(lines=[{k: v for k, v in x.items() if k != 'accuracy'} for x in run.lines])
  assert falling.reached(0.2) == (20, 8e7)
  assert falling.reached(0.1) is None


def test_table_shows_parts_of_the_test_set(workdirs):
  path = f'{workdirs[0]}/metrics.jsonl'
  line = {'step': 40, 'seconds': 1.0, 'bytes_sent': 1.0, 'accuracy': 0.5, 'accuracy_worst': 0.5}
  line |= {'test_loss': 1.0, 'accuracy_part0': 0.25, 'accuracy_part1': 0.75}
  with open(path, 'w') as file:
    file.write(json.dumps(line))
  head, _, dense = report.table(workdirs[:1]).splitlines()
  assert head.split()[-2:] == ['part0', 'part1']
  assert dense.split()[-2:] == ['25.00%', '75.00%']


def test_figure_shows_the_four_measures(workdirs):
  canvas = report.figure(report.load(workdirs[0]))
  assert 'simulated workers' in canvas.get_suptitle()
  loss, by_bytes, accuracy, consensus = canvas.axes
  assert loss.get_lines()[0].get_xdata().tolist() == [10, 20, 30]
  assert by_bytes.get_lines()[0].get_xdata().tolist() == [4e7, 8e7, 12e7]
  assert by_bytes.get_xscale() == 'log'
  legend = accuracy.get_legend()
  assert legend is not None
  assert [text.get_text() for text in legend.get_texts()] == ['averaged model', 'worst local model']
  assert [line.get_ydata()[-1] for line in accuracy.get_lines()] == [0.8, 0.25]
  assert consensus.get_yscale() == 'linear'  # all zero


def test_figures_are_written(workdirs, tmp_path):
  report.save_figure(workdirs[0])
  report.compare(workdirs, str(tmp_path / 'compare.png'))
  for path in (f'{workdirs[0]}/report.png', tmp_path / 'compare.png'):
    pixels = image.imread(path)
    assert min(pixels.shape[:2]) > 500
    assert pixels.std() > 0.05


def test_a_folder_without_a_run_is_refused(tmp_path):
  with pytest.raises(base.ConfigError, match='holds no run'):
    report.table([str(tmp_path)])


def test_runs_of_different_kinds_are_not_compared(workdirs):
  path = f'{workdirs[1]}/metrics.jsonl'
  line = {'step': 10, 'seconds': 1.0, 'bytes_sent': 1.0, 'loss': 1.0, 'test_loss': 1.0}
  with open(path, 'w') as file:
    file.write(json.dumps(line))
  with pytest.raises(base.ConfigError, match='cannot be compared'):
    report.table(workdirs)
