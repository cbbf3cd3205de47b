"""Command lines, run in this process."""

from __future__ import annotations

import pytest

from jaxspec import cli

SHORT = ("--max-tokens", "8", "--temperature", "0")


def refused(capsys, *arguments: str) -> str:
    """The one line that a command which cannot work prints."""
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert not out
    line = err.strip().splitlines()[-1]
    assert line.startswith("jaxspec: ")
    assert "Traceback" not in err
    return line


def answers_no(capsys, *arguments: str) -> tuple[str, str]:
    """What a command prints whose answer is no, and the one line that says why."""
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    return out, line


def run(capsys, *arguments: str) -> tuple[str, str]:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    out, err = capsys.readouterr()
    assert stop.value.code == 0, err
    return out, err
