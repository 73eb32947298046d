"""Closed forms: layered SGD's step, and what a server with and without the prox can take."""

import pytest

from jax_dsgd import simulation as sim


def test_layers_hide_the_shorter_of_loading_and_the_mean_between_nodes():
  parts = dict(compute=1.0, intra=0.2, inter=0.5, load=0.4)
  assert sim.layered_seconds(**parts) == pytest.approx(sum(parts.values()) - 0.4)
  # Nothing to hide behind: the sum.
  assert sim.layered_seconds(**parts | {'load': 0.0}) == pytest.approx(1.7)


@pytest.mark.parametrize(('communicate', 'waited'), [(0.0, 0.0), (1.0, 0.0), (1.5, 0.5)])
def test_a_mean_that_arrives_a_round_late_blocks_only_for_what_outlasts_the_round(
  communicate, waited
):
  seconds = sim.overlapped_seconds(2, compute=0.5, communicate=communicate)
  assert seconds - 2 * 0.5 == pytest.approx(waited)


def test_the_server_that_carries_the_prox_saturates():
  cost = dict(gradient=1.0, prox=0.2, add=0.01)
  tap = [sim.tap_throughput(p, **cost) for p in (1, 4, 16, 64)]
  dap = [sim.dap_throughput(p, **cost) for p in (1, 4, 16, 64)]
  assert tap == pytest.approx([1, 4, 4.762, 4.762], abs=1e-3)
  # With few workers the decoupled method is slower: each of them does more.
  assert dap == pytest.approx([0.833, 3.333, 13.333, 53.333], abs=1e-3)


@pytest.mark.parametrize(
  'call, message',
  [
    (lambda: sim.layered_seconds(compute=1, intra=1, inter=-1, load=1), r'inter must be .* >= 0'),
    (lambda: sim.tap_throughput(0, gradient=1, prox=1, add=1), r'workers must be an int >= 1'),
    (lambda: sim.dap_throughput(1, gradient=0, prox=1, add=1), r'gradient must be .* > 0, not 0'),
  ],
)
def test_numbers_that_are_refused(call, message):
  with pytest.raises(ValueError, match=message):
    call()
