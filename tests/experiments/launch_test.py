import importlib.util
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from experiments import metrics
from experiments.launch import actors, asynchronous, program
from jax_dsgd import simulation

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = ROOT / 'configs' / 'launch' / 'asynchronous.py'
METHODS = ('async_sgd', 'async_local_sgd', 'dap_sgd', 'dgs')


def config(variant='dgs_smoke', **fields):
  built = base.load(str(CONFIG)).get_config(variant)
  base.override(built, {'delays': (0.0, 0.0, 0.0), **fields})
  return built


class Machines:
  """The driver's part in one process, with nothing left to chance."""

  def __init__(self, settings, workdir):
    self.server = actors.Server(settings, str(workdir))
    self.workers = [actors.Worker(settings, k) for k in range(settings['workers'])]
    self.states = self.server.restored()[2]
    self.messages = [self.server.pull(k)[1] for k in range(settings['workers'])]

  def push(self, k):
    (spent, _), payload, state = self.workers[k].compute(self.states[k], self.messages[k])
    self.messages[k] = self.server.push(k, payload, spent)[1]
    self.states[k] = state

  def come_back(self, k):
    self.messages[k] = self.server.pull(k)[1]


@pytest.fixture(scope='module', params=METHODS)
def played(request, tmp_path_factory):
  """A server and a trace: workers die before and after their first push, and the server once."""
  settings = config(f'{request.param}_smoke').to_dict()
  workdir = tmp_path_factory.mktemp('played')
  first = Machines(settings, workdir)
  for k in (0, 0, 1, 0):
    first.push(k)
  first.come_back(2)
  first.come_back(1)
  for k in (2, 1, 0):
    first.push(k)
  first.server.save(*first.states)
  first.push(1)  # after the checkpoint: lost with the server
  first.server.finish()
  second = Machines(settings, workdir)
  second.come_back(0)
  for k in (1, 0, 2, 0, 1):
    second.push(k)
  return settings, second.server.state, second.server.trace()


def test_the_replay_is_bitwise(played):
  settings, server, trace = played
  again = program.replay(settings, trace)
  for kept, x in zip(jax.tree.leaves(server), jax.tree.leaves(again), strict=True):
    assert kept.tobytes() == x.tobytes()
  moved = [
    np.abs(a - b).max() for a, b in zip(_leaves(server.params), _first(settings), strict=True)
  ]
  assert min(moved) > 1e-3


def test_the_replay_in_one_scan_is_equal_to_rounding(played):
  settings, server, trace = played
  part = program.program(settings)
  params = jax.tree.map(jnp.asarray, part.params)
  scanned = simulation.replay_events(trace, part.method, part.gradient, params)
  for kept, x in zip(_leaves(server.params), _leaves(scanned.server.params), strict=True):
    np.testing.assert_allclose(x, kept, rtol=1e-5, atol=1e-6)


def test_the_trace_says_who_pushed_and_forgets_pulls_of_which_nothing_came(played):
  _, server, trace = played
  assert trace.worker[trace.pushes].tolist() == [0, 0, 1, 0, 2, 1, 0, 1, 0, 2, 0, 1]
  assert int(server.version) == trace.pushes.sum() == 12
  lost = trace.pushes & ~trace.pulls
  # Worker 1 once; with the server, whatever all three had pulled last.
  assert trace.worker[lost].tolist() == [1, 2, 1, 0]
  again = ~trace.pushes & (trace.seconds > 0)
  assert sorted(trace.worker[again].tolist()) == [0, 1, 1, 2]
  assert trace.worker[trace.seconds == 0].tolist() == [0, 1, 2]


def test_payloads_cross_and_not_models(tmp_path):
  settings = config('dgs_smoke').to_dict()
  machines = Machines(settings, tmp_path)
  entries = sum(x.size for x in _leaves(machines.server.state.params))
  (_, _), payload, state = machines.workers[0].compute(machines.states[0], machines.messages[0])
  machines.messages[0] = machines.server.push(0, payload, 0.0)[1]
  for tree in (payload, machines.messages[0].content):
    assert 0 < sum(x.nbytes for x in _leaves(tree)) < 0.2 * 4 * entries


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'delays': (0.0, 0.1)}, r'^config.delays=\(0.0, 0.1\): accepted is one number for each of 3'),
    ({'delays': (0.0, 0.1, -1.0)}, '^config.delays=.* accepted are seconds >= 0'),
    ({'local_steps': (1, 0, 1)}, '^config.local_steps must be'),
    ({'workers': 0}, '^config.workers must be'),
    ({'method.name': 'dsg'}, "^config.method.name: 'dsg'; did you mean 'dgs'"),
    ({'method.fraction': 2.0}, '^config.method: .*2'),
    ({'dataset.name': 'digit'}, "^config.dataset.name: 'digit'; did you mean 'digits'"),
  ],
)
def test_a_wrong_config_is_refused_before_anything_starts(fields, message, tmp_path):
  with pytest.raises(base.ConfigError, match=message):
    asynchronous.run(config(**fields), str(tmp_path / 'run'), address='local')
  assert not (tmp_path / 'run').exists()


def test_another_kind_of_config_is_refused(tmp_path):
  with pytest.raises(base.ConfigError, match='lacks the field .* configs/launch/asynchronous.py'):
    asynchronous.run(base.get_base(), str(tmp_path), address='local')


def test_without_ray_the_extra_is_named(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'ray', None)
  with pytest.raises(base.ConfigError, match=r"^Ray is not installed: pip install 'jax-dsgd\[asy"):
    asynchronous.run(config(), str(tmp_path), address='local')


def test_an_unfinished_run_has_nothing_to_replay(tmp_path):
  with pytest.raises(base.ConfigError, match='holds no finished run'):
    asynchronous.check(config(), str(tmp_path))


def test_a_model_that_is_not_finite_is_not_saved(tmp_path):
  machines = Machines(config(**{'method.learning_rate': 1e30}).to_dict(), tmp_path)
  for k in (0, 1, 0, 1, 0):
    machines.push(k)
  with pytest.raises(FloatingPointError, match='not finite after 5 pushes'):
    machines.server.save(*machines.states)


class Command:
  """The command in a process of its own; its log is read as it grows."""

  def __init__(self, workdir, *flags):
    self.log = workdir.with_suffix('.log')
    command = [sys.executable, '-m', 'experiments.launch.asynchronous', f'--workdir={workdir}']
    command += [f'--config={CONFIG}:dgs_smoke', '--config.checkpoint_every=20', *flags]
    cache = {'JAX_COMPILATION_CACHE_DIR': jax.config.jax_compilation_cache_dir}
    environment = os.environ | cache | {'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.1'}
    with self.log.open('w') as stream:
      self.process = subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT
      )

  def wait_for(self, pattern, after=0, seconds=180):
    """The first match that begins at or behind a place of the log."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
      if match := re.compile(pattern).search(self.log.read_text(), after):
        return match
      assert self.process.poll() is None, self.log.read_text()
      time.sleep(0.05)
    pytest.fail(f'no {pattern!r} within {seconds} s:\n{self.log.read_text()}')

  def end(self, seconds=90):
    return self.process.wait(seconds), self.log.read_text()

  def close(self):
    self.process.terminate()
    try:
      self.process.wait(10)
    except subprocess.TimeoutExpired:
      self.process.kill()
      self.process.wait()


@pytest.fixture
def commands():
  started = []

  def start(*args):
    started.append(Command(*args))
    return started[-1]

  yield start
  for command in started:
    command.close()


@pytest.mark.slow
@pytest.mark.multihost
@pytest.mark.skipif(importlib.util.find_spec('ray') is None, reason='the extra async: Ray')
def test_a_killed_worker_comes_back_and_a_killed_server_resumes(tmp_path, commands):
  workdir = tmp_path / 'run'
  first = commands(workdir, '--config.steps=100000')
  server = int(first.wait_for(r'the server is process (\d+)')[1])
  worker = first.wait_for(r'worker 1 is process (\d+)')
  os.kill(int(worker[1]), signal.SIGKILL)
  died = first.wait_for('worker 1 died, and is started again')
  back = first.wait_for(r'worker 1 is process (\d+)', after=died.end())
  assert back[1] != worker[1]
  for _ in range(3):  # the newest but one checkpoint is whole, and knows that the worker is back
    back = first.wait_for(r'push \d+/100000, restarts 1', after=back.end())
  os.kill(server, signal.SIGKILL)
  code, text = first.end()
  assert code == 1
  assert re.search(r"\nerror: the server died before it answered '\w+'; the same command", text)

  steps = 40 + max(map(int, re.findall(r'push (\d+)/', text)))
  second = commands(workdir, f'--config.steps={steps}')
  code, text = second.end()
  assert code == 0, text
  begins = int(re.search(r'begins at push (\d+)', text)[1])
  assert begins in (steps - 40, steps - 60)  # the newest checkpoint that was whole

  settings = config(**{'steps': steps, 'checkpoint_every': 20, 'delays': (0.0, 0.02, 0.05)})
  assert 'bit for bit' in asynchronous.check(settings, str(workdir))
  trace = simulation.EventTrace.load(workdir / actors.TRACE, workers=3)
  assert trace.pushes.sum() == steps == metrics.finished(str(workdir), settings.to_dict())['steps']
  lost = np.bincount(trace.worker[trace.pushes & ~trace.pulls], minlength=3)
  assert lost[1] == 2 and lost[[0, 2]].tolist() == [1, 1]
  counts = np.bincount(trace.worker[trace.pushes], minlength=3)
  assert counts[0] > counts[1] and counts[0] > counts[2] > 0
  durations = (trace.seconds - trace.started)[trace.pushes]
  slow = trace.worker[trace.pushes] == 2
  assert durations[slow].min() >= 0.05
  assert asynchronous.run(settings, str(workdir), address='local')['steps'] == steps  # done already


def _leaves(tree):
  return jax.tree.leaves(tree)


def _first(settings):
  return _leaves(program.program(settings).params)
