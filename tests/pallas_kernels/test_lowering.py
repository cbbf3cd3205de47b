"""Importing the kernels changes nothing of the process; lowering them does, and puts it back."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest

from pallas_kernels import lowering
from pallas_kernels.lowering import TRITON_DIALECT, TRITON_ENDS, quick_lowering

PROBE = """
import sys, warnings
import jax, jax.experimental.pallas.triton, jaxlib.mlir.ir
before, modules = list(warnings.filters), {name for name in sys.modules if name.startswith("jaxlib.mlir.dialects")}
import pallas_kernels
import pallas_kernels.self_attention.gpu, pallas_kernels.paged_attention.tpu
assert warnings.filters == before, warnings.filters
assert "jaxlib.mlir.dialects.tt" not in {name for name in sys.modules} - modules
"""


def test_importing_the_kernels_leaves_modules_and_warnings_alone():
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def fail_within() -> None:
    with quick_lowering():
        assert TRITON_DIALECT in sys.modules
        warnings.warn(f"{TRITON_ENDS} and more", DeprecationWarning, stacklevel=1)
        warnings.warn("another", DeprecationWarning, stacklevel=1)
        raise ZeroDivisionError


def test_what_lowering_changes_is_put_back(monkeypatch):
    monkeypatch.setattr(lowering, "dialect_exists", lambda: False)
    monkeypatch.delitem(sys.modules, TRITON_DIALECT, raising=False)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        filters = list(warnings.filters)
        with pytest.raises(ZeroDivisionError):
            fail_within()
        assert warnings.filters == filters
    assert [str(w.message) for w in seen] == ["another"]
    assert TRITON_DIALECT not in sys.modules


def test_a_module_that_is_there_stays(monkeypatch):
    there = object()
    monkeypatch.setitem(sys.modules, TRITON_DIALECT, there)
    with quick_lowering():
        assert sys.modules[TRITON_DIALECT] is there
    assert sys.modules[TRITON_DIALECT] is there
