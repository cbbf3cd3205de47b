"""Greedy speculative decoding gives exactly the tokens of plain decoding.

Compiling every family with every K and both drafters would take minutes, so this is a cover: every K on one family,
a few K on every family; one compiled program serves all numbers of rounds, prompts and limits.
"""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from jaxspec.cache.pages import PagedKV
from jaxspec.models.backend import Backend
from jaxspec.models.decoder import bind
from jaxspec.models.head import Vocabulary, fit_vocabulary
from jaxspec.models.rows import Rows
from pallas_kernels.device import here
from tests.support import tiny_models
from tests.support.lively_models import (
    FAMILY,
    MAX_TOKENS,
    OPTIONS,
    PROMPTS,
    VOCAB,
    engine,
    new_engine,
    params,
    plain,
    reduced,
    serve,
    target,
    texts,
    total,
)
from tests.support.sizes import cases
from tests.support.tiny_models import FAMILIES

ROUNDS = (1, 4, 32)
CASES = [(family, "first_layer", k) for family in FAMILIES for k in (2, 5)]
CASES += [(family, "ngram", k) for family, k in zip(FAMILIES, (2, 5, 3, 5) * len(FAMILIES), strict=False)]
CASES += [("llama", method, k) for method in ("noisy", "ngram") for k in (1, 3, 4, 6)]
CASES += [("llama", "ngram", 5)]
CASES += [
    ("loops", "ngram", 3),
    ("loops", "ngram", 6),
    ("llama", "random", 4),
    ("qwen3", "noisy", 4),
    ("gemma3", "noisy", 3),
]
# Families whose decoding is that of others here, but for their logits, which `tests/models/test_oracle.py` compares.
ALIKE = ("llama3", "qwen2", "qwen3", "granite", "phi3", "smollm3", "olmo2", "olmo3", "ministral3", "muse_glimmer")
ALIKE += ("mistral",)  # whose windows gemma3 has beside full attention
QUICK = [case for case in CASES if case[1:] == ("first_layer", 2) and case[0] not in (*ALIKE, "gemma3")]
QUICK += [case for case in CASES if case[:2] == ("gemma3", "ngram")]
QUICK += [("loops", "ngram", 3)]
SELF = (1, 3, 4)  # K of the tests in which a model drafts for itself
K = 4


@cases(("family", "method", "k"), CASES, quick=QUICK)
def test_equals_plain(family, method, k):
    sampling = tuple(params())
    expected = plain(PROMPTS, sampling, family)
    assert [len(tokens) for tokens in expected] == list(MAX_TOKENS)
    for rounds in ROUNDS:
        requests = serve(engine(method, k, family), PROMPTS, sampling, rounds=rounds)
        assert texts(requests) == expected, f"{rounds} rounds a launch"
        assert {r.finish_reason for r in requests} == {"length"}
        assert sum(r.metrics.num_drafts for r in requests) > 0


@cases("family", list(FAMILIES), quick=["llama", "gemma3"])
def test_plain_is_one_pass_over_the_text(family):
    """Plain decoding, which all else is compared with, emits what one pass over the finished text finds likeliest."""
    model, prompt, sampling = target(family), PROMPTS[3], params((24, 24))
    text = [*prompt, *plain(PROMPTS[2:4], tuple(sampling), family)[1]]
    count = len(text)
    layers = model.config.cached_layers
    pages = tuple(PagedKV(jnp.zeros((4, 16, 2 * own.num_kv_heads, own.head_dim))) for own in layers)
    at = jnp.arange(count, dtype=jnp.int32)
    rows = Rows(at[None], at, jnp.arange(4, dtype=jnp.int32)[None], jnp.array([count], jnp.int32))
    decoder, backend = bind(model.config, model.params), Backend(here())
    hidden, _, _ = decoder(jnp.array([text], jnp.int32), pages, rows, backend)
    likeliest = jnp.argmax(decoder.logits(hidden, backend), axis=-1)[0].tolist()
    assert text[len(prompt) :] == likeliest[len(prompt) - 1 : -1]


@cases("method", ["noisy", "ngram"], quick=["ngram"])
def test_cases_are_partly_right(method):
    """Else the tests above would prove little: some drafts are accepted at each position, some are not."""
    requests = serve(engine(method, K, FAMILY[method]), PROMPTS, params())
    accepted = total(requests)
    assert all(0 < n < sum(r.metrics.num_drafts for r in requests) for n in accepted), accepted
    assert len({token for tokens in texts(requests) for token in tokens}) > 10


@cases("rows", [1, 2, 3, 4, 5, 8], quick=[1])
@cases("method", ["noisy", "ngram"], quick=["ngram"])
@pytest.mark.usefixtures("exact_shapes")
def test_every_batch_size(method, rows):
    prompts = (*PROMPTS[::-1], *PROMPTS)[:rows]
    sampling = tuple(params((*MAX_TOKENS, *MAX_TOKENS)[:rows]))
    family = FAMILY[method]
    assert texts(serve(engine(method, K, family), prompts, sampling)) == plain(prompts, sampling, family)


@cases("method", ["noisy", "itself", "ngram"], quick=["itself"])
def test_every_row_has_its_own_k(method):
    """Rows that want 0, 1, ... K drafts share a batch, and count only what they proposed."""
    prompts, sampling = PROMPTS[::-1], [params(20, num_speculative_tokens=k)[0] for k in range(K + 1)]
    expected = plain(prompts, tuple(params((20,) * (K + 1))), FAMILY[method])
    for rounds in ROUNDS:
        requests = serve(engine(method, K, FAMILY[method]), prompts, sampling, rounds=rounds)
        assert texts(requests) == expected
        for k, request in enumerate(requests):
            m = request.metrics
            assert m.num_draft_tokens <= k * m.num_drafts
            assert m.num_accepted_tokens_per_pos[k:] == [0] * (K - k)
            if method == "itself":
                assert (m.num_drafts, m.num_draft_tokens) == (-(-20 // (k + 1)) * (k > 0), -(-20 // (k + 1)) * k)


@cases("k", SELF, quick=[4])
@pytest.mark.parametrize("rounds", ROUNDS)
def test_a_model_drafting_for_itself_is_always_right(k, rounds):
    """K of K in every round: only with a draft cache that lacks nothing, also the last accepted token's entry."""
    num_rounds = 6
    sampling = params((num_rounds * (k + 1),) * len(PROMPTS))
    requests = serve(engine("itself", k), PROMPTS, sampling, rounds=rounds)
    assert texts(requests) == plain(PROMPTS, tuple(sampling))
    for request in requests:
        m = request.metrics
        assert (m.num_drafts, m.num_draft_tokens) == (num_rounds, num_rounds * k)
        assert m.num_accepted_tokens_per_pos == [num_rounds] * k
        assert m.mean_acceptance_length == k + 1
        assert m.draft_acceptance_rate == m.system_efficiency == 1.0


@pytest.mark.thorough
def test_sliding_windows_drafting_for_themselves():
    """The same with windows of 12 positions, shorter than the text."""
    sampling = params((30,) * 5)
    requests = serve(engine("itself", K, "mistral"), PROMPTS, sampling)
    assert texts(requests) == plain(PROMPTS, tuple(sampling), "mistral")
    assert total(requests) == [30 // (K + 1) * 5] * K


@pytest.mark.parametrize("rounds", ROUNDS)
def test_a_draft_that_is_always_wrong(rounds):
    sampling = params()
    requests = serve(engine("wrong", K), PROMPTS, sampling, rounds=rounds)
    assert texts(requests) == plain(PROMPTS, tuple(sampling))
    for request, n in zip(requests, MAX_TOKENS, strict=True):
        m = request.metrics
        assert (m.num_drafts, m.num_draft_tokens, m.num_accepted_tokens) == (n, n * K, 0)
        assert (m.mean_acceptance_length, m.num_emitted_tokens) == (1.0, n)


@cases("method", ["fewer_ids", "more_ids"], quick=["fewer_ids"])
def test_draft_with_another_vocabulary_size(method):
    """Ids that only one of the models has are never proposed, and do no harm where they stand in the text."""
    prompts = (*PROMPTS, (VOCAB - 1, VOCAB - 2, 3, 4))
    sampling = tuple(params((30,) * 6))
    expected = plain(prompts, sampling)
    assert any(token >= VOCAB - 8 for tokens in expected for token in tokens[:20])
    requests = serve(engine(method, K), prompts, sampling)
    assert texts(requests) == expected
    assert total(requests)[1] > 10
    if method == "more_ids":  # the target itself, once its own ids are all that counts
        assert total(requests) == [6 * 30 // (K + 1)] * K


def test_ids_beyond_the_drafts_vocabulary_leave_it_useful():
    """The entry of an id that the draft lacks is something finite: a NaN would silence it for the rest of the row."""
    prompts = ((VOCAB - 1, 3, 4, 7), (VOCAB - 1, 9, 2, 1))
    requests = serve(engine("fewer_ids", K), prompts, params((40, 40)))
    assert all(r.metrics.num_accepted_tokens > 0 for r in requests)


@cases(
    ("spec", "wishes"),
    [({}, {}), ({"draft_sample_method": "greedy"}, {}), ({}, {"repetition_penalty": 1.1})],
    quick=[({}, {})],
    ids=["greedy", "greedy draft", "penalties"],
)
def test_draft_with_a_reduced_vocabulary(spec, wishes):
    """The text holds ids that the draft lacks; they are never proposed, and the others are accepted."""
    sampling = tuple(params((30,) * 5, **wishes))
    expected = plain(PROMPTS, sampling)
    lacking = {token for tokens in expected for token in tokens if token % 4 == 0}
    assert len(lacking) > 5
    requests = serve(new_engine("reduced", K, spec=spec), PROMPTS, sampling)
    assert texts(requests) == expected
    accepted = total(requests)
    assert 10 < accepted[0] < sum(r.metrics.num_drafts for r in requests)
    assert accepted[1] > 5


def test_logits_of_a_reduced_vocabulary_are_spread():
    m = reduced(target())
    ids = Vocabulary(m.params["d2t"], m.params["t2d"])
    logits = jnp.arange(m.config.head_size, dtype=jnp.float32)[None]
    spread = fit_vocabulary(logits, VOCAB, ids)[0]
    assert [float(spread[i]) for i in (1, 2, 3, 5, 63)] == [0, 1, 2, 3, 47]
    assert jnp.isneginf(spread[::4]).all()
    assert jnp.isfinite(spread).sum() == 48


@pytest.mark.thorough
def test_a_reduced_vocabulary_beside_prompt_lookup():
    """What was looked up may be an id that the draft does not propose; it reads it as any other."""
    m, sampling = target("loops"), tuple(params())
    config = {"method": "ngram+draft_model", "model": "x", "num_speculative_tokens": K, "prompt_lookup_min": 3}
    requests = serve(tiny_models.engine(m, config, reduced(m), **OPTIONS), PROMPTS, sampling)
    assert texts(requests) == plain(PROMPTS, sampling, "loops")
    assert sum(total(requests)) > 10


@cases("limit", [20, 33], quick=[20])
def test_draft_with_a_shorter_context(limit):
    """Rows beyond it decode plainly; a prompt that is longer from the start never speculates."""
    short = new_engine("itself", K, spec={"max_model_len": limit})
    sampling = tuple(params((28,) * 5))
    requests = serve(short, PROMPTS, sampling, rounds=4)
    assert texts(requests) == plain(PROMPTS, sampling)
    for request in requests:
        left, room, counters = 28, limit - len(request.prompt) - 1, [0, 0, 0]
        while left > 0 and room > 0:
            wanted = min(K, room)
            counters = [n + m for n, m in zip(counters, (1, wanted, min(wanted, left)), strict=True)]
            left, room = left - wanted - 1, room - wanted - 1
        m = request.metrics
        assert [m.num_drafts, m.num_draft_tokens, m.num_accepted_tokens] == counters


def test_speculation_off_for_one_or_for_all():
    sampling = tuple(params())
    off = params(num_speculative_tokens=0)
    for mixed in ([*off[:2], *sampling[2:]], off):
        requests = serve(engine("noisy", K), PROMPTS, mixed)
        assert texts(requests) == plain(PROMPTS, sampling)
        assert [r.metrics.num_drafts > 0 for r in requests] == [s.num_speculative_tokens is None for s in mixed]


def test_the_cover_is_what_it_says():
    assert {family for family, *_ in CASES} == {*FAMILIES, "loops"}
    assert {family for family, *_ in QUICK} == {*FAMILIES, "loops"} - {*ALIKE}
    for k in range(1, 7):
        assert ("llama", "ngram", k) in CASES
        assert {("llama", "noisy", k), ("llama", "first_layer", k)} & set(CASES)
