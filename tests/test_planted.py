"""The faults of `tests.support.faults` have a place each, and `make test` runs the tests that see them. Planting them
is done by hand."""

from __future__ import annotations

import builtins
import os
import shlex
import subprocess
import symtable
import sys

import pytest

from tests.support.faults import FAULTS, Fault
from tests.support.planted import QUICK, changed, places, plant
from tests.support.root import ROOT

FEWEST = 25


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.tests}: {fault.right}")
def test_a_fault_has_its_place(fault: Fault):
    ((path, found),) = places(fault, ROOT)
    planted = changed(fault, found)
    assert planted != found.string
    if path.suffix == ".py":
        assert unknown_names(planted) <= unknown_names(found.string), "a fault is no misspelling"


def unknown_names(source: str) -> set[str]:
    """Return the names that a source uses and nothing in it defines."""
    whole = symtable.symtable(source, "", "exec")
    tables = [whole]
    for table in tables:
        tables += table.get_children()
    used = {symbol.get_name() for table in tables for symbol in table.get_symbols() if symbol.is_global()}
    own = {symbol.get_name() for symbol in whole.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    return used - own - set(dir(builtins))


def test_a_fault_stays_where_names_and_files_change(tmp_path):
    """A file is moved, a variable in the fault's line gets another name, another one becomes an attribute."""
    tree = tmp_path / "jaxspec"
    (tree / "moved").mkdir(parents=True)
    fault = Fault("$drafts < $room + $drafts", "$drafts <= $room", "")
    (tree / "first.py").write_text("fits = drafts < room + tokens\n", encoding="utf-8")
    (tree / "moved" / "second.py").write_text("fits = count < self.room + count\n", encoding="utf-8")
    assert plant(fault, tmp_path).read_text(encoding="utf-8") == "fits = count <= self.room\n"
    with pytest.raises(ValueError, match="not enough values"):
        plant(fault, tmp_path)
    for name in ("one.py", "two.py"):
        (tree / name).write_text("fits = a < b + a\n", encoding="utf-8")
    with pytest.raises(ValueError, match="too many values"):
        plant(fault, tmp_path)


def test_a_misspelling_is_seen():
    assert unknown_names("import a\ndef f(b):\n    return a, b, c, [d for d in b]\n") == {"c"}


def test_they_are_many():
    assert len(FAULTS) >= FEWEST
    found = {path.relative_to(ROOT).parts[0] for fault in FAULTS for path, _ in places(fault, ROOT)}
    assert found >= {"jaxspec", "pallas_kernels", "checkpoints", "colab"}


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
