"""Pages of the target's layers with a sliding window, on the host. These layers have a smaller pool than all others.

A row has a page of that pool, its *window page*, only for pages that its next pass reads or writes in these layers.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from jaxspec.cache.allocator import Digest, OutOfPages, PageAllocator


class Row(Protocol):
    """A row, such as a request.

    pages: ids of its pages.
    window_pages: ids of their window pages, from the first page on.
    window_first: index of the first page whose window page the row holds.
    beginnings: lengths, in pages, of the beginnings that it has in common with earlier rows.
    target_len: position at which its next pass begins.
    """

    pages: list[int]
    window_pages: list[int]
    window_first: int
    beginnings: tuple[int, ...]
    target_len: int


class WindowPages:
    """A map from pages to window pages.

    A page whose content can be reused keeps its window page when no row holds it any more. If no window page is free,
    another page takes it. Pages that rows have passed lose theirs first, because the next text of a conversation begins
    with the end of a row. Then comes the page that was held least recently.

    allocator: allocator of the pages.
    page_size: number of positions of a page.
    num_pages: number of window pages; also the id in a block table for a page without one.
    window: largest window of the layers, in tokens.
    """

    def __init__(self, allocator: PageAllocator, page_size: int, num_pages: int, window: int) -> None:
        self.allocator = allocator
        self.num_pages = num_pages
        self.page_size = page_size
        self.reach = reach(window)
        self.reset()

    def reset(self) -> None:
        """Free all window pages."""
        self.of: dict[int, int] = {}  # window pages by page
        self.users: dict[int, int] = {}  # number of rows that hold each page's window page, by page
        self.free = deque(range(self.num_pages))
        self.idle: OrderedDict[int, None] = OrderedDict()  # pages that no row holds, in the order in which they go

    @property
    def num_free(self) -> int:
        """Number of window pages that no row holds."""
        return len(self.free) + len(self.idle)

    def first(self, length: int) -> int:
        """Return the index of the first page that a pass at position `length` may read."""
        return max(length - self.reach, 0) // self.page_size

    def cover(self, rows: Iterable[Row], ends: Iterable[tuple[Row, int]]) -> None:
        """Give rows window pages up to the position `end`, which their next pass or launch may write.

        Before that, all rows leave the window pages that they no longer read.
        """
        for row in rows:
            self.go_on(row, self.first(row.target_len))
        for row, end in ends:
            self.enter(row, end)

    def enter(self, row: Row, end: int) -> None:
        """Give a row window pages for all positions before `end` that its next pass may read or write."""
        first = self.first(row.target_len)
        self.go_on(row, first)
        row.window_pages += [self.num_pages] * (first - len(row.window_pages))
        row.window_pages += map(self.hold, row.pages[len(row.window_pages) : -(-end // self.page_size)])

    def go_on(self, row: Row, first: int) -> None:
        """Leave the window pages that a row has passed, which are those before its page of this index.

        They are the first to go to other pages, with two exceptions. The window before the end of a beginning that rows
        have in common may be used again. So may the last page that was passed, if the row soon ends.
        """
        common = {i for end in row.beginnings for i in range(self.first(end * self.page_size) - 1, end)}
        for i in range(row.window_first, min(first, len(row.window_pages))):
            passed = row.pages[i - 1]
            if i and i - 1 not in common and passed in self.idle:
                self.idle.move_to_end(passed, last=False)
            self.release(row.pages[i])
            row.window_pages[i] = self.num_pages
        row.window_first = max(row.window_first, first)

    def leave(self, row: Row) -> None:
        """Leave all window pages of a row that ends or loses its pages."""
        for page in row.pages[row.window_first : len(row.window_pages)]:
            self.release(page)

    def hold(self, page: int) -> int:
        """Return the page's window page, which it gets if it has none, and count one more row that holds it.

        Raises: OutOfPages if it has none, and rows hold all.
        """
        if page not in self.of:
            if not self.num_free:
                raise OutOfPages(f"all {self.num_pages} pages of layers with a window are in use: lower max_num_seqs")
            if not self.free:
                oldest, _ = self.idle.popitem(last=False)
                self.free.append(self.of.pop(oldest))
            self.of[page] = self.free.popleft()
        self.idle.pop(page, None)
        self.users[page] = self.users.get(page, 0) + 1
        return self.of[page]

    def release(self, page: int) -> None:
        """Count one row less that holds the page's window page."""
        self.users[page] -= 1
        if self.users[page]:
            return
        del self.users[page]
        if page in self.allocator.digest_of:
            self.idle[page] = None
        else:
            self.free.append(self.of.pop(page))

    def complete(self, pages: Sequence[int], length: int) -> bool:
        """Return whether all pages that a pass of a row at position `length` reads have a window page."""
        return all(page in self.of for page in pages[self.first(length) : -(-length // self.page_size)])

    def usable(self, pages: Sequence[int]) -> list[int]:
        """Return the longest beginning of `pages` from which a row can resume.

        All window pages that its next pass reads must still be there.
        """
        most = run = 0  # run: number of successive pages with a window page
        for count, page in enumerate(pages, 1):
            run = run + 1 if page in self.of else 0
            if run >= count - self.first(count * self.page_size):
                most = count
        return list(pages[:most])

    def supersedes(self, page: int, name: Digest) -> bool:
        """Return whether a page should replace the page that is registered under its digest.

        It should if it has a window page, and the registered page has none.
        """
        return page in self.of and self.allocator.page_of.get(name, page) not in self.of

    def copied(self, copies: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
        """Return copies of pages, (source, target), with the window pages of both. Release the source's."""
        found: list[tuple[int, ...]] = [(source, target, self.of[source], self.of[target]) for source, target in copies]
        for source, _ in copies:
            self.release(source)
        return found


def reach(window: int) -> int:
    """Return the largest number of positions before the target's next position that a pass reads with this window.

    An assistant's pass begins one position earlier than the target's, and its window is one position longer.
    """
    return window - 1 + 2


def needed(window: int, num_rows: int, ahead: int, pass_tokens: int, page_size: int) -> int:
    """Return the number of window pages with which num_rows rows never lack one.

    ahead: largest number of positions that a row may write in a launch.
    pass_tokens: largest number of prompt tokens in one pass, over all rows.
    """
    row = -(-(reach(window) + ahead) // page_size) + 2  # one more page at each end, which the row needs in part
    return num_rows * row + -(-pass_tokens // page_size)
