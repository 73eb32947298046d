"""Evaluation: of the model that the config names, on its part of the test set, changing nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from experiments import build, evaluation, loop
from experiments.data import datasets

BLOCKED = {
  'name': 'mm_psgd',
  'learning_rate': 0.5,
  'period': 2,
  'block': {'name': 'in_turn', 'rounds': 2, 'blocks': 2},
  'blocks': 2,
}


def _config(**fields):
  config = base.get_base()
  config.update(workers=3, batch_size=48, steps=16, log_every=8)
  config.model = {'name': 'linear', 'bias': True}
  config.feed = {'name': 'class_blocks', 'steps': 4, 'number': 2}
  with config.unlocked():
    for name, value in fields.items():
      config[name] = value
  return config


def _trained(**fields):
  experiment = build.experiment(_config(**fields))
  parts = loop.program(experiment)
  rows, _, _ = parts.advance(parts.init(), 0, 8)
  return experiment.dataset, rows, parts.evaluate(rows)


def _accuracy(params, dataset, members):
  layer = jax.tree.map(np.asarray, params)['layer_0']
  scores = dataset.test_inputs[members].reshape(-1, 64) @ layer['kernel'] + layer['bias']
  return np.mean(scores.argmax(1) == dataset.test_targets[members])


def test_each_block_is_answered_by_its_model():
  dataset, rows, measures = _trained(
    algorithm=BLOCKED, evaluation={'name': 'block_models', 'blocks': 2}
  )
  halves = [np.flatnonzero((dataset.test_targets >= 5) == upper) for upper in (False, True)]
  models = rows['state'].models
  for k, members in enumerate(halves):
    own = jax.tree.map(lambda x: x[0, k], models)  # noqa: B023
    expected = _accuracy(own, dataset, members)
    assert measures[f'accuracy_part{k}'] == pytest.approx(expected, abs=1e-6)
  whole = sum(measures[f'accuracy_part{k}'] * halves[k].size for k in range(2))
  assert measures['accuracy'] == pytest.approx(whole / dataset.test_targets.size)
  assert measures['accuracy_worst'] == pytest.approx(measures['accuracy'])  # alike after a round


def test_the_trained_model_is_measured_by_block():
  local = {'name': 'local_sgd', 'learning_rate': 0.5, 'period': 2}
  dataset, rows, by_block = _trained(
    algorithm=local, evaluation={'name': 'trained_model_by_block', 'blocks': 2}
  )
  _, _, whole = _trained(algorithm=local)
  assert by_block['accuracy'] == pytest.approx(whole['accuracy'])
  assert by_block['test_loss'] == pytest.approx(whole['test_loss'], rel=1e-5)
  assert not any('part' in name for name in whole)
  model = jax.tree.map(lambda x: x[0], rows['params'])
  upper = np.flatnonzero(dataset.test_targets >= 5)
  assert by_block['accuracy_part1'] == pytest.approx(_accuracy(model, dataset, upper), abs=1e-6)


def test_evaluation_changes_nothing():
  experiment = build.experiment(
    _config(algorithm=BLOCKED, evaluation={'name': 'block_models', 'blocks': 2})
  )
  parts = loop.program(experiment)
  rows, _, _ = parts.advance(parts.init(), 0, 8)
  before = jax.tree.map(np.array, rows)
  assert parts.evaluate(rows) == parts.evaluate(rows)
  jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, rows))


@pytest.mark.parametrize('blocks', [2, 3])
def test_an_algorithm_without_such_models_is_refused(blocks):
  algorithm = BLOCKED if blocks == 3 else {'name': 'local_sgd', 'learning_rate': 0.5, 'period': 2}
  config = _config(algorithm=algorithm, evaluation={'name': 'block_models', 'blocks': blocks})
  with pytest.raises(base.ConfigError, match=f'needs an algorithm that keeps {blocks} models'):
    loop.program(build.experiment(config))


def test_parts_of_unequal_size_count_every_example_once():
  dataset = datasets.digits()
  sizes = [part.size for part in evaluation.block_models(dataset, blocks=4).parts]
  assert sum(sizes) == 359 and len(set(sizes)) > 1
  (cut, part_of) = evaluation._batches(dataset, evaluation.block_models(dataset, blocks=4).parts)
  assert jnp.bincount(part_of).tolist() == [1] * 4
  assert [int(mask.sum()) for mask in cut[2]] == sizes
