"""The kernel that sums over two GPUs, on two GPUs: its numbers, that it stays in step, and what happens if it cannot.

Its lowering and the compiled programs are looked at without a GPU (`tests/nvidia`), its mailboxes in
`tests/parallel/test_mailbox.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxspec.models.model import Model
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.parallel.mailbox import SWITCH, mailboxes
from jaxspec.parallel.placement import make_placement, per_shard
from pallas_kernels import _add_and_norm, _peer_sum
from pallas_kernels.device import here
from tests.support import tiny_models
from tests.support.lively_models import PROMPTS, lively, serve, texts

EPS = 1e-6
SPLITS = 4
CONFIG = dataclasses.replace(
    tiny_models.FAMILIES["llama3"], width=256, mlp_width=512, head_dim=64, vocab_size=96, rope=tiny_models.Rope(5e5)
)
TIE = 0.1  # largest difference of two logits, around 1, that sums in another order may turn round in bfloat16


@pytest.fixture
def placement():
    if jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    return make_placement(2)


def mailbox_for(placement, width):
    found = mailboxes(placement, here(), jnp.bfloat16, width=width, vocab_size=2)
    assert found, "these GPUs cannot write to each other's memory"
    return tuple(found.values())


def parts_of(step, rank, rows, width):
    """Partial sums that are hard to guess and cheap. Each GPU can compute the other's, and compare without a sum."""
    index = jnp.arange(SPLITS * rows * width, dtype=jnp.uint32)
    seed = jnp.uint32(7919) * step.astype(jnp.uint32) + jnp.uint32(104729) * rank.astype(jnp.uint32)
    h = (index + seed) * jnp.uint32(2654435761)
    h = (h ^ (h >> 15)) * jnp.uint32(2246822519)
    h = h ^ (h >> 13)
    values = (h >> 8).astype(jnp.float32) * jnp.float32(2**-23) - 1
    return lax.optimization_barrier(values.reshape(SPLITS, rows, width))


def late(step, rank, carry):
    """Take up to a few dozen microseconds, at each step on another GPU."""
    turns = (step * 1103515245 + 12345 + rank * 40503) % 7
    return lax.fori_loop(0, turns, lambda _, a: jnp.cos(a + jnp.mean(a)), carry)


@functools.cache
def looping(placement, rows, width, calls, skewed=False):
    """Return a program of so many calls. It returns, for each GPU: how many numbers are wrong; how many numbers of the
    norm are further away than rounding allows; the last x."""

    def check(mailbox, x, scale):
        rank = lax.axis_index(placement.axes)
        # A sum of XLA's makes it wait until both GPUs have loaded the program.
        x += (0 * lax.psum(x[0, 0], placement.axes)).astype(x.dtype)

        def body(state):
            step, x, wrong, away, delay = state
            mine, theirs = parts_of(step, rank, rows, width), parts_of(step, 1 - rank, rows, width)
            if skewed:
                delay = late(step, rank, delay)
                mine = mine + 0 * delay[0, 0]
            out, normed = _peer_sum.sum_and_norm(x, mine, scale, EPS, mailbox, device=here())
            sums = [functools.reduce(jnp.add, list(parts)) for parts in (mine, theirs)]
            want = (x.astype(jnp.float32) + (sums[0] + sums[1])).astype(x.dtype)
            f = want.astype(jnp.float32)
            f = f * (lax.rsqrt(jnp.sum(f * f, -1, keepdims=True) / width + EPS) * scale)
            close = jnp.abs(normed.astype(jnp.float32) - f) <= 2.0**-7 * jnp.abs(f)
            x = jnp.tanh(out.astype(jnp.float32)).astype(x.dtype)
            return step + 1, x, wrong + jnp.sum(out != want), away + jnp.sum(~close), delay

        delay = jnp.full((1024, 1024), 0.01, jnp.float32) + 0 * rank
        state = jnp.int32(0), x, jnp.int32(0), jnp.int32(0), delay
        _, x, wrong, away, _ = lax.while_loop(lambda state: state[0] < calls, body, state)
        return wrong[None], away[None], x[None]

    each = P(placement.axes)
    return jax.jit(per_shard(check, placement, (each, P(), P()), each))


def run(placement, mailbox, rows, width, calls, **how):
    """Return (wrong numbers, far numbers of the norm, whether both GPUs have equal bits) of so many calls."""
    x, scale = jnp.zeros((rows, width), jnp.bfloat16), 1 + jnp.arange(width, dtype=jnp.float32) / width
    wrong, away, last = map(np.asarray, looping(placement, rows, width, calls, **how)(mailbox, x, scale))
    return int(wrong.sum()), int(away.sum()), last[0].tobytes() == last[1].tobytes()


RIGHT = (0, 0, True)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "width"), [(1, 5120), (16, 5120), (5, 4096), (80, 4096), (3, 192)])
def test_every_number_is_the_sum(placement, rows, width):
    assert run(placement, mailbox_for(placement, width), rows, width, 1000) == RIGHT


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16])
def test_a_gpu_may_be_late(placement, rows):
    assert run(placement, mailbox_for(placement, 5120), rows, 5120, 300, skewed=True) == RIGHT


@pytest.mark.gpu
def test_programs_of_other_rows_stay_in_step(placement):
    """Rows that a program lacks are skipped, on both GPUs."""
    mailbox = mailbox_for(placement, 4096)
    for rows, calls in ((16, 100), (1, 7), (80, 100), (1, 100), (16, 8), (80, 5)):
        assert run(placement, mailbox, rows, 4096, calls) == RIGHT, rows


@pytest.mark.gpu
def test_what_is_left_in_a_mailbox_is_seen(placement):
    """A planted fault: the checks above can fail."""
    places, address = mailbox_for(placement, 5120)
    wrong, _, _ = run(placement, (jax.block_until_ready(zeroed(places)), address), 1, 5120, 30)
    assert wrong > 5120


@functools.partial(jax.jit, donate_argnums=0)
def zeroed(places):
    """Return a mailbox with numbers in all places, in the same memory."""
    return jnp.where(places == _peer_sum.EMPTY, 0, places)


@pytest.mark.gpu
def test_rounded_results_are_those_of_the_other_kernel(placement):
    """With the sum of both GPUs' parts, `add_and_norm` gives the same."""
    rows, width = 5, 4096

    def both(mailbox, x, scale):
        rank = lax.axis_index(placement.axes)
        x += (0 * lax.psum(x[0, 0], placement.axes)).astype(x.dtype)
        mine, theirs = (parts_of(jnp.int32(3), each, rows, width) for each in (rank, 1 - rank))
        sums = [functools.reduce(jnp.add, list(parts)) for parts in (mine, theirs)]
        how = {"rounded": "int8", "device": here()}
        found = _peer_sum.sum_and_norm(x, mine, scale, EPS, mailbox, **how)
        expected = _add_and_norm.add_and_norm(x, (sums[0] + sums[1])[None], scale, EPS, **how)
        return jax.tree.map(lambda array: array[None], (found, expected))

    each = P(placement.axes)
    x, scale = jnp.ones((rows, width), jnp.bfloat16), 1 + jnp.arange(width, dtype=jnp.float32) / width
    program = jax.jit(per_shard(both, placement, (each, P(), P()), each))
    found, expected = program(mailbox_for(placement, width), x, scale)
    (y, (values, factors)), (want, (want_values, want_factors)) = jax.tree.map(np.asarray, (found, expected))
    np.testing.assert_array_equal(y.view(np.int16), want.view(np.int16))
    np.testing.assert_allclose(factors, want_factors, rtol=1e-6)
    assert (np.abs(values.astype(int) - want_values) <= 1).all()  # a number in the middle of two goes either way
    assert (values == want_values).mean() > 0.99


@pytest.mark.gpu
def test_a_gpu_does_not_wait_for_ever(placement, capsys):
    """If nothing arrives, its results are NaN, now and from then on; it waits some ten seconds to some minutes."""
    rows, width, polls = 2, 4096, 1 << 20
    places, address = mailbox_for(placement, width)
    unread = mailbox_for(placement, width)  # the first GPU writes to this one
    astray = jax.device_put(jnp.concatenate([unread[1][:2], address[2:]]), address.sharding)

    def once(mailbox, x, scale):
        x += (0 * lax.psum(x[0, 0], placement.axes)).astype(x.dtype)
        out, normed = _peer_sum.sum_and_norm(x, x[None] + 0.5, scale, EPS, mailbox, device=here(), polls=polls)
        return out[None], normed[None]

    each = P(placement.axes)
    x, scale = jnp.zeros((rows, width), jnp.float32).astype(jnp.bfloat16), jnp.ones(width)
    program = jax.jit(per_shard(once, placement, (each, P(), P()), each))
    compiled = program.lower((places, address), x, scale).compile()
    arguments = jax.device_put((x, scale), placement.sharding())
    started = time.perf_counter()
    first = [np.asarray(array, np.float32) for array in compiled((places, astray), *arguments)]
    seconds = (time.perf_counter() - started) * _peer_sum.POLLS / polls
    with capsys.disabled():
        print(f" (waits at most {seconds:.0f} s)", end="")
    second = [np.asarray(array, np.float32) for array in compiled((places, address), *arguments)]
    for out, normed in (first, second):
        assert (out[0] == 1).all()
        assert np.isfinite(normed[0]).all()
        assert np.isnan(out[1]).all()
        assert np.isnan(normed[1]).all()
    assert 10 < seconds < 400


@functools.cache
def bfloat16_model(*, loops: bool) -> Model:
    """loops: whether its texts soon repeat, so that n-grams are right."""
    model = tiny_models.model(CONFIG) if loops else lively(tiny_models.model(CONFIG))
    params = {name: w.astype(jnp.bfloat16) if w.ndim > 1 else w for name, w in model.params.items()}
    return Model(CONFIG, params)


GREEDY = [SamplingParams(max_tokens=24, temperature=0.0, logprobs=2)] * len(PROMPTS)
OPTIONS = {"max_model_len": 96, "num_pages": 64, "max_num_seqs": 8, "tensor_parallel_size": 2}


def served(speculative=None, *, loops=False):
    """Return (engine, requests) of a model in bfloat16 over two devices."""
    engine = tiny_models.engine(bfloat16_model(loops=loops), speculative, dtype="bfloat16", **OPTIONS)
    return engine, serve(engine, PROMPTS, GREEDY, rounds=4)


def check_agree(found, expected):
    """Each text agrees with the expected one, up to a token for which two ids are as good as equal."""
    compared = 0
    for mine, theirs in zip(found, expected, strict=True):
        for token, other, scores in zip(mine.output, theirs.output, theirs.logprobs, strict=True):
            compared += 1
            if token != other:
                likely = dict(zip(scores.top_ids, scores.top_logprobs, strict=True))
                apart = scores.top_logprobs[0] - likely.get(token, -np.inf)
                assert apart < TIE, (mine.output, theirs.output)
                break
    assert compared >= 40


def is_used(engine) -> bool:
    """Return whether something has arrived in the target's mailboxes."""
    places = np.asarray(engine.runner.params["target"]["mailbox"]).reshape(2, -1)[:, _peer_sum.MAX_ROWS :]
    return bool((places != _peer_sum.EMPTY).any(axis=1).all())


@pytest.mark.gpu
def test_an_engine_over_two_gpus_gives_the_tokens_of_the_compilers_sums(placement, monkeypatch):
    """Its texts change from token to token."""
    engine, found = served()
    assert is_used(engine)
    monkeypatch.setenv(SWITCH, "0")
    without, expected = served()
    assert "mailbox" not in without.runner.params["target"]
    assert min(len(set(text)) for text in texts(expected)) > 8
    check_agree(found, expected)


@pytest.mark.gpu
def test_ngrams_over_two_gpus_give_the_tokens_of_plain_decoding(placement):
    """Five tokens of each row pass the layers together, in plain decoding one."""
    ngrams = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    (engine, found), (_, expected) = served(ngrams, loops=True), served(loops=True)
    assert is_used(engine)
    assert engine.metrics.num_accepted_tokens > 5
    check_agree(found, expected)
