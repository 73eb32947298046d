"""Laws of compute time, links, availability, failures, presets and files of clusters."""

import dataclasses
import itertools

import numpy as np
import pytest

from jax_dsgd import clusters

RNG = np.random.default_rng


def uniform_laws(n):
  return (clusters.constant(1.0),) * n


LAWS = [
  clusters.constant(2.0, overhead=0.5),
  clusters.shifted_exponential(1.0, 0.5, delay=0.25),
  clusters.shifted_exponential(0.0, 2.0),
  clusters.log_normal(2.0, 0.5),
  clusters.markov_slowdown(1.0, 4.0, fast=30.0, slow=10.0),
  clusters.periodic(1.0, 3.0, period=10.0, slow=2.5),
  clusters.recorded([1.0, 2.0, 6.0]),
]
each_law = pytest.mark.parametrize('law', LAWS, ids=lambda law: law.name)


@each_law
def test_the_mean_of_a_law_is_that_of_many_batches(law):
  sample, now, count = law.sampler(RNG(3)), 0.0, 20_000
  for _ in range(count):
    now += sample(now, 1.0)
  assert now / count == pytest.approx(law.mean, rel=0.05)


@each_law
def test_a_law_is_the_same_for_the_same_stream_and_scales_when_slowed(law):
  times = [law.sampler(RNG(1)) for _ in range(2)]
  first = [times[0](7.0 * j, 1.5) for j in range(600)]
  assert first == [times[1](7.0 * j, 1.5) for j in range(600)]
  assert min(first) > 0
  slow = law.slowed(3.0).sampler(RNG(1))
  assert [slow(7.0 * j, 1.5) for j in range(600)] == [3.0 * x for x in first]


def test_constant_and_recorded_by_hand():
  assert clusters.constant(2.0, overhead=0.5).sampler(RNG(0))(3.0, 4.0) == 8.5
  sample = clusters.recorded([1.0, 4.0]).sampler(RNG(0))
  assert [sample(0.0, 2.0) for _ in range(3)] == [2.0, 8.0, 2.0]


@pytest.mark.parametrize(
  'start, work, seconds',
  [
    (0, 6, 6),
    (0, 7, 9),
    (7, 1, 3),
    (9, 1, 1 + 2 / 3),
    (0, 22 / 3, 10),
    (0, 23 / 3 + 22, 40 + 1 / 3),
  ],
)
def test_periodic_by_hand(start, work, seconds):
  # Six fast seconds, then four at a third of the speed: 22/3 units of work a period. From 9 on, one
  # slow second does 1/3.
  sample = clusters.periodic(1.0, 3.0, period=10.0, slow=4.0).sampler(RNG(0))
  assert sample(float(start), float(work)) == pytest.approx(seconds)


def test_markov_slowdown_depends_on_time_alone():
  """Work cut into pieces takes as long as in one piece, and a machine's past is not asked."""
  law = clusters.markov_slowdown(1.0, 5.0, fast=3.0, slow=2.0)
  whole, pieces = law.sampler(RNG(0)), law.sampler(RNG(0))
  now = 0.0
  for _ in range(400):
    now += pieces(now, 0.25)
  assert whole(0.0, 100.0) == pytest.approx(now)
  paces = np.array([whole(t, 1e-9) / 1e-9 for t in np.arange(0, 200, 0.01)])
  assert set(np.round(paces, 2)) <= {1.0, 5.0} and 0.2 < (paces > 2).mean() < 0.6


def test_workers_draw_from_streams_of_their_own():
  cluster = clusters.uniform(3, law=clusters.log_normal(1.0, 1.0))
  one, other = cluster.samplers(5), cluster.samplers(5)
  first = [one[2](0.0, 1.0) for _ in range(4)]
  for _ in range(100):
    other[0](0.0, 1.0)
  assert [other[2](0.0, 1.0) for _ in range(4)] == first
  assert one[0](0.0, 1.0) != one[1](0.0, 1.0)
  assert cluster.samplers(6)[2](0.0, 1.0) != first[0]


def test_messages_by_hand():
  latency = np.array([[0, 1], [2, 0]])
  cluster = clusters.Cluster(
    'pair', uniform_laws(2), latency, 10.0, server_latency=[1, 3], server_bandwidth=100.0
  )
  assert cluster.message_seconds(0, 1, 20) == 3
  assert cluster.message_seconds(1, 0, 20) == 4
  assert cluster.message_seconds(1, 1, 20) == 0
  assert cluster.server_seconds(1, 50) == 3.5
  with pytest.raises(ValueError, match='read-only'):
    cluster.latency[0, 1] = 0
  with pytest.raises(dataclasses.FrozenInstanceError):
    cluster.name = 'other'


def test_availability_of_chains():
  chains = clusters.Availability(up=[30, 3], down=[10, 17])
  up = clusters.Cluster('c', uniform_laws(2), availability=chains).available(RNG(0), 20_000)
  assert up.dtype == bool and up.shape == (20_000, 2)
  np.testing.assert_allclose(up.mean(axis=0), [0.75, 0.15], atol=0.03)
  runs = [len(list(run)) for value, run in itertools.groupby(up[:, 1]) if value]
  assert np.mean(runs) == pytest.approx(3, rel=0.1)


def test_groups_fail_together():
  chains = clusters.Availability(1e9, 1, groups=[4, 4, 7, 7], group_up=4, group_down=4)
  up = clusters.Cluster('c', uniform_laws(4), availability=chains).available(RNG(1), 4000)
  correlation = np.corrcoef(up.T)
  assert correlation[0, 1] > 0.99 and correlation[2, 3] > 0.99
  assert abs(correlation[0, 2]) < 0.1
  assert up.mean() == pytest.approx(0.5, abs=0.05)


def test_all_are_up_without_availability():
  assert clusters.uniform(3).available(RNG(0), 4).all()


def test_failures_cost_what_restarts_cost():
  """The mean time of work that restarts at rate r is (exp(r t) - 1) / r."""
  rate, seconds = 0.5, 2.0
  cluster = clusters.Cluster('frail', (clusters.constant(seconds),), failures_per_hour=3600 * rate)
  (sample,) = cluster.samplers(0)
  times = [sample(0.0, 1.0) for _ in range(20_000)]
  assert min(times) == seconds
  assert np.mean(times) == pytest.approx((np.exp(rate * seconds) - 1) / rate, rel=0.05)


def test_failures_that_let_nothing_succeed_are_found():
  cluster = clusters.Cluster('dead', (clusters.constant(3600.0),), failures_per_hour=1000.0)
  with pytest.raises(ValueError, match=r'dead: failures_per_hour must let 3600 s of work succeed'):
    cluster.samplers(0)[0](0.0, 1.0)


PRESETS = {
  'uniform': lambda: clusters.uniform(4),
  'with_stragglers': lambda: clusters.with_stragglers(10, fraction=0.2, factor=4),
  'tpu_pod': lambda: clusters.tpu_pod(2, 3),
  'gpu_rack': lambda: clusters.gpu_rack({'h100': 1, 't4': 2}),
  'data_centers': lambda: clusters.data_centers([2, 3]),
  'phones': lambda: clusters.phones(7),
}


@pytest.mark.parametrize('name', PRESETS)
def test_presets_are_clusters_that_run(name):
  cluster = PRESETS[name]()
  assert cluster.size == {'uniform': 4, 'with_stragglers': 10, 'tpu_pod': 6}.get(name, cluster.size)
  assert name in cluster.name
  assert all(sample(0.0, 1.0) > 0 for sample in cluster.samplers(0))
  assert cluster.latency.shape == (cluster.size, cluster.size)


def test_presets_by_hand():
  assert [law.mean for law in PRESETS['with_stragglers']().laws] == [1.0] * 8 + [4.0] * 2
  pod = PRESETS['tpu_pod']()
  assert pod.message_seconds(1, 2, 9e9) == pytest.approx(0.1 + 1e-6)
  assert pod.message_seconds(1, 3, 9e9) == pytest.approx(1.5 + 5e-5)
  rack = PRESETS['gpu_rack']()
  assert rack.memory.tolist() == [80e9, 16e9, 16e9]
  assert rack.laws[1].mean == pytest.approx(989 / 65)
  wide = PRESETS['data_centers']()
  assert wide.message_seconds(2, 4, 0) == pytest.approx(1e-5)
  assert wide.server_seconds(0, 0) < wide.server_seconds(2, 0)


FILE = """
name: lab
workers:
  - {count: 2, law: {constant: {seconds: 1.0}}, memory: 8e10, group: a}
  - {law: {markov_slowdown: {seconds: 1.0, factor: 5, fast: 60, slow: 20}}, group: b}
links: {latency: 1e-5, bandwidth: 1e10}
server: {latency: 0.5, bandwidth: [1.0, 2.0, 4.0]}
availability: {up: 20, down: 2, group_up: 10, group_down: 5}
failures_per_hour: 0.01
"""


def read(tmp_path, text):
  path = tmp_path / 'room.yaml'
  path.write_text(text)
  return clusters.from_yaml(path)


def test_a_file(tmp_path):
  cluster = read(tmp_path, FILE)
  assert (cluster.name, cluster.size) == ('lab', 3)
  assert cluster.laws[0].mean == 1.0 and cluster.laws[2].mean == pytest.approx(80 / 64)
  assert cluster.memory.tolist() == [8e10, 8e10, 16e9]
  assert cluster.latency[0, 1] == 1e-5 and cluster.bandwidth[2, 0] == 1e10
  assert cluster.server_seconds(2, 2) == 1.0
  assert cluster.availability.groups.tolist() == [0, 0, 1]
  assert cluster.availability.up.tolist() == [20, 20, 20]
  assert cluster.availability.group_down == 5
  assert cluster.failures_per_hour == 0.01


@pytest.mark.parametrize(
  'old, new, message',
  [
    ('links:', 'link:', r"a key must be one of .*, not 'link' \(did you mean 'links'\?\)"),
    ('count: 2', 'cuont: 2', r"workers\[0\]: a key .*did you mean 'count'"),
    ('constant', 'constnat', r"law must be one of .*did you mean 'constant'"),
    ('seconds: 1.0}}, memory', 'second: 1.0}}, memory', r"did you mean 'seconds'"),
    ('{seconds: 1.0}}, memory', '{}}, memory', r'constant must have seconds'),
    ('count: 2', 'count: 0', r'count must be an int >= 1, not 0'),
    ('memory: 8e10', 'memory: none', r'memory must be numbers of shape'),
    ('bandwidth: 1e10', 'bandwidth: 0', r'bandwidth\[0, 0\] must be finite and > 0, not 0'),
    (', group: b', '', r'every kind of workers must have a group, or none'),
    ('up: 20, ', '', r'availability must have up'),
    ('failures_per_hour: 0.01', 'failures_per_hour: -1', r'failures_per_hour must be a finite'),
    ('name: lab', 'name: [lab', r'must be YAML'),
    (FILE, '- 1', r'must be a mapping'),
    (FILE, 'name: x', r'workers must be a list'),
  ],
)
def test_a_file_that_is_refused(tmp_path, old, new, message):
  assert old in FILE
  with pytest.raises(ValueError, match=message) as info:
    read(tmp_path, FILE.replace(old, new, 1))
  assert '\n' not in str(info.value)


@pytest.mark.parametrize(
  'build, message',
  [
    (lambda: clusters.constant(0), r'constant: seconds must be a finite number > 0, not 0'),
    (lambda: clusters.constant(-1.0), r'seconds must be .* not -1.0'),
    (lambda: clusters.constant(float('inf')), r'not inf'),
    (lambda: clusters.constant(True), r'not True'),
    (lambda: clusters.shifted_exponential(0, 0), r'least \+ extra must be'),
    (lambda: clusters.log_normal(1, float('nan')), r'sigma must be .* not nan'),
    (lambda: clusters.markov_slowdown(1, 0.5, fast=1, slow=1), r'factor must be .* >= 1'),
    (lambda: clusters.markov_slowdown(1, 2, fast=0, slow=1), r'fast must be'),
    (lambda: clusters.periodic(1, 2, period=1, slow=1), r'slow must be shorter than period'),
    (lambda: clusters.recorded([]), r'recorded: seconds must be of shape'),
    (lambda: clusters.recorded([1, 0]), r'recorded: seconds\[1\] must be finite and > 0'),
    (lambda: clusters.constant(1).slowed(0), r'factor must be'),
    (lambda: clusters.Cluster('c', ()), r'c: laws must be a Law for each worker'),
    (lambda: clusters.Cluster('c', (1.0,)), r'c: laws must be'),
    (lambda: clusters.Cluster('c', uniform_laws(2), -1), r'c: latency\[0, 0\] must be'),
    (lambda: clusters.Cluster('c', uniform_laws(2), 0, np.inf), r'c: bandwidth\[0, 0\] must be'),
    (lambda: clusters.Cluster('c', uniform_laws(2), memory=[1, 2, 3]), r'c: memory must be'),
    (lambda: clusters.Cluster('c', uniform_laws(1), failures_per_hour=-1), r'failures_per_hour'),
    (
      lambda: clusters.Cluster('c', uniform_laws(2), availability=clusters.Availability(0.5, 1)),
      r'availability: up must be >= 1 round, not 0.5',
    ),
    (
      lambda: clusters.Cluster(
        'c', uniform_laws(2), availability=clusters.Availability(2, 1, groups=[0])
      ),
      r'groups must be 2 ints',
    ),
    (lambda: clusters.uniform(0), r'uniform: n must be an int >= 1, not 0'),
    (lambda: clusters.with_stragglers(4, fraction=2), r'fraction must be from 0 to 1, not 2'),
    (lambda: clusters.gpu_rack({'h10': 1}), r"did you mean 'h100'"),
    (lambda: clusters.data_centers([2, 0]), r'data_centers: sizes must be'),
    (lambda: clusters.uniform(2).available(RNG(0), -1), r'rounds must be an int >= 0'),
  ],
)
def test_what_is_refused(build, message):
  with pytest.raises(ValueError, match=message) as info:
    build()
  assert '\n' not in str(info.value)
