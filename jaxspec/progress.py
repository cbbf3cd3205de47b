"""A progress bar for generation, on standard error and only where a person looks at it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any


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
