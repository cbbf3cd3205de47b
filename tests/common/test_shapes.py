"""Shapes are checked here, in the tests, and jaxspec does without the checker."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

import jaxspec
from jaxspec.common import shapes
from jaxspec.sampling import rng
from jaxspec.verify import standard
from jaxspec.verify.base import leading

ROOT = Path(jaxspec.__file__).parent
ANNOTATED = [p for p in ROOT.rglob("*.py") if "jaxspec.common.shapes import" in p.read_text()]

WRONG = {
    "rows differ": lambda: leading(jnp.zeros((2, 3), bool), jnp.zeros(3, jnp.int32)),
    "a dtype": lambda: leading(jnp.zeros((2, 3)), jnp.zeros(2, jnp.int32)),
    "a rank": lambda: standard.at_tokens(jnp.zeros((2, 5)), jnp.zeros((2, 3), jnp.int32)),
    "a fixed size": lambda: rng.keys(jnp.zeros((2, 3), jnp.uint32), jnp.zeros(2, jnp.int32), "draft"),
    "inside a traced function": lambda: jax.jit(rng.take_row)(jnp.zeros((2, 3)), jnp.zeros(3, jnp.int32)),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_shape_is_an_error(case):
    with pytest.raises(TypeCheckError):
        WRONG[case]()


def test_axes_are_the_defined_letters():
    assert ANNOTATED
    for path in ANNOTATED:
        for axes in re.findall(r"\[(?:Array|np\.ndarray), \"([^\"]*)\"\]", path.read_text()):
            for axis in axes.split():
                named = re.fullmatch(r"\*?#?[a-z]+|\{\w+\}|_|\d+|\.\.\.", axis)
                assert named or axis in shapes.AXES, f"{path}: axis {axis!r} is not defined in shapes.py"


def test_jaxspec_imports_without_jaxtyping():
    program = "import sys; sys.modules['jaxtyping'] = sys.modules['beartype'] = None\n" + "\n".join(
        f"import {'.'.join(p.relative_to(ROOT.parent).with_suffix('').parts)}" for p in ANNOTATED
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT.parent)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
