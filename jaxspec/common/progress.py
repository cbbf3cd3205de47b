"""What long work says on standard error: a bar where a person looks at a terminal, else a line now and then."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from jaxspec.common.errors import UserError, quoted
from jaxspec.common.values import flag

quiet = False  # in a process whose progress is another's
PATIENCE, EVERY = 1.0, 10.0  # seconds before a bar appears, and between lines


def say(text: str, *, always: bool = False) -> None:
    """A line on standard error. always: be it quiet or not."""
    if always or not quiet:
        sys.stderr.write(f"{text}\n")  # at once, with its end: others, and JAX's own threads, write there too
        sys.stderr.flush()


def wanted(progress: bool, use_tqdm: Any) -> bool:
    """Whether to show progress: `progress`, or its name in vLLM where that is given."""
    if callable(use_tqdm):
        raise UserError(f"use_tqdm={quoted(use_tqdm)}: give True or False, the bar is not drawn by tqdm")
    return progress if use_tqdm is None else flag("use_tqdm", use_tqdm)


@dataclasses.dataclass(eq=False)
class Work:
    """Something that takes its time.

    what: a name for it.
    total, done: how much there is and how much is done, in `unit`; total is None where that is unknown.
    most: seconds that it takes at most.
    text: what is at hand.
    """

    what: str
    total: float | None
    done: float
    unit: str
    most: float = math.inf
    text: str = ""

    def __post_init__(self) -> None:
        self.begun, self.started, self.over = self.done, time.monotonic(), threading.Event()

    def report(self, done: float, text: str = "", total: float | None = None) -> None:
        """Say how much is done, and what is at hand; total: where it is another than before."""
        self.done, self.text, self.total = done, text, self.total if total is None else total

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def state(self) -> str:
        """How much is done, how long it took and will take, and what is at hand."""
        parts, total = [clock(self.seconds)], self.total
        if total is not None:
            parts.insert(0, f"{min(self.done, total):,.0f} of {total:,.0f} {self.unit}".rstrip())
            if self.begun < self.done < total:
                left = self.seconds * (total - self.done) / (self.done - self.begun)
                parts.append(f"about {clock(min(left, max(self.most - self.seconds, 0.0)))} left")
        return ", ".join(parts) + (f": {self.text}" if self.text else "")


under_way: list[Work] = []  # the innermost is the last
drawing = threading.Lock()  # held by the work whose bar is there


@contextlib.contextmanager
def working(
    what: str,
    total: float | None = None,
    *,
    done: float = 0,
    unit: str = "",
    most: float = math.inf,
    enabled: bool = True,
    bar: bool = True,
) -> Iterator[Work]:
    """Show what goes on inside: as a bar on a terminal, which moves whatever the work does, else by a line every ten
    seconds. What ends before is not shown. Works may be nested. bar: False for lines on a terminal, too."""
    work = Work(what, total, done, unit, most)
    if quiet or not enabled:
        yield work
        return
    terminal = bar and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    watching = threading.Thread(target=draw if terminal else tell, args=(work,), name="jaxspec-progress", daemon=True)
    under_way.append(work)
    watching.start()
    try:
        yield work
    finally:
        under_way.remove(work)
        work.over.set()
        watching.join()


def tell(work: Work) -> None:
    """Write a line now and then, unless an inner work does."""
    while not work.over.wait(EVERY):
        if under_way[-1:] == [work]:
            say(f"{work.what}: {work.state()}")


def draw(work: Work) -> None:
    """Draw bars of this work and of those inside, unless an outer one does."""
    if work.over.wait(PATIENCE) or not drawing.acquire(blocking=False):
        return
    from rich.console import Console
    from rich.live import Live

    try:
        with Live(console=Console(stderr=True), get_renderable=bars, transient=True):
            work.over.wait()
    finally:
        drawing.release()


def bars() -> Any:
    """A row for every work that is not over in a moment."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_column(no_wrap=True)
    for work in list(under_way):
        if work.seconds >= PATIENCE:
            picture = ProgressBar(work.total, work.done, width=30, pulse=work.total is None)
            table.add_row(work.what, picture, work.state())
    return table


def clock(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 60 else f"{int(seconds) // 60}:{int(seconds) % 60:02d} min"


@contextlib.contextmanager
def byte_progress(what: str, total: int, *, enabled: bool = True) -> Iterator[Callable[[int], None]]:
    """Yields advance(amount). total: in bytes."""
    with working(what, total / 1e6, unit="MB", enabled=enabled) as work:
        yield lambda amount: work.report(work.done + amount / 1e6)


@contextlib.contextmanager
def generation_progress(total: int, metrics: Any, *, enabled: bool) -> Iterator[Callable[[int], None]]:
    """Yields report(done): samples done of total, tokens per second, acceptance length.

    metrics: the engine's running totals, so that a report costs the same for one prompt and for thousands.
    """
    before = metrics.num_emitted_tokens
    with working("generating", total, unit="samples", enabled=enabled) as work:

        def report(done: int) -> None:
            speed = (metrics.num_emitted_tokens - before) / work.seconds
            work.report(done, f"{speed:.1f} tokens/s, acceptance length {metrics.mean_acceptance_length:.2f}")

        yield report


@contextlib.contextmanager
def token_progress(what: str, total: int, done: int, *, enabled: bool = True) -> Iterator[Callable[[int], None]]:
    """Yields report(done): tokens done of total, tokens per second. done: at the start."""
    with working(what, total, done=done, unit="tokens", enabled=enabled) as work:
        yield lambda now: work.report(now, f"{(now - done) / work.seconds:,.0f} tokens/s")


def compiling(name: str, *, bar: bool = True) -> contextlib.AbstractContextManager[Work]:
    """What the compiling of a program that a request waits for is done in."""
    return working(f"compiling ({name})", bar=bar)


@contextlib.contextmanager
def warm_up_progress(*, beside: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """Yields report(done, total, name): programs compiled, the last by name. A line at the end says how long it took.
    beside: other work goes on, which may write lines of its own."""
    with working("compiling", unit="programs", bar=not beside) as work:
        yield lambda done, total, name: work.report(done, name, total)
    say(f"compiled {work.done:.0f} programs in {work.seconds:.1f} s")
