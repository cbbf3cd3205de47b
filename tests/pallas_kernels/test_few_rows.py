"""Products of a few rows, and the sum and norm between two of them, against float32."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _add_and_norm, _few_rows, _tiling
from pallas_kernels._round_rows import round_rows
from pallas_kernels.device import CPU, here
from pallas_kernels.head_product import head_product
from pallas_kernels.plain import activate, rms_norm
from pallas_kernels.weights import dense, grouped, interleaved_grouped, product
from pallas_kernels.weights.interleaved import interleaved
from pallas_kernels.weights.scaled import quantise, rounded_rows
from tests.pallas_kernels.flavours import H100, in_two_numbers
from tests.support.sizes import cases

to_4_bits = jax.jit(grouped.quantise, static_argnums=1)  # each operation by itself takes longer to compile


def normal(seed, *size, scale=1.0, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng(seed).normal(size=size) * scale, dtype)


def exact(x, weights):
    return np.asarray(x, np.float32) @ np.asarray(weights, np.float32)


@cases("rows", [2, 5, 16, 20, 40, 80, 96], quick=[2, 40])
@cases(
    ("shape", "splits"),
    [((128, 192), 1), ((192, 64), 3), ((64, 8192), 1), ((256, 4096), 2), ((128, 16384), 1)],
    quick=[((192, 64), 3), ((256, 4096), 2)],
)
def test_the_parts_of_a_product(rows, shape, splits):
    x, weights = normal(0, rows, shape[0]), normal(1, *shape, scale=shape[0] ** -0.5)
    parts = _few_rows.product(x, weights, device=CPU)
    assert parts.shape == (splits, rows, shape[1])
    np.testing.assert_allclose(parts.sum(axis=0), exact(x, weights), rtol=0, atol=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 33, 80, 96])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("block", [(1024, 1), (128, 128)], ids=str)
def test_a_gpu_converts_every_8_bit_value_exactly(rows, dtype, block):
    """Also -128, the least numbers of e4m3 and its zeros, which no quantised matrix holds."""
    weights = quantise(normal(1, 1024, 512), dtype=dtype, block=block)
    every = jax.lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), dtype)
    every = jnp.where(jnp.isfinite(every.astype(jnp.float32)), every, jnp.zeros((), dtype))
    values = jax.random.permutation(jax.random.key(0), jnp.tile(every, 2048)).reshape(512, 1024)
    weights = interleaved(dataclasses.replace(weights, values=values))
    x = normal(0, rows, 1024)
    exactly = np.asarray(dense(dataclasses.replace(weights, computes_in="float32")))
    found = np.asarray(_few_rows.product(x, weights, device=here()).sum(axis=0))
    expected = exact(x, exactly)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    gated = np.asarray(_few_rows.product(x / 64, weights, gated=("silu", 128), device=here()), np.float32)
    both = expected.reshape(rows, -1, 2, 128) / 64
    both = (activate("silu", both[:, :, 0]) * both[:, :, 1]).reshape(rows, -1)
    np.testing.assert_allclose(gated, both, rtol=2**-7, atol=1e-4 * np.abs(both).max())


@cases("rows", [1, 5, 80], quick=[5])
def test_a_head_in_8_bits_is_read_by_the_kernel(rows, monkeypatch):
    """It is a product by itself, in float32. More rows are left to the compiler."""
    head = interleaved(quantise(normal(1, 256, 384), dtype="int8", block=(256, 1)))
    called, kernel = [], _few_rows.product
    monkeypatch.setattr(_few_rows, "product", lambda x, *args, **kw: called.append(len(x)) or kernel(x, *args, **kw))
    exactly = np.asarray(dense(dataclasses.replace(head, computes_in="float32")))
    for count in (rows, 97):
        x = normal(0, 1, count, 256)
        found = head_product(x, head, dtype=jnp.float32, device=CPU)
        assert found.dtype == jnp.float32
        expected = exact(x[0], exactly)[None]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-2 * np.abs(expected).max())
    assert called == [rows]


@cases("rows", [2, 20, 80, 96], quick=[20])
@cases("dtype", ["int8", "float8_e4m3fn"], quick=["int8"])
@cases("block", [(256, 1), (256, 128), (128, 1), (128, 64)], quick=[(256, 1), (128, 64)])
def test_the_parts_of_a_product_in_8_bits(rows, dtype, block):
    x, matrix = normal(0, rows, 256), normal(1, 256, 128, scale=1 / 16)
    weights = interleaved(quantise(matrix, dtype=dtype, block=block))
    assert _tiling.covers(rows, weights, device=H100)
    exactly = np.asarray(dense(dataclasses.replace(weights, computes_in="float32")))
    parts = _few_rows.product(x, weights, device=CPU)
    np.testing.assert_allclose(parts.sum(axis=0), exact(x, exactly), rtol=0, atol=2e-5)
    both = exact(x, exactly).reshape(rows, -1, 2, 64)
    gated = _few_rows.product(x, weights, gated=("silu", 64), device=CPU)
    expected = (activate("silu", both[:, :, 0]) * both[:, :, 1]).reshape(rows, -1)
    np.testing.assert_allclose(np.asarray(gated, np.float32), expected, rtol=2**-8, atol=1e-5)


def four_bits(shape, group, zeros):
    """Return a reordered matrix of random integers of 4 bits, with every zero there is."""
    inputs, outputs = shape
    weight = to_4_bits(normal(1, *shape, scale=1 / 16), grouped.in_four_bits(group, zeros=zeros))
    values = np.random.default_rng(2).integers(0, 256, (outputs, inputs // 2), np.uint8)
    weight = dataclasses.replace(weight, values=(jnp.asarray(values),))
    if zeros:
        of_groups = np.arange(weight.zeros.size, dtype=np.int8).reshape(weight.zeros.shape) % 17
        weight = dataclasses.replace(weight, zeros=jnp.asarray(of_groups))
    assert interleaved_grouped.can_be_interleaved(weight, weight.shape[::-1])
    return jax.jit(interleaved_grouped.interleaved)(weight)


def of_blocks(kind, shape, most=32):
    """Return a reordered matrix of random blocks of GGUF, whose weights are around 0 like those of a model.

    most: largest integer factor of a scale. Up to 32 the kernel's numbers are exact.
    """
    rng, layout = np.random.default_rng(3), grouped.BLOCKS[kind]

    def make(field, i, of_array, dtype):
        if dtype == "uint8":
            limit = 255 if field == "values" else most if field == "scale" else 63
            return jnp.asarray(rng.integers(0, limit, of_array, np.uint8, endpoint=True))
        size = 0.02 * (-7.5 if field == "offset" else 1) / (32 if len(layout.scale) == 2 else 1)
        return jnp.asarray(size * rng.uniform(0.5, 1.5, of_array), dtype)

    weight = grouped.arrays(layout, shape, make, "bfloat16")
    assert interleaved_grouped.can_be_interleaved(weight, weight.shape[::-1])
    return jax.jit(interleaved_grouped.interleaved)(weight)


def natural(weights):
    """Return a reordered matrix in its natural order, dequantised in float32."""
    return np.asarray(jax.jit(lambda weights: whole(weights.natural()))(weights))


def check_four_bits(rows, weights, device, matrix=natural, block=64):
    """Compare the kernel's products with those of the dequantised matrix, in float32 unless `matrix` rounds it."""
    x = normal(0, rows, weights.shape[0])
    assert _tiling.covers(rows, weights, device=H100)
    expected = exact(x, matrix(weights))
    parts = _few_rows.product(x, weights, device=device)
    np.testing.assert_allclose(parts.sum(axis=0), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    both = expected.reshape(rows, -1, 2, block) / 64
    both = (activate("silu", both[:, :, 0]) * both[:, :, 1]).reshape(rows, -1)
    gated = _few_rows.product(x / 64, weights, gated=("silu", block), device=device)
    np.testing.assert_allclose(np.asarray(gated, np.float32), both, rtol=2**-7, atol=1e-4 * np.abs(both).max())


@cases(
    ("rows", "group", "zeros"),
    list(itertools.product([1, 5, 16, 80, 96], [32, 64, 128, 512, 0], [False, True])),
    quick=[(1, 128, True), (80, 32, False), (80, 0, True)],
    rest=[(16, 64, True), (96, 512, False)],
)
def test_the_parts_of_a_product_in_4_bits(rows, group, zeros):
    check_four_bits(rows, four_bits((512, 128), group, zeros), CPU)


@cases(
    ("rows", "kind"),
    list(itertools.product([1, 5, 16, 80, 96], ["q4_0", "q4_k"])),
    quick=[(5, "q4_0"), (5, "q4_k"), (80, "q4_k")],
    rest=[(1, "q4_k")],
)
def test_the_parts_of_a_product_in_blocks_of_gguf(rows, kind):
    check_four_bits(rows, of_blocks(kind, (512, 128)), CPU)


@cases(
    ("rows", "group", "zeros"),
    list(itertools.product([33, 80], [32, 128, 0], [False, True])),
    quick=[(33, 128, True), (80, 32, False)],
    rest=[(80, 0, True)],
)
def test_many_rows_are_multiplied_with_the_dequantised_matrix(rows, group, zeros, monkeypatch):
    check_wide(rows, group, zeros, CPU, monkeypatch)


def check_wide(rows, group, zeros, device, monkeypatch):
    """A program has 256 columns. Each weight is rounded to bfloat16 once, as in the dequantised matrix."""
    monkeypatch.setattr(_tiling, "PROGRAMS", 2)
    monkeypatch.setattr(_tiling, "LEAST_STEPS_WIDE", 1)
    weights = four_bits((256, 512), group, zeros)
    assert [_tiling.tiling(n, weights, gated=256).columns for n in (32, rows, 81)] == [64, 256, 64]
    check_four_bits(rows, weights, device, matrix=dense, block=128)


def test_a_product_in_q4_k_is_more_exact_than_one_with_the_dequantised_matrix():
    """Numbers above 256 lose a bit in the kernel, and all weights lose some if they are dequantised to bfloat16."""
    weights, x = of_blocks("q4_k", (512, 128), most=63), normal(0, 5, 512)
    expected = exact(x, natural(weights))
    products = _few_rows.product(x, weights, device=CPU).sum(axis=0), exact(x, dense(weights))
    errors = [np.square(np.asarray(product) - expected).mean() for product in products]
    assert errors[0] < 0.7 * errors[1]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 16, 33, 80, 96])
@pytest.mark.parametrize("group", [32, 64, 128, 0])
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
def test_a_gpu_unpacks_every_4_bit_value_exactly(rows, group, zeros):
    check_four_bits(rows, four_bits((4096, 512), group, zeros), here())


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [33, 80])
@pytest.mark.parametrize("group", [32, 128, 0])
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
def test_a_gpu_multiplies_many_rows_with_the_dequantised_matrix(rows, group, zeros, monkeypatch):
    check_wide(rows, group, zeros, here(), monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 16, 33, 80, 96])
@pytest.mark.parametrize("kind", ["q4_0", "q4_k"])
def test_a_gpu_multiplies_blocks_of_gguf_exactly(rows, kind):
    check_four_bits(rows, of_blocks(kind, (4096, 512)), here())


def check_sums(device):
    """Compare the sums of x that kernels leave for a product with those that the product makes itself."""
    first, then = normal(1, 512, 1024, scale=1 / 32), of_blocks("q4_k", (512, 128))
    x, parts, scale = normal(0, 5, 512), normal(2, 3, 5, 512, dtype=jnp.float32), normal(4, 512, dtype=jnp.float32)
    norms = [
        _add_and_norm.add_and_norm(x, parts, scale, 1e-6, summed=summed, device=device)[1] for summed in (False, True)
    ]
    gated = [_few_rows.product(x, first, gated=("silu", 256), then=matrix, device=device) for matrix in (None, then)]
    for rows, found in (norms, gated):
        np.testing.assert_array_equal(found.rows, rows)
        expected = in_two_numbers(interleaved_grouped.summed(rows).sums).sum(2)
        sums = in_two_numbers(found.sums)
        np.testing.assert_allclose(sums.sum(2), expected, rtol=0, atol=2**-15 * np.abs(expected).max())
        assert np.abs(sums[:, :, 1]).max() <= 2**-8 * np.abs(sums[:, :, 0]).max()
        products = [_few_rows.product(given, then, device=device).sum(0) for given in (rows, found)]
        np.testing.assert_allclose(*products, rtol=0, atol=1e-5 * np.abs(products[0]).max())


def test_kernels_leave_sums_for_the_next_product():
    check_sums(CPU)


@pytest.mark.gpu
def test_a_gpu_leaves_sums_for_the_next_product():
    check_sums(here())


def swapped(plane):
    """Return bytes with their two integers of 4 bits exchanged."""
    return plane << 4 | plane >> 4


def changed(field, i, change):
    """Return a function of a weight that changes an array of one of its fields."""

    def fault(weight):
        arrays = getattr(weight, field)
        return dataclasses.replace(weight, **{field: (*arrays[:i], change(arrays[i]), *arrays[i + 1 :])})

    return fault


SWAPPED = changed("values", 0, lambda x: x.at[7, 9].set(swapped(x[7, 9])))


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("int4", lambda w: dataclasses.replace(w, zeros=w.zeros.at[1, 3].add(1))),
        ("int4", changed("scale", 0, lambda x: x.at[0, 5].set(x[1, 5]))),
        ("int4", SWAPPED),
        ("q4_k", SWAPPED),
        ("q4_k", changed("scale", 0, lambda x: x.at[0, 5].set(x[1, 5]))),
        ("q4_k", changed("scale", 1, lambda x: x.at[2, 5].add(1 << 16))),
        ("q4_k", changed("offset", 0, lambda x: x.at[3, 5].add(1 << 8))),
    ],
    ids=[
        *("zero off by one", "scales of the next groups", "swapped integers"),
        *("swapped integers of Q4_K", "scale of the next chunk", "integer of a scale", "integer of an offset"),
    ],
)
def test_one_fault_in_4_bits_is_seen(kind, fault):
    """The tolerance of the tests above is below the least fault that a matrix of 4 bits can have."""
    weights = four_bits((512, 128), 128, zeros=True) if kind == "int4" else of_blocks(kind, (512, 128))
    faulty = fault(weights)
    expected, found = (natural(w) for w in (weights, faulty))
    assert np.abs(found - expected).max() > 0
    x = normal(0, 5, 512)
    parts = _few_rows.product(x, faulty, device=CPU).sum(axis=0)
    np.testing.assert_allclose(parts, exact(x, found), rtol=0, atol=1e-5 * np.abs(exact(x, found)).max())
    assert np.abs(parts - exact(x, expected)).max() > 1e-3 * np.abs(exact(x, expected)).max()


@cases(
    ("rows", "dtype", "shape"),
    list(itertools.product([1, 5, 80, 96], ["int8", "float8_e4m3fn"], [(256, 128), (192, 64), (128, 8192)])),
    quick=[(5, "int8", (256, 128)), (80, "float8_e4m3fn", (256, 128))],
    rest=[(96, "int8", (192, 64)), (5, "float8_e4m3fn", (128, 8192))],
)
def test_a_product_of_rounded_activations(rows, dtype, shape):
    """The kernel rounds each row as the compiler's product does, and multiplies 8-bit numbers with each other."""
    check_rounded(rows, dtype, shape, CPU, rtol=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 33, 80, 96])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_a_gpu_multiplies_8_bits_with_8_bits(rows, dtype):
    """Its matrix units keep some 14 bits of a sum of floats, and every bit of a sum of integers."""
    check_rounded(rows, dtype, (4096, 512), here(), rtol=2e-5 if dtype == "int8" else 2e-3)


def check_rounded(rows, dtype, shape, device, rtol):
    """Compare the kernels' products of rounded activations with products of the rounded numbers in float32."""
    weights = quantise(normal(1, *shape), dtype=dtype, block=(shape[0], 1), activations=dtype)
    assert _tiling.covers(rows, weights, device=H100)
    x = normal(0, rows, shape[0], scale=30)

    def expected(values, of_rows):
        return np.asarray(of_rows) * exact(values, matrix(weights))

    sums = expected(*round_rows(x, dtype, device=device))
    close = {"rtol": 0, "atol": rtol * np.abs(sums).max()}
    np.testing.assert_allclose(_few_rows.product(x, weights, device=device).sum(axis=0), sums, **close)
    np.testing.assert_allclose(product(x, weights, dtype=jnp.float32), expected(*rounded_rows(x, dtype)), **close)
    small = x / np.abs(sums).max() * 2
    both = expected(*round_rows(small, dtype, device=device)).reshape(rows, -1, 2, shape[1] // 2)
    both = (activate("silu", both[:, :, 0]) * both[:, :, 1]).reshape(rows, -1)
    gated = _few_rows.product(small, weights, gated=("silu", shape[1] // 2), device=device)
    np.testing.assert_allclose(np.asarray(gated, np.float32), both, rtol=2**-7, atol=4 * rtol + 1e-5)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_the_kernel_rounds_rows_as_the_compiler_does(dtype):
    """Quotients may differ in their last bit, so a number in the middle of two goes either way. Zeros and NaN stay."""
    x = normal(0, 6, 192, scale=30).at[1].set(0).at[2, 3].set(jnp.nan).at[4].set(1e30)
    (values, of_rows), (expected, of_expected) = round_rows(x, dtype, device=CPU), rounded_rows(x, dtype)
    same = np.asarray(values, np.float32) == np.asarray(expected, np.float32)
    kept = np.array([0, 1, 3, 4, 5])
    assert same[kept].mean() > 0.99
    np.testing.assert_allclose(of_rows[kept], of_expected[kept], rtol=1e-6)
    assert not np.isfinite(np.asarray(values[2], np.float32) * of_rows[2]).any()


def test_a_sum_and_norm_in_8_bits():
    """The norm's kernel rounds what it would otherwise return."""
    x, parts, scale = normal(0, 5, 192), normal(1, 3, 5, 192, dtype=jnp.float32), normal(2, 192, dtype=jnp.float32)
    y, normed = _add_and_norm.add_and_norm(x, parts, scale, 1e-6, device=CPU)
    same, rounded = _add_and_norm.add_and_norm(x, parts, scale, 1e-6, rounded="int8", device=CPU)
    np.testing.assert_array_equal(same, y)
    for found, expected in zip(rounded, round_rows(normed, "int8", device=CPU), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@jax.jit
def whole(weights):
    return dense(dataclasses.replace(weights, computes_in="float32"))


def matrix(weights):
    """Return a quantised matrix [I, O], dequantised in float32."""
    return np.asarray(whole(weights))


@pytest.mark.parametrize("form", [lambda w: w, interleaved], ids=["natural", "interleaved"])
def test_what_no_kernel_reads_is_not_prefetched(form):
    """The next matrix may be one that the compiler multiplies."""
    x, weights = normal(0, 5, 256), normal(1, 256, 128)
    then = form(quantise(weights, dtype="int8", block=(64, 1)))
    assert _few_rows.prefetch_options(then, 5, 96, H100) == ([], None)
    found = jax.eval_shape(functools.partial(_few_rows.product, then=then, device=H100), x, weights)
    assert found.shape[1:] == (5, 128)


def test_more_rows_have_two_parts_of_twice_the_columns():
    x, weights = normal(0, 40, 256), normal(1, 256, 6144, scale=1 / 16)
    parts = _few_rows.product(x, weights, device=CPU)
    assert parts.shape == (2, 40, 6144)
    np.testing.assert_allclose(parts.sum(axis=0), exact(x, weights), rtol=0, atol=2e-5)


@cases("kind", ["silu", "gelu_tanh"], quick=["silu"])
@pytest.mark.parametrize(
    ("rows", "shape", "block"),
    [(2, (128, 256), 64), (5, (64, 512), 128), (17, (192, 1024), 256), (16, (64, 16384), 64), (75, (192, 512), 64)],
)
def test_a_product_with_its_activation(rows, shape, block, kind):
    x, weights = normal(0, rows, shape[0]), normal(1, *shape, scale=shape[0] ** -0.5)
    out = _few_rows.product(x, weights, gated=(kind, block), device=CPU)
    both = exact(x, weights).reshape(rows, -1, 2, block)
    expected = (activate(kind, both[:, :, 0]) * both[:, :, 1]).reshape(rows, -1)
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, rtol=2**-8, atol=1e-5)  # one rounding


@pytest.mark.parametrize("width", [192, 256])
def test_sum_and_norm(width):
    x, parts = normal(0, 5, width), normal(1, 3, 5, width, dtype=jnp.float32)
    scale = normal(2, width, dtype=jnp.float32)
    y, normed = _add_and_norm.add_and_norm(x, parts, scale, 1e-6, device=CPU)
    expected = (x.astype(jnp.float32) + parts[0] + parts[1] + parts[2]).astype(jnp.bfloat16)
    np.testing.assert_array_equal(y, expected)
    close = {"rtol": 2**-7, "atol": 1e-6}  # a number between two of bfloat16 goes either way
    np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (normed, rms_norm(scale, y, 1e-6))), **close)
