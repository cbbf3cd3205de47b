"""The faults of tests/planted.py still have a place each; planting them takes minutes, and is done by hand."""

from __future__ import annotations

import shlex

import pytest

from tests.planted import FAULTS, ROOT, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.file}: {fault.tests}")
def test_a_fault_has_its_place(fault: Fault):
    assert (ROOT / fault.file).read_text(encoding="utf-8").count(fault.right) == 1
    path, *_ = shlex.split(fault.tests)
    assert (ROOT / path).is_file()
