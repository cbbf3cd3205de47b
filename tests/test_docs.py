"""What the documents say can be done: examples run, and every command, target, file and test they name exists."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

from tests.folders import write_model

ROOT = Path(__file__).parent.parent


def blocks(document: str, language: str) -> list[str]:
    """The fenced blocks of a language, unindented."""
    found: list[str] = []
    inside: tuple[str, list[str]] | None = None  # the language and the lines of an open block
    for line in (ROOT / document).read_text(encoding="utf-8").splitlines():
        if fence := re.fullmatch(r" *```(\w*)", line):
            if inside is None:
                inside = (fence[1], [])
                continue
            if inside[0] == language:
                found.append(textwrap.dedent("\n".join(inside[1]) + "\n"))
            inside = None
        elif inside is not None:
            inside[1].append(line)
    assert inside is None, f"{document}: a block is not closed"
    return found


def spans(document: str) -> list[str]:
    """Code within the text and its tables."""
    text = (ROOT / document).read_text(encoding="utf-8")
    return re.findall(r"`([^`\n]+)`", re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE))


def commands(document: str, program: str) -> list[list[str]]:
    """Every command line of `program` in the document's blocks and code spans, split into words."""
    lines = [line.lstrip(" !") for block in blocks(document, "") for line in block.splitlines()] + spans(document)
    return [shlex.split(line, comments=True) for line in lines if re.match(rf"{program}( |$)", line)]


def test_python_examples_run(tmp_path, capsys):
    """With a tiny model under the real one's name."""
    folder = write_model(tmp_path / "tiny")
    examples = blocks("README.md", "python")
    assert examples
    for example in examples:
        assert "smollm2-135m-instruct" in example
        exec(compile(example.replace("smollm2-135m-instruct", str(folder)), "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_the_first_example_is_ten_lines():
    example, *_ = blocks("README.md", "python")
    assert sum(bool(line.strip()) for line in example.splitlines()) <= 10


def test_commands_exist():
    """With the options that they are shown with."""
    import typer.main

    from jaxspec.cli import app

    group = typer.main.get_command(app)
    shown = commands("README.md", "jaxspec")
    assert shown
    assert any(len(words) > 2 for words in shown)
    for _, name, *rest in shown:
        known = {option for parameter in group.commands[name].params for option in parameter.opts}
        assert {word for word in rest if word.startswith("-")} <= known, (name, rest)


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = commands("README.md", "make")
    assert {words[1] for words in shown} >= {"demo", "test", "lint"}
    for _, target, *arguments in shown:
        assert target in targets
        for word in shlex.split(" ".join(arguments).removeprefix("ARGS=")):
            if word.startswith("tests/"):
                assert (ROOT / word).is_file(), word


def test_named_files_and_extras_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in re.findall(r"`((?:jaxspec|tests|checkpoints|pallas_kernels|\.ci)/[\w./]+)`", text):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"\]\((?!http)([^)]+)\)", text):
        assert (ROOT / path).exists(), path
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for extra in re.findall(r"\.\[(\w+)\]", text):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra


def test_public_names_in_the_readme():
    import jaxspec

    for name in re.findall(r"from jaxspec import ([\w, ]+)", (ROOT / "README.md").read_text(encoding="utf-8")):
        assert set(name.split(", ")) <= set(jaxspec.__all__)
