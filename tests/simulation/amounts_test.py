"""How much each does: DyLU, adaptive Hogbatch, dynamic batching."""

import numpy as np
import pytest

from jax_dsgd import clusters
from jax_dsgd import simulation as sim

FOUR = clusters.Cluster('toy', tuple(map(clusters.constant, (0.58, 0.75, 1.51, 3.33))))


def of_worker(trace, worker, column):
  return getattr(trace, column)[trace.pushes & (trace.worker == worker)]


@pytest.mark.parametrize('steps, expected', [(50, [50, 38, 19, 8]), (20, [20, 15, 7, 5])])
def test_slow_workers_do_fewer_steps(steps, expected):
  trace = sim.simulate_events(FOUR, sim.dynamic_local_updates(steps), until=800.0)
  for worker, number in enumerate(expected):
    assert set(of_worker(trace, worker, 'steps').tolist()) == {number}


def test_speeds_are_measured_not_told():
  """A worker whose law promises one second but takes four gets a quarter of the steps."""
  liar = clusters.constant(4.0)._replace(mean=1.0)
  cluster = clusters.Cluster('c', (clusters.constant(1.0), liar))
  trace = sim.simulate_events(cluster, sim.dynamic_local_updates(40), until=1000.0)
  steps = of_worker(trace, 1, 'steps').tolist()
  assert steps[0] == 40 and set(steps[1:]) == {10}


def test_shards_are_visited_evenly_whoever_is_fast():
  free = sim.simulate_events(FOUR, sim.dynamic_local_updates(50, least=50), until=3000.0)
  visits = np.bincount(free.shard[free.pushes], minlength=4)
  assert np.ptp(visits) <= 4  # a task counts when it is given
  assert len(set(of_worker(free, 0, 'shard').tolist())) == 4
  pinned = sim.dynamic_local_updates(50, least=50, pinned=True)
  bound = sim.simulate_events(FOUR, pinned, until=3000.0)
  assert (bound.shard == bound.worker).all()
  # The unflattering control: the slow worker's data is seen a sixth as often.
  visits = np.bincount(bound.shard[bound.pushes], minlength=4)
  assert visits[0] / visits[3] == pytest.approx(3.33 / 0.58, rel=0.15)


def test_who_arrives_within_the_grace_joins():
  cluster = clusters.Cluster('c', tuple(map(clusters.constant, (1.0, 1.3, 2.0))))
  policy = sim.dynamic_local_updates(1, least=1, grace=0.5)
  trace = sim.simulate_events(cluster, policy, until=2.1)
  got = list(zip(trace.seconds, trace.worker, trace.pushes, trace.pulls, strict=True))[3:]
  assert got == [
    (1.0, 0, True, False),  # opens a window to 1.5
    (1.3, 1, True, True),  # the last to join
    (1.3, 0, False, True),
    (2.0, 2, True, False),  # 0 arrives at 2.3, within 2.5; its task was begun before
  ]
  none = sim.simulate_events(cluster, sim.dynamic_local_updates(1, least=1), until=2.1)
  assert none.pulls[none.pushes].all()


HOG = clusters.Cluster(
  'cpu and gpu', (clusters.constant(1 / 40), clusters.constant(1 / 4000, overhead=0.05))
)


def hogbatch(alpha):
  policy = sim.adaptive_hogbatch([1, 8192], least=[1, 4096], most=[64, 8192], alpha=alpha)
  return sim.simulate_events(HOG, policy, until=4000.0)


def test_static_hogbatch_starves_the_gpu_and_the_adaptive_one_balances():
  static = hogbatch(1.0)
  updates = np.bincount(static.worker[static.pushes])
  # 40 a second, and one every 8192 / 4000 + 0.05 s.
  assert abs(updates[0] - 160_000) <= 1 and updates[1] == int(4000 / 2.098) == 1906
  adaptive = hogbatch(2.0)
  updates = np.bincount(adaptive.worker[adaptive.pushes])
  assert updates == pytest.approx([2513, 2512], rel=0.02)
  # Once off the start, the counts never part by more than a few.
  lead = np.cumsum(np.where(adaptive.worker == 0, 1, -1) * adaptive.pushes)
  assert np.ptp(lead[2000:]) <= 3
  assert set(of_worker(adaptive, 0, 'examples')[-100:].tolist()) <= {32, 64}
  assert of_worker(adaptive, 1, 'examples').min() == 4096


def batches(laws, rounds, **options):
  cluster = clusters.Cluster('c', tuple(laws))
  policy = sim.dynamic_batching(128, **{'least': 1, 'most': 128, 'deadband': 0.0, **options})
  trace = sim.simulate_rounds(cluster, policy, rounds=rounds)
  return np.rint(trace.weight * 128).astype(int), trace


def test_proportional_times_are_balanced_in_one_step():
  batch, trace = batches([clusters.constant(1 / x) for x in (1, 2, 5, 8)], 4)
  assert batch.tolist() == [[32] * 4] + [[8, 16, 40, 64]] * 3
  np.testing.assert_allclose(np.diff(trace.seconds, prepend=0), [32, 8, 8, 8])


def test_overheads_take_a_few_steps_and_end_in_equal_times():
  batch, trace = batches([clusters.constant(1 / x, overhead=2 * x) for x in (1, 2)], 12)
  # 2 + b = 4 + (128 - b) / 2: b = 44, and 46 s for both.
  spent = trace.finished - trace.started
  assert spent[0].tolist() == [66, 36]
  assert batch[1].tolist() != batch[-1].tolist() == [44, 84]
  assert np.ptp(spent[-1]) == 0
  assert (np.diff(np.ptp(spent, axis=1)) <= 1).all()


def test_noise_moves_batches_only_without_a_dead_band():
  laws = [clusters.log_normal(1 / x, 0.1) for x in (1, 2, 5, 8)]
  moves = {}
  for deadband in (0.0, 0.3):
    batch, _ = batches(laws, 100, deadband=deadband)
    moves[deadband] = (np.diff(batch, axis=0) != 0).any(axis=1).sum()
    assert (batch.sum(axis=1) == 128).all()
    np.testing.assert_allclose(batch[-1], [8, 16, 40, 64], rtol=0.3, atol=1)
  assert moves[0.0] > 90 and moves[0.3] < 10


def test_bounds_hold_and_the_sum_is_kept():
  laws = [clusters.constant(1 / x) for x in (1, 2, 5, 8)]
  batch, _ = batches(laws, 4, least=12, most=50)
  assert batch.sum(axis=1).tolist() == [128] * 4
  assert batch[-1].min() == 12 and batch[-1].max() == 50


def test_smoothing_averages_times():
  laws = [clusters.recorded([1.0, 3.0]), clusters.constant(1.0)]
  batch, _ = batches(laws, 3, smoothing=0.5)
  # Times 64 and 64 keep the batches. Then 192 is seen as 128: aims 64 - 0.5 (128 - 96) = 48 and
  # 64 + 32 = 96, scaled by 128 / 144.
  assert batch.tolist() == [[64, 64], [64, 64], [43, 85]]
