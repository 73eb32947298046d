"""Runs every setting of a config's `sweep(add)` and compares them.

`python -m experiments.sweep --config=configs/digits.py --workdir=runs/digits` makes a folder a run,
`00_variant=allreduce` and so on, a table and a figure; the same command again runs what is missing.
With `--dry_run` it prints a command a run instead, and `--index=3` is one run only: for job arrays.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import ml_collections
from absl import app, flags, logging
from ml_collections import config_flags

from configs import base
from experiments import report, timeline, train

flags.DEFINE_integer('index', None, 'Only this run, from 0.', lower_bound=0)
flags.DEFINE_bool('dry_run', False, 'Print the commands and run nothing.')


class Setting(NamedTuple):
  """One run of a sweep.

  Attributes:
    name: of its folder.
    variant: of the config; None for its default.
    overrides: values of fields by their dotted names.
    config: the config with these.
  """

  name: str
  variant: str | None
  overrides: dict[str, Any]
  config: ml_collections.ConfigDict

  def command(self, path: str, workdir: str) -> str:
    """The command that does this run alone."""
    words = ['python', '-m', 'experiments.train']
    words.append(f'--config={path}:{self.variant}' if self.variant else f'--config={path}')
    words += [f'--config.{name}={value}' for name, value in self.overrides.items()]
    return shlex.join([*words, f'--workdir={os.path.join(workdir, self.name)}'])


def settings(path: str, common: dict[str, Any] | None = None) -> list[Setting]:
  """The runs that a config file's `sweep(add)` adds, in order.

  Args:
    path: of the config file. In it, `add(variant='topk', **{'split.name': 'iid'})` adds a run; both
      parts may be left out.
    common: overrides of every run.

  Raises:
    base.ConfigError: a file without `sweep`, or an unknown variant or field in it.
  """
  module = base.load(path)
  if not hasattr(module, 'sweep'):
    raise base.ConfigError(f'{path} defines no sweep(add)')
  found: list[Setting] = []

  def add(variant: str | None = None, **overrides: Any) -> None:
    config = module.get_config(variant) if variant else module.get_config()
    parts = ([f'variant={variant}'] if variant else []) + [f'{k}={v}' for k, v in overrides.items()]
    overrides = {**(common or {}), **overrides}
    base.override(config, overrides)
    name = f'{len(found):02d}_{",".join(parts) or "default"}'.replace(os.sep, '-')
    found.append(Setting(name, variant, overrides, config))

  module.sweep(add)
  return found


def run(runs: Sequence[Setting], workdir: str) -> None:
  """Does the runs one after the other, then writes `table.txt` and `compare.png`.

  A run that diverges is reported and left out of both.
  """
  done = []
  for i, setting in enumerate(runs):
    print(f'[{i + 1}/{len(runs)}] {setting.name}', flush=True)
    folder = os.path.join(workdir, setting.name)
    try:
      print(report.sentence(train.run(setting.config, folder)), flush=True)
      done.append(folder)
    except FloatingPointError as error:
      print(f'stopped: {error}', flush=True)
  if not done:
    raise base.ConfigError(f'none of the {len(runs)} runs came to its end')
  pages = report if runs[0].config.cluster is None else timeline
  text = pages.table(done)
  pages.compare(done, os.path.join(workdir, 'compare.png'))
  with open(os.path.join(workdir, 'table.txt'), 'w', encoding='utf-8') as file:
    file.write(text + '\n')
  print(f'\n{text}\n\n{os.path.join(workdir, "compare.png")}')


def main(argv: Sequence[str]) -> None:
  """Runs a sweep, a part of it, or prints its commands."""
  if len(argv) > 1:
    raise base.ConfigError(f'arguments without a flag: {" ".join(argv[1:])}')
  path = config_flags.get_config_filename(flags.FLAGS['config'])
  common = dict(config_flags.get_override_values(flags.FLAGS['config']))
  runs = settings(path.partition(':')[0], common)
  index, workdir = flags.FLAGS.index, flags.FLAGS.workdir
  if index is not None and index >= len(runs):
    raise base.ConfigError(f'--index={index}: {path} has runs 0 to {len(runs) - 1}')
  chosen = runs if index is None else runs[index : index + 1]
  if flags.FLAGS.dry_run:
    print('\n'.join(setting.command(path, workdir) for setting in chosen))
  elif index is None:
    train.log_own_lines_from(logging.WARNING)
    run(chosen, workdir)
  else:
    train.log_own_lines_from(logging.INFO)
    print(report.sentence(train.run(chosen[0].config, os.path.join(workdir, chosen[0].name))))


if __name__ == '__main__':
  jax.config.config_with_absl()
  flags.mark_flags_as_required(['config', 'workdir'])
  app.run(train.in_one_line(main), flags_parser=train.in_one_line(train.parse_flags))
