"""Notebooks as people read them on the web: with an install cell, outputs, and nothing of ours.

That they run is a test of its own: `make test` runs each from its first cell to its last.
"""

import importlib.util
import re
import types
from pathlib import Path

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
BY_NAME = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
MOST_BYTES = 150_000
MOST_LINES = 40


def read(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_there_are_notebooks_and_a_page_that_lists_them():
    assert [path.name[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05"]
    page = (ROOT / "docs" / "notebooks.md").read_text()
    assert set(re.findall(r"\(\.\./notebooks/(\w+\.ipynb)\)", page)) == {
        path.name for path in NOTEBOOKS
    }


@BY_NAME
def test_what_a_reader_meets_first(path):
    notebook = read(path)
    first = notebook.cells[0]
    assert first.cell_type == "markdown"
    assert re.match(r"# \S.*\n\n.*[Yy]ou\s+will\s+see", first.source, re.DOTALL)


def install_cell(path):
    cells = read(path).cells
    place = next(n for n, cell in enumerate(cells) if cell.source.startswith("## Install"))
    assert all("s3ac_jax" not in cell.source for cell in cells[:place] if cell.cell_type == "code")
    return cells[place + 1].source


def commands(source, monkeypatch, *, there, settings='"", ""'):
    """What the cell does to the machine. there: whether s3ac_jax can be imported."""
    asked = []
    shell = types.SimpleNamespace(
        run_line_magic=lambda name, line: asked.append(f"{name} {line}"), system=asked.append
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: there or None)
    source = re.sub("(?m)^(SOURCE, ACCELERATOR =) .*", rf"\1 {settings}", source)
    exec(TransformerManager().transform_cell(source), {"get_ipython": lambda: shell})
    return [re.sub(" +--quiet| --depth 1", "", line) for line in asked]


@BY_NAME
def test_the_install_cell_does_what_is_asked_for_and_no_more(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    cell = install_cell(path)
    assert commands(cell, monkeypatch, there=True) == []
    (package,) = commands(cell, monkeypatch, there=False)
    assert package.startswith("pip install ")
    assert "jax[" not in package.replace("s3ac-jax[", "")
    found = commands(cell, monkeypatch, there=False, settings='"https://a.example/b.git", "tpu"')
    assert found[0] == "git clone {SOURCE} s3ac-jax"
    assert found[2:] == ['pip install "jax[{ACCELERATOR}]"']


@BY_NAME
def test_cells_are_short_and_claims_are_asserted(path):
    cells = code(read(path))
    for cell in cells:
        lines = cell.source.splitlines()
        assert len(lines) <= MOST_LINES, lines[0]
    source = "\n".join(cell.source for cell in cells)
    assert len(re.findall(r"^ *(?:assert |np\.testing\.assert_)", source, re.MULTILINE)) >= 2


@BY_NAME
def test_it_is_stored_as_it_ran_and_small(path):
    notebook = read(path)
    cells = code(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [out for cell in cells for out in cell.outputs]
    kinds = [out.output_type for out in outputs]
    assert kinds.count("stream") >= 2
    assert "error" not in kinds
    assert sum("image/png" in out.get("data", {}) for out in outputs) >= 1
    assert path.stat().st_size < MOST_BYTES


@BY_NAME
def test_nothing_of_the_machine_that_ran_it_is_kept(path):
    notebook = read(path)
    assert all(not cell.metadata for cell in notebook.cells)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert set(notebook.metadata.language_info) == {"name"}
    for cell in code(notebook):
        for out in cell.outputs:
            assert out.get("name") != "stderr"
            text = out.get("text", "") + str(out.get("data", {}).get("text/plain", ""))
            assert not re.search(r"(?:^|[\s\"'(=])(?:/|[A-Z]:\\|~/)\w", text), text
