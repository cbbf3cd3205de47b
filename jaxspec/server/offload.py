"""Execution of long work in threads, so that the event loop serves other requests meanwhile."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

# Size of a request body, in bytes, above which a thread parses it. This many take a few milliseconds.
LARGE_BODY = 32_768
# Number of tokens and log-probabilities above which a thread serialises an answer. This many take about a millisecond.
LARGE_ANSWER = 1000
# The pool has two threads: more would only compete with each other and with the event loop for Python's lock.
THREADS = concurrent.futures.ThreadPoolExecutor(2, "jaxspec-server")
# The preparation of long prompts has its own thread: long prompts wait for each other, and no other work for them.
PROMPTS = concurrent.futures.ThreadPoolExecutor(1, "jaxspec-prompts")


async def offload(
    large: bool, function: Callable[..., T], *args: Any, threads: concurrent.futures.ThreadPoolExecutor = THREADS
) -> T:
    """Call the function and return its result: in one of `threads` if `large`, else directly in the event loop."""
    if not large:
        return function(*args)
    return await asyncio.get_running_loop().run_in_executor(threads, function, *args)
