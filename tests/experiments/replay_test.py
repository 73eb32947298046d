import jax
import numpy as np
import pytest

from configs import base
from experiments import build, metrics, train
from jax_dsgd import simulation


def _config(**fields):
  config = base.get_base()
  config.update(workers=2, batch_size=8, steps=7, log_every=3, eval_every=3)
  config.dataset = {'name': 'quadratics', 'clients': 2, 'dimension': 3, 'examples': 8}
  config.split = {'name': 'by_client'}
  config.model = {'name': 'linear'}
  config.algorithm = {'name': 'async_sgd', 'learning_rate': 0.1}
  config.cluster, config.policy = {'name': 'uniform'}, {'name': 'asp'}
  for name, value in fields.items():
    config[name] = value
  return config


def test_lines_are_those_of_a_run_by_hand(tmp_path):
  config = _config()
  train.run(config, str(tmp_path))
  experiment = build.experiment(config)
  rows, targets = experiment.dataset.inputs, experiment.dataset.targets
  start = experiment.model.init(jax.random.key(0))
  size = sum(leaf.size for leaf in jax.tree.leaves(start))

  # Two equal machines take turns: the server is one update ahead of what each has pulled.
  loss = lambda params, a, b: 0.5 * np.mean((experiment.model.apply(params, a) - b) ** 2)  # noqa: E731
  gradient = jax.grad(
    lambda params, a, b: ((experiment.model.apply(params, a) - b) ** 2).mean() / 2
  )
  server, views, losses = start, [start, start], []
  for push in range(7):
    worker, count = push % 2, push // 2
    batch = experiment.feed.indices(count)[0, worker]
    step = gradient(views[worker], rows[batch], targets[batch])
    server = jax.tree.map(lambda x, g: x - 0.1 * g, server, step)
    views[worker] = server
    losses.append(float(loss(server, rows, targets)) - experiment.dataset.floor)

  lines = metrics.read(str(tmp_path))
  assert [line['step'] for line in lines] == [3, 6, 7]
  assert [line['loss'] for line in lines] == pytest.approx(
    [losses[s - 1] for s in (3, 6, 7)], rel=1e-4
  )
  assert [line['test_loss'] for line in lines] == [line['loss'] for line in lines]
  assert [line['staleness'] for line in lines] == pytest.approx([2 / 3, 1, 1])
  assert [line['bytes_sent'] for line in lines] == [4 * size * s / 2 for s in (3, 6, 7)]
  assert [line['bytes_received'] for line in lines] == [4 * size * (s + 2) / 2 for s in (3, 6, 7)]
  assert [line['simulated_seconds'] for line in lines] == pytest.approx([2, 3, 4], abs=1e-6)
  assert 'accuracy' not in lines[0]
  trace = simulation.EventTrace.load(tmp_path / 'trace.npz', workers=2)
  assert trace.pushes.sum() == 7


def test_bsp_at_a_server_is_synchronous_sgd(tmp_path):
  common = {'workers': 4, 'batch_size': 32, 'dataset': {'name': 'digits'}, 'split': {'name': 'iid'}}
  model = {'name': 'mlp', 'hidden': (8,)}
  pushed = {'name': 'async_sgd', 'learning_rate': 0.4 / 4}
  whole = {'name': 'allreduce_sgd', 'learning_rate': 0.4}
  cluster = {
    'name': 'with_stragglers',
    'fraction': 0.25,
    'law': {'name': 'log_normal', 'seconds': 1.0, 'sigma': 0.3},
  }
  common |= {'model': model, 'cluster': cluster}
  server = train.run(
    _config(**common, algorithm=pushed, policy={'name': 'bsp'}, steps=20), str(tmp_path / 'server')
  )
  mean = train.run(
    _config(**common, algorithm=whole, policy={'name': 'bulk'}, steps=5), str(tmp_path / 'mean')
  )
  assert server['test_loss'] == pytest.approx(mean['test_loss'], rel=1e-5)
  assert server['accuracy'] == pytest.approx(mean['accuracy'])
  assert server['simulated_seconds'] == pytest.approx(mean['simulated_seconds'], rel=1e-3)
  assert server['bytes_sent'] + 5 * 4 == mean['bytes_sent']  # the weight of each round


def test_a_loss_that_is_not_finite_stops_with_its_push_and_time(tmp_path):
  config = _config(algorithm={'name': 'async_sgd', 'learning_rate': 1e30})
  with pytest.raises(FloatingPointError, match=r'at push \d+, after \d+ simulated seconds: lower'):
    train.run(config, str(tmp_path))
