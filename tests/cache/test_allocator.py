"""The page pool: nothing is handed out twice, nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxspec.cache.allocator import OutOfPages, PageAllocator, digest

NAMES = st.sampled_from([b"a", b"b", b"c", b"d", b"e"])


class Pool(RuleBasedStateMachine):
    """Any order of allocate, share, release, register, lookup and forget, against lists and dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.holdings = PageAllocator(12), []
        self.names: dict[bytes, int] = {}
        self.kept: list[int] = []  # free but known, the next to go first

    @rule(count=st.integers(0, 14))
    def allocate(self, count):
        free = self.pool.num_free
        if count > free:
            with pytest.raises(OutOfPages, match=f"{count} pages are needed, {free} of 12 are free"):
                self.pool.allocate(count)
            assert self.pool.num_free == free, "nothing was taken"
            return
        num_evicted = max(count - (free - len(self.kept)), 0)
        evicted, self.kept = self.kept[:num_evicted], self.kept[num_evicted:]
        self.names = {name: page for name, page in self.names.items() if page not in evicted}
        pages = self.pool.allocate(count)
        taken = {page for held in self.holdings for page in held}
        assert len(set(pages)) == count
        assert not (taken | set(self.kept)) & set(pages)
        assert set(evicted) <= set(pages)
        self.holdings.append(pages)

    @precondition(lambda self: self.holdings)
    @rule(data=st.data())
    def share(self, data):
        pages = data.draw(st.sampled_from(self.holdings))
        self.pool.share(pages)
        self.holdings.append(list(pages))

    @precondition(lambda self: self.holdings)
    @rule(data=st.data())
    def release(self, data):
        gone = self.holdings.pop(data.draw(st.integers(0, len(self.holdings) - 1)))
        self.pool.release(gone)
        held = {page for pages in self.holdings for page in pages}
        self.kept += [page for page in reversed(gone) if page not in held and page in self.names.values()]

    @precondition(lambda self: any(self.holdings))
    @rule(data=st.data(), name=NAMES)
    def register(self, data, name):
        page = data.draw(st.sampled_from([page for held in self.holdings for page in held]))
        self.pool.register(page, name)
        if name not in self.names and page not in self.names.values():
            self.names[name] = page

    @rule(wanted=st.lists(NAMES, max_size=4, unique=True))
    def lookup_and_share(self, wanted):
        found = self.pool.lookup(wanted)
        known = [name in self.names for name in wanted]
        assert found == [self.names[name] for name in wanted[: [*known, False].index(False)]]
        self.pool.share(found)
        self.kept = [page for page in self.kept if page not in found]
        self.holdings.append(found)

    @rule()
    def reset(self):
        self.pool.reset()
        self.names, self.kept, self.holdings = {}, [], []

    @invariant()
    def agrees(self):
        counts = [sum(page in held for held in self.holdings) for page in range(12)]
        assert self.pool.references == counts
        assert list(self.pool.kept) == self.kept
        assert sorted([*self.pool.free, *self.kept]) == [page for page in range(12) if not counts[page]]
        assert self.pool.page_of == self.names
        assert self.pool.digest_of == {page: name for name, page in self.names.items()}


Pool.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestPool = Pool.TestCase


def test_a_page_is_free_when_its_last_holder_lets_go():
    pool = PageAllocator(3)
    pages = pool.allocate(2)
    pool.share(pages)
    pool.release(pages)
    assert pool.num_free == 1
    pool.release(pages)
    assert pool.num_free == 3


@pytest.mark.parametrize("wrong", [lambda pool: pool.release([1]), lambda pool: pool.release([0, 0])])
def test_a_double_release_raises(wrong):
    pool = PageAllocator(2)
    assert pool.allocate(1) == [0]
    with pytest.raises(ValueError, match=r"page \d is released more often than it was taken"):
        wrong(pool)


def test_a_free_page_cannot_be_shared():
    with pytest.raises(ValueError, match="page 2 is free and cannot be shared"):
        PageAllocator(3).share([2])


@given(st.integers(0, 40))
def test_everything_can_be_handed_out(count):
    pool = PageAllocator(count)
    assert sorted(pool.allocate(count)) == list(range(count))
    with pytest.raises(OutOfPages):
        pool.allocate(1)


def known(pool: PageAllocator, names: str) -> list[int]:
    """Pages of a row, held and known by one letter each."""
    pages = pool.allocate(len(names))
    for page, name in zip(pages, names, strict=True):
        pool.register(page, name.encode())
    return pages


def lookup(pool: PageAllocator, names: str) -> list[int]:
    return pool.lookup(name.encode() for name in names)


def test_known_pages_are_found_until_their_space_is_needed():
    pool = PageAllocator(5)
    pages = known(pool, "abc")
    pool.release(pages)
    assert pool.num_free == 5
    assert lookup(pool, "abc") == pages
    assert lookup(pool, "abxc") == pages[:2], "up to the first that is not known"
    assert lookup(pool, "xabc") == []
    pool.allocate(2)
    assert lookup(pool, "abc") == pages, "pages that nobody knows go first"
    pool.allocate(1)
    assert lookup(pool, "abc") == pages[:2], "of a row's pages the first are the last to go"


def test_the_least_recently_released_goes_first():
    pool = PageAllocator(4)
    a, b = known(pool, "ab"), known(pool, "xy")
    pool.release(a)
    pool.release(b)
    pool.share(lookup(pool, "ab"))
    pool.release(a)  # used again, so younger than b
    pool.allocate(2)
    assert (lookup(pool, "xy"), lookup(pool, "ab")) == ([], a)


def test_a_kept_page_is_held_again_when_it_is_shared():
    pool = PageAllocator(2)
    pages = known(pool, "ab")
    pool.release(pages)
    pool.share(pages[:1])
    assert pool.num_free == 1
    assert pool.allocate(1) == pages[1:]
    with pytest.raises(OutOfPages):
        pool.allocate(1)
    pool.release(pages[:1])
    assert lookup(pool, "a") == pages[:1]


def test_the_first_to_be_known_stays():
    """Another page with the same content, or another content for a known page, changes nothing."""
    pool = PageAllocator(3)
    one, two = pool.allocate(2)
    pool.register(one, b"a")
    pool.register(two, b"a")
    pool.register(one, b"b")
    assert (lookup(pool, "a"), lookup(pool, "b")) == ([one], [])
    pool.release([two, one])
    assert list(pool.kept) == [one]


def test_nothing_is_left_of_a_pool_that_was_reset():
    pool = PageAllocator(3)
    _held, kept = known(pool, "a"), known(pool, "b")
    pool.release(kept)
    pool.reset()
    assert (lookup(pool, "a"), lookup(pool, "b"), pool.num_free) == ([], [], 3)
    assert sorted(pool.allocate(3)) == [0, 1, 2]


def test_a_digest_names_a_page_and_all_before_it():
    first = digest(b"", [1, 2])
    assert first == digest(b"", (1, 2))
    assert (
        len({first, digest(b"", [2, 1]), digest(first, [1, 2]), digest(b"", [1]), digest(digest(b"", [1]), [2])}) == 5
    )
