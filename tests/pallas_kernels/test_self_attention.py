"""self_attention against its parts in float32: what it returns where a query is live, and what it writes."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _split_product, self_attention
from pallas_kernels.forms import function
from pallas_kernels.plain import rms_norm
from pallas_kernels.tree_mask import packed
from pallas_kernels.weights import grouped, interleaved_grouped
from pallas_kernels.weights.interleaved import Interleaved, interleaved
from pallas_kernels.weights.scaled import quantise
from tests.pallas_kernels.flavours import dequantised, in_two_numbers, kernel, rounded
from tests.support.sizes import cases

FLAVOURS = ["reference", "gpu", pytest.param("gpu compiled", marks=pytest.mark.gpu)]
TOLERANCE = {"float32": 3e-6, "bfloat16": 1e-2}  # of the norm, and absolutely of what is written (up to 5)
PAGE_SIZE = 8


class Case(NamedTuple):
    b: int
    t: int
    h: int
    g: int
    d: int
    n: int
    norms: bool = False
    bias: bool = False
    window: int | None = None
    soft_cap: float | None = None
    width: int = 192

    @property
    def options(self):
        options = {"scale": self.d**-0.5, "window": self.window, "soft_cap": self.soft_cap}
        return options | {"eps": 1e-6, "num_queries": self.t}


CASES = [
    Case(b=1, t=1, h=4, g=2, d=32, n=40, norms=True),  # one row: the product in parts
    Case(b=1, t=1, h=8, g=1, d=64, n=17, bias=True, window=30),
    Case(b=1, t=5, h=4, g=4, d=32, n=9, norms=True, bias=True),
    Case(b=3, t=2, h=4, g=2, d=64, n=20, bias=True, window=19),
    Case(b=3, t=5, h=6, g=2, d=32, n=33, norms=True, window=50, soft_cap=5.0),
    Case(b=1, t=1, h=16, g=1, d=128, n=40, norms=True),  # more parts than are read at a time
    Case(b=3, t=1, h=4, g=2, d=64, n=16, norms=True, window=50),  # few keys: a program has them all, and what is new
    Case(b=3, t=4, h=4, g=2, d=32, n=9, bias=True, soft_cap=5.0),
    Case(b=3, t=4, h=4, g=2, d=32, n=1, norms=True, window=3),  # hardly a key but the new ones, some out of the window
    Case(b=2, t=1, h=14, g=1, d=128, n=3, norms=True, bias=True),
    Case(b=3, t=40, h=8, g=2, d=32, n=9, norms=True),  # pieces of prompts: more queries than a program has
    Case(b=1, t=1, h=2, g=1, d=64, n=17, norms=True, width=1024),  # too many parts: a few rows' kernels
]


def random_arguments(case, dtype, seed=0):
    """(arguments, live queries): rows of any length, one not computed, the last token of another not written."""
    (b, t, h, g, d, n, *_), width = case, case.width
    draw = np.random.default_rng(seed)
    normal = lambda *size, scale=1.0: jnp.asarray(draw.normal(size=size) * scale, dtype)
    about_one = lambda size: jnp.asarray(1 + 0.1 * draw.normal(size=size), jnp.float32)
    num_pages = b * n + 2
    kv_len = draw.integers(n * PAGE_SIZE // 2, n * PAGE_SIZE + 1, b)
    live = np.ones((b, t), bool)
    if b > 2:
        kv_len[2], live[2] = 0, False
    block_table = draw.permutation(num_pages)[: b * n].reshape(b, n)
    position = np.maximum(kv_len[:, None] - t + np.arange(t), 0)
    if t > 1:
        live[0, -1] = False
    slots = np.take_along_axis(block_table, position // PAGE_SIZE, axis=1) * PAGE_SIZE + position % PAGE_SIZE
    outside = np.where(live.any(axis=1), num_pages * PAGE_SIZE, -1)[:, None]
    slots = np.where(live, slots, outside)
    angles = position[..., None] * 10000.0 ** (-np.arange(0, d, 2) / d)
    i32 = lambda x: jnp.asarray(x, jnp.int32)
    arguments = {
        "x": normal(b, t, width),
        "norm": about_one(width),
        "normed": None,
        "qkv": normal(width, (h + 2 * g) * d, scale=width**-0.5),
        "bias": normal((h + 2 * g) * d) if case.bias else None,
        "q_norm": about_one(d) if case.norms else None,
        "k_norm": about_one(d) if case.norms else None,
        "pages": normal(num_pages, PAGE_SIZE, 2 * g, d),
        "slots": i32(slots.reshape(-1)),
        "block_table": i32(block_table),
        "kv_len": i32(kv_len),
        "cos": jnp.cos(jnp.asarray(angles, jnp.float32)),
        "sin": jnp.sin(jnp.asarray(angles, jnp.float32)),
    }
    return arguments, live


def parts(**options):
    """Return the reference as one program: each operation by itself takes longer to compile."""
    return jax.jit(functools.partial(function("self_attention", "reference"), **options))


def widened(arguments):
    return {k: v.astype(jnp.float32) if v is not None and v.dtype == jnp.bfloat16 else v for k, v in arguments.items()}


def check(got, expected, live, tolerance):
    (mixed, pages), (expected_mixed, expected_pages) = ([np.asarray(x, np.float32) for x in y] for y in (got, expected))
    error = np.linalg.norm((mixed - expected_mixed)[live]) / np.linalg.norm(expected_mixed[live])
    assert error < tolerance
    np.testing.assert_allclose(pages, expected_pages, rtol=0, atol=4 * tolerance)


@pytest.mark.parametrize("name", FLAVOURS)
@cases("case", CASES, quick=[CASES[4], CASES[8]], ids=str)
@cases("dtype", ["float32", "bfloat16"], quick=["bfloat16"])
def test_every_flavour_equals_the_parts(name, case, dtype):
    arguments, live = random_arguments(case, dtype)
    got = kernel("self_attention", name, **case.options)(*arguments.values())
    expected = parts(**case.options)(*widened(arguments).values())
    check(got, expected, live, TOLERANCE[dtype])
    if not live.any(axis=1).all():
        assert (np.asarray(got[0], np.float32)[~live.any(axis=1)] == 0).all()


@pytest.mark.parametrize("name", FLAVOURS[1:])
@cases("case", [CASES[0], CASES[4], CASES[10]], quick=[CASES[4]], ids=str)
@cases("stored", ["int8", "float8_e4m3fn"], quick=["int8"])
def test_pages_in_8_bits(name, case, stored):
    """The result is that of float32 pages that hold the same values, of which the new ones are rounded, too."""
    arguments, live = random_arguments(case, "bfloat16")
    pages, held = rounded(arguments["pages"], stored)
    plain = parts(**case.options)
    new = plain(*(widened(arguments) | {"pages": jnp.asarray(held)}).values())[1]
    mixed = plain(*(widened(arguments) | {"pages": jnp.asarray(rounded(new, stored)[1])}).values())[0]
    got, written = kernel("self_attention", name, **case.options)(*(arguments | {"pages": pages}).values())
    # A written value is half a step of the rounding off, and a step where the rounding of bfloat16 came before.
    check((got, dequantised(written)), (mixed, new), live, 2e-2 if stored == "int8" else 9e-2)


@pytest.mark.parametrize("name", FLAVOURS[1:])
@cases("case", CASES[:2], quick=CASES[:1], ids=str)
def test_one_token_of_a_larger_matrix(name, case, monkeypatch):
    """Its product is one of a few rows."""
    monkeypatch.setattr(_split_product, "MAX_SIZE", 1)
    case = case._replace(width=320)  # which no other test has: what is traced is kept
    arguments, live = random_arguments(case, "bfloat16")
    expected = parts(**case.options)(*widened(arguments).values())
    check(kernel("self_attention", name, **case.options)(*arguments.values()), expected, live, TOLERANCE["bfloat16"])


@pytest.mark.parametrize("name", FLAVOURS[1:])
@pytest.mark.parametrize("t", [1, 5])
def test_the_sums_that_the_next_product_reads(name, t, monkeypatch):
    """The kernel that combines splits of the keys stores the sums that a product in blocks with offsets reads."""
    monkeypatch.setattr(_split_product, "MAX_SIZE", 1)
    case = Case(b=1, t=t, h=4, g=2, d=64, n=40, norms=True, width=384)  # a width which no other test has
    arguments, _ = random_arguments(case, "bfloat16")
    ones = lambda field, i, shape, dtype: jnp.ones(shape, dtype)
    out = interleaved_grouped.interleaved(grouped.arrays(grouped.BLOCKS["q4_k"], (256, 64), ones, "bfloat16"))
    run = kernel("self_attention", name, **case.options)
    (mixed, _), (prepared, _) = (run(*arguments.values(), next_out) for next_out in (None, out))
    np.testing.assert_array_equal(prepared.rows, mixed)
    found, expected = (in_two_numbers(x.sums[0]).sum(2) for x in (prepared, interleaved_grouped.summed(mixed)))
    np.testing.assert_allclose(found, expected, rtol=2**-12)


@pytest.mark.parametrize("name", FLAVOURS[1:])
@cases("stored", ["int8", "float8_e4m3fn"], quick=["float8_e4m3fn"])
def test_one_token_of_a_matrix_in_8_bits(name, stored):
    case = CASES[0]._replace(width=256)
    arguments, live = random_arguments(case, "bfloat16")
    qkv = interleaved(quantise(arguments["qkv"], dtype=stored, block=(256, 1)))
    assert _split_product.covers(qkv)
    held = qkv.in_form(Interleaved, computes_in="float32").dense()
    wide = widened(arguments) | {"qkv": held}
    expected = function("self_attention", "reference")(*wide.values(), **case.options)
    got = kernel("self_attention", name, **case.options)(*(arguments | {"qkv": qkv}).values())
    check(got, expected, live, TOLERANCE["bfloat16"])


@pytest.mark.parametrize("name", FLAVOURS)
@cases("case", [*CASES[:4], CASES[5]], quick=CASES[:1] + CASES[2:3], ids=str)
@cases("norm", ["there", "none"], quick=["none"])
def test_x_may_be_normed_already(name, case, norm):
    """As it is where a layer before has done it, and where a head made the first layer's input itself and there is
    none."""
    arguments, live = random_arguments(case, "bfloat16")
    expected = parts(**case.options)(*widened(arguments).values())
    x = arguments["x"]
    arguments |= {"normed": rms_norm(arguments["norm"], x, 1e-6), "x": jnp.full_like(x, jnp.nan)}
    if norm == "none":
        arguments["norm"] = None
    check(kernel("self_attention", name, **case.options)(*arguments.values()), expected, live, TOLERANCE["bfloat16"])


@pytest.mark.parametrize("name", FLAVOURS)
@cases("num_queries", [0, 1, 3], quick=[3])
def test_only_the_last_may_look(name, num_queries):
    """At all there is, themselves included, whatever comes after: a block, which is a tree whose nodes see each other.
    All keys and values are written."""
    case = CASES[7]
    arguments, live = random_arguments(case, "bfloat16")
    first, beyond = arguments["kv_len"] - num_queries, jnp.full(case.b, arguments["pages"].shape[0] * PAGE_SIZE)
    seen = jnp.ones((case.b, num_queries, num_queries), bool)
    tree = packed(first[:, None] + jnp.arange(num_queries), first, seen)
    run = kernel("self_attention", name, **case.options | {"num_queries": num_queries})
    mixed, pages = run(*arguments.values(), None, None, tree)
    assert mixed.shape == (case.b, num_queries, case.h * case.d)
    reference, wide = function("self_attention", "reference"), widened(arguments)
    _, written = reference(*wide.values(), **case.options)
    np.testing.assert_allclose(np.asarray(pages, np.float32), written, rtol=0, atol=4 * TOLERANCE["bfloat16"])
    for i in range(num_queries):  # alone, at the end of the text, it sees all that the block sees
        mine = {key: wide[key][:, case.t - num_queries + i][:, None] for key in ("x", "cos", "sin")}
        one = wide | mine | {"pages": written, "slots": beyond}
        expected, _ = reference(*one.values(), **case.options | {"num_queries": 1})
        check((mixed[:, i], pages), (expected[:, 0], written), live.any(axis=1), TOLERANCE["bfloat16"])


@pytest.mark.parametrize("implementation", [None, "reference", "pallas"])
def test_public_function(implementation):
    case = CASES[3]
    arguments, live = random_arguments(case, "float32", seed=1)
    expected = parts(**case.options)(*arguments.values())
    got = self_attention(**arguments, **case.options, implementation=implementation, platform="cpu")
    check(got, expected, live, TOLERANCE["float32"])


def test_wrong_arguments_are_named():
    arguments, _ = random_arguments(CASES[3], "float32")
    with pytest.raises(ValueError, match="511 columns of qkv do not divide"):
        self_attention(**{**arguments, "qkv": arguments["qkv"][:, 1:]}, **CASES[3].options)
