"""Progress of long work on standard error: a bar on a terminal, otherwise a line every few seconds."""

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

quiet = False  # True in a process whose progress another process reports
PATIENCE = 1.0  # seconds before a bar appears
EVERY = 10.0  # seconds between lines


def write_line(text: str, *, always: bool = False) -> None:
    """Write a line to standard error. always: write it even in a quiet process."""
    if always or not quiet:
        sys.stderr.write(f"{text}\n")  # line end included: other threads, such as JAX's, write too
        sys.stderr.flush()


def wanted(progress: bool, use_tqdm: Any) -> bool:
    """Return whether to show progress: `use_tqdm` (vLLM's name of the option) where it is given, else `progress`.

    Raises: UserError for a function as `use_tqdm`.
    """
    if callable(use_tqdm):
        raise UserError(f"use_tqdm={quoted(use_tqdm)}: give True or False, the bar is not drawn by tqdm")
    return progress if use_tqdm is None else flag("use_tqdm", use_tqdm)


@dataclasses.dataclass(eq=False)
class Work:
    """A task whose progress is shown.

    what: its name.
    total: the amount of work in `unit`, or None where it is unknown.
    done: the amount done so far, in `unit`.
    most: upper bound of its duration, in seconds.
    text: the current step, in words.
    """

    what: str
    total: float | None
    done: float
    unit: str
    most: float = math.inf
    text: str = ""

    def __post_init__(self) -> None:
        self.begun = self.done
        self.started = time.monotonic()
        self.over = threading.Event()

    def report(self, done: float, text: str = "", total: float | None = None) -> None:
        """Set the amount done and the current step. total: the new total, or None where it has not changed."""
        self.done = done
        self.text = text
        if total is not None:
            self.total = total

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def state(self) -> str:
        """Return one line: the amount done, the seconds spent, the seconds left and the current step."""
        parts = [clock(self.seconds)]
        total = self.total
        if total is not None:
            parts.insert(0, f"{min(self.done, total):,.0f} of {total:,.0f} {self.unit}".rstrip())
            if self.begun < self.done < total:
                left = self.seconds * (total - self.done) / (self.done - self.begun)
                parts.append(f"about {clock(min(left, max(self.most - self.seconds, 0.0)))} left")
        return ", ".join(parts) + (f": {self.text}" if self.text else "")


under_way: list[Work] = []  # running tasks; the innermost is the last
drawing = threading.Lock()  # held by the task that draws the bars


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
    """Show the progress of the task inside this context; tasks may be nested.

    On a terminal a thread draws a bar, which moves whatever the task does. Elsewhere a line is written every EVERY
    seconds. A task that ends before its first bar or line shows nothing.

    bar: False to write lines on a terminal too.
    """
    work = Work(what, total, done, unit, most)
    if quiet or not enabled:
        yield work
        return
    terminal = bar and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    watching = threading.Thread(
        target=draw if terminal else write_lines, args=(work,), name="jaxspec-progress", daemon=True
    )
    under_way.append(work)
    watching.start()
    try:
        yield work
    finally:
        under_way.remove(work)
        work.over.set()
        watching.join()


def write_lines(work: Work) -> None:
    """Write a line every EVERY seconds until the task ends, except while an inner task runs."""
    while not work.over.wait(EVERY):
        if under_way[-1:] == [work]:
            write_line(f"{work.what}: {work.state()}")


def draw(work: Work) -> None:
    """Draw bars of this task and its inner tasks until it ends, unless an outer task draws them already."""
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
    """Return a table with a row for every running task that is older than PATIENCE."""
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
    """Yield a function `advance(amount)`. total and amount are in bytes."""
    with working(what, total / 1e6, unit="MB", enabled=enabled) as work:

        def advance(amount: int) -> None:
            work.report(work.done + amount / 1e6)

        yield advance


@contextlib.contextmanager
def generation_progress(total: int, metrics: Any, *, enabled: bool) -> Iterator[Callable[[int], None]]:
    """Yield a function `report(done)` that shows finished samples, tokens per second and acceptance length.

    metrics: the engine's running totals. A report costs the same for one prompt and for thousands.
    """
    before = metrics.num_emitted_tokens
    with working("generating", total, unit="samples", enabled=enabled) as work:

        def report(done: int) -> None:
            speed = (metrics.num_emitted_tokens - before) / work.seconds
            work.report(done, f"{speed:.1f} tokens/s, acceptance length {metrics.mean_acceptance_length:.2f}")

        yield report


@contextlib.contextmanager
def token_progress(what: str, total: int, done: int, *, enabled: bool = True) -> Iterator[Callable[[int], None]]:
    """Yield a function `report(now)` that shows tokens done and tokens per second. done: tokens done at the start."""
    with working(what, total, done=done, unit="tokens", enabled=enabled) as work:

        def report(now: int) -> None:
            work.report(now, f"{(now - done) / work.seconds:,.0f} tokens/s")

        yield report


def compiling(name: str, *, bar: bool = True) -> contextlib.AbstractContextManager[Work]:
    """Return the context in which a program is compiled while a request waits for it."""
    return working(f"compiling ({name})", bar=bar)


@contextlib.contextmanager
def warm_up_progress(*, beside: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """Yield a function `report(done, total, name)`: programs compiled, all programs, and the last one's name.

    A line at the end reports the seconds that compiling took.

    beside: True while other work runs that may write lines too; then no bar is drawn.
    """
    with working("compiling", unit="programs", bar=not beside) as work:

        def report(done: int, total: int, name: str) -> None:
            work.report(done, name, total)

        yield report
    write_line(f"compiled {work.done:.0f} programs in {work.seconds:.1f} s")
