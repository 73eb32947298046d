"""Trains what a config describes.

`python -m experiments.train --config=configs/digits.py:topk --config.seed=1 --workdir=runs/topk`;
the same command again continues the run, or finds it done.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_collections
from absl import app, flags, logging
from ml_collections import config_flags

from configs import base
from experiments import build, loop, metrics, replay, report, simulate, timeline
from jax_dsgd import checkpoint

config_flags.DEFINE_config_file('config', None, 'The config file[:variant].', lock_config=True)
flags.DEFINE_string('workdir', None, 'Where everything is written.')


def run(config: ml_collections.ConfigDict, workdir: str) -> dict[str, Any]:
  """Trains, or continues, or finds a run done.

  Args:
    config: with the fields of `configs.base`.
    workdir: a folder, made if need be once the whole config is known to be right.

  Returns:
    The summary, as in `summary.json`: the measures after the last step.

  Raises:
    base.ConfigError: a wrong field, or a workdir of another config; nothing is written.
    FloatingPointError: a loss that is not finite.
  """
  settings = config.to_dict()
  if (summary := metrics.finished(workdir, settings)) is not None:
    return summary
  experiment = build.experiment(config)
  parts = loop.program(experiment) if experiment.server is None else None
  try:
    os.makedirs(workdir, exist_ok=True)
  except OSError as error:
    raise base.ConfigError(f'--workdir={workdir}: {error.strerror}') from error
  with checkpoint.Checkpoints(os.path.join(workdir, 'checkpoints')) as checkpoints:
    start, steps = checkpoints.latest_step() or 0, settings['steps']
    if start > steps:
      raise base.ConfigError(f'config.steps={steps}, but {workdir} is at step {start} already')
    metrics.save(workdir, metrics.CONFIG, settings)
    kind = 'simulated workers' if experiment.workers.mesh is None else 'workers on a mesh'
    title = f'{experiment.workers.count} {kind}, a model of {experiment.entries:,} entries'
    if experiment.trace is not None:
      experiment.trace.save(os.path.join(workdir, simulate.TRACE))
    with metrics.Writer(workdir, start=start, steps=steps, title=title) as writer:
      if parts is None:
        replay.events(experiment, writer)
      else:
        loop.train(experiment, parts, checkpoints=checkpoints, writer=writer)
  summary = {'steps': steps, 'entries': experiment.entries, **metrics.read(workdir)[-1]}
  (report if experiment.trace is None else timeline).save_figure(workdir)
  metrics.save(workdir, metrics.SUMMARY, summary)
  return summary


def parse_flags(argv: Sequence[str]) -> list[str]:
  """Parses a command line.

  Raises:
    base.ConfigError: what is wrong with it, in one line.
  """
  try:
    rest = flags.FLAGS(argv)
    flags.FLAGS.config.keys()  # a file that cannot be read is only reported when it is used
  except (flags.Error, OSError) as error:
    raise base.ConfigError(str(error).strip().splitlines()[-1].strip()) from error
  except (AttributeError, KeyError) as error:
    text = ' '.join(argv)
    path = re.search(r'--?config[= ]([^:\s]+):?(\S*)', text)
    if path is None:
      raise base.ConfigError('--config=FILE.py[:variant] comes before --config.field') from error
    config = base.load(path[1]).get_config(*filter(None, [path[2]]))
    base.require_fields(config, re.findall(r'--?(?:no)?config\.([\w.]+)', text))
    raise
  return rest


def in_one_line(function: Callable[..., Any]) -> Callable[..., Any]:
  """A function that ends the program with one line on a user's error; the rest is a bug's."""

  def guarded(*args: Any) -> Any:
    try:
      return function(*args)
    except (base.ConfigError, FloatingPointError) as error:
      logging.debug('refused', exc_info=True)
      sys.exit(f'error: {error}')

  return guarded


def log_own_lines_from(level: int) -> None:
  """Shows log lines of this application from a level on, and only warnings of what it uses."""
  own = os.path.dirname(os.path.abspath(__file__))
  if not flags.FLAGS['verbosity'].present:
    logging.set_verbosity(level)
    logging.get_absl_handler().addFilter(
      lambda record: record.levelname != 'INFO' or record.pathname.startswith(own)
    )


def main(argv: Sequence[str]) -> None:
  """Trains and prints the summary."""
  if len(argv) > 1:
    raise base.ConfigError(f'arguments without a flag: {" ".join(argv[1:])}')
  log_own_lines_from(logging.INFO)
  summary = run(flags.FLAGS.config, flags.FLAGS.workdir)
  print(report.sentence(summary))


if __name__ == '__main__':
  jax.config.config_with_absl()
  flags.mark_flags_as_required(['config', 'workdir'])
  app.run(in_one_line(main), flags_parser=in_one_line(parse_flags))
