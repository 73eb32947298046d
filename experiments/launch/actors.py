"""The worker and the server of an asynchronous run: plain classes, of which Ray makes actors."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.launch import program
from jax_dsgd import checkpoint, servers, simulation

TRACE = 'trace.npz'
_COLUMNS = [
  field.name for field in dataclasses.fields(simulation.EventTrace) if field.name != 'workers'
]


class Message(NamedTuple):
  """What a worker is sent: the model whole as it starts or comes back, else an encoded answer."""

  content: Any
  version: Any
  whole: bool


class Worker:
  """Computes. Its state comes with each call, so that one that died is simply made anew."""

  def __init__(self, settings: Mapping[str, Any], index: int):
    self._part = program.program(settings)
    numbers: Any = (index, settings['local_steps'][index], settings['batch_size'])
    self._index, self._steps, self._examples = map(np.int32, numbers)
    self._delay = settings['delays'][index] * settings['local_steps'][index]

  def compute(
    self, state: tuple[servers.WorkerState, servers.ShardState], message: Message
  ) -> tuple[tuple[float, int], Any, Any]:
    """The seconds it took and the process, the payload to push, and the state after."""
    began = time.monotonic()
    worker, shard = state
    if message.whole:
      worker = worker._replace(view=message.content, version=message.version)
    else:
      worker = self._part.receive(worker, self._index, message.content, message.version)
    work: Any = self._index, self._index, shard.count, self._examples
    payload, worker, shard = self._part.compute(worker, shard, servers.Work(*work), self._steps)
    payload, state = jax.device_get((payload, (worker, shard)))
    time.sleep(self._delay)
    return (time.monotonic() - began, os.getpid()), payload, state


class Server:
  """Applies what is pushed, answers, and keeps the events and the checkpoints."""

  def __init__(self, settings: Mapping[str, Any], workdir: str):
    """Continues from the newest checkpoint in the workdir, if there is one."""
    self._part = part = program.program(settings)
    self._settings, self._workdir = settings, pathlib.Path(workdir)
    self._checkpoints = checkpoint.Checkpoints(self._workdir / 'checkpoints')
    count = settings['workers']
    workers = [servers.init_worker(part.method, part.params)] * count
    shards = [servers.init_shard(part.method, part.params)] * count
    state = servers.init_server(part.method, part.params), workers, shards
    self._events: list[dict[str, Any]] = []
    if (step := self._checkpoints.latest_step()) is not None:
      state = self._checkpoints.restore(jax.tree.map(jnp.asarray, state))
      self._events = _rows(simulation.EventTrace.load(self._path(step), workers=count))
    # Workers as they pushed last, and as they pulled after it.
    self.state, self._pushed, self._shards = jax.device_get(state)
    self._pulled = list(self._pushed)
    self._origin = time.monotonic() - (self._events[-1]['seconds'] if self._events else 0.0)

  def restored(self) -> tuple[int, int, list[Any]]:
    """The process, the pushes applied so far, and the state of each worker and its shard."""
    states = list(zip(self._pushed, self._shards, strict=True))
    return os.getpid(), int(self.state.version), states

  def pull(self, index: int) -> tuple[int, Message]:
    """The model whole, for a worker that starts or comes back.

    Its pull before, of which nothing came, is taken back: it is as if it had begun only now.
    Whoever has not pushed yet begins with the first parameters, which all pull at time 0.
    """
    mine = [e for e, event in enumerate(self._events) if event['worker'] == index]
    last = self._events[mine[-1]] if mine else None
    if last is None or last['pushes'] or last['seconds'] > 0:
      if last is not None and last['pushes']:
        last['pulls'] = False
      elif last is not None:
        del self._events[mine[-1]]
      self._answer(index)
      now = 0.0 if last is None else time.monotonic() - self._origin
      self._record(seconds=now, worker=index, pulls=True, started=now)
    worker = self._pulled[index]
    return int(self.state.version), Message(worker.view, worker.version, True)

  def push(self, index: int, payload: Any, spent: float) -> tuple[int, Message]:
    """Applies what a worker pushed after `spent` seconds, and answers: version and message."""
    worker = self._pulled[index]
    staleness = int(self.state.version - worker.version)
    self.state = jax.device_get(self._part.apply(self.state, worker, np.int32(index), payload))
    self._pushed[index] = worker
    crossed = self._answer(index)
    now = time.monotonic() - self._origin
    self._record(
      seconds=now,
      worker=index,
      pushes=True,
      pulls=True,
      staleness=staleness,
      steps=self._settings['local_steps'][index],
      examples=self._settings['batch_size'],
      started=max(now - spent, 0.0),
    )
    return int(self.state.version), Message(crossed, self.state.version, False)

  def save(self, *states: tuple[servers.WorkerState, servers.ShardState]) -> None:
    """Saves the run, with the states that workers had after their last pushes.

    Raises:
      FloatingPointError: a parameter that is not finite.
    """
    version = int(self.state.version)
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(self.state.params)):
      raise FloatingPointError(f'the model is not finite after {version} pushes')
    pairs = zip(self._pushed, states, strict=True)
    workers = [pushed._replace(memory=state[0].memory) for pushed, state in pairs]
    tree = self.state, workers, [state[1] for state in states]
    kept = self._checkpoints.latest_step()
    for path in self._path(version).parent.iterdir():
      if path.stem != str(kept):
        path.unlink()
    self.trace().save(self._path(version))
    self._checkpoints.save(version, jax.tree.map(jnp.asarray, tree))

  def finish(self) -> dict[str, Any]:
    """Waits for what is being saved, writes the trace, and measures the model."""
    self._checkpoints.close()
    trace, method, params = self.trace(), self._part.method, self._part.params
    trace.save(self._workdir / TRACE)
    up, down = servers.message_bytes(method, params)
    return {
      'seconds': float(trace.seconds[-1]),
      'staleness': float(trace.staleness[trace.pushes].mean()),
      'bytes_sent': float(trace.link_bytes(up, down).mean()),
      **self._part.measures(self.state.params),
    }

  def trace(self) -> simulation.EventTrace:
    """What happened so far."""
    columns: Any = {name: [event[name] for event in self._events] for name in _COLUMNS}
    return simulation.EventTrace(**columns, workers=self._settings['workers'])

  def _answer(self, index: int) -> Any:
    answered = self._part.answer(self.state, self._pushed[index], np.int32(index))
    crossed, self._pulled[index] = jax.device_get(answered)
    return crossed

  def _record(self, **event: Any) -> None:
    nothing = dict(pushes=False, pulls=False, staleness=0, steps=0, examples=0)
    self._events.append({**nothing, 'shard': event['worker'], **event})

  def _path(self, step: int) -> pathlib.Path:
    folder = self._workdir / 'traces'
    folder.mkdir(exist_ok=True)
    return folder / f'{step}.npz'


def _rows(trace: simulation.EventTrace) -> list[dict[str, Any]]:
  columns = [getattr(trace, name).tolist() for name in _COLUMNS]
  return [dict(zip(_COLUMNS, row, strict=True)) for row in zip(*columns, strict=True)]
