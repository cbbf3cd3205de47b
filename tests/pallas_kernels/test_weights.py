"""Forms of weights: each multiplies as its dense form, goes through a model as that does, and names what it needs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.models.backend import Backend
from jaxspec.models.decoder import parameters
from jaxspec.parallel.placement import AXES, make_placement
from pallas_kernels import weights
from pallas_kernels.device import CPU, Device
from pallas_kernels.forms import Form, Op
from pallas_kernels.weights import grouped, interleaved_grouped, nbytes, product, specs
from pallas_kernels.weights.interleaved import interleaved
from pallas_kernels.weights.output_first import OutputFirst, Streamed
from pallas_kernels.weights.scaled import Scaled, StreamedScaled, quantise, sum_of_blocks
from pallas_kernels.weights.streamed_grouped import streamed_form
from tests.support import tiny_models
from tests.support.whole_text import whole_logits

# Compiled as a whole: each operation by itself is compiled for each shape and each sharding.
dense = jax.jit(weights.dense)
to_8_bits = jax.jit(quantise, static_argnames=("dtype", "block", "activations"))
to_4_bits = jax.jit(grouped.quantise, static_argnums=1)


def numbers(*shape: int, dtype: str = "float32"):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), dtype)


def scaled(matrix, block, dtype="int8") -> Scaled:
    """Round a matrix [I, O] to 8 bits, and its scales by numpy."""
    found = to_8_bits(jnp.asarray(matrix), dtype=dtype, block=block)
    blocks = matrix.shape[0] // block[0], matrix.shape[1] // block[1]
    parts = np.asarray(matrix, np.float32).reshape(blocks[0], block[0], blocks[1], block[1])
    largest = np.abs(parts).max(axis=(1, 3)).T / (127 if dtype == "int8" else 448)
    np.testing.assert_allclose(found.scale, largest, rtol=1e-6)
    return found


FORMS = {
    "output_first": lambda x: OutputFirst(x.T),
    "streamed": lambda x: Streamed(x.T),
    "streamed bfloat16": lambda x: Streamed(x.T.astype(jnp.bfloat16)),
    "int8 per channel": lambda x: scaled(x, (len(x), 1)),
    "int8 streamed": lambda x: StreamedScaled(
        *(getattr(scaled(x, (len(x), 1)), n) for n in ("values", "scale")), "float32"
    ),
    "int8 in groups": lambda x: scaled(x, (32, 1)),
    "fp8 in blocks": lambda x: scaled(x, (32, 16), "float8_e4m3fn"),
    "fp8 per tensor": lambda x: scaled(x, x.shape, "float8_e4m3fn"),
    "int8 interleaved": lambda x: interleaved(scaled(x, (len(x), 1))),
    "fp8 interleaved, in blocks": lambda x: interleaved(scaled(x, (128, 16), "float8_e4m3fn")),
    "int4 in groups of 32": lambda x: four_bits(x, 32),
    "int4 streamed": lambda x: streamed_form(four_bits(x, 64)),
    "int4 streamed with zeros": lambda x: streamed_form(four_bits(x, 32, zeros=True)),
    "int4 in groups of 128 with zeros": lambda x: four_bits(x, 128, zeros=True),
    "int4 interleaved": lambda x: interleaved_grouped.interleaved(four_bits(x, 64)),
    "int4 interleaved with zeros": lambda x: interleaved_grouped.interleaved(four_bits(x, 128, zeros=True)),
}
BLOCKS = {"int4 interleaved, Q4_K": lambda x: interleaved_grouped.interleaved(of_blocks("q4_k", *x.shape)[0])}


def four_bits(x, group: int, **how) -> grouped.Grouped:
    return to_4_bits(jnp.asarray(x), grouped.in_four_bits(group, **how))


def of_blocks(kind: str, inputs: int = 512, outputs: int = 16) -> tuple[grouped.Grouped, np.ndarray]:
    """A matrix in a layout of GGUF with random arrays, and its numbers by numpy in float64."""
    rng, layout = np.random.default_rng(0), grouped.BLOCKS[kind]
    values = rng.integers(0, 1 << sum(layout.bits), (outputs, inputs), np.uint8)
    planes = grouped.packed(values, layout.bits)
    made: dict[tuple[str, int], np.ndarray] = {}

    def make(field, i, shape, dtype):
        x = (
            planes[i]
            if field == "values"
            else (rng.normal(size=shape) / 4096 if dtype == "float16" else rng.integers(0, 64, shape))
        )
        made[field, i] = np.asarray(x).astype(dtype)
        return jnp.asarray(made[field, i])

    def whole(field):
        factors = [x.astype(np.float64).repeat(inputs // x.shape[1], 1) for (of, _), x in made.items() if of == field]
        return np.prod(factors, axis=0)

    weight = grouped.arrays(layout, (inputs, outputs), make, "float32")
    offset = whole("offset") if layout.offset else 0
    return weight, ((values.astype(np.float64) - layout.zero) * whole("scale") + offset).T


@pytest.mark.parametrize("kind", grouped.BLOCKS)
def test_blocks_hold_integers_scales_and_offsets(kind):
    weight, expected = of_blocks(kind)
    assert weight.shape == expected.shape
    np.testing.assert_allclose(dense(weight), expected, rtol=1e-6, atol=1e-5)
    x = numbers(3, 512)
    products = x @ expected.astype(np.float32)
    sizes = {"rtol": 1e-4, "atol": 1e-4 * np.abs(products).max()}
    np.testing.assert_allclose(jax.jit(product)(x, weight), products, **sizes)
    cpu = streamed_form(weight)
    assert len(cpu.values) == 1
    np.testing.assert_array_equal(dense(cpu), dense(weight))
    for rows in (1, 3):
        np.testing.assert_allclose(jax.jit(product)(x[:rows], cpu), products[:rows], **sizes)
    if weight.size_of_groups % grouped.CHUNK == 0:  # what a TPU computes
        np.testing.assert_allclose(jax.jit(grouped.sum_of_groups)(x, weight), products, **sizes)


def test_four_bits_take_four_bits():
    whole = numbers(256, 64)
    sizes = {zeros: four_bits(whole, 32, zeros=zeros).nbytes * 8 / whole.size for zeros in (False, True)}
    assert sizes == {False: 4 + 16 / 32, True: 4 + 24 / 32}
    skewed = four_bits(whole + 2, 32, zeros=True), four_bits(whole + 2, 32)
    errors = [np.square(dense(x) - (whole + 2)).mean() for x in skewed]
    assert errors[0] < errors[1] / 2, "zero points follow weights that are not around 0"
    coarse = [np.square(dense(four_bits(whole, size)) - whole).mean() for size in (128, 64, 32)]
    assert coarse == sorted(coarse, reverse=True)
    assert np.isfinite(dense(four_bits(0 * whole, 32))).all()


def test_inputs_in_another_order():
    weight, order = four_bits(numbers(256, 64), 32), np.random.default_rng(0).permutation(256)
    ordered = dataclasses.replace(weight, order=jnp.asarray(order))
    np.testing.assert_array_equal(np.asarray(dense(ordered))[order], dense(weight))
    x = numbers(3, 256)
    np.testing.assert_allclose(product(x, ordered), x @ np.asarray(dense(ordered)), rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [(1,), (2, 3)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_each_form_multiplies_as_its_dense_form(form, rows):
    weight, x = FORMS[form](numbers(256, 64)), numbers(*rows, 256)
    assert weight.shape == (256, 64)
    assert weight.dtype == dense(weight).dtype == jnp.float32
    found = jax.jit(lambda x, w: product(x, w))(x, weight)
    assert (found.shape, found.dtype) == ((*rows, 64), jnp.float32)
    np.testing.assert_allclose(found, x @ np.asarray(dense(weight)), rtol=2e-5, atol=1e-5)
    expected = numbers(256, 64)
    most = 0.7 if "int4" in form else 0.15
    assert np.abs(dense(weight) - expected).max() < most, "rounding takes no more than that"


@pytest.mark.parametrize("form", ["scaled", "interleaved", "streamed"])
def test_activations_are_rounded_by_the_row(form):
    """The rows beside a row, zeros and huge ones among them, change nothing."""
    weight = quantise(numbers(256, 64), dtype="float8_e4m3fn", block=(256, 1), activations="float8_e4m3fn")
    weight = {"scaled": weight, "interleaved": interleaved(weight)}.get(form) or StreamedScaled(
        weight.values, weight.scale, weight.computes_in, weight.activations
    )
    x = jnp.concatenate([numbers(3, 256), jnp.zeros((1, 256)), 1e30 * numbers(1, 256)])
    largest = np.abs(np.asarray(x)).max(axis=1, keepdims=True)
    scale = np.where(largest == 0, 1, largest) / 448
    rounded = (np.asarray(x) / scale).astype(jnp.float8_e4m3fn).astype(np.float32) * scale
    found = jax.jit(lambda x, w: product(x, w))(x, weight)
    exactly = rounded @ np.asarray(dense(weight))
    of_rows = np.abs(exactly).max(axis=1, keepdims=True) + 1e-9
    np.testing.assert_allclose(found / of_rows, exactly / of_rows, rtol=0, atol=1e-5)
    assert np.abs(found - x @ dense(weight)).max() > 1e-3, "they are rounded"
    np.testing.assert_allclose(product(x[:1], weight), found[:1], rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [(1,), (2, 3)], ids=str)
@pytest.mark.parametrize(("block", "dtype"), [((32, 1), "int8"), ((32, 16), "float8_e4m3fn")])
def test_a_sum_of_blocks_is_the_product(block, dtype, rows):
    """The sum is what a TPU computes. Five blocks are not divided by the blocks of a step."""
    weight, x = scaled(numbers(160, 64), block, dtype), numbers(*rows, 160)
    found = jax.jit(sum_of_blocks)(x, weight)
    assert (found.shape, found.dtype) == ((*rows, 64), jnp.float32)
    np.testing.assert_allclose(found, x @ np.asarray(dense(weight)), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("inputs", "group"), [(256, 32), (512, 64), (768, 128), (384, 192), (384, 128), (96, 0)])
def test_a_sum_of_groups_is_the_product(inputs, group, zeros):
    """A step reads several groups, or one whose bytes fill no lanes, or all inputs."""
    weight, x = four_bits(numbers(inputs, 64), group, zeros=zeros), numbers(2, 3, inputs)
    found = jax.jit(grouped.sum_of_groups)(x, weight)
    assert (found.shape, found.dtype) == ((2, 3, 64), jnp.float32)
    np.testing.assert_allclose(found, x @ np.asarray(dense(weight)), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("platform", ["cpu", "tpu", "gpu"])
@pytest.mark.parametrize("rows", [1, 5, 80, 200])
@pytest.mark.parametrize("form", [name for name in FORMS if "per" in name or "in " in name])
def test_activations_keep_their_dtype_at_every_number_of_rows(form, rows, platform):
    """So that a prefill, a verification and decoding give a token the same keys and values."""
    x, weight = numbers(rows, 256, dtype="bfloat16"), FORMS[form](numbers(256, 64, dtype="bfloat16"))
    made = jax.make_jaxpr(lambda x, w: product(x, w, device=Device(platform)))(x, weight)
    dots = [e for e in equations(made.jaxpr) if e.primitive.name == "dot_general"]
    assert dots
    assert all(e.invars[0].aval.dtype == jnp.bfloat16 for e in dots)
    assert not [
        e
        for e in equations(made.jaxpr)
        if e.outvars[0].aval.dtype in (jnp.int8, jnp.float8_e4m3fn) and e.primitive.name == "convert_element_type"
    ]


def equations(jaxpr):
    """Those of the branches and loops, too."""
    for equation in jaxpr.eqns:
        yield equation
        for parameter in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def test_what_bfloat16_computes_is_rounded_once():
    """The product of bfloat16 activations is float32 where that is asked for."""
    x, weight = numbers(3, 64, dtype="bfloat16"), Streamed(numbers(64, 64).T)
    found = product(x, weight, dtype=jnp.float32)
    assert found.dtype == jnp.float32
    assert np.any(found.astype(jnp.bfloat16) != found)


@pytest.mark.parametrize("weight", [numbers(64, 64), OutputFirst(numbers(64, 64))], ids=["dense", "table"])
def test_a_gpu_sees_no_product_with_a_single_row(weight):
    made = jax.make_jaxpr(lambda x, w: product(x, w, device=Device("gpu")))(numbers(1, 64), weight)
    (dot,) = [e for e in made.eqns if e.primitive.name == "dot_general"]
    assert dot.invars[0].aval.shape[0] > 1


def test_bytes_are_those_of_all_arrays():
    x = numbers(64, 64)
    assert nbytes(x) == nbytes(OutputFirst(x.T)) == 64 * 64 * 4
    assert FORMS["int8 in groups"](x).nbytes == 64 * 64 + 2 * 64 * 4
    assert nbytes({"a": x, "b": [x]}) == 2 * nbytes(x)


@pytest.mark.skipif(jax.device_count() < 2, reason="wants 2 devices: --xla_force_host_platform_device_count")
@pytest.mark.parametrize("spec", [P(None, AXES), P(AXES, None), P()], ids=str)
@pytest.mark.parametrize("form", FORMS | BLOCKS)
def test_each_form_is_sharded_as_its_dense_form(form, spec):
    size = 2 * interleaved_grouped.CHUNK if "int4 interleaved" in form else 256  # each device has whole chunks
    mesh, weight, x = make_placement(2).mesh, (FORMS | BLOCKS)[form](numbers(size, 64)), numbers(3, size)
    inputs, outputs = (*spec, None, None)[:2]
    places = jax.tree.map(lambda s: NamedSharding(mesh, s), specs(weight, spec), is_leaf=lambda s: isinstance(s, P))
    placed = jax.device_put(weight, places)
    np.testing.assert_array_equal(dense(placed), dense(weight))

    def partial(x, weight):
        found = product(x, weight, dtype=jnp.float32)
        return jax.lax.psum(found, inputs) if inputs else found

    places = P(None, inputs), specs(weight, spec)
    run = jax.jit(jax.shard_map(partial, mesh=mesh, in_specs=places, out_specs=P(None, outputs), check_vma=False))
    # Sums of 256 or 512 products near 1, added in another order: the error is 8e-6 on some CPUs, above 1e-5 on others.
    np.testing.assert_allclose(run(x, placed), product(x, dense(weight)), rtol=2e-5, atol=5e-5)


def test_a_kernel_that_does_not_read_a_form_is_not_chosen():
    op = Op("feed_forward", (Form("pallas", "gpu", ("gpu",), ("gpu",)), Form("reference", "reference", ())))
    device = Device("gpu", (9, 0))
    x, matrices = numbers(1, 64, dtype="bfloat16"), [numbers(64, 64, dtype="bfloat16")] * 3
    arguments = lambda out, gate_up, down: (x, x, out, numbers(64), gate_up, down, None, None, None)
    assert op.choose(None, device, *arguments(*matrices)).name == "pallas"
    assert op.choose(None, device, *arguments(OutputFirst(matrices[0].T), *matrices[1:])).name == "reference"


@pytest.mark.parametrize("form", ["output_first", "int8 in groups", "fp8 in blocks"])
def test_a_model_computes_with_any_form(form):
    """As with the numbers that the form holds."""
    config = tiny_models.FAMILIES["llama3"]
    params, backend = dict(tiny_models.model(config).params), Backend(CPU, make_placement())
    turn = {name for name, p in parameters(config).items() if p.kind == "matrix" and not any(n % 32 for n in p.shape)}
    assert turn
    of_form = params | {name: FORMS[form](params[name]) for name in turn}
    as_dense = params | {name: dense(of_form[name]) for name in turn}
    tokens = jnp.arange(12, dtype=jnp.int32)[None] % config.vocab_size
    logits = lambda params: whole_logits(config, params, tokens, backend)
    np.testing.assert_allclose(logits(of_form), logits(as_dense), atol=2e-5)


def test_a_weight_has_no_parts():
    with pytest.raises(TypeError, match="only"):
        Streamed(numbers(4, 4))[0]
