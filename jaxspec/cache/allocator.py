"""The host's side of the page pool: a free list, reference counts, pages found again by their content."""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

import numpy as np

Digest = bytes


class OutOfPages(RuntimeError):
    """The pool has fewer free pages than were asked for. Nothing was taken."""


class PageAllocator:
    """Hands out page ids 0..num_pages-1. A page is free again when its last holder releases it.

    A free page whose content is known by its digest is kept for those who come with the same tokens, until the space
    is needed: the least recently released goes first.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.reset()

    def reset(self) -> None:
        """All pages are free, and none is known by its content."""
        self.free = deque(range(self.num_pages))
        self.references = [0] * self.num_pages
        self.kept: OrderedDict[int, None] = OrderedDict()  # free, but known by its digest; oldest first
        self.page_of: dict[Digest, int] = {}
        self.digest_of: dict[int, Digest] = {}

    @property
    def num_free(self) -> int:
        return len(self.free) + len(self.kept)

    def allocate(self, count: int) -> list[int]:
        """count fresh pages, each with one reference. Raises OutOfPages, taking nothing, where they are not there."""
        if count > self.num_free:
            raise OutOfPages(f"{count} pages wanted, {self.num_free} of {self.num_pages} free")
        while len(self.free) < count:
            page, _ = self.kept.popitem(last=False)
            del self.page_of[self.digest_of.pop(page)]
            self.free.append(page)
        pages = [self.free.popleft() for _ in range(count)]
        for page in pages:
            self.references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for each of these pages, which are held or kept."""
        for page in pages:
            if not self.references[page] and page not in self.kept:
                raise ValueError(f"page {page} is free and cannot be shared")
            self.kept.pop(page, None)
            self.references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder less for each of these pages. Of a row's pages the first are the last to be given away."""
        for page in reversed(list(pages)):
            if not self.references[page]:
                raise ValueError(f"page {page} is released more often than it was taken")
            self.references[page] -= 1
            if not self.references[page]:
                if page in self.digest_of:
                    self.kept[page] = None
                else:
                    self.free.append(page)

    def register(self, page: int, digest: Digest) -> bool:
        """Makes a held page known by its content, unless the page or the content is known already -> whether it did."""
        if new := digest not in self.page_of and page not in self.digest_of:
            self.page_of[digest], self.digest_of[page] = page, digest
        return new

    def lookup(self, digests: Iterable[Digest]) -> list[int]:
        """The pages of these digests, up to the first that is not known. No reference is taken."""
        pages = []
        for digest in digests:
            if digest not in self.page_of:
                break
            pages.append(self.page_of[digest])
        return pages


def digest(before: Digest, tokens: Sequence[int]) -> Digest:
    """Of a page that holds tokens, `before` being the digest of the page before it (b"" for the first)."""
    return hashlib.blake2b(before + np.asarray(tokens, np.int64).tobytes(), digest_size=16).digest()
