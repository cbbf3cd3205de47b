"""Pages that requests share, on the host alone: those of a prompt's samples, and of others that begin alike."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine.schedules import PAGE, fill, request, samples, scheduler


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
    assert copies == [(r, (first.pages[2], r.pages[2])) for r in (second, third)]
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
    ("target_len", "draft_len", "known", "drafted"),
    [(12, 12, 3, 3), (12, 11, 3, 2), (12, 3, 3, 0), (7, 7, 1, 1), (3, 3, 0, 0)],
)
def test_pages_are_known_as_far_as_each_cache_holds(target_len, draft_len, known, drafted):
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
    assert (again.target_len, again.draft_len) == (known * PAGE, drafted * PAGE)


def test_what_the_draft_reads_later_is_known_then():
    """By whoever reads it; and a page that is given away is not held against its next holder."""
    s = scheduler(num_pages=5)

    def admitted(r):
        s.add(r)
        s.admit()
        return r

    first = admitted(request(13, max_tokens=1))
    first.target_len = 12
    s.register(first)
    s.remove(first)
    second = admitted(request(13, max_tokens=1, id=1))
    assert (second.target_len, second.draft_len) == (12, 0)
    second.draft_len = 9
    s.register(second)
    s.remove(second)
    third = admitted(request(13, max_tokens=1, id=2))
    assert (third.target_len, third.draft_len) == (12, 8)
    s.remove(third)
    other = admitted(request(13, max_tokens=1, id=3, first=50))
    fill(s, other)
    s.remove(other)
    again = admitted(request(13, max_tokens=1, id=4, first=50))
    assert (again.target_len, again.draft_len) == (12, 12)


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


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_hit_is_as_long_as_what_its_entries_see_is_the_same(lookahead):
    """Prompts of two ids that part anywhere: an entry of the draft's may depend on the token after its own."""
    for seed in range(100):
        rng = np.random.default_rng(seed)
        ids = lambda n, rng=rng: rng.integers(0, 2, n).tolist()
        s, a, b, alike = (
            scheduler(num_pages=30, lookahead=lookahead),
            request(id=0),
            request(id=1),
            ids(rng.integers(14)),
        )
        a.prompt, b.prompt = ([*alike, *ids(rng.integers(1, 9))] for _ in range(2))
        s.add(a)
        s.admit()
        a.target_len = len(a.prompt) - 1
        a.draft_len = max(a.target_len - lookahead, 0)
        s.register(a)
        same = lambda n, a=a, b=b: a.prompt[: n + lookahead] == b.prompt[: n + lookahead]
        s.add(b)
        s.admit()
        for found, most in ((b.target_len, a.target_len), (b.draft_len, a.draft_len)):
            ends = range(PAGE, min(most, len(b.prompt) - 1) + 1, PAGE)
            assert found == PAGE * sum(same(end) for end in ends), (a.prompt, b.prompt)


def test_without_reuse_nothing_is_known():
    s = scheduler(reuse=False, num_pages=30)
    for i in range(2):
        r = request(13, id=i)
        s.add(r)
        s.admit()
        fill(s, r)
        assert (r.num_registered, s.allocator.page_of) == (0, {})


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
    assert copies == [(r, (third.pages[1], r.pages[1])) for r in (first, second)]


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
