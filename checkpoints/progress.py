"""A progress bar that stays out of the way: on standard error, on a terminal, and only when the work takes a while."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

PATIENCE = 1.0  # seconds before a bar appears


@contextlib.contextmanager
def progress_bar(label: str, total: int, *, enabled: bool = True) -> Iterator[Callable[[int], None]]:
    """Yields advance(amount). total: in bytes. Shows nothing where standard error is no terminal."""
    if not enabled or not sys.stderr.isatty():
        yield lambda amount: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task, start, shown = bar.add_task(label, total=total), time.monotonic(), False

    def advance(amount: int) -> None:
        nonlocal shown
        bar.advance(task, amount)
        if not shown and time.monotonic() - start > PATIENCE:
            bar.start()
            shown = True

    try:
        yield advance
    finally:
        if shown:
            bar.stop()
