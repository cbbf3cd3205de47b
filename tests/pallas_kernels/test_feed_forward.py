"""feed_forward against its plain form in float32."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import _few_rows, _split_product, feed_forward
from pallas_kernels.device import CPU, here
from pallas_kernels.forms import function, module
from pallas_kernels.plain import rms_norm
from pallas_kernels.weights import Prepared, dense, grouped, interleaved_grouped, product
from pallas_kernels.weights.interleaved import Interleaved, interleaved
from pallas_kernels.weights.scaled import quantise
from tests.pallas_kernels.flavours import A100, H100, kernel
from tests.support.sizes import cases

FLAVOURS = ["reference", "gpu", pytest.param("gpu compiled", marks=pytest.mark.gpu)]
# ||out - expected|| / ||expected||: bfloat16 rounds x, the hidden numbers and the result.
TOLERANCE = {"float32": 2e-6, "bfloat16": 6e-3}
# A, E, F, block. The last: a program's share of the depth spans several blocks of gate and up.
SHAPES = [(256, 128, 512, 128), (128, 192, 256, 64), (2048, 1024, 3072, 128), (64, 4096, 512, 64)]


def random_arguments(shape, rows, dtype, seed=0):
    a, e, f, _ = shape
    draw = np.random.default_rng(seed)
    normal = lambda *size, scale=1.0: jnp.asarray(draw.normal(size=size) * scale, dtype)
    weights = normal(a, e, scale=a**-0.5), normal(e, 2 * f, scale=e**-0.5), normal(f, e, scale=f**-0.5)
    return normal(*rows, e), normal(*rows, a), *weights, jnp.asarray(1 + 0.1 * draw.normal(size=e), jnp.float32)


def relative_error(out, expected):
    out, expected = np.asarray(out, np.float32), np.asarray(expected, np.float32)
    return np.linalg.norm(out - expected) / np.linalg.norm(expected)


def check(name, shape, rows, dtype, activation="silu", next_norm=None):
    x, mixed, out, gate_up, down, norm = random_arguments(shape, rows, dtype)
    options = {"eps": 1e-6, "activation": activation, "block": shape[3]}
    next_qkv = None if next_norm is None else jnp.full_like(gate_up, jnp.nan)  # which nobody reads
    arguments = x, mixed, out, norm, gate_up, down, None, None, next_norm, next_qkv
    y, normed = kernel("feed_forward", name, **options)(*arguments)
    wide = [None if array is None else array.astype(jnp.float32) for array in arguments]
    expected, _ = function("feed_forward", "reference")(*wide, **options)
    assert relative_error(y, expected) < TOLERANCE[dtype]
    if normed is not None:
        normed = normed.plain() if isinstance(normed, Prepared) else normed
        assert relative_error(normed, rms_norm(next_norm, expected, 1e-6)) < TOLERANCE[dtype]
    return normed


@pytest.mark.parametrize("name", FLAVOURS)
@cases("shape", SHAPES, quick=SHAPES[:2], ids=str)
@cases("dtype", ["float32", "bfloat16"], quick=["bfloat16"])
@cases("activation", ["silu", "gelu_tanh"], quick=["gelu_tanh"])
def test_every_flavour_equals_the_plain_form(name, shape, dtype, activation):
    check(name, shape, (1, 1), dtype, activation)


@pytest.mark.parametrize("name", FLAVOURS[1:])
@cases("shape", SHAPES[:3], quick=SHAPES[1:2], ids=str)
@cases("rows", [(1, 5), (16, 1), (16, 2), (16, 5)], quick=[(16, 5)], ids=str)
def test_a_few_rows(name, shape, rows):
    next_norm = jnp.asarray(np.linspace(0.5, 2, shape[1]), jnp.float32)
    normed = check(name, shape, rows, "bfloat16", next_norm=next_norm)
    assert (normed is not None) == (name == "gpu" or here().shares_much)
    assert check(name, shape, rows, "bfloat16", "gelu_tanh") is None


@pytest.mark.parametrize("name", FLAVOURS[1:])
def test_one_row_of_larger_matrices(name, monkeypatch):
    """Is for a few rows' kernels."""
    monkeypatch.setattr(_split_product, "MAX_SIZE", 1)
    shape = (256, 320, 512, 128)  # which no other test has: what is traced is kept
    normed = check(name, shape, (1, 1), "bfloat16", next_norm=jnp.asarray(np.linspace(0.5, 2, shape[1]), jnp.float32))
    assert (normed is not None) == (name == "gpu" or here().shares_much)


@pytest.mark.parametrize("name", FLAVOURS[1:])
@cases(
    "shape", [(256, 128, 512, 128), (128, 256, 256, 64), (2048, 1024, 3072, 128)], rest=[], quick=[(128, 256, 256, 64)]
)
@cases("stored", ["int8", "float8_e4m3fn"], quick=["int8"])
def test_one_row_of_matrices_in_8_bits(name, shape, stored):
    """Three kernels as for bfloat16, which read the words of four values."""
    x, mixed, *matrices, norm = random_arguments(shape, (1, 1), "bfloat16")
    weights = [interleaved(quantise(w, dtype=stored, block=(w.shape[0], 1))) for w in matrices]
    assert _split_product.covers(*weights)
    options = {"eps": 1e-6, "activation": "silu", "block": shape[3]}
    arguments = x, mixed, weights[0], norm, *weights[1:], None, None, None, None
    y, _ = kernel("feed_forward", name, **options)(*arguments)
    wide = [array.astype(jnp.float32) for array in (x, mixed)]
    held = [w.in_form(Interleaved, computes_in="float32").dense() for w in weights]
    expected, _ = function("feed_forward", "reference")(
        *wide, held[0], norm, *held[1:], None, None, None, None, **options
    )
    assert relative_error(y, expected) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("name", FLAVOURS[:2])
@cases("rows", [(1, 1), (1, 5), (16, 1), (1, 97)], quick=[(1, 1)], ids=str)
def test_parts_of_two_devices_are_added_up(name, rows):
    """Each has half of the heads and of the columns; what it gives is the whole, normed for the next layer too."""
    shape = SHAPES[0]
    x, mixed, out, gate_up, down, norm = random_arguments(shape, rows, "bfloat16")
    options = {"eps": 1e-6, "activation": "silu", "block": shape[3], "sum_over": ("parts",)}
    mesh = jax.make_mesh((2,), ("parts",), (AxisType.Auto,), devices=jax.devices()[:2])

    def part(x, mixed, out, gate_up, down, norm):
        return kernel("feed_forward", name, **options)(x, mixed, out, norm, gate_up, down, None, None, norm)

    specs = (P(), P(None, None, "parts"), P("parts", None), P(None, "parts"), P("parts", None), P())
    run = jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    y, normed = jax.jit(run)(x, mixed, out, gate_up, down, norm)
    wide = [array.astype(jnp.float32) for array in (x, mixed, out, norm, gate_up, down)]
    whole = {"eps": 1e-6, "activation": "silu", "block": shape[3]}
    expected, _ = function("feed_forward", "reference")(*wide, None, None, None, **whole)
    assert relative_error(y, expected) < TOLERANCE["bfloat16"]
    assert (normed is not None) == (name == "gpu" and rows != (1, 97))
    if normed is not None:
        assert relative_error(normed, rms_norm(norm, expected, 1e-6)) < TOLERANCE["bfloat16"]


@cases("rows", [(1, 1), (3, 5), (1, 97)], quick=[(3, 5)], ids=str)
@pytest.mark.parametrize("post", [False, True])
def test_public_function(rows, post):
    x, mixed, *weights, norm = random_arguments(SHAPES[0], rows, "float32")
    options = {"norm": norm, "next_norm": norm, "eps": 1e-6, "activation": "silu", "block": 128, "platform": "cpu"}
    if post:
        options |= {"post_attention_norm": norm, "post_mlp_norm": norm}
    expected, normed = feed_forward(x, mixed, *weights, **options, implementation="reference")
    assert expected.shape == x.shape
    assert normed is None
    np.testing.assert_array_equal(feed_forward(x, mixed, *weights, **options)[0], expected)
    np.testing.assert_array_equal(feed_forward(x, mixed, *weights, **options, implementation="pallas")[0], expected)


def num_kernels(shape, rows):
    a, e, f, block = shape
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((rows, e), (rows, a), (a, e), (e, 2 * f), (f, e))]
    options = {"eps": 1e-6, "block": block, "platform": H100, "implementation": "pallas"}
    layer = lambda *arrays: feed_forward(*arrays[:-1], norm=arrays[-1], next_norm=arrays[-1], **options)
    return launched(jax.make_jaxpr(layer)(*shapes, jax.ShapeDtypeStruct((e,), jnp.float32)).jaxpr)


def launched(jaxpr) -> int:
    """Kernels, one that is called twice twice."""
    inner = lambda eqn: [value.jaxpr for value in eqn.params.values() if hasattr(value, "jaxpr")]
    return sum(1 if e.primitive.name == "pallas_call" else sum(map(launched, inner(e))) for e in jaxpr.eqns)


def test_the_next_product_gets_rounded_activations():
    """Rounded by the norm's kernel, they are those that the next product would round itself."""
    keys = iter(jax.random.split(jax.random.key(0), 9))

    def normal(*shape):
        return jax.random.normal(next(keys), shape, jnp.bfloat16) / 8

    def rounding(*shape):
        options = {"dtype": "float8_e4m3fn", "block": (shape[0], 1), "activations": "float8_e4m3fn"}
        return quantise(normal(*shape), **options)

    x, mixed, ones, next_qkv = normal(1, 3, 128), normal(1, 3, 64), jnp.ones(128), rounding(128, 192)
    arrays = x, mixed, rounding(64, 128), ones, rounding(128, 256), rounding(128, 128), None, None, ones
    layer = functools.partial(
        function("feed_forward", "gpu"), *arrays, eps=1e-6, activation="silu", block=64, device=CPU
    )
    (y, normed), (same, plain) = layer(next_qkv), layer(None)
    np.testing.assert_array_equal(y, same)
    assert normed[0].dtype == jnp.float8_e4m3fn
    assert plain.dtype == jnp.bfloat16
    np.testing.assert_array_equal(product(normed, next_qkv, device=CPU), product(plain, next_qkv, device=CPU))


@pytest.mark.parametrize(("rows", "small", "large", "larger"), [(1, 3, 5, 0), (2, 5, 5, 0), (96, 5, 5, 0)])
def test_large_matrices_have_the_plain_form(rows, small, large, larger):
    assert num_kernels((2048, 1024, 3072, 128), rows) == small
    assert num_kernels((4096, 4096, 12288, 128), rows) == large
    assert num_kernels((8192, 8192, 28672, 128), rows) == larger


@pytest.mark.parametrize("device", [A100, H100])
def test_what_it_is_meant_for(device):
    fits = lambda *rows, dtype=jnp.bfloat16: module("feed_forward", "gpu").fits(
        jax.ShapeDtypeStruct((*rows, 64), dtype), device=device
    )
    assert fits(1, 1)
    assert fits(1, 2) is fits(16, 2) is (device == H100)
    assert not fits(1, 97)
    assert not fits(1, 1, dtype=jnp.float32)


@pytest.mark.parametrize(
    ("depth", "width"), [(1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024), (2048, 8128), (704, 64)]
)
def test_what_a_program_reads_fits_into_its_registers(depth, width):
    columns, splits = _split_product.tile(depth, width)
    assert width % columns == 0 == depth % (splits * _split_product.STEP)
    assert depth // splits * columns <= _split_product.MAX_SHARE


def test_wrong_arguments_are_named():
    x, mixed, out, gate_up, down, norm = random_arguments(SHAPES[0], (2, 1), "float32")
    with pytest.raises(ValueError, match="blocks of 96 do not divide 512"):
        feed_forward(x, mixed, out, gate_up, down, norm=norm, eps=1e-6, block=96)
    with pytest.raises(ValueError, match="mixed must have shape"):
        feed_forward(x, mixed[..., 1:], out, gate_up, down, norm=norm, eps=1e-6, block=128)


def test_the_next_product_gets_sums_of_groups(monkeypatch):
    """The kernels before a product with offsets leave what it needs, in this layer and for the next one's qkv."""
    keys = iter(jax.random.split(jax.random.key(0), 99))

    def q4_k(inputs, outputs):
        def make(field, i, shape, dtype):
            if dtype == "uint8":
                return jax.random.randint(next(keys), shape, 0, 256 if field == "values" else 64).astype(dtype)
            return (jax.random.uniform(next(keys), shape) * (-2e-3 if field == "offset" else 3e-4)).astype(dtype)

        blocks = grouped.arrays(grouped.BLOCKS["q4_k"], (inputs, outputs), make, "bfloat16")
        return interleaved_grouped.interleaved(blocks)

    x, mixed = (jax.random.normal(next(keys), (1, 3, size), jnp.bfloat16) for size in (512, 256))
    norm, next_qkv, weights = jnp.ones(512), q4_k(512, 192), [q4_k(256, 512), q4_k(512, 1024), q4_k(512, 512)]
    options = {"eps": 1e-6, "activation": "silu", "block": 64}
    given, kernel_of_product = [], _few_rows.product
    monkeypatch.setattr(
        _few_rows, "product", lambda x, *args, **how: given.append(type(x)) or kernel_of_product(x, *args, **how)
    )
    arrays = x, mixed, weights[0], norm, *weights[1:], None, None, norm, next_qkv
    y, normed = function("feed_forward", "gpu")(*arrays, **options, device=CPU)
    assert [issubclass(kind, Prepared) for kind in given] == [False, True, True]
    held = [dense(dataclasses.replace(w.natural(), computes_in="float32")) for w in weights]
    wide = [array.astype(jnp.float32) for array in (x, mixed)]
    expected, _ = function("feed_forward", "reference")(
        *wide, held[0], norm, *held[1:], None, None, None, None, **options
    )
    assert relative_error(y, expected) < TOLERANCE["bfloat16"]
    np.testing.assert_array_equal(product(normed, next_qkv), product(normed.plain(), next_qkv))
    sums = interleaved_grouped.summed(normed.rows).sums
    np.testing.assert_allclose(np.asarray(normed.sums, np.float32), np.asarray(sums, np.float32), atol=2**-10)
