"""Preparing the next work item on the host while the device computes the current one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


def ahead(function: Callable[[Any], Any], arguments: Iterable[Any]) -> Generator[Any, None, None]:
    """Yield function(argument) for every argument, in order.

    A thread computes each result while the caller uses the previous one. Close the generator if you stop before its
    end.
    """
    coming: deque[Future[Any]] = deque()
    with ThreadPoolExecutor(1) as pool:
        for argument in arguments:
            coming.append(pool.submit(function, argument))
            if len(coming) > 1:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()
