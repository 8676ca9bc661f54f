"""The notebooks run from top to bottom, and both files of a pair hold the same cells."""

import os
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


def test_every_notebook_is_a_pair():
    assert NAMES
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_both_files_of_a_pair_agree_and_hold_no_output(name):
    script = jupytext.read(FOLDER / f"{name}.py")
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    made_of = [(cell.cell_type, cell.source) for cell in script.cells]
    hint = f"run: jupytext --update --to ipynb notebooks/{name}.py"
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == made_of, hint
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs(name, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    client = NotebookClient(
        notebook, timeout=500, kernel_name="python3", resources={"metadata": {"path": FOLDER}}
    )
    client.execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    pictures = [o for cell in code for o in cell.outputs if "image/png" in o.get("data", {})]
    assert pictures
