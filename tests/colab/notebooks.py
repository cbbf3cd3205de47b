"""The notebooks: their two forms, an execution on CPU, and the outputs that are stored.

python -m tests.colab.notebooks [NAME ...]    make the notebooks from their text forms, with outputs

A notebook whose code has not changed keeps its outputs; --execute executes it all the same.
"""

from __future__ import annotations

import argparse
import base64
import getpass
import io
import os
import re
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.root import ROOT

FOLDER = ROOT / "colab"
# Of XLA. Real weights want one device and quick programs; tiny models want quick compilation, as in tests/conftest.py.
REAL, TINY = "", os.environ.get("XLA_FLAGS", "")
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": str(ROOT),
    "HF_HUB_OFFLINE": "1",
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",  # what a notebook draws with
}
CORES = 2  # those that the stored outputs are from
COLOURS = 128  # of a stored picture: a third of the bytes, and no visible difference
# Two parts at least, as in /home/name. A quotient such as tokens/s is none.
ABSOLUTE_PATH = re.compile(r"(?<![\w./])/[\w.-]+/[\w./-]+|\b[A-Z]:\\")


def read(name: str):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def from_text(name: str):
    """Make the notebook from its text form, without outputs."""
    notebook = jupytext.read(FOLDER / f"{name}.py")
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i}"  # jupytext draws new ones each time
    return notebook


def code_of(notebook) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def execute(name: str, changes: Mapping[str, str], folder: Path, flags: str = REAL):
    """The notebook after a run in this folder, with changes of its cells, each of one place: {old: new}."""
    notebook = from_text(name)
    for old, new in changes.items():
        (cell,) = [cell for cell in notebook.cells if old in cell.source]
        assert cell.source.count(old) == 1, old
        cell.source = cell.source.replace(old, new)
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in {**ENVIRONMENT, "XLA_FLAGS": flags}.items():
            patch.setenv(variable, value)
        where = {"metadata": {"path": str(folder)}}
        client = NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where, record_timing=False)
        return client.execute(env=dict(os.environ))


# The stored outputs show what real weights do, the execution that the code still does it.
both = pytest.fixture(scope="module", params=["stored", pytest.param("executed", marks=pytest.mark.thorough)])


def said(notebook) -> str:
    """What was printed."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


def pictures(notebook) -> list[bytes]:
    """The PNG files that were drawn."""
    data = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])]
    return [base64.b64decode(of_one["image/png"]) for of_one in data if "image/png" in of_one]


def num_pictures(notebook) -> int:
    return len(pictures(notebook))


def smaller(png: str) -> str:
    """Reduce the number of colours of a picture in base64."""
    from PIL import Image  # matplotlib needs it

    buffer = io.BytesIO()
    with Image.open(io.BytesIO(base64.b64decode(png))) as picture:
        picture.convert("RGB").quantize(COLOURS).save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def tidy(outputs: list) -> list:
    """Return what is stored of a cell's outputs: one text and small pictures. Progress and warnings are left out."""
    kept: list = []
    for output in outputs:
        if output.output_type == "stream":
            if output.name != "stdout":
                continue
            if kept and kept[-1].output_type == "stream":
                kept[-1].text += output.text
                continue
        elif "image/png" in output.get("data", {}):
            output.data["image/png"] = smaller(output.data["image/png"])
        kept.append(output)
    return kept


def make(name: str, always: bool) -> None:
    """Write the notebook. always: execute it even if its code has not changed."""
    notebook, path = from_text(name), FOLDER / f"{name}.ipynb"
    before = read(name) if path.exists() else None
    if always or before is None or code_of(before) != code_of(notebook):
        with tempfile.TemporaryDirectory() as folder:
            executed = execute(name, {}, Path(folder))
    else:
        executed = before
    done = [cell for cell in executed.cells if cell.cell_type == "code"]
    for cell, by_it in zip((c for c in notebook.cells if c.cell_type == "code"), done, strict=True):
        cell.execution_count, cell.outputs = by_it.execution_count, tidy(by_it.outputs)
    for private in (getpass.getuser(), socket.gethostname(), str(ROOT)):
        if re.search(rf"\b{re.escape(private)}\b", said(notebook)):
            raise SystemExit(f"{name}: its outputs contain {private!r}; change the cell that prints it")
    nbformat.write(notebook, path)
    print(f"{path.relative_to(ROOT)}: {'kept its outputs' if executed is before else 'executed'}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the notebooks from their text forms, with outputs.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--execute", action="store_true", help="execute notebooks whose code has not changed, too")
    options = parser.parse_args()
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"there is no notebook {', '.join(sorted(unknown))}; the names are {', '.join(NAMES)}")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    for name in options.names or NAMES:
        make(name, options.execute)


if __name__ == "__main__":
    main()
