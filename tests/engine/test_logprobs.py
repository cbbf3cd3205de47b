"""Log-probabilities: of raw logits, for every kind of token a round makes, of prompts too; where asked for only."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from jaxspec.common.errors import UserError
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import TokenLogprobs
from jaxspec.engine.runner import fetch
from jaxspec.options.sampling_params import SamplingParams
from tests.models import forward
from tests.support.lively_models import FAMILY, new_engine, params, repeating, serve, target
from tests.support.sampling_wishes import METHODS, PROMPTS, batch, expected, found
from tests.support.sizes import cases

CLOSE = 1e-4


@functools.cache
def dense(family: str, tokens: tuple[int, ...]) -> np.ndarray:
    """Log-probabilities [T,V] of what follows each token, in numpy from one dense pass."""
    m, length = target(family), 64  # one compiled program
    padded = np.array([[*tokens, *[0] * (length - len(tokens))]])
    z = np.asarray(forward.run(m.config, m.params, padded, [length])[0, : len(tokens)], np.float64)
    return z - np.log(np.exp(z - z.max(axis=-1, keepdims=True)).sum(axis=-1, keepdims=True)) - z.max(axis=-1)[:, None]


def check(entries: list[TokenLogprobs], tokens: list[int], start: int, n: int, family: str) -> None:
    """entries belong to tokens[start:]."""
    assert len(entries) == len(tokens) - start
    for entry, row, token in zip(entries, dense(family, tuple(tokens))[start - 1 :], tokens[start:], strict=False):
        assert abs(entry.logprob - row[token]) < CLOSE
        # Ids within rounding of the token may stand on either side of it.
        assert 1 + (row > row[token] + CLOSE).sum() <= entry.rank <= (row > row[token] - CLOSE).sum()
        assert len(entry.top_ids) == len(entry.top_logprobs) == n
        assert len(set(entry.top_ids)) == n
        np.testing.assert_allclose(entry.top_logprobs, -np.sort(-row)[:n], atol=CLOSE)
        np.testing.assert_allclose(row[entry.top_ids], entry.top_logprobs, atol=CLOSE)


def same(some: list[TokenLogprobs], others: list[TokenLogprobs]) -> None:
    assert len(some) == len(others)
    for a, b in zip(some, others, strict=True):
        assert (a.rank, a.top_ids) == (b.rank, b.top_ids)
        np.testing.assert_allclose([a.logprob, *a.top_logprobs], [b.logprob, *b.top_logprobs], atol=CLOSE)


@cases("family", ["llama", "loops"], quick=["llama"])
def test_plain_decoding_has_those_of_a_dense_pass(family):
    """Raw ones: temperature, penalties and masks take no part. Rows beside them that ask for none have none."""
    ranks = set()
    for row in batch(family):
        request, n = expected(family)[row.name], row.sampling.logprobs
        if n is None:
            assert request.logprobs == []
        else:
            check(request.logprobs, request.tokens, len(request.prompt), n, family)
            ranks |= {entry.rank for entry in request.logprobs}
    assert len(ranks) > 3


@cases(("method", "k"), METHODS, rest=[("noisy", 4), ("combined", 4)])
def test_speculation_changes_none_of_them(method, k):
    """Of accepted, recovered and bonus tokens."""
    here, there = found(method, k), expected(FAMILY[method])
    asked = [row for row in batch(FAMILY[method]) if row.sampling.logprobs is not None]
    for row in asked:
        same(here[row.name].logprobs, there[row.name].logprobs)
    metrics = [here[row.name].metrics for row in asked]
    rounds, full = sum(m.num_drafts for m in metrics), sum(m.num_accepted_tokens_per_pos[-1] for m in metrics)
    if method in ("noisy", "combined"):
        assert 0 < full < rounds  # a bonus token, a recovered one, and what was accepted


@pytest.mark.parametrize("rounds", [1, 3])
def test_several_launches(rounds):
    """Each brings those of its own tokens; stop ids, limits and stop strings cut them with the text."""
    engine = asking()
    text = serve(engine, PROMPTS, params((20,) * 3))[1].output
    sampling = [
        *params(20, logprobs=2),
        *params(20, logprobs=2, stop_token_ids=[text[7]]),
        *params(3, logprobs=2),
        *params(20, logprobs=2, stop=("a string",)),
    ]
    prompts = (PROMPTS[0], PROMPTS[1], PROMPTS[2], PROMPTS[1])
    requests = [engine.add(p, s) for p, s in zip(prompts, sampling, strict=True)]
    for request in requests:
        request.find_stop = cut if request.params.stop else None
    while engine.busy:
        engine.step(rounds)
    assert [len(r.output) for r in requests] == [20, text.index(text[7]) + 1, 3, 5]
    for request in requests:
        check(request.logprobs, request.tokens, len(request.prompt), 2, "llama")


def cut(output: list[int], start: int) -> int | None:
    """As a stop string would that is complete with the ninth token and begins with the sixth."""
    return 5 if len(output) >= 9 else None


@pytest.mark.thorough
def test_a_batch_that_asks_for_none_has_a_program_without_them():
    engine = new_engine("noisy", 2)
    requests = [engine.add(p, s) for p, s in zip(PROMPTS[:2], params((9, 9)), strict=True)]
    engine.admit()
    engine.prefill()
    engine.scheduler.grow(4)
    result = fetch(engine.runner.start(engine.launch(requests, 2, 4)))
    assert result.logprobs is None
    hlo = [program.result().as_text() for key, program in engine.runner.programs.compiled.items() if key[0] == "launch"]
    assert len(hlo) == 1
    assert not any(word in hlo[0].lower() for word in ("topk", "top_k", " sort("))
    for request in requests:
        engine.abort(request)


@functools.cache
def asking() -> Engine:
    """Prompts in chunks of 16 tokens, pages of 16 kept for reuse."""
    return new_engine("noisy", 2, max_num_seqs=4, enable_prefix_caching=True)


@pytest.mark.parametrize("n", [0, 4])
def test_prompts(n):
    """Over several chunks, of rows with and without; a second time the same, though the pages are known."""
    engine = asking()
    prompts = (repeating(45, 11, 8 + n), repeating(16, 5, 2), (3,), repeating(30, 7, 4))
    wishes = [params(2, prompt_logprobs=n)[0]] * 3 + params(2)
    for _ in range(2):
        requests = serve(engine, prompts, wishes)
        for request in requests[:3]:
            check(request.prompt_logprobs, request.prompt, 1, n, "llama")
        assert requests[2].prompt_logprobs == requests[3].prompt_logprobs == []
        # Now without, on known pages: the text does not change.
        again = serve(engine, prompts, params((2,) * 4))
        assert [r.output for r in again] == [r.output for r in requests]


@pytest.mark.thorough
def test_prompts_of_samples():
    """Computed once: the first sample has them."""
    sampling = SamplingParams(n=2, max_tokens=4, seed=1, prompt_logprobs=2, logprobs=1)
    (first,) = serve(asking(), (repeating(37, 9, 6),), (sampling,))
    check(first.prompt_logprobs, first.prompt, 1, 2, "llama")
    assert [len(s.prompt_logprobs) for s in first.samples] == [36, 0]
    for sample in first.samples:
        check(sample.logprobs, sample.tokens, len(sample.prompt), 1, "llama")


def test_scoring_alone():
    """Without output there is no launch. Prompts as long as the context fit, and other requests decode meanwhile."""
    engine = asking()
    longest = engine.limits.max_model_len
    scoring = SamplingParams(max_tokens=0, prompt_logprobs=2, n=2)
    prompts = (repeating(45, 11, 3), (3,), repeating(longest, 7, 4))
    decoded = engine.timing.decode_seconds
    requests = serve(engine, prompts, [scoring] * 3)
    assert engine.timing.decode_seconds == decoded
    for request in requests[:2]:
        check(request.prompt_logprobs, request.prompt, 1, 2, "llama")
    assert len(requests[2].prompt_logprobs) == longest - 1
    assert {(sample.finish_reason, *sample.output) for r in requests for sample in r.samples} == {("length",)}
    alone = serve(engine, prompts[:1], params(8))
    beside = serve(engine, (prompts[0], prompts[0]), [*params(8), scoring])
    assert [len(r.output) for r in beside] == [8, 0]
    assert beside[0].output == alone[0].output
    assert engine.scheduler.allocator.num_free == engine.num_pages
    with pytest.raises(UserError, match=f"the prompt has {longest + 1} tokens"):
        engine.add([3] * (longest + 1), scoring)
    with pytest.raises(UserError, match="max_tokens=0 is below 1"):
        SamplingParams(max_tokens=0)
