"""Products on CPU that stream a matrix which lies output-first: their numbers, and what they are compiled to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decode.programs import COMPILER_OPTIONS
from pallas_kernels import _streamed, feed_forward
from pallas_kernels._dispatch import flavour
from pallas_kernels.feed_forward import reference
from tests.hlo import Program
from tests.pallas_kernels.test_feed_forward import random_arguments, relative_error

ROWS = [(1,), (1, 2), (5,), (2, 3), (7,), (3, 4), (13,)]


@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("shape", [(64, 96), (48, 50), (576, 7)], ids=str)
def test_it_is_the_product(rows, shape):
    draw = np.random.default_rng(0)
    x, matrix = draw.normal(size=(*rows, shape[0])), draw.normal(size=shape[::-1])
    turn = lambda x, matrix: _streamed.linear(matrix.T, x)
    y = jax.jit(turn)(jnp.asarray(x, jnp.float32), jnp.asarray(matrix, jnp.float32))
    assert y.shape == (*rows, shape[1])
    assert relative_error(y, x @ matrix.T) < 1e-6


def test_other_dtypes_and_many_rows_are_the_librarys(monkeypatch):
    monkeypatch.setattr(reference, "linear", lambda weights, x: "the library's")
    matrix = jnp.ones((8, 16))
    assert _streamed.linear(matrix, jnp.ones((_streamed.MAX_ROWS + 1, 8))) == "the library's"
    assert _streamed.linear(matrix, jnp.ones((4, 8), jnp.bfloat16)) == "the library's"
    assert _streamed.linear(jnp.ones((8, 15)), jnp.ones((1, 8))) == "the library's"
    assert _streamed.linear(matrix, jnp.ones((_streamed.MAX_ROWS, 8))).shape == (_streamed.MAX_ROWS, 16)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="compiles for CPU")
@pytest.mark.parametrize("rows", [1, 5])
def test_matrices_are_read_as_they_lie_and_x_is_made_once(rows):
    """No matrix is turned, copied or computed with outside of the three loops, and those make nothing else."""
    x, mixed, out, gate_up, down, norm = random_arguments((128, 192, 256, 64), (1, rows), "float32")

    def layer(x, mixed, norm, *matrices):
        out, gate_up, down = (matrix.T for matrix in matrices)
        options = {"norm": norm, "eps": 1e-6, "block": 64, "platform": "cpu"}
        return feed_forward(x, mixed, out, gate_up, down, **options)[0]

    turned = [jnp.asarray(matrix.T) for matrix in (out, gate_up, down)]
    compiled = jax.jit(layer, compiler_options=COMPILER_OPTIONS["cpu"]).lower(x, mixed, norm, *turned).compile()
    program = Program(compiled.as_text())
    sizes = {matrix.size for matrix in turned}
    large = [i for i in program.entry if i.opcode != "parameter" and sizes & set(i.sizes)]
    calls = [i for i in program.entry if i.opcode == "call" and "product" in i.name]
    assert not large, [i.line for i in large]
    assert len(calls) == 3
    called = [program.computations[i.line.split("to_apply=%")[1].split(",")[0]] for i in calls]
    for product in called:
        loops = [i for i in product if i.opcode == "fusion" and len(i.sizes) > 1]
        assert [len(i.sizes) for i in loops] == [rows * 4], [i.line for i in product]
    plain = flavour("feed_forward", "reference")
    expected, _ = plain(x, mixed, out, norm, gate_up, down, None, None, None, eps=1e-6, activation="silu", block=64)
    assert relative_error(compiled(x, mixed, norm, *turned), expected) < 2e-6
