"""`process` against numpy with sorts in float64."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.sampling.distribution import (
    SamplingRows,
    bits_at_a_time,
    in_pieces,
    ordered,
    process,
    threshold,
    without_loops,
)
from pallas_kernels.plain import argmax
from tests.support import exact

V, T, B = 12, 2, 16
NEARBY = (1 - 1e-5, 1 + 1e-5)


def rows_of(wishes: list[tuple]) -> SamplingRows:
    """wishes: (temperature, top_k, top_p, min_p) of each row."""
    temperature, top_k, top_p, min_p = map(np.array, zip(*wishes, strict=True))
    return SamplingRows(
        temperature=jnp.asarray(temperature, jnp.float32),
        top_k=jnp.asarray(top_k, jnp.int32),
        top_p=jnp.asarray(top_p, jnp.float32),
        min_p=jnp.asarray(min_p, jnp.float32),
        seed=jnp.zeros((len(wishes), 2), jnp.uint32),
        rule=jnp.zeros(len(wishes), jnp.int32),
    )


filtered = jax.jit(lambda logits, rows: process(logits, rows, filters=True))
unfiltered = jax.jit(lambda logits, rows: process(logits, rows, filters=False))


def decided(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> bool:
    """Whether the kept ids are the same a little to either side of the thresholds: float32 cannot tell otherwise."""
    off_or = lambda x, by: x if x == 1 else min(x * by, 1.0)
    kept = [exact.distribution(logits, temperature, top_k, off_or(top_p, by), off_or(min_p, by)) > 0 for by in NEARBY]
    return bool((kept[0] == kept[1]).all())


def check(logits: np.ndarray, wishes: list[tuple]) -> int:
    """Compares every row that is decided; returns how many were."""
    logits = logits.astype(np.float32)
    z = np.asarray(filtered(jnp.asarray(logits), rows_of(wishes)))
    compared = 0
    for got, row, wish in zip(z, logits, wishes, strict=True):
        wish = (np.float32(wish[0]), wish[1], float(np.float32(wish[2])), float(np.float32(wish[3])))
        if wish[0] == 0 or not decided(row, *wish):
            continue
        expected = exact.distribution(row, *wish)
        np.testing.assert_array_equal(np.isfinite(got), expected > 0)
        np.testing.assert_allclose(exact.softmax(got.astype(np.float64)), expected, rtol=2e-5, atol=1e-7)
        compared += 1
    return compared


WISHES = [
    *[(t, k, p, m) for t in (0.7, 1.3) for k in (0, 5) for p in (1.0, 0.8) for m in (0.0, 0.15)][: B - 6],
    (1.0, V + 5, 0.9, 0.0),  # top_k beyond the vocabulary
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 1e-6, 0.0),  # top_p that only the best id can satisfy
    (1.0, 0, 1.0, 1.0),  # min_p: the best id and its equals
    (0.01, 3, 0.999, 0.0),
    (50.0, 7, 0.5, 0.9),
]


def random_logits(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(0, 2, (B, T, V))


def tied_logits(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(-2, 3, (B, T, V)).astype(float)


def masked_logits(rng: np.random.Generator) -> np.ndarray:
    """Some ids forbidden before, never all."""
    logits = np.where(rng.random((B, T, V)) < 0.4, -np.inf, tied_logits(rng) + rng.integers(2, size=V) / 8)
    logits[..., 3] = 0.5
    return logits


@pytest.mark.parametrize("make", [random_logits, tied_logits, masked_logits])
def test_process_is_temperature_min_p_top_k_top_p(make):
    rng = np.random.default_rng(0)
    compared = sum(check(make(rng), WISHES) for _ in range(20))
    assert compared > 0.8 * 20 * B


wish = st.tuples(
    st.floats(0.05, 10), st.integers(0, V + 2), st.floats(1e-6, 1), st.one_of(st.just(0.0), st.floats(1e-6, 1))
)


@settings(max_examples=60, derandomize=True)
@given(st.lists(wish, min_size=B, max_size=B), st.integers(0, 2**32 - 1), st.booleans())
def test_process_for_any_wishes(wishes, seed, ties):
    rng = np.random.default_rng(seed)
    check(tied_logits(rng) if ties else random_logits(rng), wishes)


def test_ties_with_a_threshold_are_kept():
    logits = jnp.array([[[1.0, 3.0, 1.0, -1.0]], [[2.0, 2.0, 0.0, 2.0]], [[0.0, 0.0, 0.0, 0.0]]])
    z = filtered(logits, rows_of([(1.0, 2, 1.0, 0.0), (1.0, 1, 1.0, 0.0), (1.0, 0, 0.3, 0.0)]))
    assert np.isfinite(z[:, 0]).tolist() == [[True, True, True, False], [True, True, False, True], [True] * 4]


def test_both_zeros_tie():
    z = filtered(jnp.array([[[-0.0, 0.0, -1.0]]]), rows_of([(1.0, 1, 1.0, 0.0)]))
    assert np.isfinite(z[0, 0]).tolist() == [True, True, False]


def test_without_filters_only_the_temperature_counts():
    logits = random_logits(np.random.default_rng(3)).astype(np.float32)
    z = unfiltered(jnp.asarray(logits), rows_of(WISHES))
    np.testing.assert_allclose(z, logits / np.array([[[w[0]]] for w in WISHES]), rtol=1e-6)


@pytest.mark.parametrize("make", [random_logits, tied_logits])
def test_greedy_rows_keep_their_argmax(make):
    """Whatever filters they carry, in a batch with sampling rows; ties still go to the lowest id."""
    rng = np.random.default_rng(1)
    wishes = [(0.0, *w[1:]) if i % 2 else w for i, w in enumerate(WISHES)]
    for _ in range(10):
        logits = make(rng).astype(np.float32)
        z = np.asarray(filtered(jnp.asarray(logits), rows_of(wishes)))
        assert not np.isnan(z).any()
        assert (z.argmax(axis=-1) == logits.argmax(axis=-1))[1::2].all()


def test_rows_do_not_see_each_other():
    rng = np.random.default_rng(2)
    logits = random_logits(rng).astype(np.float32)
    order = rng.permutation(B)
    z = filtered(jnp.asarray(logits), rows_of(WISHES))
    shuffled = filtered(jnp.asarray(logits[order]), rows_of([WISHES[i] for i in order]))
    np.testing.assert_array_equal(np.asarray(z)[order], shuffled)


def test_ordered_keeps_the_order_of_floats():
    x = np.array([-np.inf, -3e38, -1.5, -1e-30, 0.0, 1e-30, 1.0, 1.0000001, 3e38, np.inf], np.float32)
    keys = np.asarray(ordered(jnp.asarray(x)))
    assert (np.diff(keys.astype(np.uint64)) > 0).all()


# By bits on CPU, by sixteenths of rows in pieces on GPU.
WAYS = {
    "as here": threshold,
    **{f"{n} bits": functools.partial(bits_at_a_time, n, 32) for n in (1, 4)},
    "pieces": without_loops,
}


@pytest.mark.parametrize("way", WAYS)
def test_threshold_is_the_largest_that_suffices(way):
    values = jnp.array([[5, 9, 2, 9, 7]], jnp.uint32)
    weights = jnp.array([[0.1, 0.2, 0.3, 0.1, 0.3]])
    for need, expected in ((0.05, 9), (0.3, 9), (0.35, 7), (0.65, 5), (0.9, 2)):
        assert WAYS[way](values, weights, jnp.array([[need]])).tolist() == [[expected]]


@pytest.mark.parametrize("way", WAYS)
def test_threshold_is_the_largest_that_suffices_for_any_bits(way):
    """Weights are whole numbers, so that sums are exact in any order."""
    rng = np.random.default_rng(5)
    values = rng.integers(0, 1 << 32, (6, 40), dtype=np.uint32)
    values[0, :3], values[1] = (0, 2**32 - 1, 2**31), values[1, 0]
    weights, need = rng.integers(0, 5, values.shape), rng.integers(1, 40, (6, 1))
    enough = [[v for v in row if w[row >= v].sum() >= n] for row, w, n in zip(values, weights, need, strict=True)]
    found = WAYS[way](jnp.asarray(values), jnp.asarray(weights, jnp.float32), jnp.asarray(need, jnp.float32))
    assert found.tolist() == [[max(row)] for row in enough]


@pytest.mark.parametrize("way", [threshold, without_loops])
def test_the_highest_bits_of_a_threshold(way):
    rng = np.random.default_rng(6)
    values = jnp.asarray(rng.integers(0, 1 << 32, (6, 40), dtype=np.uint32))
    weights, need = jnp.ones(values.shape), jnp.asarray(rng.integers(1, 40, (6, 1)), jnp.float32)
    exact, rough = (np.asarray(way(values, weights, need, bits=bits)) for bits in (32, 16))
    np.testing.assert_array_equal(rough, exact & np.uint32(0xFFFF0000))


def test_drafts_may_be_what_the_request_allows():
    """Filtered by half of a threshold's bits: nothing that is allowed is missing, and little is there beside it."""
    logits = 3 * jax.random.normal(jax.random.key(1), (B, T, V))
    exact, rough = (process(logits, rows_of(WISHES), filters=True, bits=bits) > -jnp.inf for bits in (32, 16))
    assert bool((rough >= exact).all())
    assert int(rough.sum()) <= 1.02 * int(exact.sum())


@pytest.mark.parametrize("shape", [(40,), (3, 1001), (20, 16, 50)])
def test_pieces_hold_every_number_once_and_zeros(shape):
    x = jnp.arange(1, math.prod(shape) + 1).reshape(shape)
    pieces = in_pieces(x)
    together = pieces.reshape(*shape[:-1], -1)
    assert pieces.shape[: len(shape) - 1] == shape[:-1]
    assert math.prod(pieces.shape[:-1]) <= max(256, math.prod(shape[:-1]))
    assert (together[..., : shape[-1]] == x).all()
    assert not together[..., shape[-1] :].any()


def primitives(jaxpr) -> set[str]:
    """Names of all primitives of a jaxpr and of those inside it."""
    names = set()
    for equation in jaxpr.eqns:
        names.add(equation.primitive.name)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            names |= primitives(inner) if hasattr(inner, "eqns") else set()
    return names


def test_nothing_is_sorted():
    jaxpr = jax.make_jaxpr(lambda z, rows: process(z, rows, filters=True))(jnp.zeros((B, T, V)), rows_of(WISHES))
    names = primitives(jaxpr.jaxpr)
    assert "exp" in names  # the softmax in the middle: the walk goes inside
    assert not {n for n in names if "sort" in n or "top_k" in n}


@pytest.mark.parametrize("shape", [(7,), (3, 500), (2, 5, 49)])
def test_likeliest(shape):
    """The first of the largest, as jnp.argmax finds it: among few values, with infinities, and all of them alike."""
    rng = np.random.default_rng(0)
    for values in (rng.normal(size=shape), rng.integers(-2, 2, shape), np.full(shape, -np.inf), np.zeros(shape)):
        x = np.where(rng.random(shape) < 0.2, -np.inf, values).astype(np.float32)
        found = jax.jit(argmax)(x)
        assert found.dtype == jnp.int32
        np.testing.assert_array_equal(found, np.argmax(x, axis=-1))
    broken = np.full((2, 5), np.nan, np.float32)
    assert 0 <= int(argmax(jnp.asarray(broken)).max()) < 5


@pytest.mark.parametrize(
    "wish", [(1.0, 0, 1e-38, 0.0), (1.0, 0, 1e-45, 0.0), (1e6, 0, 1e-45, 1.0), (1e-5, 1, 1e-7, 1.0)]
)
def test_the_largest_logit_is_always_kept(wish):
    """Whatever float32, which has no 1e-45 on some machines, makes of a wish: a law is left, and of allowed ids."""
    logits = jnp.array([[[0.5, -jnp.inf, 3.0, -1.0]]])
    z = filtered(logits, rows_of([wish]))
    assert np.isfinite(z[0, 0]).tolist() == [False, False, True, False]
