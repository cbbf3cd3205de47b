"""Pages of layers with a window, on the host alone: random schedules against a model of what these layers hold."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from jaxspec.cache import windows
from jaxspec.cache.allocator import OutOfPages, PageAllocator
from jaxspec.cache.windows import WindowPages
from jaxspec.engine import batch
from jaxspec.engine.request import Request
from jaxspec.engine.scheduler import Scheduler
from tests.engine.schedules import PAGE, K, fill, request, samples
from tests.support.sizes import cases

WINDOW, ROUNDS, ROWS = 9, 3, 5
SHAPE = batch.ChunkShape(4, 8)
NEEDED = windows.needed(WINDOW, ROWS, ROUNDS * (K + 1), SHAPE.rows * SHAPE.width, PAGE)


def scheduler(num_pages: int = 400, num_window_pages: int = NEEDED, rows: int = ROWS, **options) -> Scheduler:
    pool = num_window_pages, WINDOW
    return Scheduler(PageAllocator(num_pages), PAGE, rows, K, window_pool=pool, **options)


def admitted(s: Scheduler, r: Request) -> Request:
    s.add(r)
    assert s.admit()[0] == [r]
    return r


def read(s: Scheduler, r: Request, end: int | None = None) -> None:
    """Prefill its tokens before `end`, by default all but the pending one."""
    s.cover([(r, r.num_tokens - 1 if end is None else end)])
    r.target_len = r.num_tokens - 1 if end is None else end
    s.register(r)


class Layers:
    """A model of the layers with a window: for each position of each window page the text that it was computed from."""

    def __init__(self, s: Scheduler, seed: int) -> None:
        self.s, self.rng, self.held = s, random.Random(seed), {}
        self.counts: Counter[str] = Counter()
        self.turn = 0

    def text(self, tokens: list[int], at: int) -> int:
        return hash(tuple(tokens[: at + 1]))

    def run(self, table: list[int], tokens: list[int], start: int, end: int) -> None:
        """One pass: it reads what is within the window of an assistant, and writes."""
        for at in range(max(start - WINDOW - 1, 0), start):
            assert self.held[table[at // PAGE], at % PAGE] == self.text(tokens, at), f"position {at} of {start}"
        for at in range(start, end):
            assert table[at // PAGE] < self.s.windows.num_pages
            self.held[table[at // PAGE], at % PAGE] = self.text(tokens, at)

    def admit(self) -> None:
        found, copies = self.s.admit()
        self.counts["reused"] += sum(r.target_len > 0 for r in found)
        self.counts["copies"] += len(copies)
        for first in range(0, len(copies), 2):  # several runs of the program, each of which reads before it writes
            some = [copy[2:] for _, copy in copies[first : first + 2]]
            new = {(to, i): self.held.get((source, i)) for source, to in some for i in range(PAGE)}
            self.held |= new

    def prefill(self):
        """Plan a pass. Return a function that runs it."""
        unread = [r for r in self.s.running if not r.prefilled]
        pieces = batch.pieces(unread, [r.target_len for r in unread], SHAPE, turn=self.turn)
        self.turn += 1
        self.s.cover([(r, start + length) for r, start, length in pieces])
        planned = [(list(r.window_pages), r.tokens, start, start + length) for r, start, length in pieces]
        for r, _, length in pieces:
            r.target_len += length
        for r in dict.fromkeys(r for r, *_ in pieces):
            self.s.register(r)
        return lambda: [self.run(*each) for each in planned]

    def launch(self) -> None:
        rounds = self.rng.randint(1, ROUNDS)
        self.counts["preempted"] += len(self.s.grow(rounds))
        rows = [r for r in self.s.ready if r.pages]
        tables = [list(r.window_pages) for r in rows]
        queued = self.prefill() if self.rng.random() < 0.3 else lambda: None
        for r, table in zip(rows, tables, strict=True):
            for _ in range(rounds):
                start = r.num_tokens - 1
                if r.num_tokens >= r.max_len or start + K >= len(r.pages) * PAGE:
                    break
                drafts = [self.rng.randrange(100, 200) for _ in range(K)]
                self.run(table, r.tokens + drafts, start, start + 1 + K)
                accepted = self.rng.randint(0, K)
                new = [*drafts[:accepted], self.rng.randrange(50)]
                r.output += new[: r.max_len - r.num_tokens]
            r.target_len = r.num_tokens - 1
        queued()
        for r in rows:
            self.s.register(r)
            if r.num_tokens >= r.max_len or self.rng.random() < 0.05:
                self.s.remove(r)

    def step(self) -> None:
        self.admit()
        for _ in range(self.rng.randint(0, 3)):
            self.prefill()()
        self.launch()
        w = self.s.windows
        users = Counter(page for r in self.s.running for page in r.pages[r.window_first : len(r.window_pages)])
        assert w.users == users
        assert w.num_free + len(users) == w.num_pages
        assert sorted([*w.free, *w.of.values()]) == list(range(w.num_pages))
        assert set(w.idle) == set(w.of) - set(users)


@cases(
    ("seed", "reuse", "num_pages"),
    [(i, i % 3 > 0, 400 if i % 2 else 60) for i in range(24)],
    quick=[(1, True, 400), (2, True, 60)],
)
def test_every_pass_reads_what_was_computed_for_its_text(seed, reuse, num_pages):
    """And the pool never lacks a page, whatever the order of passes, launches, samples, ends and preemptions."""
    s = scheduler(num_pages, reuse=reuse)
    layers, rng = Layers(s, seed), random.Random(seed)
    begins = [[rng.randrange(50) for _ in range(90)] for _ in range(3)]
    count = 0
    for _ in range(300):
        if len(s.waiting) < 4:
            prompt = begins[rng.randrange(3)][: rng.randint(1, 90)] + [
                rng.randrange(50) for _ in range(rng.randint(0, 9))
            ]
            found = samples(rng.choice([1, 1, 2, 4]), 1, max_tokens=rng.randint(1, 60))
            for r in found:
                r.id, r.prompt, r.max_len = count, prompt, len(prompt) + r.params.max_tokens
                count += 1
                s.add(r)
        layers.step()
    assert count > 100
    assert layers.counts["copies"] > 10
    assert (layers.counts["reused"] > 20) >= reuse
    assert (layers.counts["preempted"] > 10) == (num_pages == 60)
    for r in [*s.running, *s.waiting]:
        s.remove(r)
    assert (s.windows.num_free, s.windows.users) == (NEEDED, {})


def test_a_row_holds_its_window_and_what_it_writes():
    s = scheduler()
    r = admitted(s, request(100, max_tokens=9))
    assert r.window_pages == []
    read(s, r, 32)
    assert (r.window_first, len(r.window_pages)) == (0, 8)
    s.cover([])
    first = (32 - WINDOW - 1) // PAGE
    assert (r.window_first, len(s.windows.users)) == (first, 8 - first)
    assert r.window_pages[:first] == [NEEDED] * first
    read(s, r)
    s.grow(2)
    assert r.window_first == (99 - WINDOW - 1) // PAGE
    assert len(r.window_pages) == -(-(99 + 2 * (K + 1)) // PAGE)


def test_a_beginning_is_reused_with_the_window_before_its_end():
    """A longer one whose window is not whole is not, nor any if none is."""
    s = scheduler(rows=9, num_window_pages=8)
    r = admitted(s, request(21, max_tokens=1))
    read(s, r)
    s.remove(r)
    w = s.windows
    assert len(w.idle) == 5, "what can be found again keeps its window page"
    again = admitted(s, request(21, max_tokens=1, id=1))
    assert again.target_len == 20
    assert len(w.users) == 3, "positions 10 to 19"
    s.remove(again)
    kept = s.allocator.lookup(s.digests(request(21), 5))
    for gone, usable in ((4, 4), (1, 1), (0, 0)):  # without page 4, then 1 too, then 0 too
        page = kept[gone]
        w.idle.pop(page)
        w.free.append(w.of.pop(page))
        assert w.usable(kept) == kept[:usable]


def test_a_page_that_lost_its_window_page_is_superseded():
    """Otherwise what everybody begins with would never be reused again."""
    s = scheduler(num_window_pages=40)
    for id in range(3):
        r = admitted(s, request(21, max_tokens=1, id=id))
        assert r.target_len == (0, 0, 20)[id]
        read(s, r)
        s.remove(r)
        if id == 0:
            for page in list(s.windows.idle):
                s.windows.idle.pop(page)
                s.windows.free.append(s.windows.of.pop(page))
    assert s.allocator.num_free == 400


def test_a_sample_shares_only_what_is_left_of_the_prompt():
    """A sample reads its prompt itself if its sibling has gone on and lost the first window pages."""
    for reuse in (True, False):
        s = scheduler(rows=1, reuse=reuse)
        first, second = samples(2, 30, max_tokens=60)
        s.add(first)
        s.add(second)
        s.admit()
        read(s, first)
        s.grow(15)
        first.output += range(50, 90)
        first.target_len = first.num_tokens - 1
        s.register(first)
        s.cover([])
        s.max_num_seqs = 2
        (found,), copies = s.admit()
        assert found is second
        if reuse:
            ((_, (source, target, from_window, to_window)),) = copies
            assert (source, second.target_len) == (first.pages[7], 29)
            assert (from_window, to_window) == (s.windows.of[source], s.windows.of[target])
        else:
            assert (copies, second.target_len) == ([], 0)


def test_a_source_of_a_copy_keeps_its_window_page_until_all_copies_are_known():
    s = scheduler(rows=4, num_window_pages=7)
    first, second, third = samples(3, 12, max_tokens=1)
    for r in (first, second, third):
        s.add(r)
    s.admit()
    read(s, first)
    _, copies = s.admit()
    assert [copy[2] for _, copy in copies] == [first.window_pages[2]] * 2
    assert len({copy[3] for _, copy in copies}) == 2
    assert s.windows.users[first.pages[2]] == 1, "only its row holds it now"


def test_all_are_in_use():
    pool = WindowPages(PageAllocator(9), PAGE, 2, WINDOW)
    assert [pool.hold(page) for page in (5, 3, 5)] == [0, 1, 0]
    with pytest.raises(OutOfPages, match="all 2 pages of layers with a window are in use: lower max_num_seqs"):
        pool.hold(7)
    pool.release(5)
    pool.release(5)
    assert pool.hold(7) == 0


def test_nothing_is_left_after_a_reset():
    s = scheduler()
    r = admitted(s, request(40))
    fill(s, r)
    read(s, r)
    s.reset([r])
    assert (s.windows.num_free, s.windows.of, r.window_pages, r.window_first) == (NEEDED, {}, [], 0)


def test_the_least_recently_left_goes_first():
    s = scheduler(num_window_pages=12)
    first, second, again = (request(13, max_tokens=1, id=id, first=start) for id, start in enumerate((0, 60, 0)))
    for r in (first, second, again):
        admitted(s, r)
        read(s, r)
        s.remove(r)
    for page in s.allocator.allocate(8):
        s.windows.hold(page)
    known = [list(s.digests(r, 3)) for r in (first, second)]
    assert [len(s.windows.usable(s.allocator.lookup(names))) for names in known] == [3, 0]


def text_of(s: Scheduler, r: Request, step: int = 16) -> int:
    """Let a row read its prompt and end after one more token. Return how many tokens it reused."""
    reused = admitted(s, r).target_len
    while not r.prefilled:
        read(s, r, min(r.target_len + step, r.num_tokens - 1))
    s.grow(1)
    r.output.append(7)
    r.target_len += 1
    s.register(r)
    s.remove(r)
    return reused


def test_what_a_long_prompt_passes_goes_before_the_ends_of_other_conversations():
    """Each of 32 texts passes 25 pages, of which the next turn reads the last three or four."""
    s = scheduler(2000, num_window_pages=320)
    turns = [[text_of(s, request(length, 1, c, 1000 * (c + 1))) for c in range(32)] for length in (99, 120, 140)]
    assert turns == [[0] * 32, [96] * 32, [120] * 32]


def test_a_beginning_that_texts_have_in_common_is_kept():
    """In a full pool the first text loses its end, the second one computes it again, and all others reuse it."""
    s = scheduler(4000, num_window_pages=60)
    assert not any(text_of(s, request(99, 1, c, 1000 * (c + 1))) for c in range(20))
    texts = [request(40, 1, c) for c in range(30)]
    for c, r in enumerate(texts):
        r.prompt += range(1000 * (c + 30), 1000 * (c + 30) + 90)
        r.max_len = 131
    assert [text_of(s, r) for r in texts] == [0, 0, *[40] * 28]
