"""What long work says on standard error; its bars are drawn only where a person looks at them."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from jaxspec.errors import UserError, quoted
from jaxspec.options import flag

quiet = False  # in a process whose progress is another's


def say(text: str, *, always: bool = False) -> None:
    """A line on standard error. always: be it quiet or not."""
    if always or not quiet:
        sys.stderr.write(f"{text}\n")  # at once, with its end: others, and JAX's own threads, write there too
        sys.stderr.flush()


def wanted(progress: bool, use_tqdm: Any) -> bool:
    """Whether to draw a bar: `progress`, or its name in vLLM where that is given."""
    if callable(use_tqdm):
        raise UserError(f"use_tqdm={quoted(use_tqdm)}: give True or False, the bar is not drawn by tqdm")
    return progress if use_tqdm is None else flag("use_tqdm", use_tqdm)


@contextlib.contextmanager
def generation_progress(total: int, metrics: Any, *, enabled: bool) -> Iterator[Callable[[int], None]]:
    """Yields report(done), which redraws the bar: samples done of total, tokens per second, acceptance length.

    metrics: the engine's running totals, so that a report costs the same for one prompt and for thousands.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not enabled or not console.is_terminal:
        yield lambda done: None
        return
    started, before = time.perf_counter(), metrics.num_emitted_tokens
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)

        def report(done: int) -> None:
            speed = (metrics.num_emitted_tokens - before) / (time.perf_counter() - started)
            text = f"{speed:.1f} tokens/s, acceptance length {metrics.mean_acceptance_length:.2f}"
            bar.update(task, completed=done, description=text)

        yield report


@contextlib.contextmanager
def token_progress(total: int, done: int, *, enabled: bool) -> Iterator[Callable[[int], None]]:
    """Yields report(done), which redraws the bar: tokens done of total, tokens per second. Where nobody looks at a
    terminal it writes a line for every twentieth. done: at the start."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console, started, shown = Console(stderr=True), time.perf_counter(), 20 * done // total
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), TimeRemainingColumn())
    hidden = not (enabled and console.is_terminal)
    with Progress(*columns, console=console, disable=hidden) as bar:
        task = bar.add_task("", total=total)

        def report(now: int) -> None:
            nonlocal shown
            speed = (now - done) / (time.perf_counter() - started)
            text = f"{now:,} of {total:,} tokens, {speed:,.0f} tokens/s"
            bar.update(task, completed=min(now, total), description=text)
            if enabled and hidden and 20 * now // total > shown:
                shown = 20 * now // total
                console.print(text, highlight=False, soft_wrap=True)

        yield report


@contextlib.contextmanager
def warm_up_progress() -> Iterator[Callable[[int, int, str], None]]:
    """Yields report(done, total, name), which redraws the bar of programs compiled, the last by name; a line at the end
    tells how long that took."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console, started = Console(stderr=True), time.perf_counter()
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        count = 0

        def report(done: int, total: int, name: str) -> None:
            nonlocal count
            count = done
            bar.update(task, completed=done, total=total, description=name)

        yield report
    say(f"compiled {count} programs in {time.perf_counter() - started:.1f} s")


@contextlib.contextmanager
def training_progress(total: int) -> Iterator[Callable[[int, str], None]]:
    """Yields report(step, text), which redraws a bar of `total` steps; shows nothing where nobody looks."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda step, text: None
        return
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda step, text: bar.update(task, completed=step, description=text)
