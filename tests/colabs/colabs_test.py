"""Notebooks are made from the scripts beside them, and run."""

import json
import pathlib

import jupytext
import nbclient
import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
SCRIPTS = sorted((ROOT / 'colabs').glob('*.py'))


@pytest.mark.parametrize('script', SCRIPTS, ids=lambda path: path.stem)
def test_the_notebook_is_made_from_the_script(script):
  made = jupytext.read(script)
  kept = json.loads(script.with_suffix('.ipynb').read_text())
  cells = [(cell['cell_type'], ''.join(cell['source'])) for cell in kept['cells']]
  assert cells == [(cell.cell_type, cell.source) for cell in made.cells], (
    f'make it anew: jupytext --to ipynb {script.relative_to(ROOT)}'
  )
  assert not any(cell.get('outputs') for cell in kept['cells'])


@pytest.mark.parametrize('script', SCRIPTS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings(
  'ignore'
)  # of what runs notebooks; the notebook has a process of its own
def test_the_notebook_runs(script, monkeypatch):
  monkeypatch.setenv('PYTHONPATH', str(ROOT))
  notebook = jupytext.read(script)
  nbclient.NotebookClient(notebook, timeout=300).execute()
  kinds = {output.output_type for cell in notebook.cells for output in cell.get('outputs', [])}
  assert 'display_data' in kinds, 'a notebook shows a figure'
