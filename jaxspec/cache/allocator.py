"""The allocator of KV cache pages, on the host: free pages, reference counts, and an index of pages by content."""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

import numpy as np

Digest = bytes


class OutOfPages(RuntimeError):
    """An attempt to allocate more pages than are free. No page is allocated."""


class PageAllocator:
    """An allocator of page ids 0..num_pages-1. A page becomes free when the last request that holds it releases it.

    A free page whose content is registered by a digest keeps its content for later requests with the same tokens. Such
    pages are allocated anew only if no other page is free, the least recently released one first.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.reset()

    def reset(self) -> None:
        """Free all pages, and forget the digests of their contents."""
        self.free = deque(range(self.num_pages))
        self.references = [0] * self.num_pages
        self.kept: OrderedDict[int, None] = OrderedDict()  # free pages with a digest, the least recently released first
        self.page_of: dict[Digest, int] = {}
        self.digest_of: dict[int, Digest] = {}

    @property
    def num_free(self) -> int:
        """Number of pages that no request holds."""
        return len(self.free) + len(self.kept)

    def allocate(self, count: int) -> list[int]:
        """Return `count` free pages, which now have one reference each.

        Raises: OutOfPages if fewer pages are free; then no page is allocated.
        """
        if count > self.num_free:
            raise OutOfPages(f"{count} pages are needed, {self.num_free} of {self.num_pages} are free")
        while len(self.free) < count:
            self.forget(self.digest_of[next(iter(self.kept))])
        pages = [self.free.popleft() for _ in range(count)]
        for page in pages:
            self.references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add one reference to each of these pages.

        Raises: ValueError for a free page whose content is not registered by a digest.
        """
        for page in pages:
            if not self.references[page] and page not in self.kept:
                raise ValueError(f"page {page} is free and cannot be shared")
            self.kept.pop(page, None)
            self.references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove one reference from each of these pages, the last page first.

        The first pages of a row are therefore overwritten last. This order helps reuse, because `lookup` finds a page
        only together with all pages before it.

        Raises: ValueError for a page without a reference.
        """
        for page in reversed(list(pages)):
            if not self.references[page]:
                raise ValueError(f"page {page} is released more often than it was taken")
            self.references[page] -= 1
            if self.references[page]:
                continue
            if page in self.digest_of:
                self.kept[page] = None
            else:
                self.free.append(page)

    def register(self, page: int, digest: Digest) -> bool:
        """Register the digest of a page's content, unless the page or the digest is registered already.

        Return whether the page was registered by this call.
        """
        if digest in self.page_of or page in self.digest_of:
            return False
        self.page_of[digest] = page
        self.digest_of[page] = digest
        return True

    def forget(self, digest: Digest) -> None:
        """Remove a registered digest. Its page, if it is free, then counts as one without content."""
        page = self.page_of.pop(digest)
        del self.digest_of[page]
        if page in self.kept:
            del self.kept[page]
            self.free.append(page)

    def lookup(self, digests: Iterable[Digest]) -> list[int]:
        """Return the pages with these digests, up to the first unknown digest. Their reference counts do not change."""
        pages = []
        for digest in digests:
            if digest not in self.page_of:
                break
            pages.append(self.page_of[digest])
        return pages


def digest(before: Digest, tokens: Sequence[int]) -> Digest:
    """Return the digest of the content of a page with these tokens.

    before: digest of the row's preceding page; b"" for a row's first page.
    """
    return hashlib.blake2b(before + np.asarray(tokens, np.int64).tobytes(), digest_size=16).digest()
