"""The distribution: one version, one name, and the files that tell people how to work on it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import pytest

import jaxspec
from jaxspec.common.package import DISTRIBUTION, VERSION
from tests.support.documents import text_of
from tests.support.root import ROOT

PROJECT = tomllib.loads(text_of("pyproject.toml"))
WRITTEN = re.compile(rf"""^(?:__version__|version) *= *["']|["']{re.escape(VERSION)}["']""", re.MULTILINE)


def test_the_version_is_written_once():
    written = [path for path in ROOT.glob("*.toml") if WRITTEN.search(path.read_text(encoding="utf-8"))]
    for package in ("jaxspec", "pallas_kernels", "checkpoints", "docs"):
        written += [path for path in (ROOT / package).rglob("*.py") if WRITTEN.search(path.read_text(encoding="utf-8"))]
    assert written == [ROOT / "jaxspec/common/package.py"]
    assert jaxspec.__version__ == VERSION
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "jaxspec/common/package.py"


@pytest.mark.parametrize("line", ['__version__ = "0.0.1"', 'version = "1.0"', f"OURS = '{VERSION}'"])
def test_a_second_version_would_be_seen(line):
    assert WRITTEN.search(f"import re\n{line}\n")


def test_the_newest_entry_of_the_changelog_is_this_version():
    entries = re.findall(r"^## (.+)$", text_of("CHANGELOG.md"), re.MULTILINE)
    newest = next(entry for entry in entries if entry != "Unreleased")
    version, date = newest.split(" - ")
    assert version == VERSION
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)


def test_the_distribution_has_one_name():
    assert PROJECT["project"]["name"] == DISTRIBUTION
    assert f"`{DISTRIBUTION}`" in text_of("README.md")


def test_the_metadata_names_nobody_and_no_address():
    """There is no address; an invented one would lead somewhere else some day."""
    assert not PROJECT["project"].keys() & {"authors", "maintainers", "urls"}


def test_matplotlib_is_not_in_the_way():
    """Who serves does without it; who tests or runs the demo gets it."""
    project = PROJECT["project"]
    assert not [name for name in project["dependencies"] if name.startswith("matplotlib")]
    assert f"{DISTRIBUTION}[plots,ray]" in project["optional-dependencies"]["test"]
    assert "$(VENV)/.demo: EXTRAS := [plots]" in text_of("Makefile")


@pytest.mark.parametrize("module", ["jaxspec.bench.picture", "jaxspec.demo.report", "jaxspec.train.plot"])
def test_a_picture_without_matplotlib_is_refused_in_one_line(module):
    code = f"import sys; sys.modules['matplotlib'] = None; import {module}; from jaxspec.common import plots\n"
    code += "try: plots.new_figure(1, 1)\nexcept Exception as error: print(type(error).__name__, error)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ran.stdout == "UserError pictures need matplotlib: pip install 'jaxspec-decoding[plots]'\n", ran.stderr


def test_hooks_are_those_of_make_lint():
    """From .venv: pre-commit fetches nothing."""
    hooks = text_of(".pre-commit-config.yaml")
    assert re.findall(r"repo: (\S+)", hooks) == ["local"]
    assert set(re.findall(r"language: (\S+)", hooks)) == {"system"}
    tools = set(re.findall(r"entry: \.venv/bin/(\w+)", hooks))
    lint = text_of("Makefile").partition("\nlint:")[2].partition("\n\n")[0]
    assert tools == set(re.findall(r"\$\(BIN\)/(\w+)", lint)) == {"ruff", "mypy"}
