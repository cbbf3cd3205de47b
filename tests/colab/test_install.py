"""The cell that installs, run in an empty environment with a pip that only writes down what it is asked."""

from __future__ import annotations

import json
import os
import re
import subprocess
import venv
from pathlib import Path

import pytest

from tests.colab.notebooks import code_of, from_text

# It installs CONTENT, and jax, from the URLs among ANSWERS. From others it fails as git does.
PIP = """
import json, os, pathlib, sys
here = pathlib.Path(__file__).parent
with open(here / "calls.jsonl", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[-1].partition(" @ ")[2] in json.loads(os.environ["ANSWERS"]):
    (here / "jaxspec").mkdir(exist_ok=True)
    (here / "jaxspec" / "__init__.py").write_text(os.environ["CONTENT"])
    (here / "jax-0.10.dist-info").mkdir(exist_ok=True)
    (here / "jax-0.10.dist-info" / "METADATA").write_text("Name: jax\\nVersion: 0.10\\n")
else:
    sys.exit("fatal: repository not found\\n\\nnote: this is not a problem with pip")
"""
OURS, ANOTHER = "LLM = None\n", "spectrum = None\n"
ADDRESS = "git+file:///somewhere"


class Machine:
    """An empty environment, and a folder outside of any clone."""

    def __init__(self, folder: Path) -> None:
        venv.EnvBuilder(symlinks=True).create(folder / "environment")
        (self.packages,) = (folder / "environment" / "lib").glob("python*/site-packages")
        (self.packages / "pip.py").write_text(PIP)
        self.python = folder / "environment" / "bin" / "python"
        self.outside = folder / "outside"
        self.outside.mkdir()

    def run(self, source: str, answers: tuple[str, ...] = (), content: str = OURS, where: Path | None = None):
        """Run the cell. answers: the URLs from which pip can install; content: what it finds there."""
        cell = code_of(from_text("quickstart"))[0]
        cell = re.sub(r"^SOURCE = .*", f"SOURCE = {source!r}", cell, flags=re.MULTILINE)
        environment = {"ANSWERS": json.dumps(answers), "CONTENT": content, "PATH": os.environ["PATH"]}
        where = where or self.outside
        return subprocess.run([self.python, "-c", cell], capture_output=True, text=True, env=environment, cwd=where)

    @property
    def tried(self) -> list[str]:
        """The URLs from which pip was asked to install jaxspec; nothing else may be asked for."""
        file = self.packages / "calls.jsonl"
        calls = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        matches = [re.fullmatch(r"install -q -U jaxspec-decoding\[plots[\w,]*\] @ (\S+)", " ".join(c)) for c in calls]
        return [match[1] for match in matches]


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def repository(folder: Path) -> str:
    """Make a folder look like jaxspec's repository and return its URL."""
    (folder / "jaxspec" / "decode").mkdir(parents=True)
    (folder / "jaxspec" / "decode" / "round.py").touch()
    return folder.as_uri()


def error_line(result) -> str:
    """The one line that the cell ends with."""
    assert result.returncode == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


def test_from_a_folder(machine, tmp_path):
    url = repository(tmp_path / "uploaded")
    result = machine.run(str(tmp_path / "uploaded"), (url,))
    assert result.stdout == "jax None -> 0.10\nNo restart is needed.\n"
    assert machine.tried == [url]
    again = machine.run(str(tmp_path / "uploaded"))
    assert again.stdout == "jaxspec is installed.\n"
    assert machine.tried == [url]


def test_from_an_address(machine):
    assert machine.run(ADDRESS, (ADDRESS,)).returncode == 0
    assert machine.tried == [ADDRESS]


def test_from_the_clone_where_the_address_does_not_answer(machine, tmp_path):
    url = repository(tmp_path / "clone")
    (tmp_path / "clone" / "colab").mkdir()
    result = machine.run(ADDRESS, (url,), where=tmp_path / "clone" / "colab")
    assert result.stdout == "jax None -> 0.10\nNo restart is needed.\n"
    assert machine.tried == [ADDRESS, url]


@pytest.mark.parametrize(
    ("source", "problem"), [(ADDRESS, "fatal: repository not found"), ("/absent/jaxspec", "there is no such folder")]
)
def test_one_line_where_nothing_answers(machine, source, problem):
    line = error_line(machine.run(source))
    assert line.startswith(f"jaxspec cannot be installed from {source}: {problem}")
    assert "Set SOURCE to" in line


def test_another_projects_jaxspec_is_not_taken(machine):
    (machine.packages / "jaxspec").mkdir()
    (machine.packages / "jaxspec" / "__init__.py").write_text(ANOTHER)
    (machine.packages / "jaxspec-0.3.dist-info").mkdir()
    (machine.packages / "jaxspec-0.3.dist-info" / "METADATA").write_text("Name: jaxspec\nVersion: 0.3\n")
    line = error_line(machine.run(ADDRESS, (ADDRESS,)))
    assert "Another project's package jaxspec 0.3 is installed" in line
    assert "pip uninstall" in line
    assert machine.tried == []


def test_what_was_installed_is_looked_at(machine):
    line = error_line(machine.run(ADDRESS, (ADDRESS,), content=ANOTHER))
    assert "cannot import name 'LLM' from 'jaxspec'" in line
