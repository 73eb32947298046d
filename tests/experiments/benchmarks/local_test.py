"""The benchmark of local steps runs; its times are not tested."""

from experiments.benchmarks import local


def test_a_local_step_is_timed_beside_a_plain_one():
  for problem in (local.one_pass(leaves=2, entries=100), local.text()):
    plain, ours, ratio = local.ratio(*problem, rounds=1)
    assert min(plain, ours, ratio) > 0


def test_a_round_of_clients_is_timed():
  found = local.federated_round(clients=3, steps=2, rounds=1)
  assert found['seconds'] > 0
  assert 0.01 < found['gib'] < 64
