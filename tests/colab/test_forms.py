"""Every notebook, without running it: its two forms agree, its links lead somewhere, its outputs are stored."""

from __future__ import annotations

import re

import jupytext
import nbformat
import pytest

from tests.colab.notebooks import ABSOLUTE_PATH, FOLDER, NAMES, code_of, pictures, read, said

REMEDY = "run `python -m tests.colab.notebooks`"
PNG_BYTES, NOTEBOOK_BYTES = 60_000, 250_000
every = pytest.mark.parametrize("name", NAMES)


def cells(notebook) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def text_form(name: str) -> str:
    return (FOLDER / f"{name}.py").read_text(encoding="utf-8")


def test_each_is_there_twice():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(NAMES) >= {"quickstart"}


@every
def test_the_two_forms_are_one(name):
    notebook = read(name)
    nbformat.validate(notebook)
    assert cells(notebook) == cells(jupytext.read(FOLDER / f"{name}.py")), REMEDY


@every
def test_outputs_are_of_one_run_of_this_code(name):
    """Every cell was run, in order, and none failed. What prints or draws has an output."""
    code = [cell for cell in read(name).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), REMEDY
    for cell in code:
        kinds = [output.output_type for output in cell.outputs]
        assert set(kinds) <= {"stream", "display_data"}, kinds
        # Helpers that are only defined print later.
        at_once = re.sub(r"^(def|class) .*\n((    .*)?\n)*", "", cell.source + "\n", flags=re.MULTILINE)
        assert ("stream" in kinds) == ("print(" in at_once), cell.source
        assert kinds.count("display_data") == at_once.count("plt.show()"), cell.source


@every
def test_outputs_are_nobodys(name):
    """Neither paths nor progress of the machine that made them."""
    notebook = read(name)
    assert not ABSOLUTE_PATH.findall(said(notebook))
    streams = {o.name for cell in notebook.cells for o in cell.get("outputs", []) if o.output_type == "stream"}
    assert streams == {"stdout"}
    assert not {"execution", "ExecuteTime"} & {key for cell in notebook.cells for key in cell.metadata}


def test_a_path_is_seen():
    for text in ("saved in /tmp/abc", "('/home/name/x')", "C:\\Users"):
        assert ABSOLUTE_PATH.search(text)
    for text in ("12.3 tokens/s", "p/q and 1/2/3", "Yes / no", "jaxspec/decode/round.py"):
        assert not ABSOLUTE_PATH.search(text)


@every
def test_pictures_are_small(name):
    drawn = pictures(read(name))
    assert drawn
    assert max(map(len, drawn)) < PNG_BYTES
    assert (FOLDER / f"{name}.ipynb").stat().st_size < NOTEBOOK_BYTES


@every
def test_it_says_where_its_outputs_are_from(name):
    top = re.sub(r"\s+", " ", read(name).cells[0].source)
    assert "**The stored outputs** are from two CPU cores" in top
    assert "On a TPU" in top
    assert "None of these notebooks has been run on a TPU so far." in top


@every
def test_all_install_alike(name):
    install = code_of(read(name))[0]
    assert "SOURCE = " in install
    assert install == code_of(read("quickstart"))[0]


@every
def test_links_lead_somewhere(name):
    text = text_form(name)
    for link in re.findall(r"\]\(([^)]*)\)", text):
        assert link.removesuffix(".ipynb") in NAMES, "no address of jaxspec is public"
    named = re.findall(r"\b((?:jaxspec|docs)/[\w/]+\.(?:py|md))", text)
    assert not [path for path in named if not (FOLDER.parent / path).is_file()]


def test_the_readme_lists_them():
    listed = re.findall(r"^\| \[(\w+)\.ipynb\]\(\1\.ipynb\)", (FOLDER / "README.md").read_text(encoding="utf-8"), re.M)
    assert sorted(listed) == NAMES
