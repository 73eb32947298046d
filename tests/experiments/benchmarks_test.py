"""The benchmarks run and print what they claim; their times are not tested."""

import pytest

from experiments.benchmarks import break_even, gossip
from experiments.benchmarks import compressors as benchmark
from jax_dsgd import compressors


@pytest.fixture
def few(monkeypatch):
  members = ((compressors.cast(), 0.15), (compressors.random_k(0.01), None))
  monkeypatch.setattr(benchmark, 'MEMBERS', members)


def test_a_line_a_compressor(few, capsys):
  benchmark.table(entries=3000, rounds=1)
  first, header, cast, random = capsys.readouterr().out.splitlines()
  assert first.startswith('numpy copy of 3000 float32')
  assert header.split()[0] == 'compressor'
  assert cast.split()[:2] == ["cast('bfloat16')", '2.0']
  assert random.split()[:2] == ['random_k(fraction=0.01)', '100.0']


def test_errors_are_those_of_the_compressor():
  x = benchmark.gradient(3000)
  assert benchmark.measure(compressors.identity(), x, rounds=1).error == 0
  assert 0.9 < benchmark.measure(compressors.random_k(0.01), x, rounds=1).error < 1


def test_break_even_by_hand():
  sparse, shared = compressors.top_k(0.1), compressors.random_k(0.1)
  speed = break_even.link_speed
  # Dense, a link of a ring of 4 carries 1.5 times the model; a gather carries three payloads.
  assert speed(sparse, 200, 1000, workers=4, seconds=2.0) == (1500 - 600) / 2
  assert speed(shared, 200, 1000, workers=4, seconds=2.0) == (1500 - 300) / 2
  assert speed(sparse, 200, 1000, workers=64, seconds=2.0) == 0


def test_break_even_prints_bytes(few, capsys):
  break_even.table(entries=3000, workers=8, rounds=1)
  lines = capsys.readouterr().out.splitlines()
  assert lines[2].split()[:3] == ["cast('bfloat16')", '6000', '42000']  # 7 payloads of 6000
  assert lines[2].split()[-1] == 'never'
  assert lines[3].split()[:3] == ['random_k(fraction=0.01)', '120', '210']


def test_gossip_times_workers_and_counts_the_rounds_of_theory(monkeypatch, capsys):
  gossip.speed((2, 4), hidden=3, batch=2, repeats=1)
  first, header, *lines = capsys.readouterr().out.splitlines()
  assert first.startswith('235 parameters, 2 examples')  # 64 x 3 + 3 + 3 x 10 + 10
  assert header.split() == ['2', '4', 'ratio']
  assert [line[:22].strip() for line in lines] == ['no mixing', *gossip.TIMED]
  graphs = {name: gossip.GRAPHS[name] for name in ('ring', 'one_peer_exponential')}
  monkeypatch.setattr(gossip, 'GRAPHS', graphs)
  rows = list(gossip.consensus((4, 16)))
  # The ring of 16 falls by (1 + 2 cos(pi / 8)) / 3 a round; the other is the mean after log2 n.
  assert [row[2:] for row in rows] == [(7, 7), (133, 133), (2, 2), (4, 4)]
  left, right = gossip.figure(rows, workers=4).axes
  assert left.get_lines()[0].get_ydata()[0] == pytest.approx(1)
  assert right.get_lines()[0].get_xdata().tolist() == [4, 16]
