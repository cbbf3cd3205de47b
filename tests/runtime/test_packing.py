"""Small arrays as one array of words, on the host and inside a program."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxspec.runtime.packing import pack

TREE = {
    "i": np.array([[-(2**31), 2**31 - 1, -1]], np.int32),
    "u": np.array([0, 2**32 - 1], np.uint32),
    "f": np.array([[-0.0], [np.inf], [-np.inf], [np.nan], [1e-45]], np.float32),
    "b": np.array([True, False, True]),
    "one": np.bool_(True),
    "none": None,
    "empty": np.zeros((0, 3), np.float32),
}


def same(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.shape, x.dtype, x.tobytes()) == (y.shape, y.dtype, y.tobytes())


def test_it_comes_back_bit_by_bit():
    packed = pack(TREE)
    assert packed.words.dtype == np.int32
    same(packed.unpack(), TREE)


def test_through_a_program_and_back():
    out = jax.jit(lambda packed: pack({"back": packed.unpack()}))(pack(TREE))
    same(jax.device_get(out).unpack(), {"back": TREE})


def test_nothing_is_packed_too():
    assert jax.device_get(jax.jit(lambda: pack(None))()).unpack() is None


def test_other_sizes_are_refused():
    with pytest.raises(TypeError, match="float16 cannot be packed"):
        pack(np.zeros(2, np.float16))
