"""One event of a parameter server at a time: DGS by its identities, versions, views and bytes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_dsgd import algorithms, compressors, servers, transforms

W, D, RATE = 3, 20, 0.05
RNG = np.random.default_rng(0)
A, B = RNG.uniform(0.5, 2, (W, D)), RNG.normal(size=(W, D))
START = RNG.normal(size=D)
ARRIVALS = RNG.integers(W, size=60)


def gradient(x, work):
  a, b = jnp.asarray(A, x.dtype), jnp.asarray(B, x.dtype)
  return a[work.shard] * (x - b[work.shard])


class Run:
  """Workers that push and pull in the order given, with what crosses kept."""

  def __init__(self, method, workers=W):
    self.method, start = method, jnp.asarray(START)
    self.server = servers.init_server(method, start)
    self.workers = [servers.init_worker(method, start) for _ in range(workers)]
    self.shards = [servers.init_shard(method, start) for _ in range(workers)]
    self.compute = jax.jit(functools.partial(servers.compute, method, gradient))
    self.apply = jax.jit(functools.partial(servers.apply, method))
    self.answer = jax.jit(functools.partial(servers.answer, method))

  def event(self, k, steps=1):
    index = jnp.int32(k)
    work = servers.Work(index, index, self.shards[k].count, jnp.int32(1))
    push, self.workers[k], self.shards[k] = self.compute(
      self.workers[k], self.shards[k], work, jnp.int32(steps)
    )
    self.server = self.apply(self.server, self.workers[k], index, push)
    reply, self.workers[k] = self.answer(self.server, self.workers[k], index)
    return dense(push), dense(reply)


def dense(payload):
  """What a payload of top-k stands for."""
  (part,) = payload
  if not isinstance(part, dict) or 'places' not in part:
    return np.asarray(jax.tree.leaves(part)[0], float)
  x = np.zeros(D)
  x[np.asarray(part['places'])] = np.asarray(part['values'])
  return x


def test_dgs_forgets_nothing_of_what_waits():
  """What waits holds m u = m u_sent + sum of lr g, undecayed; views are the sum of answers."""
  momentum = 0.7
  with jax.enable_x64(True):
    run = Run(algorithms.dgs(RATE, 0.2, momentum=momentum))
    waits, answered = np.zeros((W, D)), np.zeros((W, D))
    pushed = np.zeros(D)
    for k in ARRIVALS.tolist():
      g = A[k] * (np.asarray(run.workers[k].view) - B[k])
      push, reply = run.event(k)
      assert np.count_nonzero(push) == np.count_nonzero(reply) == 4
      due = waits[k] + RATE * g
      np.testing.assert_allclose(push[push != 0], due[push != 0], rtol=1e-6)
      waits[k] = np.where(push != 0, momentum * due, due)
      u = np.asarray(run.workers[k].memory.velocity)
      np.testing.assert_allclose(momentum * u, waits[k], rtol=0, atol=1e-15)
      answered[k] += reply
      pushed += push
      np.testing.assert_allclose(run.workers[k].view, START + answered[k], rtol=0, atol=1e-14)
      np.testing.assert_allclose(run.server.params, START - pushed, rtol=0, atol=1e-14)


def test_dense_answers_are_the_server():
  run = Run(algorithms.dgs(RATE, 0.2, answer_fraction=1))
  for k in ARRIVALS[:20].tolist():
    run.event(k)
    np.testing.assert_array_equal(run.workers[k].view, run.server.params)


def test_dense_dgs_of_one_worker_is_heavy_ball():
  run = Run(algorithms.dgs(RATE, 1.0, momentum=0.7), workers=1)
  x, u = START.copy(), np.zeros(D)
  for _ in range(30):
    run.event(0)
    u = 0.7 * u + RATE * A[0] * (x - B[0])
    x = x - u
    np.testing.assert_allclose(run.server.params, x, atol=1e-5)


def told():
  """A server's transform that keeps what it was told."""

  def update(updates, state, params=None, *, control=None, **extra):
    del state, params, extra
    return jax.tree.map(jnp.negative, updates), (control.staleness, control.view)

  init = lambda params: (jnp.zeros((), jnp.int32), params)  # noqa: E731
  return optax.GradientTransformationExtraArgs(init, update)


def test_versions_and_views_are_those_of_the_pull():
  run = Run(servers.ParameterServer(optax.sgd(RATE), told()))
  pulled, views = [0] * W, [np.asarray(START, np.float32)] * W
  for t, k in enumerate(ARRIVALS[:20].tolist()):
    run.event(k)
    staleness, view = run.server.outer
    assert int(staleness) == t - pulled[k]
    np.testing.assert_array_equal(view, views[k])
    pulled[k], views[k] = t + 1, np.asarray(run.server.params)
    assert int(run.server.version) == t + 1 == int(run.workers[k].version)


def test_local_steps_push_what_they_moved():
  """Three steps, with the inner optimizer's state and count those of the shard."""
  run = Run(servers.ParameterServer(optax.sgd(RATE, momentum=0.5), optax.sgd(1.0)))
  run.event(0, steps=3)
  run.event(0, steps=2)
  x, m = START.copy(), np.zeros(D)
  for _ in range(5):
    m = 0.5 * m + A[0] * (x - B[0])
    x = x - RATE * m
  np.testing.assert_allclose(run.server.params, x, atol=1e-5)
  assert int(run.shards[0].count) == 5


@pytest.mark.parametrize(
  ('method', 'up', 'down'),
  [
    (algorithms.async_sgd(0.1), 4 * 120, 4 * 120),
    (algorithms.dgs(0.1, 0.1), 12 * 6, 12 * 6),  # 10 + 2 entries of 4 + 2 bytes
    (algorithms.dgs(0.1, 0.1, answer_fraction=1), 12 * 6, 4 * 120),
    (
      servers.ParameterServer(optax.sgd(1.0), optax.sgd(1.0), up=compressors.cast()),
      2 * 120,
      4 * 120,
    ),
  ],
)
def test_bytes_of_messages(method, up, down):
  params = {'a': jnp.zeros((10, 10)), 'b': jnp.zeros(20)}
  assert servers.message_bytes(method, params) == (up, down)


def test_compression_of_pushes_is_the_same_at_both_ends():
  """A random compressor: the server decodes with the key of the worker's version."""
  method = servers.ParameterServer(
    optax.sgd(RATE), optax.scale(-1.0), up=compressors.qsgd(), seed=3
  )
  run, twin = Run(method), Run(method)
  before = np.asarray(run.server.params)
  run.event(1)
  twin.event(1)
  np.testing.assert_array_equal(run.server.params, twin.server.params)
  step, right = before - np.asarray(run.server.params), RATE * A[1] * (START - B[1])
  # qsgd of 7 levels: off by at most one level of the norm an entry.
  assert 0 < np.abs(step - right).max() <= np.linalg.norm(right) / 7 + 1e-6


def test_transforms_without_control_still_serve():
  outer = optax.chain(transforms.discount_staleness(0.0), optax.adam(0.1))
  run = Run(servers.ParameterServer(optax.sgd(RATE), outer))
  run.event(0)
  assert np.isfinite(run.server.params).all()
