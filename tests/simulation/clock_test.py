"""Both clocks with every policy: traces that hold, prices, bad input, and what would never end."""

import dataclasses

import numpy as np
import pytest

from jax_dsgd import clusters
from jax_dsgd import simulation as sim

EVENTS = {
  'asp': lambda: sim.asp(),
  'bsp': lambda: sim.bsp(),
  'ssp': lambda: sim.ssp(2),
  'psp': lambda: sim.psp(3, 1),
  'dylu': lambda: sim.dynamic_local_updates(10, grace=1.0),
  'pinned': lambda: sim.dynamic_local_updates(10, pinned=True),
  'hogbatch': lambda: sim.adaptive_hogbatch([4] * 8, least=[1] * 8, most=[16] * 8),
}
ROUNDS = {
  'bulk': lambda: sim.bulk(),
  'fastest': lambda: sim.fastest(5),
  'adaptive_fastest': lambda: sim.adaptive_fastest(
    [2, 4], error=1.0, floor=1.0, contraction=0.1, draws=20
  ),
  'elastic_norm': lambda: sim.elastic_norm(0.6),
  'elastic_variance': lambda: sim.elastic_variance(1.2),
  'wait_avoiding': lambda: sim.wait_avoiding_groups(4, 5, grace=0.1),
  'group_generator': lambda: sim.group_generator(3, threshold=4),
  'static_groups': lambda: sim.static_groups([[0, 0, 1, 1, 2, 2, 3, -1], [0, 1] * 4]),
  'availability': lambda: sim.availability_weighted(4),
  'dynamic_batching': lambda: sim.dynamic_batching(64, least=2, most=32),
}
UNEVEN = clusters.with_stragglers(8, fraction=0.25, factor=3, law=clusters.log_normal(1.0, 0.3))
PATCHY = dataclasses.replace(UNEVEN, availability=clusters.Availability(6, 2, [0, 0, 1, 1] * 2))


def same(one, other):
  fields = [field.name for field in dataclasses.fields(one)]
  return all(
    np.array_equal(
      np.asarray(getattr(one, name), float), np.asarray(getattr(other, name), float), equal_nan=True
    )
    for name in fields
  )


@pytest.mark.parametrize('name', EVENTS)
def test_events_are_valid_repeatable_and_as_many_as_asked_for(name):
  def play(seed, **horizon):
    return sim.simulate_events(
      UNEVEN, EVENTS[name](), seed=seed, batch=4, up_bytes=1e8, down_bytes=2e8, **horizon
    )

  trace = play(1, events=600)
  assert trace.seconds.size == 600 and trace.workers == 8
  assert same(trace, play(1, events=600)) and not same(trace, play(2, events=600))
  # A longer run begins like the shorter one, and none runs past its end.
  end = trace.seconds[300]
  timed = play(1, until=end)
  assert timed.seconds[-1] == end
  np.testing.assert_array_equal(timed.worker[:301], trace.worker[:301])
  first = sim.EventTrace(**{f.name: getattr(trace, f.name) for f in dataclasses.fields(trace)})
  assert same(first, trace)


@pytest.mark.parametrize('cluster', [UNEVEN, PATCHY], ids=['all up', 'some down'])
@pytest.mark.parametrize('name', ROUNDS)
def test_rounds_are_valid_and_repeatable(name, cluster):
  def play(seed, **horizon):
    return sim.simulate_rounds(
      cluster, ROUNDS[name](), seed=seed, batch=4, message_bytes=1e8, **horizon
    )

  trace = play(1, rounds=60)
  assert trace.active.shape == (60, 8) and trace.active.any()
  assert same(trace, play(1, rounds=60)) and not same(trace, play(2, rounds=60))
  timed = play(1, until=trace.seconds[30])
  assert 31 <= timed.seconds.size <= 60 and timed.seconds[-1] == trace.seconds[30]
  # Weights are shares: they sum to one in every group.
  for row, group in zip(trace.weight, trace.group, strict=True):
    for number in set(group.tolist()) - {-1}:
      assert row[group == number].sum() == pytest.approx(1, abs=1e-5)
  # No worker does two things at once.
  for started, finished in zip(trace.started.T, trace.finished.T, strict=True):
    did = np.isfinite(started)
    assert (started[did][1:] >= finished[did][:-1] - 1e-9).all()


def test_the_machines_are_the_same_under_every_policy():
  """The j-th computation of a worker takes equally long: seeds do not mix with decisions."""
  traces = [sim.simulate_rounds(UNEVEN, ROUNDS[n](), rounds=9, seed=3) for n in ('bulk', 'fastest')]
  spent = [trace.finished[0] - trace.started[0] for trace in traces]
  active = traces[1].active[0]
  np.testing.assert_array_equal(spent[0][active], spent[1][active])


def test_messages_of_events_are_paid():
  cluster = clusters.uniform(1, latency=0.5, bandwidth=10.0)
  trace = sim.simulate_events(cluster, sim.asp(), events=3, up_bytes=10, down_bytes=20)
  # Down 0.5 + 2, compute 1, up 0.5 + 1.
  assert trace.seconds.tolist() == [0, 5, 10]
  assert trace.started.tolist() == [0, 2.5, 7.5]


def test_messages_of_rounds_are_paid():
  cluster = clusters.uniform(4, latency=0.5, bandwidth=10.0)
  central = sim.simulate_rounds(cluster, sim.bulk(), rounds=2, message_bytes=10)
  assert central.seconds.tolist() == [4, 8]  # 1.5 down, 1 of work, 1.5 up
  assert central.started[1].tolist() == [5.5] * 4 and central.finished[1].tolist() == [6.5] * 4
  ring = sim.simulate_rounds(cluster, sim.static_groups([[0, 0, 1, 1]]), rounds=2, message_bytes=10)
  # In a pair, two messages of half the bytes: 2 (0.5 + 0.5).
  assert ring.seconds.tolist() == [3, 6]
  assert ring.pair_bytes(10)[0].tolist() == [0, 20, 0, 0]


def test_static_groups_have_clocks_of_their_own():
  cluster = clusters.Cluster('c', tuple(clusters.constant(s) for s in (1.0, 2.0, 5.0, 6.0)))
  table = [[0, 0, 1, 1], [0, 0, 1, 1], [0, 1, 0, 1]]
  trace = sim.simulate_rounds(cluster, sim.static_groups(table), rounds=3)
  assert trace.seconds.tolist() == [6, 12, 18]
  assert trace.started[:, 0].tolist() == [0, 2, 4] and trace.finished[2].tolist() == [5, 6, 17, 18]


def test_who_is_down_does_nothing():
  trace = sim.simulate_rounds(PATCHY, sim.bulk(), rounds=200, seed=4)
  share = trace.active.mean()
  # Own chain up 6 / 8, group chain up 20 / 22.
  assert share == pytest.approx(0.75 * 20 / 22, abs=0.1)
  assert not trace.active.all(axis=1).all()


def names(*workers):
  return lambda view, worker: workers


def one_of_two(view):
  return sim.Meeting(np.full(view.workers, -1), np.full(view.workers, np.inf))


@pytest.mark.parametrize(
  'policy, message',
  [
    (
      sim.Policy('none', names()),
      r'none: deadlock at 1 s, nobody works: all 3 wait$',
    ),
    (sim.Policy('far', names(0, 9)), r'far: resumes must name workers that wait, not 9'),
    (sim.Policy('below', names(-1)), r'below: resumes must name workers that wait, not -1'),
    (sim.Policy('busy', names(0, 1)), r'busy: resumes must name workers that wait, not 1'),
    (sim.Policy('twice', names(0, 0)), r'twice: resumes must name workers that wait, not 0'),
    (
      sim.Policy('lazy', amount=lambda v, w: sim.Task(0)),
      r'lazy: the task of worker 0 must have steps and examples >= 1 .* not Task\(steps=0',
    ),
    (sim.Policy('shards', amount=lambda v, w: sim.Task(shard=3)), r'a shard below 3, not'),
    (sim.psp(3), r'psp: sample must be an int from 0 to 2, not 3'),
    (
      sim.adaptive_hogbatch([1, 1], least=[1, 1], most=[2, 2]),
      r'batches must be of 3 workers, not 2',
    ),
  ],
  ids=lambda value: getattr(value, 'name', ''),
)
def test_policies_of_events_that_are_refused(policy, message):
  with pytest.raises(ValueError, match=message):
    sim.simulate_events(clusters.uniform(3), policy, until=100)


@pytest.mark.parametrize(
  'policy, message',
  [
    (sim.Policy('never', meet=one_of_two), r'never: deadlock at 0 s in round 0: .*: 0, 1, 2$'),
    (
      sim.Policy('nobody', choose=lambda v: np.zeros(3, bool)),
      r'nobody: deadlock at 0 s in round 0: .*: nobody',
    ),
    (sim.Policy('ints', choose=lambda v: [0, 1]), r'ints: choose must give bool \[3\], not int64'),
    (
      sim.Policy('early', meet=lambda v: sim.Meeting(np.zeros(3, int), np.full(3, 0.5))),
      r'early: the end of worker \[0\] must be finite and after it arrived, not 0.5',
    ),
    (
      sim.Policy('big', meet=lambda v: sim.Meeting(np.array([0, 0, 3]), np.full(3, 9.0))),
      r'big: the group of worker \[2\] must be below 3, not 3',
    ),
    (sim.static_groups([[0, 0]]), r'table must be of 3 workers, not 2'),
    (sim.wait_avoiding_groups(2, 4), r'the workers must be a power of 2, not 3'),
    (sim.wait_avoiding_groups(4, 4), r'size must be an int from 1 to 3, not 4'),
    (sim.availability_weighted(4), r'size must be an int from 1 to 3, not 4'),
    (sim.dynamic_batching(10), r'total must be an int from 48 to 288, not 10'),
  ],
  ids=lambda value: getattr(value, 'name', ''),
)
@pytest.mark.parametrize('horizon', [{'rounds': 5}, {'until': 50.0}], ids=str)
def test_policies_of_rounds_that_are_refused(policy, message, horizon):
  with pytest.raises(ValueError, match=message):
    sim.simulate_rounds(clusters.uniform(3), policy, **horizon)


def test_nobody_up_for_ever_is_found():
  chains = clusters.Availability(up=1.0, down=1e12)
  cluster = dataclasses.replace(clusters.uniform(2), availability=chains)
  with pytest.raises(ValueError, match='deadlock'):
    sim.simulate_rounds(cluster, sim.bulk(), until=100.0)


def test_a_clock_that_stands_still_is_found():
  frozen = clusters.Law('frozen', 1.0, lambda rng: lambda start, work: 0.0)
  for simulate in (sim.simulate_events, sim.simulate_rounds):
    with pytest.raises(ValueError, match=r'the law of worker 0 must give finite seconds'):
      simulate(clusters.Cluster('c', (frozen,)), sim.Policy('p'), until=1.0)


@pytest.mark.parametrize('simulate', [sim.simulate_events, sim.simulate_rounds])
@pytest.mark.parametrize(
  'arguments, message',
  [
    ({}, r'give \w+ or until, not \w+=None and until=None'),
    ({'until': -1.0}, r'until must be a finite number >= 0, not -1.0'),
    ({'until': float('inf')}, r'until must be a finite number'),
    ({'until': 1.0, 'batch': 0}, r'batch must be an int >= 1, not 0'),
    ({'until': 1.0, 'seed': -1}, r'seed must be an int >= 0, not -1'),
  ],
)
def test_arguments_that_are_refused(simulate, arguments, message):
  with pytest.raises(ValueError, match=message):
    simulate(clusters.uniform(2), sim.Policy('p'), **arguments)


def test_sizes_that_are_refused():
  cluster = clusters.uniform(2)
  with pytest.raises(ValueError, match='events must be an int >= 1, not 0'):
    sim.simulate_events(cluster, sim.asp(), events=0)
  with pytest.raises(ValueError, match='rounds must be an int >= 1, not 1.5'):
    sim.simulate_rounds(cluster, sim.bulk(), rounds=1.5)
  with pytest.raises(ValueError, match='up_bytes must be a finite number >= 0, not -1'):
    sim.simulate_events(cluster, sim.asp(), events=5, up_bytes=-1)
  with pytest.raises(ValueError, match='message_bytes must be'):
    sim.simulate_rounds(cluster, sim.bulk(), rounds=5, message_bytes=np.nan)


@pytest.mark.parametrize(
  'build, message',
  [
    (lambda: sim.ssp(-1), r'ssp: slack must be an int >= 0, not -1'),
    (lambda: sim.psp(-1), r'psp: sample'),
    (lambda: sim.psp(1, 0.5), r'psp: slack must be .* not 0.5'),
    (lambda: sim.dynamic_local_updates(0), r'dynamic_local_updates: steps'),
    (lambda: sim.dynamic_local_updates(5, grace=-1), r'grace must be'),
    (lambda: sim.adaptive_hogbatch([1], least=[2], most=[3]), r'batches\[0\] must be from least'),
    (lambda: sim.adaptive_hogbatch([1], least=[1, 1], most=[3]), r'must be \[W\], not'),
    (lambda: sim.adaptive_hogbatch([1], least=[1], most=[3], alpha=0.5), r'alpha must be'),
    (lambda: sim.dynamic_batching(0), r'total must be'),
    (lambda: sim.dynamic_batching(64, least=9, most=8), r'most must be an int >= 9, not 8'),
    (lambda: sim.dynamic_batching(64, smoothing=0), r'smoothing must be over 0'),
    (lambda: sim.fastest(0), r'fastest: k must be'),
    (lambda: sim.elastic_norm(0), r'beta must be over 0'),
    (lambda: sim.elastic_variance(0), r'deadline must be a finite number > 0, not 0'),
    (
      lambda: sim.adaptive_fastest([], error=1, floor=1, contraction=0.1),
      r'loads must hold at least one load',
    ),
    (
      lambda: sim.adaptive_fastest([1], error=1, floor=1, contraction=1),
      r'contraction must be between 0 and 1',
    ),
    (lambda: sim.wait_avoiding_groups(3, 4), r'size must be a power of 2, not 3'),
    (lambda: sim.wait_avoiding_groups(4, 0), r'period must be'),
    (lambda: sim.group_generator(0), r'group_generator: size'),
    (lambda: sim.group_generator(2, threshold=0), r'threshold must be'),
    (lambda: sim.static_groups([0, 1]), r'table must be ints \[period, W\]'),
    (lambda: sim.static_groups([[0, -2]]), r'table\[0, 1\] must be from -1 to 1, not -2'),
    (lambda: sim.static_groups([[0, 2]]), r'table\[0, 1\] must be from -1 to 1, not 2'),
    (lambda: sim.availability_weighted(0), r'size must be'),
    (lambda: sim.availability_weighted(1, returns=2), r'returns must be from 0 to 1'),
    (lambda: sim.availability_weighted(1, neighbors=-1), r'neighbors must be an int >= 0, not -1'),
  ],
)
def test_parameters_that_are_refused(build, message):
  with pytest.raises(ValueError, match=message) as info:
    build()
  assert '\n' not in str(info.value)


def test_a_view_is_read_only():
  def resumes(view, worker):
    view.counts[worker] = 0
    return [worker]

  with pytest.raises(ValueError, match='read-only'):
    sim.simulate_events(clusters.uniform(2), sim.Policy('cheat', resumes), until=5.0)
