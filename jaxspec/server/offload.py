"""Long work beside the event loop, which serves others meanwhile."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

LARGE_BODY = 32_768  # bytes that are read in a few milliseconds
LARGE_ANSWER = 1000  # tokens and log-probabilities that are written in about one
# Two: more would only wait for Python's lock, and keep it from the event loop.
THREADS = concurrent.futures.ThreadPoolExecutor(2, "jaxspec-server")


async def offload(large: bool, function: Callable[..., T], *args: Any) -> T:
    """Call the function, in a thread where its work is large."""
    if not large:
        return function(*args)
    return await asyncio.get_running_loop().run_in_executor(THREADS, function, *args)
