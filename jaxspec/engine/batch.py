"""Requests -> the arrays of a launch or a prefill. The host's lists are the truth; every launch is packed afresh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec.decode.prefill import Chunk
from jaxspec.decode.state import LaunchInput, RowLimits, Variant
from jaxspec.engine.request import Request
from jaxspec.sampling.distribution import SamplingRows
from jaxspec.sampling.rng import seed_words


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least n and at least `least`."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def padded(lists: Sequence[Sequence[int]], rows: int, width: int, fill: int, dtype: Any = np.int32) -> Any:
    """Lists as an array [rows, width], filled up."""
    array = np.full((rows, width), fill, dtype)
    for row, values in enumerate(lists):
        array[row, : len(values)] = values
    return array


def launch_input(
    requests: Sequence[Request], *, rows: int, num_pages: int, page_size: int, row_pages: int
) -> LaunchInput:
    """rows = B, row_pages = N; rows beyond the requests are not live."""
    params = [r.params for r in requests]

    def column(values: Sequence, dtype: type, fill: float = 0) -> Any:
        return np.array([*values, *[fill] * (rows - len(values))], dtype)

    return LaunchInput(
        tokens=padded([r.tokens for r in requests], rows, row_pages * page_size + 1, 0),
        num_tokens=column([r.num_tokens for r in requests], np.int32, 1),
        draft_len=column([r.draft_len for r in requests], np.int32),
        live=column([True] * len(requests), np.bool_, False),
        block_table=padded([r.pages for r in requests], rows, row_pages, num_pages),
        sampling=SamplingRows(
            temperature=column([0.0 if p.greedy else p.temperature for p in params], np.float32),
            top_k=column([max(p.top_k, 0) for p in params], np.int32),
            top_p=column([p.top_p for p in params], np.float32, 1.0),
            min_p=column([p.min_p for p in params], np.float32),
            seed=padded([seed_words(r.seed) for r in requests], rows, 2, 0, np.uint32),
            coupled=column([r.coupled for r in requests], np.bool_, False),
        ),
        limits=RowLimits(
            num_speculative_tokens=column([r.num_speculative_tokens for r in requests], np.int32),
            max_len=column([r.max_len for r in requests], np.int32, 1),
            stop_ids=padded(
                [r.stop_ids for r in requests], rows, power_of_two(max(len(r.stop_ids) for r in requests), 4), -1
            ),
        ),
    )


def variant(requests: Sequence[Request]) -> Variant:
    """The code paths that these requests need."""
    sampled = [r for r in requests if not r.params.greedy]
    return Variant(
        standard=any(not r.coupled for r in sampled),
        coupled=any(r.coupled for r in sampled),
        filters=any(r.params.filtered for r in sampled),
    )


def chunk_input(requests: Sequence[Request], start: int, *, num_pages: int, row_pages: int, longest: int) -> Chunk:
    """Tokens [start, start + T) of each prompt, the last (pending) prompt token left out; T a power of two."""
    lengths = [min(max(r.num_tokens - 1 - start, 0), longest) for r in requests]
    rows, width = power_of_two(len(requests)), min(power_of_two(max(lengths), 16), longest)
    pieces = [r.tokens[start : start + n] for r, n in zip(requests, lengths, strict=True)]
    return Chunk(
        tokens=padded(pieces, rows, width, 0),
        start=padded([[start]] * rows, rows, 1, 0)[:, 0],
        length=padded([lengths], 1, rows, 0)[0],
        block_table=padded([r.pages for r in requests], rows, row_pages, num_pages),
    )
