"""Runs notebooks and stores them with their outputs, without what changes from run to run.

make notebooks
.venv-test/bin/python .ci/notebooks.py notebooks/01_quickstart.ipynb
"""

import base64
import io
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image


def small(picture: str) -> str:
    """The PNG with 64 colours, which plots hardly have: a third of the bytes."""
    plain = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB").quantize(64)
    out = io.BytesIO()
    plain.save(out, "png", optimize=True)
    return base64.b64encode(out.getvalue()).decode()


def tidy(notebook: nbformat.NotebookNode) -> None:
    """Leaves sources, outputs and counts; of a picture the picture alone."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02d}"
        cell.metadata = {}
        outputs = cell.get("outputs", [])
        # What an install or a library says to stderr is of that machine.
        outputs = [out for out in outputs if out.get("name") != "stderr"]
        for out in outputs:
            if "image/png" in out.get("data", {}):
                out.data = {"image/png": small(out.data["image/png"])}
                out.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = outputs


for path in map(Path, sys.argv[1:]):
    start = time.perf_counter()
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": path.parent}}).execute()
    tidy(notebook)
    nbformat.write(notebook, path)
    print(
        f"{path}: {time.perf_counter() - start:.0f} s, {path.stat().st_size // 1024} KiB",
        flush=True,
    )
