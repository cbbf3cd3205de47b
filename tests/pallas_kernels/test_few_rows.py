"""Products of a few rows, and the sum and norm between two of them, against float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _device, _few_rows
from pallas_kernels.feed_forward.reference import activate, rms_norm


def normal(seed, *size, scale=1.0, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng(seed).normal(size=size) * scale, dtype)


def exact(x, weights):
    return np.asarray(x, np.float32) @ np.asarray(weights, np.float32)


@pytest.mark.parametrize("rows", [2, 5, 16, 20])
@pytest.mark.parametrize(
    ("shape", "splits"), [((128, 192), 1), ((192, 64), 3), ((64, 8192), 1), ((256, 4096), 2), ((128, 16384), 1)]
)
def test_the_parts_of_a_product(rows, shape, splits):
    x, weights = normal(0, rows, shape[0]), normal(1, *shape, scale=shape[0] ** -0.5)
    parts = _few_rows.product(x, weights, interpret=True)
    assert parts.shape == (splits, rows, shape[1])
    np.testing.assert_allclose(parts.sum(axis=0), exact(x, weights), rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("rows", "shape", "block"),
    [(2, (128, 256), 64), (5, (64, 512), 128), (17, (192, 1024), 256), (16, (64, 16384), 64)],
)
def test_a_product_with_its_activation(rows, shape, block, kind):
    x, weights = normal(0, rows, shape[0]), normal(1, *shape, scale=shape[0] ** -0.5)
    out = _few_rows.product(x, weights, gated=(kind, block), interpret=True)
    both = exact(x, weights).reshape(rows, -1, 2, block)
    expected = (activate(kind, both[:, :, 0]) * both[:, :, 1]).reshape(rows, -1)
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, rtol=2**-8, atol=1e-5)  # one rounding


@pytest.mark.parametrize("width", [192, 256])
def test_sum_and_norm(width):
    x, parts = normal(0, 5, width), normal(1, 3, 5, width, dtype=jnp.float32)
    scale = normal(2, width, dtype=jnp.float32)
    y, normed = _few_rows.add_and_norm(x, parts, scale, 1e-6, interpret=True)
    expected = (x.astype(jnp.float32) + parts[0] + parts[1] + parts[2]).astype(jnp.bfloat16)
    np.testing.assert_array_equal(y, expected)
    close = {"rtol": 2**-7, "atol": 1e-6}  # a number between two of bfloat16 goes either way
    np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (normed, rms_norm(scale, y, 1e-6))), **close)


@pytest.mark.parametrize(
    ("shape", "splits"),
    [
        ((1024, 4096), 2),
        ((2048, 1024), 8),
        ((3072, 1024), 8),
        ((1024, 8192), 1),
        ((704, 64), 11),
        ((4096, 6144), 2),
        ((4096, 4096), 2),
        ((12288, 4096), 2),
        ((4096, 16320), 1),
        ((4096, 16384), 1),
    ],
)
def test_the_depth_is_split_until_there_are_programs_enough(shape, splits):
    assert _few_rows.num_splits(*shape) == splits


@pytest.mark.parametrize(
    ("rows", "shape", "dtype", "expected"),
    [
        (32, (64, 64), jnp.bfloat16, True),
        (33, (64, 64), jnp.bfloat16, False),
        (2, (64, 64), jnp.bfloat16, True),
        (1, (64, 64), jnp.bfloat16, False),
        (2, (96, 64), jnp.bfloat16, False),
        (2, (64, 96), jnp.bfloat16, False),
        (2, (64, 64), jnp.float32, False),
        (2, (4096, 24576), jnp.bfloat16, True),
        (2, (8192, 16384), jnp.bfloat16, False),
    ],
)
def test_what_the_kernels_cover(monkeypatch, rows, shape, dtype, expected):
    weights = jax.ShapeDtypeStruct(shape, dtype)
    assert _few_rows.covers(rows, weights, interpret=True) is expected
    for hopper in (False, True):
        monkeypatch.setattr(_device, "shares_much", lambda hopper=hopper: hopper)
        assert _few_rows.covers(rows, weights) is (expected and hopper)


@pytest.mark.parametrize(("width", "columns"), [(64, 64), (8192, 64), (16320, 64), (16384, 128), (24576, 128)])
def test_programs_have_more_columns_where_there_are_many(width, columns):
    assert _few_rows.num_columns(width) == columns
