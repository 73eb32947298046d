import numpy as np
import pytest

from configs import base
from experiments import build
from jax_dsgd import algorithms, compressors, topologies


def _config(**fields):
  config = base.get_base()
  with config.unlocked():
    for name, value in fields.items():
      config[name] = value
  return config


CHOCO = {
  'name': 'choco_sgd',
  'learning_rate': 0.1,
  'topology': {'name': 'ring'},
  'compressor': {'name': 'top_k', 'fraction': 0.1},
  'consensus_rate': 0.3,
}


def test_candidates_are_what_the_package_defines():
  assert build.candidates('compressor')['top_k'] is compressors.top_k
  assert build.candidates('topology')['ring'] is topologies.ring
  assert build.candidates('algorithm')['dsgd'] is algorithms.dsgd
  assert 'cosine_decay_schedule' in build.candidates('learning_rate')


@pytest.mark.parametrize(
  ('kind', 'name'),
  [
    ('compressor', 'mean_magnitude'),  # public, and no compressor
    ('compressor', 'Compressor'),
    ('dataset', 'whole_number'),
    ('dataset', 'Dataset'),
    ('learning_rate', 'sgd'),
    ('learning_rate', 'scale_by_schedule'),
    ('topology', 'np'),
  ],
)
def test_only_what_returns_the_wanted_type_is_a_candidate(kind, name):
  assert name not in build.candidates(kind)


def test_objects_are_those_of_the_config():
  built = build.experiment(_config(workers=4, batch_size=64, model={'name': 'mlp', 'hidden': (5,)}))
  assert built.workers.count == 4
  assert built.dataset.inputs.shape == (1438, 8, 8, 1)
  indices = built.feed.indices(0)
  assert indices.shape == (1, 4, 16)
  assert len(np.unique(indices)) == 64


def test_context_fills_in_what_the_config_leaves_out():
  topology = build.construct('topology', {'name': 'ring'}, field='f', context={'n': 5})
  assert topology.size == 5
  spec = {'name': 'local_sgd', 'learning_rate': 0.1, 'period': 2}
  with pytest.raises(base.ConfigError, match="config.a: local_sgd needs the argument 'axis_name'"):
    build.construct('algorithm', spec, field='config.a', context={})
  build.construct('algorithm', spec, field='a', context={'axis_name': 'w', 'examples': [1, 2]})


def test_what_the_config_gives_wins_over_the_context():
  spec = {'name': 'iid', 'seed': 3}
  dataset = build.construct('dataset', {'name': 'digits'}, field='d', context={'seed': 0})
  context = {'dataset': dataset, 'workers': 2, 'seed': 0}
  parts = build.construct('split', spec, field='s', context=context)
  other = build.construct('split', {'name': 'iid'}, field='s', context=context | {'seed': 3})
  np.testing.assert_array_equal(parts[0], other[0])


def test_a_nested_schedule_is_built():
  schedule = build.construct(
    'learning_rate',
    {'name': 'linear_schedule', 'init_value': 1.0, 'end_value': 0.0, 'transition_steps': 4},
    field='f',
    context={},
  )
  assert float(schedule(1)) == 0.75


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    (
      {'algorithm': {**CHOCO, 'compressor': {'name': 'top_k', 'fracton': 0.1}}},
      r"^config.algorithm.compressor.fracton: top_k has no argument 'fracton'; did you mean "
      r"'fraction'\? accepted: fraction, k$",
    ),
    (
      {'algorithm': {**CHOCO, 'topology': {'name': 'rng'}}},
      r"^config.algorithm.topology.name: 'rng'; did you mean 'ring'\? accepted: .*complete, ",
    ),
    (
      {'algorithm': {**CHOCO, 'topology': {'name': 'torus', 'rows': 2, 'columns': 3}}},
      r'^config.algorithm.topology: .*torus.* is for 6 workers and config.workers is 8$',
    ),
    ({'algorithm': {**CHOCO, 'topology': 'ring'}}, r"^config.algorithm.topology: .*got 'ring'$"),
    (
      {'algorithm': {k: v for k, v in CHOCO.items() if k != 'consensus_rate'}},
      r"^config.algorithm: choco_sgd needs the argument 'consensus_rate'$",
    ),
    (
      {'algorithm': {**CHOCO, 'compressor': {'name': 'top_k', 'fraction': 20.0}}},
      r'^config.algorithm.compressor: .*fraction=20.0.*fraction=0.05',
    ),
    (
      {'algorithm': {'name': 'allreduce', 'learning_rate': 0.1}},
      r"^config.algorithm.name: 'allreduce'; did you mean 'allreduce_sgd'\?",
    ),
    (
      {'algorithm': {'name': 'allreduce_sgd', 'learning_rate': 'fast'}},
      r"^config.algorithm.learning_rate: .*got 'fast'",
    ),
    (
      {'algorithm': {**CHOCO, 'axis_name': 'w'}},
      r"^config.algorithm.axis_name: choco_sgd has no argument 'axis_name'",
    ),
    ({'algorithm': {'learning_rate': 0.1}}, r"^config.algorithm: takes \{'name'"),
    ({'model': {'name': 'mlp', 'hiden': (3,)}}, r'^config.model.hiden: .*did you mean .hidden.'),
    ({'model': {'name': 'transformer'}}, r'^config.model: transformer takes tokens'),
    ({'split': {'name': 'dirichlet', 'alpha': -1.0}}, r'^config.split: alpha must be'),
    (
      {'dataset': {'name': 'quadratics', 'clients': 4}, 'split': {'name': 'by_client'}},
      r'^config.split: .*4 clients for 8 workers',
    ),
    ({'batch_size': 100}, r'^config.batch_size: .*100 is not divisible by 8 workers; take 96'),
    ({'runtime': 'mash'}, r"^config.runtime: 'mash'; did you mean 'mesh'\?"),
    ({'runtime': 'mesh', 'workers': 16}, r'^config.runtime: .*needs 16 devices'),
    ({'workers': 0}, r'^config.workers: workers must be an int >= 1, got 0$'),
    ({'log_every': 0}, r'^config.log_every: '),
    ({'seed': -1}, r'^config.seed: '),
    ({'log_evry': 5}, r"^config has no field 'log_evry'; did you mean 'log_every'\?"),
  ],
)
def test_wrong_configs_are_refused_by_field(fields, message):
  with pytest.raises(base.ConfigError, match=message) as caught:
    build.experiment(_config(**fields))
  assert '\n' not in str(caught.value)


def test_missing_data_says_what_to_install(monkeypatch, tmp_path):
  monkeypatch.setattr('experiments.data.datasets._FASHION_SYSTEM', str(tmp_path))
  monkeypatch.setenv('HOME', str(tmp_path))
  monkeypatch.delenv('JAX_DSGD_DATA', raising=False)
  with pytest.raises(base.ConfigError, match='^config.dataset: .*dataset-fashion-mnist') as caught:
    build.experiment(_config(dataset={'name': 'fashion_mnist'}))
  assert '\n' not in str(caught.value)


def test_a_field_that_is_gone_is_named():
  config = base.get_base()
  with config.unlocked():
    del config['split']
  with pytest.raises(base.ConfigError, match="^config lacks the field 'split'$"):
    build.experiment(config)


def test_skip_nonfinite_wraps_the_whole_chain():
  import jax.numpy as jnp

  built = build.experiment(_config(skip_nonfinite=True))
  assert built.tx.init(jnp.zeros(2)).skipped == 0
