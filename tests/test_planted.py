"""The faults of `tests.support.planted` have a place each, and `make test` runs the tests that see them. Planting them
is done by hand."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest

from tests.support.planted import FAULTS, QUICK, ROOT, Fault

FEWEST = 25


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.file}: {fault.tests}")
def test_a_fault_has_its_place(fault: Fault):
    assert (ROOT / fault.file).read_text(encoding="utf-8").count(fault.right) == 1
    assert fault.right != fault.wrong


def test_they_are_many():
    assert len(FAULTS) >= FEWEST
    assert {fault.file.split("/")[0] for fault in FAULTS} >= {"jaxspec", "pallas_kernels", "checkpoints", "colab"}


@pytest.mark.thorough
def test_make_test_runs_what_sees_them():
    """What pytest collects for each, in one process, by the very arguments that planting uses."""
    assert f"$(PYTEST) {QUICK} $(ARGS)" in (ROOT / "Makefile").read_text(encoding="utf-8")
    arguments = [[*shlex.split(QUICK), *shlex.split(fault.tests)] for fault in FAULTS]
    none = selecting_nothing([*arguments, ["tests/decode/test_tpu_full.py", *shlex.split(QUICK)]])
    assert none == [len(FAULTS)], "the faults whose tests make test leaves out, and one such file"


def selecting_nothing(commands: list[list[str]]) -> list[int]:
    """Which of these select no test. Modules are imported once, in a process of its own."""
    code = (
        "import sys, pytest\n"
        "found = [pytest.main(['-q', '--collect-only', '-p', 'no:cacheprovider', *words]) for words in %r]\n"
        "print('CODES', *map(int, found))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code % commands], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    *_, last = done.stdout.splitlines()
    assert last.startswith("CODES "), done.stdout[-2000:] + done.stderr[-2000:]
    codes = [int(word) for word in last.split()[1:]]
    assert set(codes) <= {0, 5}, codes  # 5: nothing was selected
    return [i for i, code in enumerate(codes) if code == 5]
