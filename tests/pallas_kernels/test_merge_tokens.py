import numpy as np
import pytest
from hypothesis import given

from pallas_kernels import merge_tokens
from tests.pallas_kernels.flavours import FLAVOURS, few_examples, kernel, layouts, seeds
from tests.support.sizes import cases

SHAPES = [(0, 3), (1, 1), (13, 4), (150, 5)]  # T, B; the last spans two blocks of the GPU form


def oracle(tokens, next_tokens, query_start, num_rejected, fill):
    merged = []
    for b, next_token in enumerate(next_tokens):
        row = tokens[query_start[b] : query_start[b + 1]]
        kept = row[: len(row) - num_rejected[b]]
        merged += [(t, False) for t in kept] + [(next_token, False)] + [(fill, True)] * num_rejected[b]
    merged += [(fill, True)] * (len(tokens) + len(next_tokens) - len(merged))
    return [np.array(x) for x in zip(*merged, strict=True)]


@pytest.mark.parametrize("name", FLAVOURS)
@cases("shape", SHAPES, quick=[(0, 3), (150, 5)])
def test_every_flavour_equals_the_oracle(name, shape):
    t, b = shape
    merge = kernel("merge_tokens", name, fill=7)

    @few_examples
    @given(layouts(t, b), seeds)
    def check(layout, seed):
        draw = np.random.default_rng(seed)
        tokens, next_tokens = draw.integers(-5, 1000, t, np.int32), draw.integers(-5, 1000, b, np.int32)
        merged, rejected = merge(tokens, next_tokens, *layout)
        expected, expected_rejected = oracle(tokens, next_tokens, *layout, fill=7)
        assert rejected.dtype == bool
        np.testing.assert_array_equal(merged, expected)
        np.testing.assert_array_equal(rejected, expected_rejected)

    check()


@pytest.mark.parametrize("implementation", [None, "reference", "pallas"])
def test_public_function(implementation):
    tokens, next_tokens = np.array([5, 6, 7, 8], np.int32), np.array([1, 2, 3], np.int32)
    query_start, num_rejected = np.array([0, 3, 3, 4], np.int32), np.array([2, 0, 1], np.int32)
    merged, rejected = merge_tokens(
        tokens, next_tokens, query_start, num_rejected, implementation=implementation, platform="cpu"
    )
    np.testing.assert_array_equal(merged, [5, 1, 0, 0, 2, 3, 0])
    np.testing.assert_array_equal(rejected, [0, 0, 1, 1, 0, 0, 1])


def test_wrong_arguments_are_named():
    tokens, next_tokens, rejected = np.zeros(4, np.int32), np.zeros(2, np.int32), np.zeros(2, np.int32)
    start = np.zeros(3, np.int32)
    with pytest.raises(ValueError, match=r"query_start must have shape \(3,\).*not \(2,\)"):
        merge_tokens(tokens, next_tokens, start[1:], rejected)
    with pytest.raises(ValueError, match=r"'fast' is not one of \(None, 'reference', 'pallas'\)"):
        merge_tokens(tokens, next_tokens, start, rejected, implementation="fast")
    with pytest.raises(ValueError, match="'npu' is not one of cpu, gpu, tpu"):
        merge_tokens(tokens, next_tokens, start, rejected, platform="npu")
