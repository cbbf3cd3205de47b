"""What the documents say can be done: examples run, and every command, target, file and test they name exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tests.folders import write_model

ROOT = Path(__file__).parent.parent


def blocks(document: str, language: str) -> list[str]:
    """The fenced blocks of a language, unindented."""
    text = (ROOT / document).read_text(encoding="utf-8")
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    return [re.sub(rf"^{indent}", "", body, flags=re.MULTILINE) for indent, body in found]


def commands(document: str, program: str) -> list[list[str]]:
    """Every command line of `program` in the document's blocks and code spans, split into words."""
    text = (ROOT / document).read_text(encoding="utf-8")
    lines = [line.lstrip(" !") for block in blocks(document, "") for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
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
