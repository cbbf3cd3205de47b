"""argmax_token against numpy, on whole numbers, of which every form has the same sums."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import argmax_token
from pallas_kernels.device import CPU
from tests.pallas_kernels.flavours import kernel
from tests.support.sizes import cases

FLAVOURS = ["reference", "gpu", pytest.param("gpu compiled", marks=pytest.mark.gpu)]


def whole_numbers(*shape, seed):
    return jnp.asarray(np.random.default_rng(seed).integers(-2, 3, size=shape), jnp.bfloat16)


def run(name, x, table, num_ids):
    options = {"device": CPU} if name == "reference" else {}
    return np.asarray(kernel("argmax_token", name, num_ids=num_ids, **options)(x, table))


@pytest.mark.parametrize("name", FLAVOURS)
@cases("rows", [(1, 1), (5,), (16, 1), (4, 5), (16, 5)], quick=[(5,), (16, 5)], ids=str)
@pytest.mark.parametrize(("size", "num_ids"), [(1024, 1024), (1000, 1000), (1000, 900), (40, 40)])
@cases("width", [64, 576], quick=[64])
def test_every_flavour_finds_the_lowest_of_the_largest(name, rows, size, num_ids, width):
    """Few different sums, so that ties are many: within a program's columns, and between programs. What stands after
    num_ids, and in no table at all, is never found, though every row would like it best."""
    x, table = whole_numbers(*rows, width, seed=1), whole_numbers(size, width, seed=2)
    table = table.at[size // 2 :].set(table[: size - size // 2])  # each sum twice
    x = x.at[..., 0].set(2)
    table = table.at[:, 0].set(0).at[num_ids:, 0].set(100)
    logits = np.asarray(x, np.float64) @ np.asarray(table, np.float64).T
    expected = np.argmax(logits[..., :num_ids], axis=-1)
    assert num_ids == size or (logits.argmax(axis=-1) >= num_ids).all()
    found = run(name, x, table, num_ids)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", FLAVOURS)
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_without_a_largest_it_is_some_id(name, value):
    x, table = jnp.ones((3, 64), jnp.bfloat16), jnp.full((100, 64), value, jnp.bfloat16)
    found = run(name, x, table, 70)
    assert ((found >= 0) & (found < 70)).all()


@pytest.mark.gpu
def test_a_table_as_large_as_models_have():
    """Behind 2^27 numbers: more than any product of `_few_rows` reads."""
    size, width = 151_936, 1024
    x, table = whole_numbers(16, width, seed=3), whole_numbers(size, width, seed=4)
    logits = np.asarray(jnp.dot(x, table.T, preferred_element_type=jnp.float32))
    np.testing.assert_array_equal(run("gpu compiled", x, table, size), logits.argmax(axis=-1))


def test_public_function():
    x, table = whole_numbers(2, 3, 64, seed=5), whole_numbers(100, 64, seed=6)
    expected = argmax_token(x, table, platform="cpu")
    assert expected.shape == (2, 3)
    np.testing.assert_array_equal(argmax_token(x, table, platform="cpu", implementation="pallas"), expected)
    few = argmax_token(x, table, num_ids=7, platform="cpu")
    assert few.max() < 7
    np.testing.assert_array_equal(argmax_token(x, table, num_ids=1000, platform="cpu"), expected)
    with pytest.raises(ValueError, match=r"table must have shape \(100, 64\)"):
        argmax_token(x, table[:, :63], platform="cpu")
