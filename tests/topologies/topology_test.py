"""Hand-made rounds: what is checked, what is counted, what mixes and how fast."""

import itertools
import time

import numpy as np
import pytest

from jax_dsgd import topologies


def send(entry, values):
  """Plays one round message by message: [n] values before, [n] values after."""
  after = [weight * value for weight, value in zip(entry.self_weights, values, strict=True)]
  for destinations, weights in zip(entry.destinations, entry.weights, strict=True):
    for sender, receiver in enumerate(destinations):
      after[receiver] += weights[receiver] * values[sender]
  return np.array(after)


GOOD = {'self_weights': [0.5, 0.5], 'destinations': [[1, 0]], 'weights': [[0.5, 0.5]]}


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'destinations': [[1, 1]]}, r'permutation 0 must send to worker 0, not \[1, 1\]'),
    ({'destinations': [[2, 0]]}, r'permutation 0 must send to worker 1, not \[2, 0\]'),
    ({'destinations': [[1.0, 0.0]]}, 'destinations must be ints, not float64'),
    ({'destinations': [1, 0]}, r'shapes must be .* with n = 2, not \(\(2,\), \(2,\), \(1, 2\)\)'),
    ({'self_weights': [0.5] * 3}, r'n = 2, not \(\(3,\), \(1, 2\), \(1, 2\)\)'),
    ({'self_weights': [0.5, -0.5]}, 'self weight of worker 1 must be finite and >= 0, not -0.5'),
    ({'weights': [[0.5, np.inf]]}, 'weight of permutation, worker 0, 1 must be finite .* not inf'),
    ({'weights': [[np.nan, 0.5]]}, 'weight of permutation, worker 0, 0 must be finite .* not nan'),
    ({'weights': [[0.5, 0.25]]}, 'the weights of worker 1 must sum to 1, not 0.75'),
  ],
)
def test_hand_made_rounds_are_checked(change, message):
  good, bad = topologies.Round(**GOOD), topologies.Round(**{**GOOD, **change})
  with pytest.raises(ValueError, match=f'mine: round 1: .*{message}'):
    topologies.Topology('mine', (good, bad))
  with pytest.raises(ValueError, match='mine: rounds must hold at least one Round, not'):
    topologies.Topology('mine', ())


def test_hand_made_self_loops_count_as_own_value():
  loops = [[0.5, 0.5, 0.5], [0.25, 0.25, 0]]
  entry = topologies.Round([0.25, 0.25, 0.5], [[1, 0, 2], [0, 1, 2]], loops)
  topology = topologies.Topology('mine', (entry,))
  assert topology.matrix().tolist() == [[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 1]]
  assert topology.sends.tolist() == [[1, 1, 0]]
  assert topology.spectral_gap() == pytest.approx(0)
  assert repr(topology) == "Topology('mine', size=3, period=1)"


def test_a_round_keeps_read_only_copies():
  weights = np.array([0.5, 0.5])
  entry = topologies.Round(**{**GOOD, 'self_weights': weights})
  weights[0] = 7
  assert entry.self_weights.tolist() == [0.5, 0.5]
  for array in (entry.self_weights, entry.destinations, entry.weights):
    with pytest.raises(ValueError, match='read-only'):
      array[...] = 0


def test_spectral_gap_follows_the_order_of_rounds():
  swap = topologies.Round([0.5, 0.5, 1, 1], [[1, 0, 2, 3]], [[0.5, 0.5, 0, 0]])
  skew = topologies.Round([0] * 4, [[1, 2, 3, 0], [0, 2, 1, 3]], [[0.5] * 4] * 2)
  product = np.stack([send(skew, send(swap, unit)) for unit in np.eye(4)], axis=1)
  sigma = np.linalg.svd(product, compute_uv=False)[1]
  gap = topologies.Topology('mine', (swap, skew)).spectral_gap()
  assert gap == pytest.approx(1 - np.sqrt(sigma))
  assert gap != pytest.approx(topologies.Topology('mine', (skew, swap)).spectral_gap())


def test_spectral_gap_of_an_exact_mean_is_free_of_noise():
  fifth, workers = np.full((5, 25), 1 / 5), np.arange(25)
  tables = [[(workers + digit * base) % 25 for digit in range(1, 5)] for base in (1, 5)]
  rounds = tuple(topologies.Round(fifth[0], table, fifth[1:]) for table in tables)
  assert topologies.Topology('mine', rounds).spectral_gap() == 1


def of_matrices(*matrices):
  """Rounds with these matrices, by all n - 1 cyclic shifts."""
  rounds = []
  for matrix in np.asarray(matrices, float):
    workers = np.arange(len(matrix))
    shifts = [(workers + shift) % len(matrix) for shift in workers[1:]]
    weights = [matrix[workers, np.argsort(shift)] for shift in shifts]
    table = np.reshape(shifts, (-1, len(matrix))).astype(int)
    rounds.append(topologies.Round(matrix.diagonal(), table, np.reshape(weights, table.shape)))
  return topologies.Topology('mine', tuple(rounds))


ROWS = [[0.5, 0.5, 0], [0, 1, 0], [0.25, 0.25, 0.5]]
BOTH = [[0.5, 0.5, 0], [0, 0.5, 0.5], [0.5, 0, 0.5]]
EVEN = np.full((3, 3), 1 / 3)


@pytest.mark.parametrize(
  ('matrices', 'kinds'),
  [
    ([EVEN], 'row column doubly symmetric'),
    ([BOTH], 'row column doubly'),
    ([ROWS], 'row'),
    ([np.transpose(ROWS)], 'column'),
    ([BOTH, ROWS], 'row'),
    ([np.transpose(ROWS), EVEN], 'column'),
    ([EVEN, BOTH], 'row column doubly'),
    ([[[0.75, 0.25], [0.25, 0.75]], [[0.5, 0.5], [0.5, 0.5]]], 'row column doubly symmetric'),
    ([[[0.75, 0.25 + 1e-8], [0.25, 0.75 - 1e-8]]], 'column'),
  ],
)
def test_kinds(matrices, kinds):
  topology = of_matrices(*matrices)
  np.testing.assert_allclose([topology.matrix(t) for t in range(len(matrices))], matrices)
  names = {'row': 'row_stochastic', 'column': 'column_stochastic', 'doubly': 'doubly_stochastic'}
  names['symmetric'] = 'symmetric'
  assert [kind for kind, name in names.items() if getattr(topology, name)] == kinds.split()


def test_kinds_are_not_mixed():
  with pytest.raises(ValueError, match='round 1: the weights of worker 0 must sum to 1, not 0.75,'):
    of_matrices(ROWS, np.transpose(ROWS))
  with pytest.raises(ValueError, match='not 0.75 as by 0 in round 0'):
    of_matrices(ROWS, np.transpose(ROWS))


def test_messages_of_no_weight_are_not_counted():
  topology = of_matrices(ROWS)
  assert topology.sends.tolist() == [[1, 2, 0]]
  assert topology.rounds[0].given.tolist() == [[0, 0.25, 0], [0.25, 0.5, 0]]


def test_spectral_gap_of_rows_and_columns_is_the_rate_in_the_long_run():
  assert of_matrices(ROWS).spectral_gap() == pytest.approx(0.5)
  assert of_matrices(np.transpose(ROWS)).spectral_gap() == pytest.approx(0.5)
  assert of_matrices(ROWS, ROWS).spectral_gap() == pytest.approx(0.5)
  assert of_matrices([[0, 1], [0, 1]]).spectral_gap() == 1


MIXING = {
  'even': [EVEN],
  'one way': [BOTH],
  'never by oneself, but cycles of 2 and 3': [[[0, 0.5, 0.5], [1, 0, 0], [0, 1, 0]]],
  'pairs in turn': [np.kron(np.eye(2), np.full((2, 2), 0.5)), np.eye(4)[[0, 3, 2, 1]]],
  'all take the value of one, then a cycle': [[[1, 0, 0]] * 3, np.roll(np.eye(3), 1, axis=0)],
  'alone': [[[1]]],
}
NOT_MIXING = {
  'alone': ([np.eye(3)], r'not only inside the parts \[\[0\], \[1\], \[2\]\]'),
  'apart': ([np.kron(np.eye(2), np.full((2, 2), 0.5))], r'inside the parts \[\[0, 1\], \[2, 3\]\]'),
  'one listens, none answers': ([ROWS], r'inside the parts \[\[0\], \[1\], \[2\]\]'),
  'two that swap': ([[[0, 1], [1, 0]]], r'move values around between \[\[0\], \[1\]\] for ever'),
  'a cycle': ([np.roll(np.eye(3), 1, axis=0)], r'between \[\[0\], \[1\], \[2\]\] for ever'),
  'bipartite': (
    [[[0, 0.5, 0, 0.5], [0.5, 0, 0.5, 0]] * 2],
    r'between \[\[0, 2\], \[1, 3\]\] for ever',
  ),
  'two swaps': ([[[0, 1], [1, 0]]] * 2, r'period together must mix, not .* \[\[0\], \[1\]\]'),
}


@pytest.mark.parametrize('transposed', [False, True])
@pytest.mark.parametrize('case', MIXING)
def test_what_mixes(case, transposed):
  matrices = [np.transpose(m) for m in MIXING[case]][::-1] if transposed else MIXING[case]
  of_matrices(*matrices).require_mixing()


@pytest.mark.parametrize('transposed', [False, True])
@pytest.mark.parametrize('case', NOT_MIXING)
def test_what_does_not_mix(case, transposed):
  matrices, message = NOT_MIXING[case]
  with pytest.raises(ValueError, match=f'^mine: .*{message}'):
    of_matrices(*(np.transpose(m) if transposed else m for m in matrices)).require_mixing()


@pytest.mark.parametrize('n', [2, 3, 4])
def test_mixing_is_decided_as_by_powers(n):
  """Random deterministic moves and pairs against the long power of their product."""
  generator, outcomes = np.random.default_rng(n), set()
  for _ in range(60):
    moves = [np.eye(n)[generator.permutation(n)] for _ in range(3)]
    topology = of_matrices(moves[0], (moves[1] + moves[2]) / 2)
    power = np.linalg.matrix_power(topology.matrix(1) @ topology.matrix(0), 500)
    mixes = bool(np.allclose(power, 1 / n))
    try:
      topology.require_mixing()
    except ValueError:
      assert not mixes
    else:
      assert mixes
    outcomes.add(mixes)
  assert outcomes == {False, True}


def test_mixing_is_cheap_to_require():
  topology = topologies.random_pairs(1024, 40, seed=0)
  start = time.perf_counter()
  topology.require_mixing()
  assert time.perf_counter() - start < 1  # 0.02 s on an idle core
  with pytest.raises(ValueError, match='not only inside the parts'):
    topologies.random_pairs(1024, 1, seed=0).require_mixing()


@pytest.mark.parametrize('n', range(1, 7))
def test_covers_are_as_small_as_can_be(n):
  """All arrows of a random directed graph, each once, in max degree permutations."""
  generator = np.random.default_rng(n)
  for _, density in itertools.product(range(20), (0.2, 0.5, 0.9)):
    links = (generator.random((n, n)) < density) | np.roll(np.eye(n, dtype=bool), 1, axis=0)
    np.fill_diagonal(links, True)
    topology = topologies.from_matrix(links / links.sum(axis=1, keepdims=True))
    entry = topology.rounds[0]
    degree = max((links.sum(axis=axis) - 1).max() for axis in (0, 1))
    assert len(entry.destinations) == degree
    used = [
      (sender, receiver)
      for destinations, weights in zip(entry.destinations, entry.weights, strict=True)
      for sender, receiver in enumerate(destinations.tolist())
      if weights[receiver] > 0
    ]
    wanted = {(j, i) for i, j in np.argwhere(links).tolist() if i != j}
    assert len(used) == len(set(used)) and set(used) == wanted
