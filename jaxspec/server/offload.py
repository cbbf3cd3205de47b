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
PROMPTS = concurrent.futures.ThreadPoolExecutor(1, "jaxspec-prompts")  # long prompts wait for each other, and no others


async def offload(
    large: bool, function: Callable[..., T], *args: Any, threads: concurrent.futures.ThreadPoolExecutor = THREADS
) -> T:
    """Call the function: in one of the threads if its work is large, else directly."""
    if not large:
        return function(*args)
    return await asyncio.get_running_loop().run_in_executor(threads, function, *args)
