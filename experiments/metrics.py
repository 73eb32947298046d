"""What a run leaves in its workdir: `config.json`, `metrics.jsonl`, TensorBoard events, a summary.

The same workdir continues a run. `metrics.jsonl` then holds every step once: lines after the
checkpoint that the run continues from are dropped.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from absl import logging

from configs import base

CONFIG, LINES, SUMMARY = 'config.json', 'metrics.jsonl', 'summary.json'


def finished(workdir: str, config: Mapping[str, Any]) -> dict[str, Any] | None:
  """The summary of a run that is done already, or None. Only reads.

  Raises:
    base.ConfigError: the workdir is that of another config. Only `steps` may differ: a run may be
      made longer.
  """
  there = _load(os.path.join(workdir, CONFIG))
  if there is None:
    return None
  old, new = (dict(_flat(settings)) for settings in (there, json.loads(json.dumps(config))))
  for field in sorted(old.keys() | new.keys()):
    if field != 'steps' and old.get(field, _ABSENT) != new.get(field, _ABSENT):
      raise base.ConfigError(
        f'{workdir} holds a run with config.{field}={old.get(field, _ABSENT)} and this one has '
        f'{new.get(field, _ABSENT)}; take another --workdir'
      )
  summary = _load(os.path.join(workdir, SUMMARY))
  return summary if summary and summary['steps'] == config['steps'] else None


def read(workdir: str) -> list[dict[str, Any]]:
  """The lines of a run so far; a last line that was cut off is left out."""
  lines = []
  try:
    with open(os.path.join(workdir, LINES), encoding='utf-8') as file:
      for text in file:
        lines.append(json.loads(text))
  except (FileNotFoundError, json.JSONDecodeError):
    pass
  return lines


def save(workdir: str, name: str, value: Any) -> None:
  """Writes a JSON file whole or not at all, from the first process."""
  if jax.process_index():
    return
  path = os.path.join(workdir, name)
  with open(f'{path}.new', 'w', encoding='utf-8') as file:
    json.dump(value, file, indent=2)
    file.write('\n')
  os.replace(f'{path}.new', path)


class Writer:
  """Writes lines and events, and shows how far the run is: a bar on a terminal, else log lines.

  Args:
    workdir: where.
    start: the step to continue from; later lines are dropped.
    steps: the step at which the run ends.
    title: what the run is, printed with the bytes a step once these are known.
  """

  def __init__(self, workdir: str, *, start: int, steps: int, title: str):
    self._kept = [line for line in read(workdir) if line['step'] <= start]
    self._start = self._first = start
    self._steps, self._title = steps, title
    self._last = (start, self._kept[-1]['bytes_sent'] if self._kept else 0.0)
    self._before = self._kept[-1]['seconds'] if self._kept else 0.0
    self._began = self._warm = time.monotonic()
    self._file = self._events = self._bar = None
    if jax.process_index():
      return
    import tensorboardX  # an extra of the experiments

    path = os.path.join(workdir, LINES)
    with open(f'{path}.new', 'w', encoding='utf-8') as file:
      file.writelines(json.dumps(line) + '\n' for line in self._kept)
    os.replace(f'{path}.new', path)
    self._file = open(path, 'a', encoding='utf-8')  # noqa: SIM115  closed by close()
    self._events = tensorboardX.SummaryWriter(workdir, purge_step=start + 1)
    if sys.stderr.isatty():
      import tqdm

      self._bar = tqdm.tqdm(initial=start, total=steps, unit='step', leave=False)

  def __enter__(self) -> Writer:
    return self

  def __exit__(self, *exception: object) -> None:
    for resource in (self._file, self._events, self._bar):
      if resource is not None:
        resource.close()

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Writes one line; what is not finite becomes null, as JSON has no word for it."""
    if self._file is None or self._events is None:
      return
    seconds = self._before + time.monotonic() - self._began
    line = {'step': step, 'seconds': seconds, **values}
    line = {k: v if math.isfinite(v) else None for k, v in line.items()}
    self._file.write(json.dumps(line) + '\n')
    self._file.flush()
    for name, value in values.items():
      self._events.add_scalar(name, value, step)
    self._show(step, values)

  def _show(self, step: int, values: Mapping[str, float]) -> None:
    (last, sent), now = self._last, time.monotonic()
    self._last = step, values['bytes_sent']
    if last == self._start:
      rate = (values['bytes_sent'] - sent) / (step - last)
      print(f'{self._title}, {quantity(rate)}B a worker a step', flush=True)
      self._first, self._warm = step, now  # the first steps compile: they say nothing of the speed
      speed = ''
    else:
      speed = (step - self._first) / (now - self._warm)
      speed = f'  {speed:.3g} steps/s  {(self._steps - step) / speed:.0f} s left'
    if self._bar is not None:
      self._bar.set_postfix_str(f'loss {values["loss"]:.4g}', refresh=False)
      self._bar.update(step - last)
      return
    logging.info(
      'step %d/%d  loss %.4g%s  %sB sent a worker%s',
      step,
      self._steps,
      values['loss'],
      f'  accuracy {values["accuracy"]:.4f}' if 'accuracy' in values else '',
      quantity(values['bytes_sent']),
      speed,
    )


def quantity(value: float) -> str:
  """A number with its decimal prefix, to three digits.

  >>> quantity(0), quantity(38440), quantity(1.5e9)
  ('0 ', '38.4 k', '1.5 G')
  """
  power = min(int(math.log10(abs(value)) // 3), 4) if abs(value) >= 1 else 0
  return f'{value / 1000**power:.3g} {["", "k", "M", "G", "T"][power]}'


_ABSENT = 'nothing'


def _load(path: str) -> Any:
  try:
    with open(path, encoding='utf-8') as file:
      return json.load(file)
  except (FileNotFoundError, NotADirectoryError):
    return None
  except json.JSONDecodeError as error:
    raise base.ConfigError(f'{path} is not JSON: {error}; take another --workdir') from error


def _flat(tree: Mapping[str, Any], prefix: str = '') -> Iterator[tuple[str, Any]]:
  for key, value in tree.items():
    if isinstance(value, dict):
      yield from _flat(value, f'{prefix}{key}.')
    else:
      yield f'{prefix}{key}', value
