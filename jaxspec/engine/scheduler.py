"""Which requests run: first come, first served, as rows and pages allow."""

from __future__ import annotations

from collections import deque

from jaxspec.cache.allocator import PageAllocator
from jaxspec.engine.request import Request


class Scheduler:
    """A request is admitted with all the pages it can ever need, so it never waits for pages once it runs."""

    def __init__(self, allocator: PageAllocator, page_size: int, max_num_seqs: int, num_drafts: int = 0) -> None:
        self.allocator, self.page_size = allocator, page_size
        self.max_num_seqs, self.num_drafts = max_num_seqs, num_drafts
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def pages_needed(self, request: Request) -> int:
        """For prompt, output and the drafts of a last round; alike for rows that draft less, so that shapes are too."""
        return -(-(request.max_len + self.num_drafts) // self.page_size)

    def add(self, request: Request) -> None:
        """Queues a request. Raises ValueError where the pool could never hold it."""
        need = self.pages_needed(request)
        if need > self.allocator.num_pages:
            raise ValueError(
                f"a request of {request.max_len} tokens needs {need} pages of {self.page_size}, the pool has "
                f"{self.allocator.num_pages}: lower max_tokens or raise num_pages"
            )
        self.waiting.append(request)

    def admit(self) -> list[Request]:
        """Moves waiting requests to running while there are rows and pages; returns the newcomers."""
        admitted = []
        while self.waiting and len(self.running) < self.max_num_seqs:
            if self.pages_needed(self.waiting[0]) > self.allocator.num_free:
                break
            request = self.waiting.popleft()
            request.pages = self.allocator.allocate(self.pages_needed(request))
            self.running.append(request)
            admitted.append(request)
        return admitted

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it is, and frees its pages."""
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        self.allocator.release(request.pages)
        request.pages = []
