import json

import numpy as np
import pytest
from matplotlib import colors
from matplotlib.figure import Figure

from configs import base
from experiments import timeline
from jax_dsgd import clusters, simulation

PAIR = clusters.with_stragglers(2, fraction=0.5, factor=3.0)


def _bars(axes):
  return sorted(
    (round(bar.get_y() + bar.get_height() / 2), bar.get_x(), bar.get_x() + bar.get_width())
    for bar in axes.patches
  )


def test_a_chart_of_events_has_a_bar_a_task_and_a_dot_a_push():
  trace = simulation.simulate_events(PAIR, simulation.bsp(), until=6.5)
  axes = Figure().subplots()
  timeline.gantt(axes, trace)
  assert _bars(axes) == [(0, 0, 1), (0, 3, 4), (1, 0, 3), (1, 3, 6)]
  (dots,) = axes.lines
  assert sorted(zip(*dots.get_data(), strict=True)) == [(1, 0), (3, 1), (4, 0), (6, 1)]
  assert axes.get_xlabel() == 'simulated seconds'


def test_a_chart_of_rounds_joins_who_meets_and_greys_what_is_called_off():
  trace = simulation.simulate_rounds(PAIR, simulation.bulk(), rounds=2)
  axes = Figure().subplots()
  timeline.gantt(axes, trace, until=4)
  assert _bars(axes) == [(0, 0, 1), (0, 3, 4), (1, 0, 3), (1, 3, 6)]
  (line,) = axes.lines
  assert [x.tolist() for x in line.get_data()] == [[3, 3], [0, 1]]

  trace = simulation.simulate_rounds(PAIR, simulation.fastest(1), rounds=1)
  axes = Figure().subplots()
  timeline.gantt(axes, trace)
  assert _bars(axes) == [(0, 0, 1), (1, 0, 1)]
  kept, lost = (colors.to_hex(bar.get_facecolor()) for bar in axes.patches)
  assert kept != lost == '#d0d0d0'


@pytest.fixture
def workdirs(tmp_path):
  """Two simulated runs as they are on disk; the second goes on after the first has ended."""
  made = []
  for i, (name, losses) in enumerate((('slow', [4, 3, 2]), ('quick', [3, 2, 1, 0.5]))):
    folder = tmp_path / f'0{i}_variant={name}'
    folder.mkdir()
    config = base.get_base().to_dict() | {'cluster': {'name': 'uniform'}, 'policy': {'name': 'asp'}}
    (folder / 'config.json').write_text(json.dumps(config))
    lines = [
      {'step': 2 * k, 'simulated_seconds': 10.0 * k, 'bytes_sent': 1e6 * k, 'test_loss': loss}
      for k, loss in enumerate(losses, 1)
    ]
    (folder / 'metrics.jsonl').write_text('\n'.join(map(json.dumps, lines)) + '\n')
    made.append(str(folder))
  return made


def test_the_table_compares_at_equal_seconds(workdirs):
  head, _, *rows = timeline.table(workdirs).splitlines()
  assert head.split() == 'run test loss accuracy MB a worker steps sim. s to 2'.split()
  assert [row.split() for row in rows] == [
    ['slow', '2', '-', '3.000', '6', '30.0', '30.0'],
    ['quick', '1', '-', '3.000', '6', '30.0', '20.0'],
  ]


def test_the_figure_of_several_is_written(workdirs, tmp_path):
  timeline.compare(workdirs, str(tmp_path / 'compare.png'))
  assert (tmp_path / 'compare.png').stat().st_size > 10_000


def test_runs_without_a_cluster_are_refused(workdirs):
  lines = f'{workdirs[0]}/metrics.jsonl'
  with open(lines, 'w') as file:
    file.write(json.dumps({'step': 1, 'bytes_sent': 1.0, 'test_loss': 1.0}) + '\n')
  with pytest.raises(
    base.ConfigError, match='has no simulated seconds: its config names no cluster'
  ):
    timeline.table(workdirs)


def test_a_report_shows_the_beginning_of_the_trace():
  trace = simulation.simulate_events(PAIR, simulation.asp(), until=100)
  assert timeline._beginning(trace) == 8
  assert timeline._beginning(simulation.simulate_rounds(PAIR, simulation.bulk(), rounds=4)) == 12
  assert np.isfinite(trace.seconds).all()
