"""Figures and tables of runs on a simulated cluster: what happened when, and loss against time.

All seconds here are simulated, and labelled so.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import jax
import numpy as np
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from configs import base
from experiments import report, simulate
from jax_dsgd import simulation

_BUSY, _LOST, _MARK = '#56B4E9', '#D0D0D0', '#D55E00'
_TIME, _LABEL = 'simulated_seconds', 'simulated seconds'
_SHOWN = 8  # tasks of the busiest worker that the chart in a report shows


def gantt(axes: Axes, trace: simulate.Trace, *, until: float | None = None) -> None:
  """Draws who is busy when: a bar a task, from its start to its arrival or end; gaps are waiting.

  At a parameter server each push is a dot. In rounds a line joins those who meet, at the time when
  the last of them is done, and work that was called off is grey.

  Args:
    axes: where.
    trace: of events or rounds.
    until: simulated seconds shown; all if None.
  """
  end = until or float(trace.seconds[-1])
  if isinstance(trace, simulation.EventTrace):
    _pushes(axes, trace, end)
  else:
    _meetings(axes, trace, end)
  axes.set(xlim=(0, end), ylim=(trace.workers - 0.4, -0.6), xlabel=_LABEL, ylabel='worker')
  axes.yaxis.set_major_locator(ticker.MaxNLocator(integer=True))
  for side in ('top', 'right'):
    axes.spines[side].set_visible(False)


def _pushes(axes: Axes, trace: simulation.EventTrace, end: float) -> None:
  shown = trace.pushes & (trace.started < end)
  worker, start, stop = (x[shown] for x in (trace.worker, trace.started, trace.seconds))
  _bars(axes, worker, start, stop, _BUSY)
  inside = stop <= end
  axes.plot(stop[inside], worker[inside], 'o', color=_MARK, markersize=3, linestyle='none')


def _meetings(axes: Axes, trace: simulation.RoundTrace, end: float) -> None:
  shown = np.isfinite(trace.started) & (np.nan_to_num(trace.started) < end)
  for mask, colour in ((shown & trace.active, _BUSY), (shown & ~trace.active, _LOST)):
    _bars(axes, np.nonzero(mask)[1], trace.started[mask], trace.finished[mask], colour)
  for row, finished in zip(trace.group, trace.finished, strict=True):
    for number in np.unique(row[row >= 0]):
      members = np.flatnonzero(row == number)
      when = finished[members].max()
      if when <= end:
        axes.plot(
          np.full(members.size, when), members, '.-', color=_MARK, markersize=4, linewidth=1
        )


def _bars(axes: Axes, worker: np.ndarray, start: np.ndarray, stop: np.ndarray, colour: str) -> None:
  axes.barh(
    worker, stop - start, left=start, height=0.7, color=colour, edgecolor='w', linewidth=0.5
  )


def figure(run: report.Run, trace: simulate.Trace) -> Figure:
  """The report of one run: loss against simulated seconds, and the beginning of its trace."""
  canvas = Figure(figsize=(10, 3.4 + 0.12 * min(trace.workers, 40)), layout='constrained', dpi=120)
  left, right = canvas.subplots(1, 2)
  config = run.config
  canvas.suptitle(
    f'{config["algorithm"]["name"]} under {config["policy"]["name"]}, '
    f'{config["workers"]} simulated workers of {config["cluster"]["name"]}'
  )
  _curve(left, run, 'loss', label='training loss')
  _curve(left, run, 'test_loss', label='test loss')
  left.set(xlabel=_LABEL, ylabel='loss')
  _log(left)
  left.legend(frameon=False)
  left.grid(True, color='#dddddd')
  gantt(right, trace, until=_beginning(trace))
  return canvas


def _beginning(trace: simulate.Trace) -> float:
  """Simulated seconds until the first worker has ended some tasks."""
  if isinstance(trace, simulation.EventTrace):
    ended = [trace.seconds[trace.pushes & (trace.worker == w)] for w in range(trace.workers)]
  else:
    ended = [column[np.isfinite(column)] for column in trace.finished.T]
  return min((float(x[_SHOWN - 1]) for x in ended if len(x) >= _SHOWN), default=trace.seconds[-1])


def save_figure(workdir: str) -> None:
  """Writes `report.png` into the workdir of a simulated run, from the first process."""
  if jax.process_index():
    return
  path = os.path.join(workdir, simulate.TRACE)
  with np.load(path) as file:
    kind = getattr(simulation, str(file['kind']))
  figure(report.load(workdir), kind.load(path)).savefig(os.path.join(workdir, 'report.png'))


def compare(workdirs: Sequence[str], output: str) -> None:
  """Draws test loss against simulated seconds and against bytes, a line a run.

  What is far worse than the first run is in the beginning is out of the picture.

  Args:
    workdirs: of simulated runs of one problem.
    output: the file, in a format that matplotlib knows by its ending.
  """
  runs = _simulated(workdirs)
  canvas = Figure(figsize=(12, 4.8), layout='constrained', dpi=120)
  left, right = canvas.subplots(1, 2, sharey=True)
  for run in runs:
    _curve(left, run, 'test_loss', label=run.name)
    right.plot(*run.column('test_loss', along='bytes_sent'), linewidth=1.6)
  left.set(xlabel=_LABEL, ylabel='test loss', xlim=(0, _common_end(runs)))
  _log(left)
  left.set_ylim(top=1.5 * runs[0].column('test_loss')[1][0])
  right.set(xlabel='sent by a worker', xscale='log')
  right.xaxis.set_major_formatter(ticker.EngFormatter(unit='B', sep=' '))
  for axes in (left, right):
    axes.grid(True, color='#dddddd')
  config = runs[0].config
  canvas.suptitle(f'{config["dataset"]["name"]}: {config["workers"]} simulated workers')
  canvas.legend(*left.get_legend_handles_labels(), loc='outside right center', frameon=False)
  canvas.savefig(output)


def table(workdirs: Sequence[str]) -> str:
  """One row a run, aligned, of the last evaluation within the seconds that all runs have.

  The last column is when each was first as good in test loss as the first of them is in the end.

  Args:
    workdirs: of simulated runs of one problem.
  """
  runs = _simulated(workdirs)
  end = _common_end(runs)
  lines = [[x for x in run.lines if 'test_loss' in x and x[_TIME] <= end] for run in runs]
  target = lines[0][-1]['test_loss']
  rows = [('run', 'test loss', 'accuracy', 'MB a worker', 'steps', 'sim. s', f'to {target:.4g}')]
  for run, line in zip(runs, lines, strict=True):
    last = line[-1]
    reached = (x[_TIME] for x in line if x['test_loss'] <= target)
    rows.append((
      run.name,
      f'{last["test_loss"]:.4g}',
      f'{last["accuracy"]:.2%}' if 'accuracy' in last else '-',
      f'{last["bytes_sent"] / 1e6:.3f}',
      str(last['step']),
      f'{last[_TIME]:.1f}',
      f'{time:.1f}' if (time := next(reached, None)) is not None else '-',
    ))  # fmt: skip
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  text = [
    '  '.join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
  ]
  return '\n'.join([text[0], '-' * len(text[0]), *text[1:]])


def _simulated(workdirs: Sequence[str]) -> list[report.Run]:
  runs = [report.load(workdir) for workdir in workdirs]
  for workdir, run in zip(workdirs, runs, strict=True):
    if _TIME not in run.lines[-1]:
      raise base.ConfigError(f'{workdir} has no simulated seconds: its config names no cluster')
  return runs


def _common_end(runs: Sequence[report.Run]) -> float:
  """The simulated seconds that all runs have, and a thousandth more for events not quite alike."""
  return 1.001 * min(run.lines[-1][_TIME] for run in runs)


def _curve(axes: Axes, run: report.Run, name: str, *, label: str) -> None:
  axes.plot(*run.column(name, along=_TIME), linewidth=1.6, label=label)


def _log(axes: Axes) -> None:
  axes.set_yscale('log')
  axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
  axes.yaxis.set_major_formatter(ticker.FormatStrFormatter('%g'))
  axes.yaxis.set_minor_formatter(ticker.NullFormatter())
