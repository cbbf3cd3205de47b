"""The tiling of products of a few rows: which weights the kernels support, and how a product is divided."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import _tiling
from pallas_kernels.device import CPU
from pallas_kernels.weights import grouped, interleaved_grouped
from pallas_kernels.weights.interleaved import Interleaved, interleaved
from pallas_kernels.weights.scaled import abstract, quantise
from tests.pallas_kernels.flavours import A100, H100

FOUR_BITS = grouped.in_four_bits(128)


def test_other_quantised_forms_are_left_to_the_compiler():
    """Blocks smaller than a chunk, and inputs in their natural order."""
    matrix = jnp.ones((256, 128), jnp.bfloat16)
    assert not _tiling.covers(2, interleaved(quantise(matrix, dtype="int8", block=(64, 1))), device=H100)
    assert not _tiling.covers(2, quantise(matrix, dtype="int8", block=(256, 1)), device=H100)
    assert not _tiling.covers(2, grouped.quantise(matrix, grouped.in_four_bits(128)), device=H100)
    mixed = quantise(matrix, dtype="int8", block=(256, 1), activations="float8_e4m3fn")
    assert not _tiling.covers(2, mixed, device=H100)


@pytest.mark.parametrize(
    ("rows", "shape", "dtype", "expected"),
    [
        (96, (64, 64), jnp.bfloat16, True),
        (97, (64, 64), jnp.bfloat16, False),
        (2, (64, 64), jnp.bfloat16, True),
        (1, (64, 64), jnp.bfloat16, True),
        (2, (96, 64), jnp.bfloat16, False),
        (2, (64, 96), jnp.bfloat16, False),
        (2, (64, 64), jnp.float32, False),
        (2, (4096, 24576), jnp.bfloat16, True),
        (2, (5120, 51200), jnp.bfloat16, True),
        (2, (8192, 32768), jnp.bfloat16, False),
    ],
)
def test_what_the_kernels_cover(rows, shape, dtype, expected):
    weights = jax.ShapeDtypeStruct(shape, dtype)
    assert _tiling.covers(rows, weights, device=CPU) is expected
    assert _tiling.covers(rows, weights, device=H100) is expected
    assert not _tiling.covers(rows, weights, device=A100)


@pytest.mark.parametrize(
    ("rows", "shape", "gated", "expected"),
    [
        (5, (4096, 24576), True, (64, 1, 256, 3)),
        (5, (4096, 6144), False, (64, 4, 256, 3)),
        (16, (12288, 4096), False, (64, 4, 256, 3)),
        (80, (4096, 24576), True, (128, 1, 128, 3)),
        (80, (4096, 6144), False, (128, 4, 128, 3)),
        (96, (12288, 4096), False, (128, 6, 128, 2)),
        (5, (128, 64), False, (64, 1, 128, 6)),
    ],
)
def test_the_tiling_of_a_product_in_8_bits(rows, shape, gated, expected):
    """The tilings that were measured to be the fastest, of Qwen3-8B's matrices; and the smallest matrix."""
    weights = Interleaved(*jax.tree.leaves(abstract(shape, "int8", (shape[0], 1), "bfloat16")), "bfloat16")
    assert dataclasses.astuple(_tiling.tiling(rows, weights, gated=gated)) == expected


@pytest.mark.parametrize(
    ("rows", "shape", "gated", "splits", "stages"),
    [
        (1, (4096, 6144), False, 8, 2),
        (5, (4096, 4096), False, 8, 3),
        (8, (4096, 24576), True, 1, 4),
        (1, (12288, 4096), False, 8, 4),
        (9, (4096, 6144), False, 4, 4),
        (80, (4096, 4096), False, 4, 2),
    ],
)
def test_the_tiling_of_a_product_in_4_bits_with_few_rows(rows, shape, gated, splits, stages):
    """A tile of 8 rows has more programs. No read of two steps is early if there are very many programs."""
    weights = jax.eval_shape(interleaved_grouped.interleaved, grouped.abstract(FOUR_BITS, shape, "bfloat16"))
    assert dataclasses.astuple(_tiling.tiling(rows, weights, gated=gated)) == (64, splits, 256, stages)


@pytest.mark.parametrize("rows", [1, 8, 9, 32, 48, 80, 96])
@pytest.mark.parametrize("shape", [(4096, 24576), (12288, 4096), (256, 64)])
def test_the_tiling_of_a_product_in_4_bits(rows, shape):
    """Two reads or more fit into shared memory, and every split has whole reads."""
    weights = jax.eval_shape(interleaved_grouped.interleaved, grouped.abstract(FOUR_BITS, shape, "bfloat16"))
    tile = _tiling.tiling(rows, weights, gated=False)
    assert shape[0] // tile.splits % tile.deep == 0
    assert tile.stages >= 2
    kept = _tiling.padded_rows(rows, _tiling.least_rows(rows, FOUR_BITS))
    assert tile.stages * tile.deep * (tile.columns // 2 + 2 * kept) <= _tiling.SHARED


@pytest.mark.parametrize(
    ("rows", "shape", "gated", "expected"),
    [
        (5, (4096, 24576), True, (128, 1, 256, 3)),
        (16, (12288, 4096), False, (64, 3, 256, 5)),
        (80, (4096, 6144), False, (128, 4, 128, 4)),
        (80, (12288, 4096), False, (64, 3, 128, 5)),
    ],
)
def test_the_tiling_of_a_product_of_8_bits_with_8_bits(rows, shape, gated, expected):
    """The tilings that were measured to be the fastest, of Qwen3-8B's matrices."""
    weights = abstract(shape, "int8", (shape[0], 1), "bfloat16", "int8")
    assert dataclasses.astuple(_tiling.tiling(rows, weights, gated=gated)) == expected


@pytest.mark.parametrize(
    ("depth", "blocks", "splits"),
    [(1024, 64, 2), (2048, 16, 8), (3072, 16, 6), (1024, 96, 1), (704, 1, 11)],
)
def test_the_depth_is_split_until_there_are_programs_enough(depth, blocks, splits):
    assert _tiling.num_splits(depth, blocks) == splits


@pytest.mark.parametrize(
    ("rows", "width", "gated", "columns"),
    [
        (16, 64, False, 64),
        (32, 12224, False, 64),
        (32, 12288, False, 128),
        (16, 6144, True, 64),
        (80, 6144, True, 64),
        (80, 12288, True, 128),
        (80, 6144, False, 128),
        (80, 4096, False, 64),
    ],
)
def test_programs_have_more_columns_where_there_are_many(rows, width, gated, columns):
    assert _tiling.num_columns(rows, width, gated=gated) == columns


@pytest.mark.parametrize(
    ("rows", "tiles"),
    [(2, [(0, 16)]), (17, [(0, 32)]), (40, [(0, 32), (32, 16)]), (64, [(0, 64)]), (80, [(0, 64), (64, 16)])],
)
def test_rows_come_in_tiles_that_hold_them_all(rows, tiles):
    assert _tiling.row_tiles(rows) == tiles


@pytest.mark.parametrize(("rows", "tiles"), [(1, [(0, 8)]), (8, [(0, 8)]), (9, [(0, 16)]), (40, [(0, 32), (32, 16)])])
def test_up_to_8_rows_are_a_tile_of_8_for_weights_in_4_bits(rows, tiles):
    assert _tiling.row_tiles(rows, _tiling.least_rows(rows, FOUR_BITS)) == tiles
    assert _tiling.least_rows(rows, grouped.BLOCKS["q4_k"]) == _tiling.least_rows(rows, None) == 16


@pytest.mark.parametrize("rows", [2, 16, 32, 40, 80, 96])
@pytest.mark.parametrize(("columns", "programs"), [(64, 128), (64, 192), (128, 128), (128, 192)])
def test_what_is_under_way_fits_into_shared_memory(rows, columns, programs):
    deep, stages = _tiling.reads(rows, 4096, columns, programs)
    kept = sum(size for _, size in _tiling.row_tiles(rows))
    assert stages >= 3
    assert 2 * stages * deep * (columns + kept) <= 227 * 1024 // (1 + (programs > 132))
    assert 2 * (stages - 1) * deep * columns <= _tiling.UNDER_WAY
