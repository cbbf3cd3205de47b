"""scale_write against plain numpy, and what kv_write stores in 8 bits."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kv_write
from pallas_kernels.forms import function
from pallas_kernels.pages import entries, zeros
from tests.pallas_kernels.flavours import Racing, kernel
from tests.support.sizes import cases

FLAVOURS = ["reference", "tpu"]
SHAPES = [(10, 32, 4, 150), (7, 32, 16, 5), (5, 128, 2, 130), (50, 4, 32, 1)]  # P, S, 2G, M


def random_arguments(shape):
    """Slots as `slot_mapping` gives them, those of a page in a row, with tokens between them that are not written."""
    p, s, heads, m = shape
    draw = np.random.default_rng(m)
    scales = draw.normal(size=(p, 1, heads * s)).astype(np.float32)
    slots = np.sort(draw.permutation(p * s)[:m]).astype(np.int32)
    slots = np.where(draw.random(m) < 0.3, draw.choice([-1, p * s, 2**31 - 1, -(2**31)], m), slots).astype(np.int32)
    return scales, draw.normal(size=(m, heads)).astype(np.float32), slots


def oracle(scales, new, slots):
    p, _, width = scales.shape
    size = width // new.shape[1]
    found = scales.reshape(p, -1, size).copy()
    for row, slot in zip(new, slots, strict=True):
        if 0 <= slot < p * size:
            found[slot // size, :, slot % size] = row
    return found.reshape(scales.shape)


@pytest.mark.parametrize("name", FLAVOURS)
@cases("shape", SHAPES, quick=SHAPES[:1], rest=SHAPES[1:])
def test_every_flavour_equals_the_oracle(name, shape):
    arguments = random_arguments(shape)
    np.testing.assert_array_equal(kernel("scale_write", name)(*arguments), oracle(*arguments))


def test_copies_do_not_race(capfd):
    arguments = random_arguments(SHAPES[0])
    out = function("scale_write", "tpu")(*arguments, device=Racing())
    np.testing.assert_array_equal(out, oracle(*arguments))
    assert "RACE" not in capfd.readouterr().out


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_a_stored_value_does_not_depend_on_how_it_came(dtype):
    """Bit for bit: one token at a time, in a chunk with others, and moved to another slot."""
    kv = np.random.default_rng(0).normal(size=(12, 4, 16)).astype(np.float32)
    kv[3, 1] = 0  # a head of zeros
    kv[5, 2] *= 1e30
    slots = np.arange(2, 14, dtype=np.int32)
    empty = zeros(2, 8, 4, 16, dtype)
    together = kv_write(empty, kv, slots)
    alone = empty
    for i in range(len(slots)):
        alone = kv_write(alone, kv[i : i + 1], slots[i : i + 1])
    moved = kv_write(empty, entries(kv_write(empty, kv, slots - 1), slots - 1), slots)
    for other in (alone, moved):
        for a, b in zip((together.values, together.scales), (other.values, other.scales), strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    found = entries(together, slots)
    error = np.abs(np.asarray(found.values, np.float32) * np.asarray(found.scales)[..., None] - kv)
    top = np.abs(kv).max(axis=-1, keepdims=True)
    of_value, of_top = {"int8": (0, 0.5 / 127), "float8_e4m3fn": (2**-4, 1e-5), "float8_e5m2": (2**-3, 1e-5)}[dtype]
    assert (error <= 1.001 * (of_value * np.abs(kv) + of_top * top)).all()


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_not_finite_stays_so(dtype, wrong):
    """In its own entry alone: the engine ends the request, and no other."""
    kv = np.ones((2, 2, 16), np.float32)
    kv[0, 1, 3] = wrong
    found = entries(kv_write(zeros(1, 8, 2, 16, dtype), kv, np.arange(2, dtype=np.int32)), np.arange(2))
    assert np.isfinite(found.scales).tolist() == [[True, False], [True, True]]


def test_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match="kv_write: kv must have shape"):
        kv_write(zeros(2, 8, 4, 16, "int8"), jnp.zeros((3, 4, 8)), jnp.zeros(3, jnp.int32))
