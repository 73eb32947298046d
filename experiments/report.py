"""Figures and tables of runs, from what they wrote.

`python -m experiments.report --output=compare.png WORKDIR...` compares several, and with
`--target=2.5` says after how many steps and bytes each was first so good.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import app, flags
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from configs import base
from experiments import metrics

# Okabe and Ito's colours that read on white, told apart by everybody; a marker and a dash as well.
_COLOURS = ('#000000', '#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#7F7F7F')
_MARKERS = 'osD^vPX*<>'
_DASHES = ('-', '--', '-.', ':')
_MEASURES = {'accuracy': 'test accuracy', 'test_loss': 'test loss'}


class Run(NamedTuple):
  """What a workdir holds.

  Attributes:
    name: the folder's name without its number.
    config: `config.json`.
    lines: `metrics.jsonl`.
  """

  name: str
  config: dict[str, Any]
  lines: list[dict[str, Any]]

  def column(self, name: str, *, along: str = 'step') -> tuple[np.ndarray, np.ndarray]:
    """One measure along another, from the lines that have it; null is nan."""
    pairs = [(line[along], line[name]) for line in self.lines if name in line]
    x, y = np.array(pairs, float).reshape(-1, 2).T
    return x, y

  def reached(self, target: float) -> tuple[int, float] | None:
    """Steps and bytes at the first evaluation that is as good as a target; None if none is."""
    for line in self.lines:
      value = line.get(self.measure)
      if value is not None and (value - target) * (1 if self.measure == 'accuracy' else -1) >= 0:
        return line['step'], line['bytes_sent']
    return None

  @property
  def measure(self) -> str:
    """What runs of this kind are compared by: 'accuracy', or 'test_loss' where there is none."""
    return 'accuracy' if 'accuracy' in self.lines[-1] else 'test_loss'


def load(workdir: str) -> Run:
  """Reads what a workdir holds.

  Raises:
    base.ConfigError: a folder without a run, or without an evaluation yet.
  """
  lines = metrics.read(workdir)
  while lines and 'test_loss' not in lines[-1]:
    lines.pop()
  path = os.path.join(workdir, metrics.CONFIG)
  if not lines or not os.path.isfile(path):
    raise base.ConfigError(f'{workdir} holds no run with an evaluation')
  with open(path, encoding='utf-8') as file:
    config = json.load(file)
  name = re.sub(r'^\d+_', '', os.path.basename(os.path.normpath(workdir)))
  return Run(name.replace('variant=', '').replace(',', ', '), config, lines)


def figure(run: Run) -> Figure:
  """The report of one run: loss against steps and bytes, averaged and worst model, consensus."""
  canvas = Figure(figsize=(10, 7.2), layout='constrained', dpi=120)
  grid = canvas.subplots(2, 2)
  settings = run.config
  kind = 'workers on a mesh' if settings['runtime'] == 'mesh' else 'simulated workers'
  canvas.suptitle(
    f'{settings["algorithm"]["name"]} on {settings["dataset"]["name"]}, '
    f'{settings["workers"]} {kind}, {settings["split"]["name"]} split',
    fontsize=13,
  )
  for axes, along in ((grid[0, 0], 'step'), (grid[0, 1], 'bytes_sent')):
    _line(axes, *run.column('loss', along=along), index=1, label='mean of the workers')
    _log_if_positive(axes, 'y', run.column('loss')[1])
    if along == 'bytes_sent':
      _log_if_positive(axes, 'x', run.column(along)[1])
    _name(axes, along, 'training loss')
  axes = grid[1, 0]
  _line(axes, *run.column(run.measure), index=1, label='averaged model')
  _line(axes, *run.column(f'{run.measure}_worst'), index=2, label='worst local model')
  if run.measure == 'test_loss':
    _log_if_positive(axes, 'y', run.column('test_loss')[1])
  _name(axes, 'step', _MEASURES[run.measure])
  axes.legend(frameon=False)
  steps, distance = run.column('consensus_distance')
  _line(grid[1, 1], steps, distance, index=3, label='')
  _log_if_positive(grid[1, 1], 'y', distance)
  _name(grid[1, 1], 'step', 'distance of models from their mean')
  return canvas


def save_figure(workdir: str) -> None:
  """Writes `report.png` into a workdir, from the first process."""
  if jax.process_index():
    return
  figure(load(workdir)).savefig(os.path.join(workdir, 'report.png'))


def compare(workdirs: Sequence[str], output: str) -> None:
  """Draws runs of one problem into one figure: a line a run, against steps and against bytes.

  Of the averaged model; and against steps of the worst local one, which gossip leaves behind.

  Args:
    workdirs: of runs that have the same measure.
    output: the file, in a format that matplotlib knows by its ending.
  """
  runs = _same_measure(workdirs)
  measure = runs[0].measure
  canvas = Figure(figsize=(15, 5.4), layout='constrained', dpi=120)
  panels = (('step', ''), ('step', '_worst'), ('bytes_sent', ''))
  grid = canvas.subplots(1, 3, sharey=True)
  for axes, (along, which) in zip(grid, panels, strict=True):
    for index, run in enumerate(runs):
      _line(axes, *run.column(run.measure + which, along=along), index=index, label=run.name)
    if along == 'bytes_sent':
      _log_if_positive(axes, 'x', np.concatenate([run.column(along)[1] for run in runs]))
    if measure == 'test_loss':
      _log_if_positive(axes, 'y', np.concatenate([run.column(measure)[1] for run in runs]))
    _name(axes, along, _MEASURES[measure])
    axes.set_title('worst local model' if which else 'averaged model')
  for axes in grid[1:]:
    axes.set_ylabel('')
  kinds = {run.config['runtime'] for run in runs}
  workers = sorted({run.config['workers'] for run in runs})
  canvas.suptitle(
    f'{", ".join(sorted({run.config["dataset"]["name"] for run in runs}))}: '
    f'{" or ".join(map(str, workers))} {"" if "mesh" in kinds else "simulated "}workers',
    fontsize=13,
  )
  handles, labels = grid[0].get_legend_handles_labels()
  canvas.legend(handles, labels, loc='outside right center', frameon=False)
  canvas.savefig(output)


def table(workdirs: Sequence[str], target: float | None = None) -> str:
  """One row a run, aligned: the last measures, and bytes as a share of the first row's.

  Args:
    workdirs: of runs that have the same measure.
    target: adds the steps and bytes after which each was first so good.
  """
  runs = _same_measure(workdirs)
  measure = runs[0].measure
  form = '{:.2%}' if measure == 'accuracy' else '{:.4g}'
  parts = [name for name in runs[0].lines[-1] if name.startswith(f'{measure}_part')]
  head: tuple[str, ...] = (
    'run',
    _MEASURES[measure],
    'worst local',
    'MB a worker',
    'fewer',
    'steps',
    'seconds',
  )
  head = (*head, *(name.removeprefix(f'{measure}_') for name in parts))
  rows: list[tuple[str, ...]] = [head if target is None else (*head, f'steps to {target:g}', 'MB')]
  dense = runs[0].lines[-1]['bytes_sent']
  for run in runs:
    last = run.lines[-1]
    sent = last['bytes_sent']
    rows.append((
      run.name,
      _number(form, last[measure]),
      _number(form, last[f'{measure}_worst']),
      f'{sent / 1e6:.3f}',
      f'{dense / sent:.1f} x' if sent else '-',
      str(last['step']),
      f'{last["seconds"]:.1f}',
      *(_number(form, last.get(name)) for name in parts),
      *(() if target is None else _effort(run.reached(target))),
    ))  # fmt: skip
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = [
    '  '.join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
  ]
  return '\n'.join([lines[0], '-' * len(lines[0]), *lines[1:]])


def sentence(summary: dict[str, Any]) -> str:
  """A summary in one line.

  >>> sentence({'test_loss': 0.25, 'bytes_sent': 2.5e6, 'steps': 10, 'seconds': 1.5})
  'test loss 0.25, 2.5 MB a worker, 10 steps in 1.5 s'
  """
  parts = [f'test loss {_number("{:.4g}", summary["test_loss"])}']
  if 'accuracy' in summary:
    parts = [f'accuracy {summary["accuracy"]:.2%}', f'worst {summary["accuracy_worst"]:.2%}']
  parts.append(f'{metrics.quantity(summary["bytes_sent"])}B a worker')
  return ', '.join([*parts, f'{summary["steps"]} steps in {summary["seconds"]:.1f} s'])


def _same_measure(workdirs: Sequence[str]) -> list[Run]:
  runs = [load(workdir) for workdir in workdirs]
  if len({run.measure for run in runs}) > 1:
    raise base.ConfigError('runs with an accuracy and runs without cannot be compared')
  return runs


def _effort(reached: tuple[int, float] | None) -> tuple[str, str]:
  return ('-', '-') if reached is None else (str(reached[0]), f'{reached[1] / 1e6:.3f}')


def _number(form: str, value: float | None) -> str:
  return 'not finite' if value is None else form.format(value)


def _line(axes: Axes, x: np.ndarray, y: np.ndarray, *, index: int, label: str) -> None:
  axes.plot(
    x,
    y,
    color=_COLOURS[index % len(_COLOURS)],
    linestyle=_DASHES[index // len(_COLOURS) % len(_DASHES)],
    marker=_MARKERS[index % len(_MARKERS)],
    markevery=max(1, len(x) // 6),
    markersize=5,
    linewidth=1.6,
    label=label,
  )


def _name(axes: Axes, along: str, what: str) -> None:
  axes.set_xlabel({'step': 'step', 'bytes_sent': 'sent by a worker'}[along])
  if along == 'bytes_sent':
    axes.xaxis.set_major_formatter(ticker.EngFormatter(unit='B', sep=' '))
  if what.endswith('accuracy'):
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda y, _: f'{100 * y:g} %'))
  axes.set_ylabel(what)
  axes.grid(True, which='major', color='#dddddd', linewidth=0.8)
  axes.set_axisbelow(True)
  for side in ('top', 'right'):
    axes.spines[side].set_visible(False)


def _log_if_positive(axes: Axes, which: str, values: np.ndarray) -> None:
  """Sets a log scale where there is something to draw on one; zeros are then left out."""
  positive = values[values > 0]
  if not positive.size:
    return
  scale, axis = {'x': (axes.set_xscale, axes.xaxis), 'y': (axes.set_yscale, axes.yaxis)}[which]
  scale('log', nonpositive='mask')
  decades = np.log10(positive.max() / positive.min())
  axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if decades < 2 else (1,)))
  axis.set_major_formatter(ticker.FormatStrFormatter('%g'))
  axis.set_minor_formatter(ticker.NullFormatter())


def main(argv: Sequence[str]) -> None:
  """Compares the workdirs on the command line."""
  if not argv[1:]:
    raise base.ConfigError('name the workdirs to compare')
  text = table(argv[1:], flags.FLAGS.target)
  compare(argv[1:], flags.FLAGS.output)
  print(text)


if __name__ == '__main__':
  from experiments import train  # not at the top: it imports this module, and defines its flags

  flags.DEFINE_string('output', 'compare.png', 'The figure.')
  flags.DEFINE_float('target', None, 'A measure whose first steps and bytes the table shows.')
  app.run(train.in_one_line(main))
