"""Products on CPU that stream a matrix which lies output-first: their numbers, and what they are compiled to."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.pages import allocate
from jaxspec.hardware.platforms import CPU_COMPILER_OPTIONS
from jaxspec.models.backend import Backend
from jaxspec.models.decoder import abstract_params, bind
from jaxspec.models.paged import cache_layout
from jaxspec.models.rows import Rows
from jaxspec.models.table import looked_up
from jaxspec.parallel.placement import make_placement
from pallas_kernels import feed_forward, paged_attention, streamed
from pallas_kernels.device import CPU
from pallas_kernels.forms import function
from pallas_kernels.paged_attention.reference import KEYS
from pallas_kernels.weights.output_first import Streamed
from tests.pallas_kernels.test_feed_forward import random_arguments, relative_error
from tests.support import tiny_models
from tests.support.compilation_cache import no_compilation_cache
from tests.support.hlo import NAMES, Program
from tests.support.sizes import cases

ROWS = [(1,), (1, 2), (5,), (2, 3), (7,), (3, 4), (13,)]


@cases("rows", ROWS, quick=[(1,), (2, 3)], ids=str)
@cases("shape", [(64, 96), (48, 50), (576, 7)], quick=[(48, 50)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_the_product(rows, shape, dtype):
    draw = np.random.default_rng(0)
    x, matrix = draw.normal(size=(*rows, shape[0])), jnp.asarray(draw.normal(size=shape[::-1]), dtype)
    y = jax.jit(streamed.product)(jnp.asarray(x, jnp.float32), matrix)
    assert (y.shape, y.dtype) == ((*rows, shape[1]), jnp.float32)
    assert relative_error(y, x @ np.asarray(matrix, np.float64).T) < 1e-6


def test_other_dtypes_and_many_rows_are_the_librarys(monkeypatch):
    monkeypatch.setattr(streamed, "by_streams", lambda x, matrix, streams: 1 / 0)
    product, matrix = Streamed(jnp.ones((16, 8))).matmul, jnp.ones((15, 8))
    assert product(jnp.ones((streamed.MAX_ROWS + 1, 8)), jnp.float32).shape == (streamed.MAX_ROWS + 1, 16)
    assert product(jnp.ones((4, 8), jnp.bfloat16), jnp.float32).dtype == jnp.float32
    assert Streamed(matrix).matmul(jnp.ones((1, 8)), jnp.float32).shape == (1, 15)
    with pytest.raises(ZeroDivisionError):
        product(jnp.ones((streamed.MAX_ROWS, 8)), jnp.float32)


@pytest.mark.parametrize(
    ("rows", "depth", "width", "streams"),
    [
        (1, 576, 960, 4), (1, 4096, 50, 2), (1, 576, 7, 1),
        (2, 576, 960, 2), (5, 1024, 960, 2), (5, 1025, 960, 4), (2, 3072, 50, 2),
        (7, 1536, 960, 2), (12, 4096, 960, 2), (12, 4096, 7, 1),
    ],
)  # fmt: skip
def test_a_large_x_serves_more_rows_of_the_matrix_at_a_time(rows, depth, width, streams):
    assert streamed.num_streams(rows, depth, width) == streams


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="compiles for CPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 5])
def test_matrices_are_read_as_they_lie_and_x_is_made_once(rows, dtype):
    """No matrix is turned, copied or computed with outside of the three loops, and those make nothing else."""
    x, mixed, out, gate_up, down, norm = random_arguments((128, 192, 256, 64), (1, rows), "float32")

    def layer(x, mixed, norm, *matrices):
        out, gate_up, down = map(Streamed, matrices)
        options = {"norm": norm, "eps": 1e-6, "block": 64, "platform": "cpu"}
        return feed_forward(x, mixed, out, gate_up, down, **options)[0]

    turned = [jnp.asarray(matrix.T, dtype) for matrix in (out, gate_up, down)]
    compiled = jax.jit(layer, compiler_options=CPU_COMPILER_OPTIONS).lower(x, mixed, norm, *turned).compile()
    program = Program(compiled.as_text())
    sizes = {matrix.size for matrix in turned}
    large = [i for i in program.entry if i.opcode != "parameter" and sizes & set(i.sizes)]
    calls = [i for i in program.entry if i.opcode == "call" and "by_streams" in i.name]
    assert not large, [i.line for i in large]
    assert len(calls) == 3
    called = [program.computations[i.line.split("to_apply=%")[1].split(",")[0]] for i in calls]
    for product in called:
        loops = [i for i in product if i.opcode == "fusion" and len(i.sizes) > 1]
        assert [len(i.sizes) for i in loops] == [rows * (4 if rows == 1 else 2)], [i.line for i in product]
    plain = function("feed_forward", "reference")
    out, gate_up, down = (matrix.astype(jnp.float32).T for matrix in turned)
    expected, _ = plain(x, mixed, out, norm, gate_up, down, None, None, None, eps=1e-6, activation="silu", block=64)
    assert relative_error(compiled(x, mixed, norm, *turned), expected) < 2e-6


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="compiles for CPU")
@pytest.mark.parametrize("tokens", [1, 5])
def test_keys_are_read_where_they_lie(tokens):
    """What is gathered is the values, of as many keys as are attended to at a time; the plain form gathers keys too."""
    shapes = [(1, tokens, 6, 64), (48, 16, 4, 64), (1, 40), (1,)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32 if len(shape) > 2 else jnp.int32) for shape in shapes]
    gathered = {}
    for implementation in (None, "reference"):
        options = {"scale": 0.1, "implementation": implementation, "platform": "cpu"}
        attend = jax.jit(functools.partial(paged_attention, **options), compiler_options=CPU_COMPILER_OPTIONS)
        program = Program(attend.lower(*arrays).compile().as_text())
        made = [i for i in program.all if i.opcode not in NAMES and KEYS * 2 * 64 in i.sizes]
        gathered[implementation] = len(made)
    assert gathered[None] == 1
    assert gathered["reference"] > 1


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="compiles for CPU")
def test_rotary_tables_are_computed_once():
    """Not in every layer, for every head, wherever they are read."""
    config = tiny_models.BASE
    params = abstract_params(config, "float32", make_placement())
    layout = cache_layout(config, page_size=4, num_pages=8, dtype="float32", platform="cpu")
    pages = jax.eval_shape(lambda: allocate(layout, make_placement()))
    ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)

    def cosines(implementation):
        def forward(params, pages, tokens, *where):
            backend = Backend(CPU, kernels=implementation)
            return bind(config, params)(tokens, pages, Rows(*where), backend)[:2]

        arguments = (params, pages, ints(1, 5), ints(1, 5), ints(5), ints(1, 8), ints(1))
        compiled = jax.jit(forward, compiler_options=CPU_COMPILER_OPTIONS).lower(*arguments).compile()
        return compiled.as_text().count(" cosine(")

    assert cosines(None) == 1
    assert cosines("reference") > config.num_layers


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="compiles for CPU")
def test_matrices_in_bfloat16_are_widened_one_at_a_time():
    """For the library, which multiplies many rows; all at once they would take all the memory that they were spared."""
    matrices = [jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)] * 8

    def through(x, matrices):
        for matrix in matrices:
            x = streamed.product(x, matrix)
        return x

    x = jax.ShapeDtypeStruct((16, 512), jnp.float32)
    with no_compilation_cache():
        compiled = jax.jit(through, compiler_options=CPU_COMPILER_OPTIONS).lower(x, matrices).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * 4 * 512 * 512


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="compiles for CPU")
@pytest.mark.parametrize("count", [1, 2, 40])
def test_rows_of_a_table_in_bfloat16_are_widened_by_themselves(count):
    table = jnp.asarray(np.random.default_rng(0).normal(size=(4096, 64)), jnp.bfloat16)
    ids = jnp.asarray(np.random.default_rng(1).integers(-900, 5000, (1, count)), jnp.int32)  # some beyond it
    look = jax.jit(lambda table, ids: looked_up(table, ids, Backend(CPU)), compiler_options=CPU_COMPILER_OPTIONS)
    with no_compilation_cache():
        compiled = look.lower(table, ids).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < table.nbytes // 4
    np.testing.assert_array_equal(compiled(table, ids), table[np.clip(ids, 0, 4095)])
