"""What holds for every notebook without running it: its two forms, its links, the cell that all share."""

from __future__ import annotations

import re

import jupytext
import nbformat
import pytest

from tests.colab.notebooks import FOLDER, NAMES, read

REMEDY = "run `jupytext --to ipynb colab/*.py`"
every = pytest.mark.parametrize("name", NAMES)


def cells(notebook) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def install_cell(name: str) -> str:
    return next(cell.source for cell in read(name).cells if cell.cell_type == "code")


def test_each_is_there_twice():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(NAMES) >= {"quickstart"}


@every
def test_the_two_forms_are_one(name):
    notebook = read(name)
    nbformat.validate(notebook)
    assert cells(notebook) == cells(jupytext.read(FOLDER / f"{name}.py")), REMEDY


@every
def test_no_outputs_are_kept(name):
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in read(name).cells)


@every
def test_all_install_alike(name):
    assert "SOURCE = " in install_cell(name)
    assert install_cell(name) == install_cell("quickstart")


@every
def test_links_lead_somewhere(name):
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert f"blob/main/colab/{name}.ipynb)" in text, "the badge opens another notebook"
    for link in re.findall(r"\]\((\w+)\.ipynb\)", text):
        assert link in NAMES
    named = re.findall(r"\b((?:jaxspec|docs)/[\w/]+\.(?:py|md))", text)
    assert not [path for path in named if not (FOLDER.parent / path).is_file()]


def test_the_readme_lists_them():
    listed = re.findall(r"^\| \[(\w+)\.ipynb\]\(\1\.ipynb\)", (FOLDER / "README.md").read_text(encoding="utf-8"), re.M)
    assert sorted(listed) == NAMES
