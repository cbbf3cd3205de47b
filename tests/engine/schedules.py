"""Schedulers and requests without a device."""

from __future__ import annotations

from jaxspec.cache.allocator import PageAllocator
from jaxspec.engine.request import Request
from jaxspec.engine.scheduler import Scheduler
from jaxspec.options.sampling_params import SamplingParams

PAGE = 4
K = 2


def scheduler(num_pages: int = 8, rows: int = 4, **options) -> Scheduler:
    return Scheduler(PageAllocator(num_pages), PAGE, rows, K, **options)


def request(length: int = 5, max_tokens: int = 10, id: int = 0, first: int = 0, **options) -> Request:
    """Its prompt is first, first + 1, ..."""
    return Request(
        id=id,
        prompt=list(range(first, first + length)),
        params=SamplingParams(max_tokens=max_tokens, **options),
        seed=0,
        rule="coupled",
        stop_ids=(),
        max_len=length + max_tokens,
        num_speculative_tokens=K,
    )


def samples(count: int, length: int = 5, **options) -> list[Request]:
    found = [request(length, id=i, n=count, **options) for i in range(count)]
    for i, sample in enumerate(found):
        sample.samples, sample.index = found, i
    return found


def fill(s: Scheduler, r: Request, output: int = 0) -> None:
    """As a pass would: everything but the pending token is in both caches."""
    r.output += range(50, 50 + output)
    r.target_len = r.draft_len = r.num_tokens - 1
    s.register(r)
