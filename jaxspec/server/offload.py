"""Long work in threads, during which the event loop serves other requests."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

LARGE_BODY = 32_768  # bytes, parsed in a few milliseconds
LARGE_ANSWER = 1000  # tokens and log-probabilities, serialised in about one millisecond
# Two threads: more would only compete with each other and with the event loop for Python's lock.
THREADS = concurrent.futures.ThreadPoolExecutor(2, "jaxspec-server")


async def offload(large: bool, function: Callable[..., T], *args: Any) -> T:
    """Call the function: in a thread if its work is large, else directly."""
    if not large:
        return function(*args)
    return await asyncio.get_running_loop().run_in_executor(THREADS, function, *args)
