"""Runs a parameter server and its workers as processes that wait for nobody, with Ray.

`python -m experiments.launch.asynchronous --config=configs/launch/asynchronous.py:dgs
--workdir=runs/dgs`; the same command again continues the run from its last checkpoint, or finds it
done, and with `--replay` it checks that the recorded trace gives the same parameters.

`--address` names a Ray cluster whose machines have this folder at the same path
(`RAY_AUTH_MODE=token` where it was started with that); without it everything runs here. Only a
restart and a checkpoint move a worker's state: else payloads cross and nothing more.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import ml_collections
import numpy as np
from absl import app, flags, logging

from configs import base
from experiments import metrics, train
from experiments.launch import actors, program
from jax_dsgd import simulation

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class LostError(base.ConfigError):
  """A process that is gone or silent: one line that names it, and what to do."""


class _Run:
  """What the driver knows of a run: who computes, since when, and where states are kept."""

  def __init__(self, ray: Any, settings: dict[str, Any], workdir: str):
    self._ray, self._settings = ray, settings
    self._server = self._actor(actors.Server, settings, workdir)
    count = settings['workers']
    self._workers = [self._actor(actors.Worker, settings, worker) for worker in range(count)]
    self._computing: dict[Any, int] = {}  # what is to come, its report first -> whose it is
    self._since, self._processes, self.restarts = [0.0] * count, [0] * count, [0] * count
    pid, self._version, states = self._ask('restored')[0]
    if self._version > settings['steps']:
      raise base.ConfigError(
        f'config.steps={settings["steps"]}, but {workdir} is at push {self._version} already'
      )
    logging.info('the server is process %d, and begins at push %d', pid, self._version)
    self._states = [self._ray.put(state) for state in states]

  def play(self) -> dict[str, Any]:
    """Runs to the last push; the measures at the end."""
    for worker in range(self._settings['workers']):
      self._start(worker)
    while self._version < self._settings['steps']:
      ready, _ = self._ray.wait([report for report, *_ in self._computing], timeout=1.0)
      for refs in [refs for refs in self._computing if refs[0] in ready]:
        if self._version < self._settings['steps']:
          self._collect(refs, self._computing.pop(refs))
      for worker in self._computing.values():
        if time.monotonic() - self._since[worker] > self._settings['patience']:
          self._restart(worker, f'has been silent for {self._settings["patience"]:g} s')
          break  # of a dict that has changed
    return self._ask('finish')[0]

  def _collect(self, refs: tuple[Any, Any, Any], worker: int) -> None:
    report, payload, state = refs
    try:
      spent, process = self._ray.get(report)
    except self._ray.exceptions.RayActorError:
      self._restart(worker, 'died')
      return
    if process != self._processes[worker]:
      self._processes[worker] = process
      logging.info('worker %d is process %d', worker, process)
    self._version, message = self._ask('push', worker, payload, spent, returns=2)
    self._states[worker] = state
    steps, every = self._settings['steps'], self._settings['checkpoint_every']
    if self._version % every == 0 or self._version == steps:
      self._ask('save', *self._states)
      logging.info('push %d/%d, restarts %d', self._version, steps, sum(self.restarts))
    self._compute(worker, message)

  def _restart(self, worker: int, what: str) -> None:
    self.restarts[worker] += 1
    if self.restarts[worker] > self._settings['restarts']:
      raise LostError(
        f'worker {worker} {what}, and had come back {self._settings["restarts"]} times already '
        f'(config.restarts); the same command continues from the last checkpoint'
      )
    logging.warning('worker %d %s, and is started again', worker, what)
    self._ray.kill(self._workers[worker])
    self._computing = {refs: w for refs, w in self._computing.items() if w != worker}
    self._workers[worker] = self._actor(actors.Worker, self._settings, worker)
    self._start(worker)

  def _start(self, worker: int) -> None:
    self._compute(worker, self._ask('pull', worker, returns=2)[1])

  def _compute(self, worker: int, message: Any) -> None:
    method = self._workers[worker].compute.options(num_returns=3)
    self._computing[tuple(method.remote(self._states[worker], message))] = worker
    self._since[worker] = time.monotonic()

  def _actor(self, kind: type, *args: Any) -> Any:
    options = {'num_cpus': 1, 'scheduling_strategy': 'SPREAD'}
    return self._ray.remote(kind).options(**options).remote(*args)

  def _ask(self, name: str, *args: Any, returns: int = 1) -> tuple[Any, ...]:
    """Asks the server: the first thing that it returns, and references to the others."""
    method = getattr(self._server, name).options(num_returns=returns)
    refs = method.remote(*args)
    first, *others = [refs] if returns == 1 else refs
    again = 'the same command continues from the last checkpoint'
    try:
      return self._ray.get(first, timeout=self._settings['patience']), *others
    except self._ray.exceptions.GetTimeoutError as error:
      waited = f'{self._settings["patience"]:g} s (config.patience)'
      raise LostError(f'the server did not answer {name!r} within {waited}; {again}') from error
    except self._ray.exceptions.RayActorError as error:
      raise LostError(f'the server died before it answered {name!r}; {again}') from error


def run(config: ml_collections.ConfigDict, workdir: str, *, address: str) -> dict[str, Any]:
  """Runs, or continues, or finds a run done.

  Args:
    config: with the fields of `configs/launch/asynchronous.py`.
    workdir: a folder that the server sees; made if need be.
    address: of a Ray cluster, or 'local'.

  Returns:
    The summary, as in `summary.json`.

  Raises:
    base.ConfigError: a wrong field, a workdir of another config, Ray is missing, or a process is
      lost for good.
    FloatingPointError: a model that is not finite.
  """
  settings = config.to_dict()
  if (summary := metrics.finished(workdir, settings)) is not None:
    return summary
  program.program(settings)
  ray, workdir = _ray(), os.path.abspath(workdir)
  os.makedirs(workdir, exist_ok=True)
  metrics.save(workdir, metrics.CONFIG, settings)
  options: dict[str, Any] = {'runtime_env': {'env_vars': {'PYTHONPATH': _ROOT}}}
  if address == 'local':
    options = {'num_cpus': settings['workers'] + 1, 'include_dashboard': False}
  with warnings.catch_warnings():
    # Of a fork beside the threads of JAX; here it only precedes an exec.
    warnings.filterwarnings('ignore', message=r'os\.fork\(\) was called', category=RuntimeWarning)
    try:
      ray.init(address, log_to_driver=False, logging_level='ERROR', **options)
    except (ConnectionError, ValueError) as error:
      text = ' '.join(str(error).split())
      raise base.ConfigError(f'--address={address}: no Ray cluster answers: {text}') from error
  try:
    playing = _Run(ray, settings, workdir)
    summary = {**playing.play(), 'steps': settings['steps'], 'restarts': sum(playing.restarts)}
  except ray.exceptions.RayTaskError as error:  # also of the type of its cause, but in many lines
    if isinstance(error.cause, FloatingPointError):
      raise error.cause from error
    raise
  finally:
    ray.shutdown()
  metrics.save(workdir, metrics.SUMMARY, summary)
  return summary


def check(config: ml_collections.ConfigDict, workdir: str) -> str:
  """Replays the trace of a finished run and compares every bit of the parameters, in a sentence.

  Raises:
    base.ConfigError: the run is not finished, or the parameters differ.
  """
  settings = config.to_dict()
  if metrics.finished(workdir, settings) is None:
    raise base.ConfigError(f'{workdir} holds no finished run of this config to replay')
  trace = simulation.EventTrace.load(os.path.join(workdir, actors.TRACE))
  kept = actors.Server(settings, workdir).state.params
  again = program.replay(settings, trace).params
  pairs = list(zip(jax.tree.leaves(kept), jax.tree.leaves(again), strict=True))
  if any(a.tobytes() != b.tobytes() for a, b in pairs):
    most = max(float(np.abs(a - b).max()) for a, b in pairs)
    raise base.ConfigError(
      f'{trace} does not give the parameters of the run: they differ by {most}'
    )
  return f'{trace} gives the parameters of the run, bit for bit'


def main(argv: Sequence[str]) -> None:
  """Runs and prints the summary, or checks the trace of a run."""
  if len(argv) > 1:
    raise base.ConfigError(f'arguments without a flag: {" ".join(argv[1:])}')
  train.log_own_lines_from(logging.INFO)
  config, workdir = flags.FLAGS.config, flags.FLAGS.workdir
  if flags.FLAGS.replay:
    print(check(config, workdir))
    return
  summary = run(config, workdir, address=flags.FLAGS.address)
  print(
    f'{summary["steps"]} pushes in {summary["seconds"]:.1f} s, '
    f'staleness {summary["staleness"]:.2f} in the mean, accuracy {summary["accuracy"]:.2%}, '
    f'{summary["restarts"]} restarts'
  )


def _ray() -> Any:
  try:
    import ray  # pyright: ignore[reportMissingImports]
  except ModuleNotFoundError as error:
    raise base.ConfigError("Ray is not installed: pip install 'jax-dsgd[async]'") from error
  return ray


if __name__ == '__main__':
  flags.DEFINE_string('address', 'local', "Of a Ray cluster; 'local' starts one here.")
  flags.DEFINE_boolean('replay', False, 'Check the trace of a finished run.')
  jax.config.config_with_absl()
  flags.mark_flags_as_required(['config', 'workdir'])
  app.run(train.in_one_line(main), flags_parser=train.in_one_line(train.parse_flags))
