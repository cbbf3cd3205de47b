"""Display of the progress of long work on standard error: a bar on a terminal, otherwise a line every EVERY seconds."""

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
PATIENCE = 1.0  # seconds that a task has run before its bar appears
EVERY = 10.0  # seconds between two progress lines


def write_line(text: str, *, always: bool = False) -> None:
    """Write a line to standard error. always: whether to write it even in a quiet process."""
    if always or not quiet:
        sys.stderr.write(f"{text}\n")  # one call includes the line end, because other threads, such as JAX's, write too
        sys.stderr.flush()


def wanted(progress: bool, use_tqdm: Any) -> bool:
    """Return whether to show progress: `use_tqdm` (vLLM's name of the option) if it is not None, else `progress`.

    Raises: UserError if `use_tqdm` is neither None nor a bool, for example a function.
    """
    if callable(use_tqdm):
        raise UserError(f"use_tqdm={quoted(use_tqdm)}: give True or False, the bar is not drawn by tqdm")
    return progress if use_tqdm is None else flag("use_tqdm", use_tqdm)


@dataclasses.dataclass(eq=False)
class Work:
    """A task whose progress is shown.

    what: name of the task.
    total: amount of work in `unit`, or None if it is unknown.
    done: amount of work done so far, in `unit`.
    unit: unit of the amounts, in words.
    most: upper bound of the task's duration, in seconds.
    text: description of the current step.
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
        """Set the amount done and the text of the current step. total: new total, or None if it has not changed."""
        self.done = done
        self.text = text
        if total is not None:
            self.total = total

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def state(self) -> str:
        """Return one line with the amount done, the time spent, the estimated time left and the current step."""
        parts = [clock(self.seconds)]
        total = self.total
        if total is not None:
            parts.insert(0, f"{min(self.done, total):,.0f} of {total:,.0f} {self.unit}".rstrip())
            if self.begun < self.done < total:
                left = self.seconds * (total - self.done) / (self.done - self.begun)
                parts.append(f"about {clock(min(left, max(self.most - self.seconds, 0.0)))} left")
        return ", ".join(parts) + (f": {self.text}" if self.text else "")


under_way: list[Work] = []  # running tasks whose progress is shown, the innermost last
drawing = threading.Lock()  # lock held by the thread that draws the bars


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
    """Return a context that shows the progress of the task inside it. It yields the task's Work; tasks may be nested.

    On a terminal a thread draws a bar, which moves even while the task is busy. Elsewhere a line is written every EVERY
    seconds. A task that ends before its first bar or line shows nothing.

    what, total, done, unit, most: fields of the Work.
    enabled: False to show nothing.
    bar: False to write lines even on a terminal.
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
    """Write a line about a task every EVERY seconds until the task ends, except while an inner task runs."""
    while not work.over.wait(EVERY):
        if under_way[-1:] == [work]:
            write_line(f"{work.what}: {work.state()}")


def draw(work: Work) -> None:
    """Draw the bars of this task and its inner tasks until this task ends.

    Do nothing if this task ends within PATIENCE seconds, or if the thread of an outer task draws its bar already.
    """
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
    """Return a table with a progress bar for every running task that has run for at least PATIENCE seconds."""
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
    """Return a duration as text, such as `59 s` or `1:05 min`."""
    return f"{seconds:.0f} s" if seconds < 60 else f"{int(seconds) // 60}:{int(seconds) % 60:02d} min"


@contextlib.contextmanager
def byte_progress(what: str, total: int, *, enabled: bool = True) -> Iterator[Callable[[int], None]]:
    """Show progress in megabytes. Yield a function `advance(amount)`; total and amount are in bytes."""
    with working(what, total / 1e6, unit="MB", enabled=enabled) as work:

        def advance(amount: int) -> None:
            work.report(work.done + amount / 1e6)

        yield advance


@contextlib.contextmanager
def generation_progress(total: int, metrics: Any, *, enabled: bool) -> Iterator[Callable[[int], None]]:
    """Yield a function `report(done)` that shows finished samples, tokens per second and acceptance length.

    The acceptance length is that of all tokens that the engine has generated so far.

    total: number of samples.
    metrics: the engine's running totals. Reading them takes the same time for one prompt and for thousands.
    """
    before = metrics.num_emitted_tokens
    with working("generating", total, unit="samples", enabled=enabled) as work:

        def report(done: int) -> None:
            speed = (metrics.num_emitted_tokens - before) / work.seconds
            work.report(done, f"{speed:.1f} tokens/s, acceptance length {metrics.mean_acceptance_length:.2f}")

        yield report


@contextlib.contextmanager
def token_progress(what: str, total: int, done: int, *, enabled: bool = True) -> Iterator[Callable[[int], None]]:
    """Yield a function `report(now)` that shows the tokens done now and tokens per second.

    total: number of all tokens.
    done: number of tokens done at the start.
    """
    with working(what, total, done=done, unit="tokens", enabled=enabled) as work:

        def report(now: int) -> None:
            work.report(now, f"{(now - done) / work.seconds:,.0f} tokens/s")

        yield report


def compiling(name: str, *, bar: bool = True) -> contextlib.AbstractContextManager[Work]:
    """Return a context that shows the progress of compiling a program while a request waits. name: program's name."""
    return working(f"compiling ({name})", bar=bar)


@contextlib.contextmanager
def warm_up_progress(*, beside: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """Yield a function `report(done, total, name)` that shows the progress of compiling an engine's programs.

    done and total are numbers of programs; name is the name of the last compiled program. At the end a line gives the
    seconds that compiling took.

    beside: True if other work that may write lines runs meanwhile. No bar is drawn then.
    """
    with working("compiling", unit="programs", bar=not beside) as work:

        def report(done: int, total: int, name: str) -> None:
            work.report(done, name, total)

        yield report
    write_line(f"compiled {work.done:.0f} programs in {work.seconds:.1f} s")
