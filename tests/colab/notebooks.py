"""The notebooks: where they are, how one is executed on CPU, and what it printed and drew."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.root import ROOT

FOLDER = ROOT / "colab"
# Of XLA. Real weights want one device and quick programs; tiny models want quick compilation, as in tests/conftest.py.
REAL, TINY = "", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": str(ROOT),
    "HF_HUB_OFFLINE": "1",
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",  # what a notebook draws with
}


def read(name: str):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def execute(name: str, changes: Mapping[str, str], folder: Path, flags: str = REAL):
    """The notebook after a run in this folder, with changes of its cells, each of one place: {old: new}."""
    notebook = read(name)
    for old, new in changes.items():
        (cell,) = [cell for cell in notebook.cells if old in cell.source]
        assert cell.source.count(old) == 1, old
        cell.source = cell.source.replace(old, new)
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in {**ENVIRONMENT, "XLA_FLAGS": flags}.items():
            patch.setenv(variable, value)
        where = {"metadata": {"path": str(folder)}}
        client = NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where)
        return client.execute(env=dict(os.environ))


def said(notebook) -> str:
    """What was printed."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


def num_pictures(notebook) -> int:
    return sum("image/png" in o.get("data", {}) for cell in notebook.cells for o in cell.get("outputs", []))
