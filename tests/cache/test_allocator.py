"""The page pool: nothing is handed out twice, nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxspec.cache.allocator import OutOfPages, PageAllocator


class Pool(RuleBasedStateMachine):
    """Any order of allocate, share and release, against a list of holdings."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.holdings = PageAllocator(12), []

    @rule(count=st.integers(0, 14))
    def allocate(self, count):
        free = self.pool.num_free
        if count > free:
            with pytest.raises(OutOfPages, match=f"{count} pages wanted, {free} of 12 free"):
                self.pool.allocate(count)
            assert self.pool.num_free == free, "nothing was taken"
            return
        pages = self.pool.allocate(count)
        taken = {page for held in self.holdings for page in held}
        assert len(set(pages)) == count
        assert not taken & set(pages)
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
        self.pool.release(self.holdings.pop(data.draw(st.integers(0, len(self.holdings) - 1))))

    @invariant()
    def agrees(self):
        counts = [sum(page in held for held in self.holdings) for page in range(12)]
        assert self.pool.references == counts
        assert sorted(self.pool.free) == [page for page in range(12) if not counts[page]]


Pool.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, database=None)
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
@settings(deadline=None, database=None)
def test_everything_can_be_handed_out(count):
    pool = PageAllocator(count)
    assert sorted(pool.allocate(count)) == list(range(count))
    with pytest.raises(OutOfPages):
        pool.allocate(1)
