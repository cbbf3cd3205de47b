"""A disk that takes no more: files of this process end at so many bytes, as `ulimit -f` has it. Python ignores the
signal, so that a write fails, and the system says why."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator

SAYS = "File too large"


@contextlib.contextmanager
def files_end_at(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
