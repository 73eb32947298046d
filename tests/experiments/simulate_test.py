import jax
import numpy as np
import optax
import pytest

from configs import base
from experiments import build, simulate, train
from experiments.data import feeds
from jax_dsgd import clusters, servers, simulation, transforms

SERVER = servers.ParameterServer(optax.sgd(0.1), optax.sgd(1.0))
# A second each way at a gigabyte a second.
PARAMS = jax.ShapeDtypeStruct((250_000_000,), np.float32)


def _config(**fields):
  config = base.get_base()
  config.update(workers=2, batch_size=8, steps=6, log_every=2, eval_every=2)
  config.model = {'name': 'mlp', 'hidden': (4,)}
  config.cluster = {'name': 'uniform'}
  for name, value in fields.items():
    config[name] = value
  return config


def test_pushes_and_pulls_cost_their_bytes_and_the_trace_ends_at_the_last_push():
  trace = simulate.of_pushes(
    clusters.uniform(2), simulation.asp(), SERVER, params=PARAMS, pushes=5, batch=4, seed=0
  )
  assert trace.seconds[trace.pushes].tolist() == [3, 3, 6, 6, 9]
  assert trace.pushes[-1]
  assert trace.examples[trace.pushes].tolist() == [4] * 5


def test_rounds_cost_a_message_each_way():
  trace = simulate.of_rounds(
    clusters.uniform(2),
    simulate.with_local_steps(simulation.bulk(), 3),
    params=PARAMS,
    rounds=2,
    local_steps=3,
    batch=4,
    seed=0,
  )
  assert trace.seconds.tolist() == [5, 10]
  assert [simulate.seconds_at(trace, step, local_steps=3) for step in (1, 3, 4, 6)] == [
    5,
    5,
    10,
    10,
  ]


def test_local_steps_are_those_of_the_policy_where_it_says():
  own = simulation.dynamic_local_updates(7)
  assert simulate.with_local_steps(own, 3) is own
  assert simulate.with_local_steps(simulation.asp(), 3).amount(None, 0).steps == 3


def test_control_follows_the_trace():
  trace = simulation.simulate_rounds(
    clusters.with_stragglers(2, fraction=0.5), simulation.fastest(1), rounds=2
  )
  feed = feeds.own_parts([np.arange(4), np.arange(4, 8)], 2, workers=2)
  control = simulate.follow(feed, trace, local_steps=1).control(0, 3)
  assert control.active.tolist() == [[True, False]] * 3
  assert control.weight.tolist() == [[1, 0]] * 3
  own = feeds.Feed(feed.indices, lambda step, steps=1: transforms.Control())
  with pytest.raises(ValueError, match='says who takes part, which config.policy does'):
    simulate.follow(own, trace, local_steps=1)


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'policy': None}, '^config.policy: a cluster and a policy come together, got None$'),
    ({'cluster': None}, '^config.cluster: a cluster and a policy come together, got None$'),
    ({'policy': {'name': 'pps'}}, "^config.policy.name: 'pps'; did you mean 'psp'"),
    ({'policy': {'name': 'psp', 'sample': 2}}, '^config.policy: psp: sample '),
    ({'cluster': {'name': 'unifrm'}}, "^config.cluster.name: 'unifrm'; did you mean 'uniform'"),
    ({'cluster': {'name': 'uniform', 'law': {'name': 'x'}}}, "^config.cluster.law.name: 'x';"),
    ({'cluster': {'name': 'tpu_pod', 'slices': 2, 'per_slice': 2}}, 'is of 4 workers'),
    ({'runtime': 'mesh'}, "^config.runtime: accepted .* async_sgd is 'simulate', got 'mesh'$"),
    ({'skip_nonfinite': True}, '^config.skip_nonfinite: accepted .* is False, got True$'),
    ({'local_steps': 0}, '^config.local_steps: '),
    (
      {'policy': {'name': 'adaptive_hogbatch', 'batches': (2, 4), 'least': (1, 1), 'most': (8, 8)}},
      '^config.policy: adaptive_hogbatch changes batch sizes',
    ),
  ],
)
def test_what_cannot_be_is_refused_in_one_line(fields, message):
  given = {'policy': {'name': 'psp', 'sample': 1}, **fields}
  given['algorithm'] = {'name': 'async_sgd', 'learning_rate': 0.1}
  if given.get('runtime') == 'mesh':
    given['workers'], given['policy'] = 1, {'name': 'asp'}
  with pytest.raises(base.ConfigError, match=message):
    build.experiment(_config(**given))


def test_a_server_without_a_cluster_is_refused():
  config = _config(cluster=None, algorithm={'name': 'async_sgd', 'learning_rate': 0.1})
  with pytest.raises(
    base.ConfigError, match='^config.cluster: accepted .* is a cluster, got None$'
  ):
    build.experiment(config)


def test_bulk_rounds_train_as_without_a_cluster_and_say_when(tmp_path):
  plain = train.run(_config(cluster=None), str(tmp_path / 'plain'))
  config = _config(cluster={'name': 'with_stragglers', 'fraction': 0.5}, policy={'name': 'bulk'})
  summary = train.run(config, str(tmp_path / 'cluster'))
  assert summary['simulated_seconds'] == pytest.approx(30, abs=0.01)  # the slow one's, six times
  for name in ('loss', 'test_loss'):
    assert summary[name] == pytest.approx(plain[name], rel=1e-6)
  assert summary['bytes_sent'] == plain['bytes_sent'] + 6 * 4  # the weights cross too
  assert (tmp_path / 'cluster' / 'report.png').is_file()
  trace = simulation.RoundTrace.load(tmp_path / 'cluster' / 'trace.npz', workers=2)
  assert trace.active.all()
