"""Closed forms, roots and bounds, against the paper's numbers, played iterations and by hand."""

import numpy as np
import pytest

from jax_dsgd import simulation


def played(step, delay, updates=4000):
  """The factor an update of x_{k+1} = x_k - step x_{k-delay}, over the second half."""
  x, logs = np.random.default_rng(0).normal(size=delay + 1), 0.0
  for k in range(updates):
    x = np.append(x[1:], x[-1] - step * x[0])
    scale = np.linalg.norm(x)
    if scale == 0:
      return 0.0
    logs += np.log(scale) if k >= updates // 2 else 0.0
    x = x / scale
  return np.exp(logs / (updates - updates // 2))


NUMBERS = [(0, 2, 1, 0), (1, 1, 0.25, 0.5), (2, 0.618, 0.148, 0.667), (5, 0.285, 0.067, 0.833)]


@pytest.mark.parametrize(('delay', 'threshold', 'step', 'rate'), NUMBERS)
def test_fixed_delays_by_the_numbers_of_the_paper(delay, threshold, step, rate):
  assert simulation.stability_threshold(delay) == pytest.approx(threshold, abs=5e-4)
  best = simulation.best_step(delay)
  assert best.step == pytest.approx(step, abs=5e-4)
  assert best.rate == pytest.approx(rate, abs=5e-4)


@pytest.mark.parametrize('delay', [0, 1, 2, 5, 9])
def test_thresholds_and_best_steps_hold_for_played_iterations(delay):
  threshold, best = simulation.stability_threshold(delay), simulation.best_step(delay)
  assert played(0.98 * threshold, delay) < 1 < played(1.02 * threshold, delay)
  # Two roots meet at the best step, so that what is played is late by powers of k.
  assert played(best.step, delay) == pytest.approx(best.rate, abs=2e-3)
  law = np.eye(delay + 1)[delay]
  assert simulation.contraction(best.step, law) == pytest.approx(best.rate, abs=1e-2)
  for other in (0.9, 1.1):
    assert simulation.contraction(other * best.step, law) > best.rate + 0.002


@pytest.mark.parametrize(('delay', 'factor'), [(0, 0.75), (1, 0.5), (2, 0.77), (6, 1.004)])
def test_a_little_staleness_is_faster_than_none(delay, factor):
  law = np.eye(delay + 1)[delay]
  assert simulation.contraction(0.25, law) == pytest.approx(factor, abs=4e-3)
  assert played(0.25, delay) == pytest.approx(factor, abs=4e-3)


@pytest.mark.parametrize('law', [[0.5, 0.5], [0.2, 0.3, 0.5], [0.1, 0, 0, 0.4, 0.5], [0, 0, 1.0]])
def test_random_ages_contract_as_predicted(law):
  """The mean of 20,000 runs, each with ages of its own, over 40 updates after the first 20."""
  rng, runs, step = np.random.default_rng(0), 20_000, 0.05
  x, means = np.ones((runs, len(law))), []
  for _ in range(61):
    ages = rng.choice(len(law), size=runs, p=law)
    new = x[:, 0] - step * x[np.arange(runs), ages]
    x = np.concatenate([new[:, None], x[:, :-1]], axis=1)
    means.append(new.mean())
  measured = (means[60] / means[20]) ** (1 / 40)
  assert measured == pytest.approx(simulation.contraction(step, law), abs=2e-3)
  # Slower than without ages, or as fast: 0.95 is far from what ages of 2 to 4 give.
  assert len(law) < 3 or measured < 0.949


def test_contraction_of_the_mean_recursion_is_exact():
  law, step = np.array([0.2, 0.5, 0.3]), 0.2
  x = [1.0, 1.0, 1.0]
  for _ in range(300):
    x.append(x[-1] - step * (law @ x[-1:-4:-1]))
  peaks = np.abs(x[100:])
  factor = (peaks[150:].max() / peaks[:50].max()) ** (1 / 150)
  assert factor == pytest.approx(simulation.contraction(step, law), abs=2e-3)


@pytest.mark.parametrize('delay', [0.1, 1.0, 7.0])
def test_a_constant_delay_in_continuous_time(delay):
  root = simulation.dominant_root
  for gain in (0.1 / delay, 0.3 / delay, 1.0 / delay, 1.5 / delay, 3.0 / delay, 20 / delay):
    s = root(gain, [delay])
    assert abs(s + gain * np.exp(-s * delay)) < 1e-9 * gain
  assert (
    root(0.999 * np.pi / 2 / delay, [delay]).real
    < 0
    < root(1.001 * np.pi / 2 / delay, [delay]).real
  )
  fastest = root(1 / np.e / delay, [delay])
  assert fastest == pytest.approx(-1 / delay, rel=1e-4)
  for other in (0.95, 1.05):
    assert root(other / np.e / delay, [delay]).real > -1 / delay


def simulated_rate(gain, delays, law, dt=1e-3, horizon=60.0):
  """The decay of dx/dt = -gain E[x(t - D)] by Euler's method, from its last two thirds."""
  lags, steps = np.round(np.asarray(delays) / dt).astype(int), int(horizon / dt)
  x = np.ones(lags.max() + steps + 1)
  for k in range(lags.max(), lags.max() + steps):
    x[k + 1] = x[k] - dt * gain * (law @ x[k - lags])
  x = np.abs(x[lags.max() :])
  a, b = x[steps // 3 : steps // 2].max(), x[-(steps // 2 - steps // 3) :].max()
  return np.log(b / a) / (horizon * 0.5)


@pytest.mark.parametrize(
  ('delays', 'law', 'gain'), [([0, 2], [0.5, 0.5], 0.8), ([0.5, 1, 3], [0.2, 0.5, 0.3], 0.9)]
)
def test_a_law_of_delays_in_continuous_time(delays, law, gain):
  predicted = simulation.dominant_root(gain, delays, law=law)
  assert simulated_rate(gain, delays, np.array(law)) == pytest.approx(predicted.real, abs=0.02)
  repeated = np.repeat(delays, np.round(np.array(law) * 10).astype(int))
  assert simulation.dominant_root(gain, repeated) == pytest.approx(predicted)


def test_samples_of_an_exponential_delay_come_near_its_root():
  """E[exp(-s D)] = 1/(1 + s m): s^2 m + s + a = 0."""
  quantiles = -np.log(1 - (np.arange(400) + 0.5) / 400)
  expected = (-1 + np.sqrt(complex(1 - 4 * 0.5))) / 2
  assert simulation.dominant_root(0.5, quantiles) == pytest.approx(expected, abs=0.02)


def test_more_workers_are_not_always_faster():
  result = simulation.best_worker_count(0.25, 8)
  assert result.count == 2
  by_hand = [-(m + 1) * np.log(played(0.25, m)) for m in range(8)]
  np.testing.assert_allclose(result.speeds, by_hand, atol=0.02)
  assert result.speeds[6] < 0 < result.speeds[5]
  assert simulation.best_worker_count(0.01, 8).count == 8
  assert simulation.best_worker_count(1.0, 4).count == 1


def test_elastic_constant_by_hand():
  x = np.arange(6.0).reshape(2, 3)
  views = np.stack([x, x + [[0, 1, 0], [0, 0, 2]], x - 1])
  assert simulation.elastic_constant(views, x, learning_rate=0.5) == 6 / 0.25
  assert simulation.elastic_constant(views[:1], x, learning_rate=0.1) == 0


def test_error_feedback_stays_below_its_bound():
  rng, rate = np.random.default_rng(0), 0.1
  memory, seen, kept = np.zeros(50), 0.0, 0.9  # the top 10 %
  for _ in range(300):
    gradient = rng.normal(size=50)
    total = memory + rate * gradient / np.linalg.norm(gradient)
    memory = np.where(np.abs(total) >= np.sort(np.abs(total))[-5], 0, total)
    view = simulation.elastic_constant(memory[None], np.zeros(50), learning_rate=rate)
    seen = max(seen, view)
  assert 1 < seen < simulation.error_feedback_bound(kept, 1.0)
  # In one dimension and with C(x) = (1 - c) x, the bound of kept = c^2 is reached.
  memory = 0.0
  for _ in range(200):
    memory = 0.5 * (memory + rate * 3.0)
  assert (memory / rate) ** 2 == pytest.approx(simulation.error_feedback_bound(0.25, 3.0))
  assert simulation.error_feedback_bound(0, 5.0) == 0


def test_staleness_bound_is_reached_by_equal_gradients():
  x, rate = [0.0], 0.2
  for _ in range(10):
    x.append(x[-1] - rate * 3.0)
  shown = simulation.elastic_constant([[x[-5]], [x[-2]]], [x[-1]], learning_rate=rate)
  assert shown == pytest.approx(simulation.staleness_bound(4, 3.0))


@pytest.mark.parametrize(
  ('call', 'message'),
  [
    (lambda s: s.stability_threshold(-1), 'stability_threshold: delay must be an int >= 0, not -1'),
    (lambda s: s.best_step(0.5), 'best_step: delay must be an int >= 0, not 0.5'),
    (lambda s: s.contraction(np.nan, [1]), 'step must be a finite number >= 0, not nan'),
    (lambda s: s.contraction(0.1, [0.5, 0.4]), r'sum to 1, not \[0.5, 0.4\]'),
    (lambda s: s.contraction(0.1, [1.5, -0.5]), r'sum to 1, not \[1.5, -0.5\]'),
    (lambda s: s.dominant_root(0, [1]), 'gain must be a finite number > 0, not 0'),
    (lambda s: s.dominant_root(1, [-1]), r'finite seconds >= 0, not \[-1.0\]'),
    (lambda s: s.dominant_root(1, []), r'finite seconds >= 0, not \[\]'),
    (lambda s: s.dominant_root(1, [1, 2], law=[1]), 'law must have 2 entries, not 1'),
    (lambda s: s.best_worker_count(0, 4), 'step must be a finite number > 0, not 0'),
    (lambda s: s.best_worker_count(1, 0), 'most must be an int >= 1, not 0'),
    (
      lambda s: s.elastic_constant([1.0, 2.0], [1.0, 2.0], learning_rate=1),
      r'views must be \[workers, \*\(2,\)\], not \(2,\)',
    ),
    (
      lambda s: s.elastic_constant([[1.0]], [1.0], learning_rate=0),
      'learning_rate must be a finite number > 0, not 0',
    ),
    (lambda s: s.error_feedback_bound(1, 1), 'kept must be less than 1, not 1'),
    (lambda s: s.staleness_bound(-1, 1), 'missing must be an int >= 0, not -1'),
  ],
)
def test_arguments_are_refused(call, message):
  with pytest.raises(ValueError, match=message):
    call(simulation)
