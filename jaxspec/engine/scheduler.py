"""Which requests run, and which pages they hold: first come, first served, the youngest gives way."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator

from jaxspec.cache.allocator import PageAllocator, digest
from jaxspec.common.errors import CONTEXT_LENGTH_EXCEEDED, UserError
from jaxspec.engine.request import Request


class Scheduler:
    """Rows and pages for requests. A request gets pages for its prompt when it is admitted and more as it grows; where
    there are none left, the youngest running request is put back to wait and computed again later."""

    def __init__(
        self,
        allocator: PageAllocator,
        page_size: int,
        max_num_seqs: int,
        num_drafts: int = 0,
        *,
        reuse: bool = True,
        lookahead: int = 0,
        reach: int = 0,
        longest: int = 0,
    ) -> None:
        """num_drafts: K, the most drafts of a round; reach: positions after the pending token's that a round may write,
        where these are more, up to `longest` of a row."""
        self.allocator, self.page_size, self.lookahead = allocator, page_size, lookahead
        self.max_num_seqs, self.num_drafts, self.reuse = max_num_seqs, num_drafts, reuse
        self.reach, self.longest = max(reach, num_drafts), longest
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.undrafted: set[int] = set()  # known pages that the draft has not read
        self.num_preemptions = 0

    def pages_for(self, num_positions: int) -> int:
        return -(-num_positions // self.page_size)

    def most_positions(self, max_len: int) -> int:
        """Positions that a request of up to max_len tokens may come to hold."""
        return max(max_len + self.num_drafts, min(max_len + self.reach, self.longest))

    @property
    def longest_request(self) -> int:
        """The most tokens of a request that the whole pool has room for."""
        room = self.allocator.num_pages * self.page_size
        return max(room - (self.num_drafts if room >= self.longest else self.reach), 0)

    def most_pages(self, request: Request) -> int:
        """Pages that it may come to hold."""
        return self.pages_for(self.most_positions(request.max_len))

    def positions(self, request: Request, num_rounds: int) -> int:
        """Positions that num_rounds more rounds may write, the drafts of a last one included."""
        most = request.num_tokens + (num_rounds - 1) * (self.num_drafts + 1) + self.reach
        return min(most, self.most_positions(request.max_len))

    def add(self, request: Request) -> None:
        """Queues a request. See `check` for what is refused."""
        self.check(request.max_len)
        self.waiting.append(request)

    def check(self, max_len: int) -> None:
        """Raises UserError where the pool could never hold a request that may grow to max_len tokens."""
        need, room = self.pages_for(self.most_positions(max_len)), self.allocator.num_pages
        if need > room:
            raise UserError(
                f"a request of {max_len} tokens needs {need} pages of {self.page_size}, the pool has {room}, so this "
                f"model's maximum context length is {self.longest_request} tokens: lower max_tokens or raise num_pages",
                code=CONTEXT_LENGTH_EXCEEDED,
            )

    def reset(self, requests: Iterable[Request]) -> None:
        """These requests wait, oldest first, without pages; whatever was before."""
        self.num_preemptions += len(self.running)
        self.running.clear()
        self.allocator.reset()
        self.undrafted.clear()
        self.waiting = deque(sorted(requests, key=lambda request: request.id))
        for request in self.waiting:
            request.lose_pages()

    def admit(self) -> tuple[list[Request], list[tuple[Request, tuple[int, int]]]]:
        """Moves waiting requests to running while there are rows, and pages for what they hold and one more round
        -> (the newcomers, of pages to be copied for whom, and (source, target))."""
        admitted: list[Request] = []
        copies: list[tuple[Request, tuple[int, int]]] = []
        # A page for each that runs already and may grow, or they would soon push the newcomers out again.
        spare = sum(len(r.pages) < self.most_pages(r) for r in self.running) if self.waiting else 0
        for request in list(self.waiting):
            if len(self.running) >= self.max_num_seqs:
                break
            sibling = self.sibling(request)
            if sibling is not None and not sibling.prefilled:
                continue  # it will share what is being computed
            known = self.known_pages(request) if sibling is None else self.common_pages(request, sibling)
            self.allocator.share(known)
            need = self.pages_for(self.positions(request, 1)) - len(known)
            if need + spare > self.allocator.num_free:
                self.allocator.release(known)
                break
            self.waiting.remove(request)
            request.pages = known + self.allocator.allocate(need)
            drafted = next((i for i, page in enumerate(known) if page in self.undrafted), len(known))
            request.target_len, request.draft_len = len(known) * self.page_size, drafted * self.page_size
            request.num_registered = len(known) if sibling is None else 0
            if sibling is not None:
                source = {target: page for _, (page, target) in copies}
                copies += [(request, copy) for copy in self.share_prompt(request, sibling, len(known), source)]
            now = time.perf_counter()
            request.times.admitted = request.times.admitted or now
            if request.prefilled:
                request.times.prefilled = request.times.prefilled or now
            spare += len(request.pages) < self.most_pages(request)
            self.running.append(request)
            admitted.append(request)
        return admitted, copies

    def sibling(self, request: Request) -> Request | None:
        """Another sample of the same prompt that runs, one that has its prompt in the caches if there is any."""
        if request.output or request.wants_prompt_logprobs:
            return None
        running = [s for s in self.running if s.samples is request.samples]  # n may be large, the rows are few
        return next((s for s in running if s.prefilled), running[0] if running else None)

    def common_pages(self, request: Request, sibling: Request) -> list[int]:
        return sibling.pages[: (len(request.prompt) - 1) // self.page_size]

    def share_prompt(
        self, request: Request, sibling: Request, num_shared: int, source: dict[int, int]
    ) -> list[tuple[int, int]]:
        """The request begins where its sibling's prompt ends; the page that ends it only in part is copied. source: of
        pages that are still to be filled by a copy of the same moment."""
        request.target_len = len(request.prompt) - 1
        request.draft_len = min(sibling.draft_len, request.target_len)
        partial = request.target_len % self.page_size
        if not partial:
            return []
        page = sibling.pages[num_shared]
        return [(source.get(page, page), request.pages[num_shared])]

    def known_pages(self, request: Request) -> list[int]:
        """Pages in the pool that hold the request's first tokens already. The pending token is always left over."""
        if not self.reuse or request.wants_prompt_logprobs:
            return []
        full = (request.num_tokens - 1) // self.page_size
        return self.allocator.lookup(self.digests(request, full))

    def digests(self, request: Request, count: int, first: int = 0) -> Iterator[bytes]:
        """Of the request's first `count` full pages, or from the page `first` on, each computed once. A page's digest
        covers all tokens that its content depends on: with a lookahead some of the next page's too, up to the pending
        one at most."""
        tokens = request.tokens
        for i in range(first, count):
            if i == len(request.digests):
                page = tokens[i * self.page_size : (i + 1) * self.page_size + self.lookahead]
                request.digests.append(digest(request.digests[-1] if i else b"", page))
            yield request.digests[i]

    def register(self, request: Request) -> None:
        """Makes the request's full pages known, and which of them the draft has read."""
        full, drafted = (length // self.page_size for length in (request.target_len, request.draft_len))
        if not self.reuse or (full <= request.num_registered and drafted <= request.num_drafted):
            return
        known = request.num_registered
        for page, name in zip(request.pages[known:full], self.digests(request, full, known), strict=True):
            if self.allocator.register(page, name):
                self.undrafted.add(page)
        self.undrafted.difference_update(request.pages[:drafted])
        request.num_registered, request.num_drafted = full, drafted

    def grow(self, num_rounds: int) -> list[Request]:
        """Pages for the next rounds of all running requests: for one round at least, preempting the youngest where
        there are too few, then, oldest first, for as many of num_rounds as there are. Returns who was preempted."""
        preempted: list[Request] = []
        for request in list(self.running):
            while request.pages and not self.extend(request, self.positions(request, 1)):
                preempted.append(self.preempt(self.running[-1]))
        for request in self.running:
            if not self.extend(request, self.positions(request, num_rounds)):
                self.extend(request, len(request.pages) * self.page_size + self.allocator.num_free * self.page_size)
        return preempted

    def extend(self, request: Request, num_positions: int) -> bool:
        """Lets the request hold num_positions, if there are pages for all of them."""
        need = max(self.pages_for(num_positions) - len(request.pages), 0)
        if need > self.allocator.num_free:
            return False
        request.pages += self.allocator.allocate(need)
        return True

    def preempt(self, request: Request) -> Request:
        """Back to the head of the queue, without pages; what it has said stays."""
        self.running.remove(request)
        self.drop_pages(request)
        self.waiting.appendleft(request)
        self.num_preemptions += 1
        return request

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it is, and frees its pages."""
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
                break
        self.drop_pages(request)

    def drop_pages(self, request: Request) -> None:
        self.allocator.release(request.pages)
        request.lose_pages()
