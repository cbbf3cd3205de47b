"""Rows and pages for requests, on the host alone: first come, first served, the youngest gives way."""

from __future__ import annotations

import numpy as np
import pytest

from jaxspec.cache.allocator import PageAllocator
from jaxspec.engine.request import Request
from jaxspec.engine.scheduler import Scheduler
from jaxspec.sampling_params import SamplingParams
from tests.lively_models import new_engine, params, plain, repeating

PAGE = 4
K = 2


def scheduler(num_pages: int = 8, rows: int = 4, **options) -> Scheduler:
    return Scheduler(PageAllocator(num_pages), PAGE, rows, K, **options)


def request(length: int = 5, max_tokens: int = 10, id: int = 0, first: int = 0, **options) -> Request:
    """Its prompt is first, first + 1, ..."""
    return Request(
        id=id,
        prompt=list(range(first, first + length)),
        params=SamplingParams(max_tokens=max_tokens, **options),
        seed=0,
        coupled=True,
        stop_ids=(),
        max_len=length + max_tokens,
        num_speculative_tokens=K,
    )


def samples(count: int, length: int = 5, **options) -> list[Request]:
    found = [request(length, id=i, n=count, **options) for i in range(count)]
    for i, sample in enumerate(found):
        sample.samples, sample.index = found, i
    return found


def fill(s: Scheduler, r: Request, output: int = 0) -> None:
    """As a pass would: everything but the pending token is in both caches."""
    r.output += range(50, 50 + output)
    r.target_len = r.draft_len = r.num_tokens - 1
    s.register(r)


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


def test_samples_wait_for_the_prompt_and_share_it():
    """Full pages are shared, the one that the prompt ends is copied; the last prompt token is pending."""
    s = scheduler(num_pages=30)
    first, second, third = samples(3, length=11)
    stranger = request(4, id=9, first=30)
    for r in (first, second, third, stranger):
        s.add(r)
    assert s.admit() == ([first, stranger], []), "who need not wait does not"
    fill(s, first)
    admitted, copies = s.admit()
    assert admitted == [second, third]
    assert second.pages[:2] == third.pages[:2] == first.pages[:2]
    assert copies == [(first.pages[2], second.pages[2]), (first.pages[2], third.pages[2])]
    assert [s.allocator.references[page] for page in first.pages[:2]] == [3, 3]
    assert len({r.pages[2] for r in (first, second, third)}) == 3
    assert all((r.target_len, r.draft_len, r.prefilled) == (10, 10, True) for r in admitted)


@pytest.mark.parametrize(("length", "shared", "copied"), [(1, 0, 0), (4, 0, 1), (5, 1, 0), (6, 1, 1), (9, 2, 0)])
def test_where_a_prompt_ends(length, shared, copied):
    s = scheduler(num_pages=30, reuse=False)
    first, second = samples(2, length)
    s.add(first)
    s.add(second)
    admitted, copies = s.admit()
    if length > 1:
        assert admitted == [first]
        fill(s, first)
        admitted, copies = s.admit()
    assert admitted[-1] is second
    assert len(set(first.pages) & set(second.pages)) == shared
    assert len(copies) == copied
    assert second.prefilled


def test_a_fork_knows_no_more_of_the_draft_than_its_sibling():
    s = scheduler(num_pages=30)
    first, second = samples(2, length=12)
    s.add(first)
    s.add(second)
    s.admit()
    first.target_len, first.draft_len = 11, 6
    s.admit()
    assert (second.target_len, second.draft_len) == (11, 6)


@pytest.mark.parametrize(
    ("target_len", "draft_len", "known"), [(12, 12, 3), (12, 11, 2), (12, 3, 0), (7, 12, 1), (3, 3, 0)]
)
def test_pages_are_known_as_far_as_both_caches_hold(target_len, draft_len, known):
    s = scheduler(num_pages=30)
    r, again = request(13), request(13, id=1)
    s.add(r)
    s.admit()
    r.target_len, r.draft_len = target_len, draft_len
    s.register(r)
    assert len(s.allocator.page_of) == known
    s.add(again)
    s.admit()
    assert again.pages[:known] == r.pages[:known]
    assert again.target_len == again.draft_len == known * PAGE


@pytest.mark.parametrize(("length", "known"), [(8, 1), (9, 2)])
def test_a_hit_leaves_the_pending_token_over(length, known):
    s = scheduler(num_pages=30)
    long, again = request(20), request(length, id=1)
    s.add(long)
    s.admit()
    fill(s, long)
    s.add(again)
    s.admit()
    assert again.target_len == known * PAGE < length


def test_other_beginnings_are_no_hit():
    """The same page of tokens after another one is another page."""
    s = scheduler(num_pages=30)
    a, b = request(13), request(13, id=1)
    b.prompt = [9, *b.prompt[1:]]
    for r in (a, b):
        s.add(r)
        s.admit()
        fill(s, r)
    assert not set(a.pages) & set(b.pages)
    assert len(s.allocator.page_of) == 6


def test_without_reuse_nothing_is_known():
    s = scheduler(reuse=False, num_pages=30)
    for i in range(2):
        r = request(13, id=i)
        s.add(r)
        s.admit()
        fill(s, r)
        assert (r.num_registered, s.allocator.page_of) == (0, {})


def test_a_request_that_never_fits_is_refused_before_any_sample_is_queued():
    small = new_engine("noisy", K, num_pages=5, page_size=4)
    with pytest.raises(ValueError, match=r"a request of 20 tokens needs 6 pages of 4, the pool has 5: lower max_token"):
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


@pytest.mark.thorough
def test_all_who_decode_may_give_way_to_one_in_prefill():
    """A step without a launch, then the long prompt goes on."""
    small = new_engine("noisy", K, page_size=4, num_pages=16, max_num_seqs=2, enable_prefix_caching=False)
    prompts, sampling = (repeating(40, 7, 3), repeating(6, 3, 1)), tuple(params((3, 30)))
    long, short = (small.add(p, s) for p, s in zip(prompts, sampling, strict=True))
    without_launch = 0
    while small.busy:
        ran, said = small.step(32), (len(long.output), len(short.output))
        without_launch += ran == [long] and said[0] == 0 < said[1]
    assert without_launch
    assert [long.output, short.output] == plain(prompts, sampling)


def test_a_copy_of_a_copy_begins_at_what_is_there():
    """A sample whose sibling is itself admitted in this step: the page that is copied is not yet filled."""
    s = scheduler(num_pages=40, rows=4, reuse=False)
    first, second, third = samples(3, length=7)
    for r in (first, second, third):
        s.add(r)
    assert s.admit()[0] == [first]
    fill(s, first)
    s.waiting.clear()
    s.running.clear()
    # The last one runs, the others wait: as after two were preempted before they had said anything.
    third.pages, third.target_len, third.draft_len = first.pages, first.target_len, first.draft_len
    first.pages, first.target_len, first.draft_len = [], 0, 0
    s.running.append(third)
    s.waiting.extend([first, second])
    monkey = lambda request: next((r for r in s.running if r is not third), third)
    s.sibling = monkey  # type: ignore[method-assign]
    admitted, copies = s.admit()
    assert admitted == [first, second]
    assert copies == [(third.pages[1], first.pages[1]), (third.pages[1], second.pages[1])]


def test_samples_that_wait_cost_no_more_each_the_more_there_are():
    """What is looked at for each of n waiting samples does not grow with n."""

    def looks(n: int) -> int:
        seen = 0

        class Counted(list):
            def __iter__(self):
                nonlocal seen
                for sample in super().__iter__():
                    seen += 1
                    yield sample

        s = scheduler(num_pages=4 * n, rows=4)
        found = Counted(samples(n))
        for sample in list.__iter__(found):
            sample.samples = found
            s.add(sample)
        while s.waiting or s.running:
            s.admit()
            for r in list(s.running):
                if not r.target_len:
                    fill(s, r)
                s.remove(r)
        return seen

    assert looks(400) <= 4 * max(looks(100), 100)
