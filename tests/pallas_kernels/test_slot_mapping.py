import numpy as np
import pytest
from hypothesis import given

from pallas_kernels import slot_mapping
from tests.pallas_kernels.flavours import FLAVOURS, few_examples, kernel, layouts, seeds
from tests.support.sizes import cases

SHAPES = [(0, 3), (13, 4), (150, 5)]  # T, B; the last spans two blocks of the GPU form
PAGE_SIZE, ROW_PAGES, NUM_PAGES = 4, 3, 9
PAD_SLOT = NUM_PAGES * PAGE_SIZE


def oracle(positions, rejected, query_start, block_table, max_model_len):
    slots = np.full(len(positions), PAD_SLOT)
    for b, row_pages in enumerate(block_table):
        for i in range(query_start[b] + b, query_start[b + 1] + b + 1):
            t = positions[i]
            if rejected[i] or not 0 <= t < min(max_model_len, len(row_pages) * PAGE_SIZE):
                continue
            if (page := row_pages[t // PAGE_SIZE]) != NUM_PAGES:
                slots[i] = page * PAGE_SIZE + t % PAGE_SIZE
    return slots


@pytest.mark.parametrize("name", FLAVOURS)
@pytest.mark.parametrize("max_model_len", [10, 1000])
@cases("shape", SHAPES, quick=[(150, 5)])
def test_every_flavour_equals_the_oracle(name, shape, max_model_len):
    t, b = shape
    options = {"page_size": PAGE_SIZE, "max_model_len": max_model_len, "pad_slot": PAD_SLOT}
    slot_map = kernel("slot_mapping", name, **options)

    @few_examples
    @given(layouts(t, b), seeds)
    def check(layout, seed):
        draw = np.random.default_rng(seed)
        positions = draw.integers(-2, ROW_PAGES * PAGE_SIZE + 5, t + b, np.int32)
        rejected = draw.random(t + b) < 0.3
        block_table = draw.integers(0, NUM_PAGES + 1, (b, ROW_PAGES), np.int32)  # NUM_PAGES: unassigned
        block_table[draw.integers(b)] = NUM_PAGES  # a row that is not live
        slots = slot_map(positions, rejected, layout[0], block_table)
        np.testing.assert_array_equal(slots, oracle(positions, rejected, layout[0], block_table, max_model_len))

    check()


@pytest.mark.parametrize("implementation", [None, "reference", "pallas"])
def test_public_function(implementation):
    positions, rejected = np.array([3, 4, 0, 9, -1], np.int32), np.array([0, 0, 1, 0, 0], bool)
    query_start, block_table = np.array([0, 2, 2], np.int32), np.array([[5, 2], [1, 9]], np.int32)
    options = {"page_size": 4, "max_model_len": 8, "pad_slot": 36, "implementation": implementation}
    slots = slot_mapping(positions, rejected, query_start, block_table, platform="cpu", **options)
    np.testing.assert_array_equal(slots, [23, 8, 36, 36, 36])


def test_pad_slot_must_be_the_end_of_the_pool():
    zeros = np.zeros(3, np.int32)
    with pytest.raises(ValueError, match="pad_slot -1"):
        slot_mapping(zeros, zeros > 0, zeros, np.zeros((2, 2), np.int32), page_size=4, max_model_len=8, pad_slot=-1)
