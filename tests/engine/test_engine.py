"""The engine: requests queue, run, end and give back what they held."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxspec.engine.assembly import table_widths
from jaxspec.engine.batch import launch_input, variant
from jaxspec.engine.engine import Engine
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.options.speculative import SpeculativeConfig
from pallas_kernels.device import AMPERE, Device
from tests.support import tiny_models
from tests.support.lively_models import (
    OPTIONS,
    PROMPTS,
    VOCAB,
    engine,
    first_layer,
    new_engine,
    noisy,
    params,
    plain,
    repeating,
    serve,
    target,
    texts,
)
from tests.support.sizes import cases

K = 3
MANY = tuple(repeating(3 + 2 * i, 3 + i % 4, i) for i in range(9))
MANY_PARAMS = tuple(params(tuple(5 + (7 * i) % 17 for i in range(9))))


@functools.cache
def narrow(method: str, short: str) -> Engine:
    options = {"rows": {"max_num_seqs": 2}, "pages": {"max_num_seqs": 8, "num_pages": 7}}[short]
    return new_engine(method, K, **options)


def test_a_stream_shows_the_first_tokens_at_once_and_more_as_fast_as_one_reads(monkeypatch):
    served = new_engine()
    launched = tiny_models.rounds_of_launches(served, monkeypatch)
    monkeypatch.setattr(served.controller, "rounds_within", lambda seconds, kind, k: round(100 * seconds))
    sampling = params(12)
    request = served.add(PROMPTS[0], *sampling)
    while served.busy:
        served.step(streaming=True)
    assert launched == [1, 5, 5, 5]
    assert texts([request]) == plain(PROMPTS[:1], tuple(sampling))


def test_a_first_token_is_timed_by_the_round_that_made_it(monkeypatch):
    """Of a launch whose rounds count as equally long; not by the end of the launch."""
    served, launches = new_engine(), []
    apply_result = served.apply_result
    monkeypatch.setattr(served, "apply_result", lambda *launch: launches.append(launch[1:]) or apply_result(*launch))
    long, short = (served.add(PROMPTS[0], p) for p in params((12, 1)))
    while served.busy:
        served.step(4)
    (result, seconds), *rest = launches
    assert (int(result.num_rounds), len(rest)) == (4, 2)
    for request in (long, short):
        assert request.times.prefilled < request.times.first_token < request.times.finished
    assert short.times.finished - short.times.first_token == pytest.approx(seconds * 3 / 4)
    assert short.times.first_token == long.times.first_token


@pytest.mark.parametrize(
    ("own", "stops", "rounds"), [(None, False, 64), (None, True, 16), (5, True, 5), (20, True, 20)]
)
def test_a_launch_is_shorter_where_the_host_may_have_to_act(monkeypatch, own, stops, rounds):
    served = new_engine(rounds_per_launch=own)
    launched = tiny_models.rounds_of_launches(served, monkeypatch)
    for prompt, sampling in zip(PROMPTS[:2], params((50, 50)), strict=True):
        request = served.add(prompt, sampling)
    request.find_stop = (lambda output, known: None) if stops else None
    served.step()
    assert launched == [rounds]


@cases(("method", "rounds"), [("noisy", 1), ("noisy", 4), ("noisy", 32), ("ngram", 4)], quick=[("noisy", 4)])
@cases("short", ["rows", "pages"], quick=["pages"])
def test_requests_wait_for_rows_and_pages(method, rounds, short):
    """All complete, in the order they came, with the tokens that they have without waiting."""
    small = narrow(method, short)
    requests = [small.add(p, s) for p, s in zip(MANY, MANY_PARAMS, strict=True)]
    admitted, most = [], 0
    while small.busy:
        ran = small.step(rounds)
        admitted += [r.id for r in ran if r.id not in admitted]
        most = max(most, len(ran))
        held = [page for r in small.scheduler.running for page in r.pages]
        assert len(held) == len(set(held)) == small.num_pages - small.scheduler.allocator.num_free
    assert admitted == [r.id for r in requests], "first come, first served"
    assert 2 <= most <= small.config.max_num_seqs
    assert texts(requests) == plain(MANY, MANY_PARAMS)
    assert small.scheduler.allocator.num_free == small.num_pages


def test_a_waiting_request_is_let_in_when_a_row_ends():
    """A launch returns early when a row has finished and someone waits: the newcomer does not wait out the others."""
    small = new_engine("wrong", K, max_num_seqs=2)
    first, second, third = (small.add(PROMPTS[2], s) for s in params((30, 5, 5)))
    assert small.step(32) == [first, second]
    assert (len(first.output), second.finish_reason) == (5, "length")
    assert small.step(32) == [first, third]
    small.abort(first)


@cases("method", ["plain", "noisy"], quick=["noisy"])
def test_a_request_that_never_fits_is_refused(method):
    small = new_engine(method, K * (method == "noisy"), num_pages=2)
    with pytest.raises(ValueError, match=r"43 tokens needs 3 pages of 16, the pool has 2, .*: lower max_tokens"):
        small.add(PROMPTS[4], params(10)[0])
    assert not small.busy
    need = 32 - 7 - (K if method == "noisy" else 0)
    assert len(serve(small, PROMPTS[2:3], params(need))[0].output) == need
    with pytest.raises(ValueError, match="pool has 2"):
        small.add(PROMPTS[2], params(need + 1)[0])


def test_an_idle_step_does_nothing():
    assert engine("noisy", 4).step() == []


@pytest.mark.parametrize("when", ["waiting", "running", "ended"])
def test_abort_frees_what_was_held(when):
    small = new_engine("noisy", K, max_num_seqs=2)
    requests = [small.add(p, s) for p, s in zip(PROMPTS[1:4], params((20, 20, 20)), strict=True)]
    victim = {"waiting": requests[2], "running": requests[0], "ended": requests[0]}[when]
    small.step(1)
    if when == "ended":
        while small.busy:
            small.step()
    reason, free = victim.finish_reason, small.scheduler.allocator.num_free
    kept, held = list(victim.output), len(victim.pages)
    small.abort(victim)
    small.abort(victim)
    assert victim.finish_reason == (reason or "abort")
    assert (victim.output, victim.pages) == (kept, [])
    assert small.scheduler.allocator.num_free == free + held
    while small.busy:
        small.step()
    expected = plain(PROMPTS[1:4], tuple(params((20, 20, 20))))
    for request, tokens in zip(requests, expected, strict=True):
        assert request.output == tokens if request.finish_reason == "length" else request.output == tokens[: len(kept)]
    assert small.scheduler.allocator.num_free == small.num_pages


def test_reused_pages_leak_nothing():
    """The same engine, the same pages, other requests before: the same tokens."""
    small = narrow("noisy", "pages")
    for _ in range(3):
        assert texts(serve(small, MANY, MANY_PARAMS, rounds=4)) == plain(MANY, MANY_PARAMS)


def test_stop_strings_end_a_request_where_the_host_says():
    small = engine("noisy", 4)
    prompts, sampling = PROMPTS[2:4], params((30, 30))
    expected = plain(prompts, tuple(sampling))
    request = small.add(prompts[0], sampling[0])
    request.find_stop = lambda output, known: 7 if len(output) >= 7 else None
    other = small.add(prompts[1], sampling[1])
    while small.busy:
        small.step(2)
    assert (request.output, request.finish_reason) == (expected[0][:7], "stop")
    assert (other.output, other.finish_reason) == (expected[1], "length")
    assert request.metrics.num_emitted_tokens == 7


def test_what_a_stop_string_cuts_off_counts_for_nothing():
    """Seven tokens kept of a launch of six rounds, each of which proposed four drafts and had all accepted."""
    own = engine("itself", 4)
    prompts, sampling = PROMPTS[2:4], params((30, 30))
    request = own.add(prompts[0], sampling[0])
    request.find_stop = lambda output, known: 7
    other = own.add(prompts[1], sampling[1])
    while own.busy:
        own.step(6)
    m = request.metrics
    assert (m.num_drafts, m.num_draft_tokens, m.num_emitted_tokens) == (2, 8, 7)
    assert m.num_accepted_tokens_per_pos == [2, 2, 1, 1]
    assert other.metrics.num_accepted_tokens_per_pos == [6] * 4


def test_metrics_add_up():
    """The engine's counters are the sums of the requests'; every token is a round's own or an accepted one."""
    own = new_engine("noisy", K)
    requests = serve(own, PROMPTS, params(), rounds=2)
    fields = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens")
    for field in fields:
        assert getattr(own.metrics, field) == sum(getattr(r.metrics, field) for r in requests)
    columns = zip(*(r.metrics.num_accepted_tokens_per_pos for r in requests), strict=True)
    assert own.metrics.num_accepted_tokens_per_pos == [sum(c) for c in columns]
    assert own.metrics.num_emitted_tokens == own.timing.num_tokens == sum(len(r.output) for r in requests)
    for request in requests:  # every round drafted; the last one may have lost its extra token to the limit
        m = request.metrics
        assert 0 <= m.num_drafts + m.num_accepted_tokens - m.num_emitted_tokens <= 1


def test_num_drafts_counts_only_rounds_that_proposed():
    """An n-gram drafter without a match proposes nothing: such rounds are no drafts."""
    prompts = ((1, 2, 3, 4, 5, 6, 7, 8), (8, 7, 6, 5, 4, 3, 2, 1))
    never = new_engine("ngram", K, spec={"prompt_lookup_min": 30, "prompt_lookup_max": 30})
    for request in serve(never, prompts, params((20, 20))):
        m = request.metrics
        assert (m.num_drafts, m.num_draft_tokens, m.mean_acceptance_length) == (0, 0, 1.0)
        assert (m.num_emitted_tokens, m.draft_acceptance_rate, m.system_efficiency) == (20, 0.0, 0.0)
    plainly = serve(engine(), prompts, params((20, 20)))
    assert all(r.metrics.num_drafts == 0 and r.metrics.num_accepted_tokens_per_pos == [] for r in plainly)
    assert [r.metrics.num_emitted_tokens for r in plainly] == [20, 20]


BAD_REQUESTS = [
    ([], {}, "the prompt is empty: give at least one token"),
    (range(64), {}, "the prompt has 64 tokens, and this model's maximum context length is 64 tokens, output"),
    ([1, VOCAB], {}, f"token id {VOCAB} is outside the vocabulary 0..{VOCAB - 1}"),
    ([-1, 1], {}, "token id -1 is outside"),
    ([1], {"stop_token_ids": [3, VOCAB + 5]}, f"stop token id {VOCAB + 5} is outside"),
    ([1], {"num_speculative_tokens": 5}, "num_speculative_tokens=5 of a request exceeds the engine's 4"),
]


@pytest.mark.parametrize(("prompt", "options", "message"), BAD_REQUESTS)
def test_a_bad_request_is_refused(prompt, options, message):
    shared = engine("noisy", 4)
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        shared.add(prompt, SamplingParams(**options))
    assert not shared.busy


def test_plain_engines_take_requests_that_would_speculate():
    assert engine().add(PROMPTS[0], SamplingParams(num_speculative_tokens=3)).num_speculative_tokens == 0
    engine().abort(engine().scheduler.waiting[0])


BAD_ENGINES = [
    ({"max_model_len": 257}, {}, "max_model_len=257 exceeds the model's own 256"),
    ({}, {"draft": None}, "method='draft_model' needs a checkpoint of such a draft, none is given"),
]


@pytest.mark.parametrize(("options", "changes", "message"), BAD_ENGINES)
def test_a_bad_engine_is_refused(options, changes, message):
    arguments = {"speculative": {"model": "x"}, "draft": first_layer(target())} | changes
    with pytest.raises(ValueError, match=message):
        tiny_models.engine(target(), **arguments, **OPTIONS | options)


@pytest.mark.parametrize(
    ("asked", "seed", "rule"),
    [(None, 1, "coupled"), (None, None, "block"), ("standard", 1, "standard"), ("coupled", None, "coupled")],
)
def test_which_rule_a_request_follows(asked, seed, rule):
    spec = SpeculativeConfig(num_speculative_tokens=2, rejection_sample_method=asked)
    own = tiny_models.engine(target(), spec, **OPTIONS)
    request = own.add([1, 2], SamplingParams(seed=seed))
    assert request.rule == rule
    assert request.seed == seed or seed is None
    other = own.add([1, 2], SamplingParams(seed=seed))
    assert (other.seed == request.seed) is (seed is not None), "every request without a seed draws its own"


def test_packing_marks_what_is_not_there():
    """Rows beyond the requests are dead, pages beyond a row's are the sentinel num_pages, never -1 or 0."""
    own = new_engine("noisy", K)
    request = own.add(PROMPTS[2], params(4, stop_token_ids=[3])[0])
    own.scheduler.admit()
    packed = launch_input([request], own.num_drafts, variant([request]), own.layout, (4, 4), num_rounds=1)
    assert packed.live.tolist() == [True, False, False, False]
    assert packed.block_table[0].tolist() == [*request.pages, *[own.num_pages] * 3]
    assert (packed.block_table[1:] == own.num_pages).all()
    assert packed.limits.stop_ids[0].tolist() == [3, *[-1] * 15]
    assert packed.tokens[0, :7].tolist() == list(PROMPTS[2])
    own.abort(request)


@pytest.mark.parametrize(
    ("platform", "kernels", "most", "widths"),
    [
        ("cpu", None, 5, (5,)),
        ("gpu", "reference", 65, (65,)),
        ("gpu", None, 64, (64,)),
        ("gpu", "pallas", 65, (64, 65)),
        ("tpu", None, 300, (300,)),
    ],
)
def test_block_tables_come_in_widths_that_attention_makes_use_of(platform, kernels, most, widths):
    assert table_widths(Device(platform, AMPERE if platform == "gpu" else None), kernels, most, page_size=16) == widths


@pytest.mark.thorough
def test_a_block_table_is_as_wide_as_its_longest_request_may_become():
    own = new_engine("noisy", K)
    own.catalogue.table_widths = (2, 5)
    first, second = params([25, 5])
    seen, requests = [], []
    for prompt, sampling, steps in ((PROMPTS[1], first, 1), (PROMPTS[4], second, 99), (PROMPTS[1], first, 99)):
        requests.append(own.add(prompt, sampling))
        for _ in range(steps):
            if own.busy:
                own.step(2)
                seen.append((own.catalogue.grown[1], len(own.scheduler.running)))
    widths = [width for width, _ in seen]
    grown, idle = widths.index(5), seen.index((5, 0))
    assert (5, 1) in seen, "the longer one was to end first"
    assert (set(widths[:grown]), set(widths[grown : idle + 1]), set(widths[idle + 1 :])) == ({2}, {5}, {2})
    assert texts(requests) == [*plain((PROMPTS[1], PROMPTS[4]), (first, second)), *plain(PROMPTS[1:2], (first,))]


@pytest.mark.parametrize("limit", [None, 40])
def test_the_pool_holds_the_same_pages_for_both_models(limit):
    options = {k: v for k, v in OPTIONS.items() if k != "num_pages"} | ({"num_pages": limit} if limit else {})
    own = tiny_models.engine(target(), {"model": "x"}, noisy(target()), **options)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(own.runner.cache)} == {own.num_pages}
    assert own.num_pages == (limit or 2 * 8 * (64 + 64) // 16)  # as much again for pages to be found again
    assert dataclasses.replace(own.config).num_pages == limit
    assert isinstance(own, Engine)


def test_ids_are_the_tokens_however_they_come():
    """Appended to, taken back by a stop string, and after one that ended the output within the prompt's reach."""
    request = new_engine("plain", 0).add(PROMPTS[3], SamplingParams(max_tokens=9))
    for output in ([], [4], [4, 5, 6], [4, 5, 6], [4, 5], [], [7, 8, 9, 10]):
        request.output = output
        assert request.ids.dtype == np.int32
        assert request.ids.tolist() == request.tokens


@pytest.mark.parametrize(("longest", "factor"), [(40, 1.0), (41, 2.0)])
def test_max_model_len_chooses_longropes_factors(longest, factor):
    """The original context is 40 positions. All texts have the same factors, because they share cached keys."""
    engine = tiny_models.engine(tiny_models.model(tiny_models.FAMILIES["phi3"]), max_model_len=longest, num_pages=8)
    assert {frozenset(layer.rope.factors) for layer in engine.runner.decoding.target.config.layers} == {
        frozenset({factor})
    }
