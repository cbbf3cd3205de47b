"""Rows and pages for requests, on the host alone: first come, first served, the youngest gives way."""

from __future__ import annotations

import numpy as np
import pytest

from jaxspec.common.errors import UserError
from jaxspec.options.sampling_params import SamplingParams
from tests.engine.schedules import PAGE, K, fill, request, scheduler
from tests.support.lively_models import new_engine, params, plain, repeating


def test_first_come_first_served():
    """A small request does not overtake a large one for which there are no pages yet."""
    s = scheduler(num_pages=8)
    large, small = request(24, 6, id=1, first=20), request(1, 1, id=2)
    first = request(9, id=0)
    for r in (first, large, small):
        s.add(r)
    assert s.admit() == ([first], [])
    assert list(s.waiting) == [large, small]
    s.remove(first)
    assert s.admit()[0] == [large]


def test_rows_are_limited():
    s = scheduler(num_pages=40, rows=2)
    requests = [request(id=i) for i in range(3)]
    for r in requests:
        s.add(r)
    assert s.admit()[0] == requests[:2]
    assert s.admit()[0] == []


@pytest.mark.parametrize(
    ("length", "rounds", "positions"),
    [(1, 1, 3), (5, 1, 7), (5, 2, 10), (5, 3, 13), (5, 4, 16), (5, 5, 17), (5, 100, 17)],
)
def test_pages_grow_with_the_rounds_to_come(length, rounds, positions):
    """num_tokens + rounds (K + 1) - 1 positions, never more than the last round's drafts need."""
    s = scheduler(num_pages=20)
    r = request(length, 10)
    s.add(r)
    s.admit()
    assert len(r.pages) == -(-(length + K) // PAGE)
    assert s.grow(rounds) == []
    assert s.positions(r, rounds) == positions
    assert len(r.pages) == -(-positions // PAGE)


@pytest.mark.parametrize(
    ("rounds", "longest", "positions"), [(1, 40, 5 + 7), (2, 40, 5 + 7 + K + 1), (100, 40, 15 + 7), (100, 19, 19)]
)
def test_a_draft_that_fills_more_places_than_are_wanted(rounds, longest, positions):
    """The last round's block has pages, too, as far as the context goes."""
    s = scheduler(num_pages=20, reach=7, longest=longest)
    r = request(5, 10)
    s.add(r)
    s.admit()
    assert s.grow(rounds) == []
    assert s.positions(r, rounds) == positions
    assert len(r.pages) == -(-positions // PAGE)
    assert s.most_pages(r) == -(-min(15 + 7, longest) // PAGE)
    s.longest = 90
    with pytest.raises(UserError, match="a request of 76 tokens needs 21 pages of 4, the pool has 20"):
        s.add(request(66, 10))


def test_the_youngest_gives_way():
    """Only as many as needed; they wait in the order they came, before those who never ran; what they said stays."""
    s = scheduler(num_pages=9, reuse=False)
    old, middle, young = (request(2, 20, id=i, first=10 * i) for i in range(3))
    late = request(id=3)
    for r in (old, middle, young):
        s.add(r)
    assert s.admit()[0] == [old, middle, young]
    s.add(late)
    for r, output in ((old, 5), (middle, 7), (young, 1)):
        fill(s, r, output)
    assert s.allocator.num_free == 6
    assert s.grow(1) == []
    assert [len(r.pages) for r in (old, middle, young)] == [3, 3, 2]
    fill(s, old, 8)  # needs two pages, one is free
    assert s.grow(1) == [young]
    assert s.running == [old, middle]
    assert list(s.waiting) == [young, late]
    assert (young.output, young.pages, young.target_len, young.draft_len) == ([50], [], 0, 0)
    fill(s, old, 5)
    fill(s, middle, 8)
    assert s.grow(1) == [middle]
    assert list(s.waiting) == [middle, young, late]
    assert s.num_preemptions == 2


def test_what_rounds_ask_for_beyond_the_first_preempts_nobody():
    """Oldest first, as many pages as there are."""
    s = scheduler(num_pages=6)
    old, young = request(4, 18, id=0), request(4, 18, id=1, first=20)
    for r in (old, young):
        s.add(r)
    s.admit()
    assert s.grow(100) == []
    assert [len(r.pages) for r in (old, young)] == [4, 2]


def test_the_only_one_left_takes_itself_back():
    """A row that is the youngest gives way itself."""
    s = scheduler(num_pages=6)
    old, young = request(9, 10, id=0), request(4, 18, id=1, first=20)
    for r in (old, young):
        s.add(r)
    assert s.admit()[0] == [old, young]
    s.extend(old, 16)
    fill(s, young, 4)
    assert s.grow(1) == [young]
    assert s.running == [old]


@pytest.mark.parametrize("seed", range(20))
def test_no_deadlock(seed):
    """Whatever comes, the oldest goes on and all end; pages are counted right after every step."""
    rng = np.random.default_rng(seed)
    s = scheduler(num_pages=10, rows=5)
    wanted = [request(int(rng.integers(1, 25)), int(rng.integers(1, 13)), id=i, first=i % 3) for i in range(30)]
    for r in wanted:
        s.add(r)
    for _ in range(1000):
        s.admit()
        s.grow(int(rng.integers(1, 6)))
        assert s.running, "somebody runs"
        oldest, had = s.running[0], s.running[0].num_tokens
        for r in list(s.running):
            if r.num_tokens + K <= len(r.pages) * PAGE:  # as a launch has it
                fill(s, r, min(int(rng.integers(1, K + 2)), r.max_len - r.num_tokens))
            if r.num_tokens >= r.max_len:
                s.remove(r)
        assert oldest.num_tokens > had
        held = [page for r in s.running for page in r.pages]
        assert s.allocator.references == [held.count(page) for page in range(10)]
        if not s.running and not s.waiting:
            break
    assert all(r.num_tokens == r.max_len for r in wanted)
    assert s.allocator.num_free == 10


def test_times_are_set_once():
    s = scheduler()
    r = request(1)
    s.add(r)
    s.admit()
    admitted, prefilled = r.times.admitted, r.times.prefilled
    assert r.times.arrived <= admitted == prefilled
    s.preempt(r)
    s.admit()
    assert (r.times.admitted, r.times.prefilled) == (admitted, prefilled)


def test_a_request_that_never_fits_is_refused_before_any_sample_is_queued():
    small = new_engine("noisy", K, num_pages=5, page_size=4)
    with pytest.raises(ValueError, match=r"20 tokens needs 6 pages of 4, the pool has 5, .* is 18 tokens: lower max"):
        small.add(range(10), SamplingParams(max_tokens=10, n=3))
    assert not small.busy
    small.add(range(10), SamplingParams(max_tokens=8, n=3))
    assert len(small.scheduler.waiting) == 3


def test_preempted_requests_end_with_the_same_tokens():
    prompts = tuple(repeating(3 + i, 3, i) for i in range(4))
    sampling = tuple(params((25, 20, 25, 20)))
    small = new_engine("noisy", K, num_pages=12, page_size=4)
    requests = [small.add(p, s) for p, s in zip(prompts, sampling, strict=True)]
    times = {}
    while small.busy:
        small.step(2)
        for r in requests:
            seen = (r.times.admitted, r.times.prefilled, r.times.first_token)
            assert times.setdefault(r.id, seen)[0] in (None, seen[0])
            assert all(a in (None, b) for a, b in zip(times[r.id], seen, strict=True)), "once set, they stay"
            times[r.id] = seen
    assert small.scheduler.num_preemptions >= 2
    assert [r.output for r in requests] == plain(prompts, sampling)
    assert [r.metrics.num_emitted_tokens for r in requests] == [25, 20, 25, 20]


def test_rows_may_all_be_preempted_for_an_older_prompt():
    """The short prompt is read first. Its row then loses its pages to the older, long prompt, which is still unread."""
    sizes = {"page_size": 4, "num_pages": 16, "max_num_seqs": 2, "prefill_chunk": 16}
    small = new_engine("noisy", K, enable_prefix_caching=False, **sizes)
    prompts, sampling = (repeating(40, 7, 3), repeating(6, 3, 1)), tuple(params((3, 30)))
    requests = [small.add(p, s) for p, s in zip(prompts, sampling, strict=True)]
    while small.busy:
        small.step(32)
    assert [r.output for r in requests] == plain(prompts, sampling)
    assert small.scheduler.num_preemptions
