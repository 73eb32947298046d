"""The benchmark of topologies prints a line a topology, with the right numbers, and draws them."""

import math

import pytest

from experiments.benchmarks import topologies as benchmark


def test_a_line_a_topology_and_a_figure(capsys, tmp_path):
  rows = list(benchmark.table(10, (4, 16)))
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == 2 + 2 * len(benchmark.FAMILIES)
  assert lines[2].split()[:2] == ['ring', '4']
  benchmark.figure(rows).savefig(tmp_path / 'figure.png')
  assert (tmp_path / 'figure.png').stat().st_size > 10_000
  assert all(row.gap > 0 and row.rate > 0 and row.step_bytes > 0 for row in rows)


def test_numbers_by_hand():
  ring, mean = (benchmark.measure(family, 16, entries=10) for family in ('ring', 'complete'))
  assert ring.gap == pytest.approx(2 / 3 * (1 - math.cos(math.pi / 8)))
  assert (ring.step_bytes, mean.step_bytes) == (80, 600)
  assert ring.rounds == pytest.approx(-1 / math.log(1 - ring.gap))
  assert mean.rounds == 1
  # The worst start of an exact schedule shrinks in its last round only.
  assert benchmark.measure('one_peer_hypercube', 16, entries=10).rounds == 4
  assert benchmark.measure('butterfly_groups of 4', 16, entries=10).rounds == 2
