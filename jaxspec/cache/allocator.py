"""The host's side of the page pool: a free list and reference counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class OutOfPages(RuntimeError):
    """The pool has fewer free pages than were asked for. Nothing was taken."""


class PageAllocator:
    """Hands out page ids 0..num_pages-1. A page is free again when its last holder releases it."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.free = deque(range(num_pages))
        self.references = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self.free)

    def allocate(self, count: int) -> list[int]:
        """count fresh pages, each with one reference. Raises OutOfPages, taking nothing, where they are not there."""
        if count > len(self.free):
            raise OutOfPages(f"{count} pages wanted, {len(self.free)} of {self.num_pages} free")
        pages = [self.free.popleft() for _ in range(count)]
        for page in pages:
            self.references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for each of these pages."""
        for page in pages:
            if not self.references[page]:
                raise ValueError(f"page {page} is free and cannot be shared")
            self.references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder less for each of these pages."""
        for page in pages:
            if not self.references[page]:
                raise ValueError(f"page {page} is released more often than it was taken")
            self.references[page] -= 1
            if not self.references[page]:
                self.free.append(page)
