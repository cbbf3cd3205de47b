"""A progress bar for generation, on standard error and only where a person looks at it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def generation_progress(total: int, *, enabled: bool) -> Iterator[Callable[[list[Any], Any], None]]:
    """Yields report(jobs, metrics), which redraws the bar: requests done, tokens per second, acceptance length."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not enabled or not console.is_terminal:
        yield lambda jobs, metrics: None
        return
    started = time.perf_counter()
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)

        def report(jobs: list[Any], metrics: Any) -> None:
            done = sum(job.request.finish_reason is not None for job in jobs)
            tokens = sum(len(job.request.output) for job in jobs)
            speed = tokens / (time.perf_counter() - started)
            text = f"{speed:.1f} tokens/s, acceptance length {metrics.mean_acceptance_length:.2f}"
            bar.update(task, completed=done, description=text)

        yield report
