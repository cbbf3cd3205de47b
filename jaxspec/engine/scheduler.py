"""The scheduler of rows and pages: it serves the oldest requests first and preempts the youngest request."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator

from jaxspec.cache.allocator import PageAllocator, digest
from jaxspec.cache.windows import WindowPages
from jaxspec.common.errors import CONTEXT_LENGTH_EXCEEDED, UserError
from jaxspec.engine.grammar_pool import GrammarPool
from jaxspec.engine.request import Request


class Scheduler:
    """A scheduler that gives rows of the batch, and pages of the KV caches, to requests.

    A request gets pages for its prompt when it is admitted, and more pages as it grows. If no pages are free, the
    youngest running request is preempted: it loses its pages and waits again, and its tokens are recomputed later.

    max_num_seqs: maximum number of running requests.
    num_drafts: K, the maximum number of draft tokens of a round.
    reuse: whether requests with the same first tokens use the same pages.
    lookahead: number of later tokens on which an entry of the draft's cache depends (`Drafter.lookahead`).
    reach: maximum number of positions that a round may write after the row's last token, if more than num_drafts.
    longest: limit, in positions, up to which `reach` may extend a row; num_drafts may extend it further.
    grammars: pool of the tables of the requests' grammars.
    copies: whether a further sample of a prompt may start with the prompt's pages: all full ones, and a copy of the
      last one, which another sample may have written further.
    window_pool: as `CacheLayout.window_pool` of the target's cache.
    """

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
        copies: bool = True,
        grammars: GrammarPool | None = None,
        window_pool: tuple[int, int] | None = None,
    ) -> None:
        self.allocator = allocator
        self.page_size = page_size
        self.lookahead = lookahead
        self.max_num_seqs = max_num_seqs
        self.num_drafts = num_drafts
        self.reuse = reuse
        self.reach = max(reach, num_drafts)
        self.longest = longest
        self.copies = copies
        self.grammars = grammars or GrammarPool(0, 0)
        self.windows = WindowPages(allocator, page_size, *window_pool) if window_pool else None
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # running requests, oldest first
        self.undrafted: set[int] = set()  # registered pages whose tokens the draft has not read
        self.num_preemptions = 0

    @property
    def ready(self) -> list[Request]:
        """The running requests that can decode: their prompts are in the caches, or queued for prefill."""
        return [r for r in self.running if r.prefilled and r.finish_reason is None]

    def pages_for(self, num_positions: int) -> int:
        """Return the number of pages that hold this many positions."""
        return -(-num_positions // self.page_size)

    def most_positions(self, max_len: int) -> int:
        """Return the maximum number of positions, draft tokens included, that a request of max_len tokens may write."""
        return max(max_len + self.num_drafts, min(max_len + self.reach, self.longest))

    @property
    def longest_request(self) -> int:
        """The maximum number of tokens of a request that fits in the whole pool."""
        room = self.allocator.num_pages * self.page_size
        reserved = self.num_drafts if room >= self.longest else self.reach
        return max(room - reserved, 0)

    def most_pages(self, request: Request) -> int:
        """Return the maximum number of pages that the request may hold."""
        return self.pages_for(self.most_positions(request.max_len))

    def positions(self, request: Request, num_rounds: int) -> int:
        """Return how many positions the request may need in num_rounds more rounds, all draft tokens included."""
        most = request.num_tokens + (num_rounds - 1) * (self.num_drafts + 1) + self.reach
        return min(most, self.most_positions(request.max_len))

    def add(self, request: Request) -> None:
        """Queue a request. Raises UserError as `check` does."""
        self.check(request.max_len)
        self.waiting.append(request)

    def check(self, max_len: int) -> None:
        """Raise UserError if the pool could never hold a request that may grow to max_len tokens."""
        need = self.pages_for(self.most_positions(max_len))
        room = self.allocator.num_pages
        if need > room:
            raise UserError(
                f"a request of {max_len} tokens needs {need} pages of {self.page_size}, the pool has {room}, so this "
                f"model's maximum context length is {self.longest_request} tokens: lower max_tokens or raise num_pages",
                code=CONTEXT_LENGTH_EXCEEDED,
            )

    def reset(self, requests: Iterable[Request]) -> None:
        """Drop all queues and free all pages. Then queue these requests, the oldest first."""
        self.num_preemptions += len(self.running)
        self.running.clear()
        self.allocator.reset()
        self.grammars.reset()
        if self.windows:
            self.windows.reset()
        self.undrafted.clear()
        self.waiting = deque(sorted(requests, key=lambda request: request.id))
        for request in self.waiting:
            request.lose_pages()

    def admit(self) -> tuple[list[Request], list[tuple[Request, tuple[int, ...]]]]:
        """Move waiting requests to running while there are free rows, and pages for their tokens and one more round.

        A request with a grammar also needs room for its table in the pool of grammars.

        Return the admitted requests, and the pages to copy for them as (request, (source page, target page)). If there
        are window pages, those of both pages follow.
        """
        admitted: list[Request] = []
        copies: list[tuple[Request, tuple[int, int]]] = []
        # Spare one page for each running request that may grow, so that none soon preempts an admitted request.
        spare = sum(len(r.pages) < self.most_pages(r) for r in self.running) if self.waiting else 0
        is_full = False  # whether a request waits for room in the pool of grammars; later ones must not overtake it
        for request in list(self.waiting):
            if len(self.running) >= self.max_num_seqs:
                break
            sibling = self.sibling(request)
            if sibling is not None and not sibling.prefilled:
                continue  # wait for the sibling's prefill, whose pages this request will share
            known = self.known_pages(request) if sibling is None else self.common_pages(request, sibling)
            self.allocator.share(known)
            need = self.pages_for(self.positions(request, 1)) - len(known)
            has_room = need + spare <= self.allocator.num_free
            if has_room and request.automaton:
                request.grammar_at = None if is_full else self.grammars.hold(request.automaton)
                is_full = request.grammar_at is None
            if not has_room or (request.automaton and is_full):
                self.allocator.release(known)
                if not has_room:
                    break
                continue  # requests without a grammar do not wait for the pool of grammars
            self.waiting.remove(request)
            request.pages = known + self.allocator.allocate(need)
            num_drafted = next((i for i, page in enumerate(known) if page in self.undrafted), len(known))
            request.target_len = len(known) * self.page_size
            request.draft_len = num_drafted * self.page_size
            request.num_registered = len(known) if sibling is None else 0
            if sibling is not None:
                source = {target: page for _, (page, target) in copies}
                copies += [(request, copy) for copy in self.share_prompt(request, sibling, len(known), source)]
            if self.windows:
                self.windows.enter(request, request.target_len)
            now = time.perf_counter()
            request.times.admitted = request.times.admitted or now
            if request.prefilled:
                request.times.prefilled = request.times.prefilled or now
            spare += len(request.pages) < self.most_pages(request)
            self.running.append(request)
            admitted.append(request)
        if self.windows:
            owners, pages = [request for request, _ in copies], [copy for _, copy in copies]
            return admitted, list(zip(owners, self.windows.copied(pages), strict=True))
        return admitted, list(copies)

    def sibling(self, request: Request) -> Request | None:
        """Return another running sample of the same prompt; None if there is none, or if pages cannot be shared.

        A sample whose prompt is already in the caches is preferred.
        """
        if request.output or request.wants_prompt_logprobs or not self.copies:
            return None
        running = [s for s in self.running if s.samples is request.samples]  # request.samples may be a long list
        if windows := self.windows:
            end = len(request.prompt) - 1
            running = [s for s in running if not s.prefilled or windows.complete(s.pages, end)]
        return next((s for s in running if s.prefilled), running[0] if running else None)

    def common_pages(self, request: Request, sibling: Request) -> list[int]:
        """Return the sibling's pages that the prompt fills without its last token, which the next round reads."""
        return sibling.pages[: (len(request.prompt) - 1) // self.page_size]

    def share_prompt(
        self, request: Request, sibling: Request, num_shared: int, source: dict[int, int]
    ) -> list[tuple[int, int]]:
        """Let the request start at the prompt's last token.

        Its sibling, another sample of the prompt, has the keys and values of the tokens before it in the caches.

        Return [(source page, target page)] for the page that the prompt fills only in part, or [].

        num_shared: number of full pages that the request shares with its sibling.
        source: for each page that another copy of this step will fill, the page that it is copied from.
        """
        request.target_len = len(request.prompt) - 1
        request.draft_len = min(sibling.draft_len, request.target_len)
        partial = request.target_len % self.page_size
        if not partial:
            return []
        page = sibling.pages[num_shared]
        copy = source.get(page, page), request.pages[num_shared]
        if self.windows:  # the source is held until all copies are known, so that no other page takes its window page
            self.windows.hold(copy[0])
        return [copy]

    def known_pages(self, request: Request) -> list[int]:
        """Return the pages of the pool that already hold the request's first tokens, never its last token."""
        if not self.reuse or request.wants_prompt_logprobs:
            return []
        full = (request.num_tokens - 1) // self.page_size
        pages = self.allocator.lookup(self.digests(request, full))
        usable = self.windows.usable(pages) if self.windows else pages
        request.beginnings = len(usable), len(pages)
        return usable

    def digests(self, request: Request, count: int, first: int = 0) -> Iterator[bytes]:
        """Yield the digests of the request's full pages with index first <= i < count. Each digest is computed once.

        A page's digest covers all tokens that its content depends on. With a lookahead they include tokens of the next
        page.
        """
        tokens = request.tokens
        for i in range(first, count):
            if i == len(request.digests):
                page = tokens[i * self.page_size : (i + 1) * self.page_size + self.lookahead]
                request.digests.append(digest(request.digests[-1] if i else b"", page))
            yield request.digests[i]

    def register(self, request: Request) -> None:
        """Register the request's full pages for reuse by other requests. Record which of them the draft has read."""
        full = request.target_len // self.page_size
        drafted = request.draft_len // self.page_size
        if not self.reuse or (full <= request.num_registered and drafted <= request.num_drafted):
            return
        known = request.num_registered
        for page, name in zip(request.pages[known:full], self.digests(request, full, known), strict=True):
            if self.windows and self.windows.supersedes(page, name):
                self.allocator.forget(name)
            if self.allocator.register(page, name):
                self.undrafted.add(page)
        self.undrafted.difference_update(request.pages[:drafted])
        request.num_registered = full
        request.num_drafted = drafted

    def grow(self, num_rounds: int) -> list[Request]:
        """Allocate pages for the next rounds of all running requests. Return the preempted requests.

        Each request gets pages for one round. If there are too few pages, the youngest request is preempted. Pages that
        are still free then go to the oldest requests, for up to num_rounds rounds.
        """
        preempted: list[Request] = []
        for request in list(self.running):
            while request.pages and not self.extend(request, self.positions(request, 1)):
                preempted.append(self.preempt(self.running[-1]))
        for request in self.running:
            if not self.extend(request, self.positions(request, num_rounds)):
                self.extend(request, len(request.pages) * self.page_size + self.allocator.num_free * self.page_size)
        written = num_rounds * (self.num_drafts + 1)
        self.cover([(request, request.target_len + written) for request in self.running if request.prefilled])
        return preempted

    def cover(self, ends: Iterable[tuple[Request, int]]) -> None:
        """Give requests window pages up to the position `end`, which their next pass or launch may write."""
        if self.windows:
            self.windows.cover(self.running, ends)

    def extend(self, request: Request, num_positions: int) -> bool:
        """Allocate pages until the request's pages hold num_positions.

        Return False, and allocate no pages, if too few pages are free.
        """
        need = max(self.pages_for(num_positions) - len(request.pages), 0)
        if need > self.allocator.num_free:
            return False
        request.pages += self.allocator.allocate(need)
        return True

    def preempt(self, request: Request) -> Request:
        """Move the running request to the head of the waiting queue. It loses its pages and keeps its output."""
        self.running.remove(request)
        self.drop_pages(request)
        self.waiting.appendleft(request)
        self.num_preemptions += 1
        return request

    def remove(self, request: Request) -> None:
        """Remove a request from the running or the waiting ones, and free its pages."""
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
                break
        self.drop_pages(request)

    def drop_pages(self, request: Request) -> None:
        """Release the request's pages, and its grammar's table."""
        if request.automaton and request.grammar_at is not None:
            self.grammars.release(request.automaton)
        if self.windows:
            self.windows.leave(request)
        self.allocator.release(request.pages)
        request.lose_pages()
