"""README says what is true: its example runs, and its table of systems resolves."""

import pathlib
import re

import pytest

import jax_dsgd

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / 'README.md').read_text()


def systems():
  section = README.split('## The 42 systems')[1].split('\n## ')[0]
  rows = re.findall(r'^\| (.*) \| (.+) \| arXiv (\d{4}\.\d{5}) \| (.*) \|$', section, re.MULTILINE)
  return [[cell.strip() for cell in row] for row in rows]


def test_the_example_runs(capsys):
  exec(re.search(r'```python\n(.*?)```', README, re.DOTALL)[1], {})
  distance, nbytes = capsys.readouterr().out.split()
  assert float(distance) < 0.05
  assert int(nbytes) == 300 * (10 * 4 + 10 * 2)


def test_all_systems_are_listed_once():
  listed = [arxiv for _, _, arxiv, _ in systems()]
  assert len(listed) == len(set(listed)) == 42


@pytest.mark.parametrize('row', systems(), ids=lambda row: row[1])
def test_a_system_that_works_has_a_name_and_a_docstring_that_cites_it(row):
  mark, _, arxiv, here = row
  assert (mark == '●') == bool(here), 'a row is marked if and only if it names what to call'
  for name in re.findall(r'`([\w.]+)`', here):
    target = jax_dsgd
    for part in name.split('.'):
      target = getattr(target, part)
    assert f'arXiv {arxiv}' in re.sub(r'\s+', ' ', target.__doc__)


def test_every_link_leads_somewhere():
  links = re.findall(r'\]\(([^)#]+)\)', README)
  assert links and all((ROOT / link).exists() for link in links)
