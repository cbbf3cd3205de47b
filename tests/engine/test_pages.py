"""What requests share: pages found again by their content, prompts of several samples. Prompts in several chunks."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxspec.engine.engine import Engine
from jaxspec.options.sampling_params import SamplingParams
from tests.support.lively_models import new_engine, params, plain, repeating, serve, texts
from tests.support.sizes import cases

K = 3
PAGE = 4
CONTEXT = 18  # of the draft that has a shorter one
LONG = repeating(30, 7, 1)
EITHER = (params(20)[0], SamplingParams(max_tokens=20, seed=4))
VARIATION = (*LONG[:22], 60, 61, 62, 63)  # 5 full pages in common, and half a page


@functools.cache
def cached(method: str, spec: tuple, options: tuple) -> Engine:
    found = new_engine(
        method, K, page_size=PAGE, spec=dict(spec), **{"num_pages": 60, "max_num_seqs": 4, **dict(options)}
    )
    found.grown_shape = lambda *requests: (4, 16)
    return found


def own(method: str = "noisy", spec: dict | None = None, **options) -> Engine:
    """Shared by the tests of this file, but with no pages known."""
    found = cached(method, tuple((spec or {}).items()), tuple(options.items()))
    found.scheduler.allocator.reset()
    return found


def prefilled_lengths(engine: Engine, monkeypatch) -> list[int]:
    """Return a list to which every prefill of the engine adds the number of its tokens."""
    lengths, start = [], engine.runner.start

    def counted(plan):
        if plan.program == "prefill":
            lengths.append(int(plan.arrays[0].length.sum()))
        return start(plan)

    monkeypatch.setattr(engine.runner, "start", counted)
    return lengths


@pytest.fixture
def computed(monkeypatch):
    """computed(engine) -> the list of `prefilled_lengths`."""
    return functools.partial(prefilled_lengths, monkeypatch=monkeypatch)


@cases("method", ["noisy", "plain"], quick=["noisy"])
@cases("sampling", EITHER, quick=EITHER[:1], ids=["greedy", "seeded"])
def test_a_common_beginning_is_computed_once(method, sampling, computed):
    engine = own(method)
    lengths, seen = computed(engine), []
    for prompt in (LONG, VARIATION, LONG):
        lengths.clear()
        request = serve(engine, [prompt], [sampling])[0]
        seen.append((sum(lengths), request.metrics.as_dict()))
        assert [request.output] == plain((prompt,), (sampling,))
    assert [count for count, _ in seen] == [29, 25 - 20, 29 - 28]
    assert seen[0][1] == seen[2][1], "the draft knows as much as if it had read the prompt"


def test_a_hit_among_running_requests(computed):
    """Pages are known as soon as they are full, not only when their first holder ends."""
    engine = own()
    lengths = computed(engine)
    first = engine.add(LONG, params(20)[0])
    engine.step(1)
    engine.step(1)
    lengths.clear()
    second = engine.add(VARIATION, params(20)[0])
    engine.step(1)
    assert second.pages[:5] == first.pages[:5]
    assert sum(lengths) == 5
    while engine.busy:
        engine.step()
    sampling = tuple(params((20, 20)))
    assert texts([first, second]) == plain((LONG, VARIATION), sampling)


def test_without_reuse_everything_is_computed_again(computed):
    engine = own(enable_prefix_caching=False)
    lengths = computed(engine)
    twice = [serve(engine, [LONG], params(20))[0] for _ in range(2)]
    assert sum(lengths) == 2 * 29
    assert texts(twice) == 2 * plain((LONG,), tuple(params(20)))
    assert twice[0].metrics == twice[1].metrics == serve(own(), [LONG], params(20))[0].metrics


def test_a_preempted_request_finds_its_own_pages(computed):
    """It computes the rest, and goes on as if nothing had been, with as many drafts accepted."""
    engine = own()
    undisturbed = serve(engine, [LONG], params(25), rounds=2)[0]
    engine.scheduler.allocator.reset()
    request = engine.add(LONG, params(25)[0])
    for _ in range(4):
        engine.step(2)
    lengths, known = computed(engine), request.num_registered
    assert request.output
    assert known > len(LONG) // PAGE, "pages of the output too"
    count = request.num_tokens - 1
    engine.scheduler.preempt(request)
    assert (request.pages, request.target_len) == ([], 0)
    while engine.busy:
        engine.step(2)
    assert sum(lengths) == count - known * PAGE
    assert request.output == undisturbed.output == plain((LONG,), tuple(params(25)))[0]
    assert request.metrics == undisturbed.metrics


def test_known_pages_go_where_space_is_needed(computed):
    engine = own(num_pages=17)
    lengths, counts = computed(engine), []
    other = repeating(40, 11, 9)
    for prompt in (LONG, LONG, other, LONG):
        lengths.clear()
        assert [serve(engine, [prompt], params(10))[0].output] == plain((prompt,), tuple(params(10)))
        counts.append(sum(lengths))
    # The other one needs 14 pages of 17; of the first one's the last go first.
    assert counts[:3] == [29, 1, 39]
    assert 29 - 4 * PAGE <= counts[3] < 29


@pytest.mark.parametrize("preempted", [False, True])
def test_pages_that_a_short_draft_lacks_are_known_for_the_target(preempted, computed):
    engine = own(spec={"max_model_len": CONTEXT})
    lengths = computed(engine)
    for computed_now in (29, 29 % PAGE):
        lengths.clear()
        request = engine.add(LONG, params(20)[0])
        engine.step(3)
        assert sum(lengths) == computed_now
        if preempted:
            engine.scheduler.preempt(request)
        while engine.busy:
            engine.step(3)
            assert request.num_drafted == 0, "it would propose nothing"
        assert [request.output] == plain((LONG,), tuple(params(20)))
        known = engine.scheduler.allocator.digest_of
        assert (len(known), len(known.keys() - engine.scheduler.undrafted)) == (49 // PAGE, 0)
        assert request.metrics.num_drafts == 0
    short = serve(engine, [LONG[:8]], params(30))[0]
    assert short.metrics.num_drafts > 0
    assert [short.output] == plain((LONG[:8],), tuple(params(30)))


def test_pages_that_were_decoded_without_the_draft_are_read_by_it_later():
    """The output of a row that never speculates; a later request on the same tokens has its drafts accepted."""
    engine = own()
    off = serve(engine, [LONG[:10]], params(30, num_speculative_tokens=0))[0]
    known = engine.scheduler.allocator.digest_of
    assert (len(known), len(known.keys() - engine.scheduler.undrafted)) == (39 // PAGE, 0)
    again = off.tokens[:30]
    with_hits = serve(engine, [again], params(20))[0]
    assert len(known.keys() & engine.scheduler.undrafted) == 39 // PAGE - 29 // PAGE, "what it did not begin with"
    engine.scheduler.allocator.reset()
    without = serve(engine, [again], params(20))[0]
    assert with_hits.output == without.output
    assert with_hits.metrics == without.metrics
    assert without.metrics.num_accepted_tokens > 0


# Samples of one prompt.


def seeds(requests) -> tuple[SamplingParams, ...]:
    """What each sample would have been asked for alone."""
    return tuple(SamplingParams(max_tokens=r.params.max_tokens, seed=r.seed) for r in requests)


@pytest.mark.parametrize("reuse", [True, False])
@cases("n", [3, 7], quick=[7])
@cases("length", [1, 2, 4, 5, 8, 9, 11], quick=[4, 11])
def test_samples_share_their_prompt(length, n, reuse):
    """One token, prompts that end at a page's border, one before and one after; more samples than rows."""
    engine = own(enable_prefix_caching=reuse)
    prompt = LONG[:length]
    request = engine.add(prompt, SamplingParams(max_tokens=9, seed=11, n=n))
    while engine.busy:
        engine.step(2)
    assert len({r.seed for r in request.samples}) == n
    assert texts(request.samples) == plain((prompt,) * n, seeds(request.samples))
    assert len(set(map(tuple, texts(request.samples)))) > 1
    assert not any(engine.scheduler.allocator.references)


def test_the_page_that_ends_the_prompt_is_copied_for_both_models():
    engine = own()
    request = engine.add(LONG[:11], SamplingParams(max_tokens=20, seed=3, n=3))
    first, *others = request.samples
    engine.step(1)
    engine.admit()
    assert [s.pages[:2] for s in others] == [first.pages[:2]] * 2
    assert [engine.scheduler.allocator.references[page] for page in first.pages[:2]] == [3, 3]
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(engine.runner.cache)]
    assert len(leaves) == 4, "two layers of each model"
    for leaf in leaves:
        ends = [leaf[s.pages[2], :2] for s in request.samples]  # the prompt's positions 8 and 9
        assert np.abs(ends[0]).max(axis=(-1, -2)).all(), "written"
        assert all(np.array_equal(ends[0], end) for end in ends[1:])
    shared = [leaf[first.pages[:2]] for leaf in leaves]
    own_end = [leaf[first.pages[2], :2] for leaf in leaves]
    pages, end = list(first.pages[:2]), first.pages[2]
    engine.step(3)
    for leaf, before, before_end in zip(jax.tree.leaves(engine.runner.cache), shared, own_end, strict=True):
        assert np.array_equal(np.asarray(leaf)[pages], before), "nobody writes to what is shared"
        assert np.array_equal(np.asarray(leaf)[end, :2], before_end)
    while engine.busy:
        engine.step()
    assert texts(request.samples) == plain((LONG[:11],) * 3, seeds(request.samples))


def test_samples_speculate_like_the_first():
    """Greedy samples are the same request again, down to the drafts that were accepted."""
    request = serve(own(), [LONG[:11]], params(20, n=3))[0]
    first, *others = request.samples
    for other in others:
        assert (other.output, other.metrics) == (first.output, first.metrics)
    assert first.metrics.num_accepted_tokens > 0


# Prompts in several chunks.


def test_others_go_on_beside_a_long_prompt(monkeypatch):
    engine = own(prefill_chunk=16)
    engine.platform = dataclasses.replace(engine.platform, rounds_per_chunk=2)
    prompts, sampling = (LONG[:3], repeating(41, 9, 5)), tuple(params((50, 8)))
    short = engine.add(prompts[0], sampling[0])
    engine.step(4)
    long, gained = engine.add(prompts[1], sampling[1]), []
    order, start = [], engine.runner.start
    monkeypatch.setattr(engine.runner, "start", lambda plan: (order.append(plan.program), start(plan))[1])
    while len(gained) < 2:
        had = len(short.output)
        assert set(engine.step(8)) == {short, long}
        gained.append((len(short.output) - had, long.target_len))
    # A pass is queued behind each launch, before the host reads its results.
    assert [computed for _, computed in gained] == [32, 40]
    assert [name for name in order if name != "catch_up"] == ["prefill", "launch", "prefill", "launch", "prefill"]
    assert all(0 < count <= 2 * (K + 1) for count, _ in gained), "two rounds of the eight"
    while engine.busy:
        engine.step()
    assert texts([short, long]) == plain(prompts, sampling)


def test_an_abort_in_prefill_frees_everything():
    engine = own(prefill_chunk=16)
    short, long = engine.add(LONG[:3], params(30)[0]), engine.add(repeating(41, 9, 5), params(8, n=2)[0])
    while not long.target_len:
        engine.step(1)
    held = engine.scheduler.allocator.num_free
    assert 0 < long.target_len < 40
    engine.abort(long)
    assert engine.scheduler.allocator.num_free > held
    while engine.busy:
        engine.step()
    assert not any(engine.scheduler.allocator.references)
    assert (long.finish_reason, long.output, long.pages) == ("abort", [], [])
    sampling = tuple(params((30, 8)))
    assert [short.output, long.samples[1].output] == plain((tuple(short.prompt), tuple(long.prompt)), sampling)
