"""Plant the faults of `tests.support.faults`, and run the tests that have to see them.

    python -m tests.support.planted             # each in turn: a quarter of an hour
    python -m tests.support.planted 3 7         # some, by number

A fault changes one place of the tree, in a copy of it, while its tests run. The place is found by its text, so that
moved files and renamed variables keep it. Only the tests that `make test` runs count. The exit status is 1 if they pass
with a fault in place.
"""

from __future__ import annotations

import os
import re
import shutil
import string
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.faults import FAULTS, Fault
from tests.support.root import ROOT

# Files in which faults are planted.
SOURCES = ("jaxspec/**/*.py", "pallas_kernels/**/*.py", "checkpoints/**/*.py", "colab/*.py", "README.md")
NAME = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"  # a name, or names joined by dots

PATIENCE = 600  # seconds; a fault by which nothing ends is seen, too
QUICK = '-m "not thorough"'  # as the Makefile has it


def pattern(right: str) -> re.Pattern[str]:
    """Return the pattern of a text with placeholders."""
    known: set[str] = set()

    def names(placeholder: re.Match[str]) -> str:
        key = placeholder[1]
        name = f"(?P={key})" if key in known else f"(?P<{key}>{NAME})"
        known.add(key)
        return rf"(?<!\w){name}(?!\w)"

    return re.compile(re.sub(r"\\\$(\w+)", names, re.escape(right)))


def places(fault: Fault, tree: Path) -> Iterator[tuple[Path, re.Match[str]]]:
    """Yield each place of the tree that the fault's text fits, as (file, match). There should be one."""
    wanted, pieces = pattern(fault.right), re.split(r"\$\w+", fault.right)
    for path in sorted(path for names in SOURCES for path in tree.glob(names)):
        text = path.read_text(encoding="utf-8")
        if all(piece in text for piece in pieces):  # most files lack one, and this is quicker than the pattern
            yield from ((path, found) for found in wanted.finditer(text))


def plant(fault: Fault, tree: Path) -> Path:
    """Plant the fault in the tree, and return the file."""
    ((path, found),) = places(fault, tree)
    path.write_text(changed(fault, found), encoding="utf-8")
    return path


def changed(fault: Fault, found: re.Match[str]) -> str:
    """Return the text of a file with the fault at this place."""
    wrong = string.Template(fault.wrong).substitute(found.groupdict())
    return found.string[: found.start()] + wrong + found.string[found.end() :]


def seen(fault: Fault) -> bool:
    """Return whether the fault's tests fail, or do not end, with it in place."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", "*_cache", ".hypothesis"))
        plant(fault, tree)
        command = f"{sys.executable} -m pytest -q -x -n0 -p no:cacheprovider {QUICK} {fault.tests}"
        try:
            done = subprocess.run(
                ["timeout", str(PATIENCE), "sh", "-c", f"exec {command}"],
                cwd=tree,
                env=os.environ | {"PYTHONPATH": str(tree)},
                capture_output=True,
                text=True,
            )
        except FileNotFoundError:
            raise SystemExit("this needs the `timeout` command") from None
    if done.returncode not in (0, 1, 124):
        raise RuntimeError(f"{fault.tests}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}")
    return done.returncode != 0


def main(arguments: Sequence[str] = ()) -> int:
    missed = 0
    for number, fault in enumerate(FAULTS):
        if arguments and str(number) not in arguments:
            continue
        found = seen(fault)
        missed += not found
        print(f"{number:3} {'seen' if found else 'NOT SEEN'}  {fault.tests}: {fault.wrong or 'left out'}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
