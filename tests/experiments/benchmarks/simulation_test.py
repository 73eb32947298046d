"""The benchmark of simulations prints a line a policy and a line a method; times are not tested."""

from experiments.benchmarks import simulation as benchmark


def test_a_line_a_policy_and_a_line_a_method(capsys):
  benchmark.table(8, 200)
  first, header, *lines = capsys.readouterr().out.splitlines()
  assert first == '200 events of 8 workers' and header.split()[0] == 'policy'
  assert [line.split('  ')[0] for line in lines] == ['asp', 'psp(4, 0)', 'psp(4, 4)', 'bsp']
  benchmark.replays(8, 64)
  first, header, *lines = capsys.readouterr().out.splitlines()
  assert first == 'replay of 64 events of 8 workers, 19968 parameters'
  assert [line[:9].strip() for line in lines] == ['async_sgd', 'dgs 1%']
