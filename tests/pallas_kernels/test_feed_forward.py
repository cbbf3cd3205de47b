"""feed_forward against its plain form in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import feed_forward
from pallas_kernels._dispatch import flavour, module
from tests.pallas_kernels.flavours import kernel

FLAVOURS = ["reference", "gpu", pytest.param("gpu compiled", marks=pytest.mark.gpu)]
# ||out - expected|| / ||expected||: bfloat16 rounds x, the hidden numbers and the result.
TOLERANCE = {"float32": 2e-6, "bfloat16": 6e-3}
SHAPES = [(256, 128, 512, 128), (128, 192, 256, 64), (2048, 1024, 3072, 128)]  # A, E, F, block


def random_arguments(shape, rows, dtype, seed=0):
    a, e, f, _ = shape
    draw = np.random.default_rng(seed)
    normal = lambda *size, scale=1.0: jnp.asarray(draw.normal(size=size) * scale, dtype)
    weights = normal(a, e, scale=a**-0.5), normal(e, 2 * f, scale=e**-0.5), normal(f, e, scale=f**-0.5)
    return normal(*rows, e), normal(*rows, a), *weights, jnp.asarray(1 + 0.1 * draw.normal(size=e), jnp.float32)


def relative_error(out, expected):
    out, expected = np.asarray(out, np.float32), np.asarray(expected, np.float32)
    return np.linalg.norm(out - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("name", FLAVOURS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_every_flavour_equals_the_plain_form(name, shape, dtype, activation):
    x, mixed, out, gate_up, down, norm = random_arguments(shape, (1, 1), dtype)
    options = {"eps": 1e-6, "activation": activation, "block": shape[3]}
    arguments = x, mixed, out, norm, gate_up, down, None, None
    plain = flavour("feed_forward", "reference")
    wide = [None if array is None else array.astype(jnp.float32) for array in arguments]
    assert (
        relative_error(kernel("feed_forward", name, **options)(*arguments), plain(*wide, **options)) < TOLERANCE[dtype]
    )


@pytest.mark.parametrize("rows", [(1, 1), (3, 5)])
@pytest.mark.parametrize("post", [False, True])
def test_public_function(rows, post):
    x, mixed, *weights, norm = random_arguments(SHAPES[0], rows, "float32")
    options = {"norm": norm, "eps": 1e-6, "activation": "silu", "block": 128, "platform": "cpu"}
    if post:
        options |= {"post_attention_norm": norm, "post_mlp_norm": norm}
    expected = feed_forward(x, mixed, *weights, **options, implementation="reference")
    assert expected.shape == x.shape
    np.testing.assert_array_equal(feed_forward(x, mixed, *weights, **options), expected)
    if post or rows != (1, 1):
        with pytest.raises(NotImplementedError, match="one row and no post norms"):
            feed_forward(x, mixed, *weights, **options, implementation="pallas")
    else:
        out = feed_forward(x, mixed, *weights, **options, implementation="pallas")
        assert relative_error(out, expected) < TOLERANCE["float32"]


def test_the_kernel_takes_one_small_bfloat16_row():
    gpu = module("feed_forward", "gpu")
    shapes = lambda *rows, e=1024, dtype=jnp.bfloat16: [
        jax.ShapeDtypeStruct(s, dtype) for s in ((*rows, e), (2048, e), (e, 6144), (3072, e))
    ]
    assert gpu.fits(*shapes(1, 1), False, 128)
    assert not gpu.fits(*shapes(1, 2), False, 128)
    assert not gpu.fits(*shapes(1, 1), True, 128)
    assert not gpu.fits(*shapes(1, 1, dtype=jnp.float32), False, 128)
    assert not gpu.fits(*shapes(1, 1, e=4096), False, 128)


def test_wrong_arguments_are_named():
    x, mixed, out, gate_up, down, norm = random_arguments(SHAPES[0], (2, 1), "float32")
    with pytest.raises(ValueError, match="blocks of 96 do not divide 512"):
        feed_forward(x, mixed, out, gate_up, down, norm=norm, eps=1e-6, block=96)
    with pytest.raises(ValueError, match="mixed must have shape"):
        feed_forward(x, mixed[..., 1:], out, gate_up, down, norm=norm, eps=1e-6, block=128)
    with pytest.raises(NotImplementedError, match="no TPU kernel"):
        feed_forward(
            x, mixed, out, gate_up, down, norm=norm, eps=1e-6, block=128, implementation="pallas", platform="tpu"
        )
