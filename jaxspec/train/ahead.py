"""The host's work for the next piece while the device is at this one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


def ahead(function: Callable[[Any], Any], arguments: Iterable[Any]) -> Generator[Any, None, None]:
    """The function's results in order, each computed in a thread while the one before is in use. Close it: it may be
    left before its end."""
    coming: deque[Future[Any]] = deque()
    with ThreadPoolExecutor(1) as pool:
        for argument in arguments:
            coming.append(pool.submit(function, argument))
            if len(coming) > 1:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()
