"""Requests -> the arrays that the programs take; nobody else makes them.

The host's lists are the truth; every launch is packed afresh.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxspec.cache.pages import CacheLayout
from jaxspec.common.values import LARGEST
from jaxspec.decode.state import Control, LaunchInput, RowLimits, Variant
from jaxspec.drafters.base import Chunk
from jaxspec.engine import arrivals
from jaxspec.engine.request import Request
from jaxspec.options.sampling_params import MAX_LOGPROBS
from jaxspec.sampling import processors
from jaxspec.sampling.arrays import filled, padded
from jaxspec.sampling.distribution import SamplingRows
from jaxspec.sampling.rng import seed_words
from jaxspec.verify import rules

FEW_LOGPROBS = 5
COPIES = 16  # of pages, by one run of a program
NEVER = LARGEST  # a number of rows that no launch has


@dataclasses.dataclass(frozen=True)
class Room:
    """How many ids a row may list, so that programs are few whatever requests list.

    biased: allowed ids, and likewise biased ones; None: any number, as the rows of a dense array.
    bad_words: how many, and the ids of each.
    """

    stop_ids: int
    biased: int | None
    bad_words: tuple[int, int]

    def holds(self, request: Request) -> bool:
        params, words = request.params, request.bad_words
        biased = max(len(params.allowed_token_ids or ()), len(params.logit_bias))
        longest = max(map(len, words), default=0)
        return (
            len(request.stop_ids) <= self.stop_ids
            and (self.biased is None or biased <= self.biased)
            and len(words) <= self.bad_words[0]
            and longest <= self.bad_words[1]
        )


FEW = Room(stop_ids=16, biased=16, bad_words=(8, 4))
MANY = Room(stop_ids=arrivals.MAX_STOP_IDS, biased=None, bad_words=arrivals.MAX_BAD_WORDS)


@dataclasses.dataclass(frozen=True)
class ChunkShape:
    """Of a prefill pass: at most `rows` of `width` tokens each, no program being made for fewer than least_rows. finer:
    as `Platform` has it."""

    rows: int
    width: int
    least_rows: int = 1
    finer: bool = False

    def padded(self, count: int) -> int:
        """The rows of the pass that takes so many: few programs serve all."""
        whole = power_of_two(count)
        if self.finer and whole >= 8 and count <= whole * 3 // 4:
            whole = whole * 3 // 4
        return min(max(whole, self.least_rows), self.rows)


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least n and at least `least`."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def scalar(value: float, dtype: type) -> Any:
    return np.array(value, dtype)


def launch_input(
    requests: Sequence[Request],
    k: int,
    used: Variant,
    layout: CacheLayout,
    shape: tuple[int, int],
    *,
    num_rounds: int,
    max_ends: int = NEVER,
    worth: float = 0.0,
    rule_options: Sequence[float] = (),
    vocab_size: int = 0,
) -> LaunchInput:
    """k: drafts a round of the program, used: its variant, shape: its (B, N); rows beyond the requests are not live.
    num_rounds, max_ends, worth: of Control; rule_options: of the rule asked for; vocab_size: V, where lists are
    long."""
    params, (rows, row_pages), room = [r.params for r in requests], shape, MANY if used.long_lists else FEW

    column = functools.partial(filled, rows)

    return LaunchInput(
        tokens=padded([r.ids for r in requests], rows, row_pages * layout.page_size + 1, 0),
        num_tokens=column([r.num_tokens for r in requests], np.int32, 1),
        draft_len=column([r.draft_len for r in requests], np.int32),
        live=column([True] * len(requests), np.bool_, False),
        block_table=padded([r.pages for r in requests], rows, row_pages, layout.num_pages),
        sampling=SamplingRows(
            temperature=column([0.0 if p.greedy else p.temperature for p in params], np.float32),
            top_k=column([max(p.top_k, 0) for p in params], np.int32),
            top_p=column([p.top_p for p in params], np.float32, 1.0),
            min_p=column([p.min_p for p in params], np.float32),
            seed=padded([seed_words(r.seed) for r in requests], rows, 2, 0, np.uint32),
            rule=column([rules.number(r.rule) for r in requests], np.int32, rules.number(rules.GREEDY)),
        ),
        limits=RowLimits(
            num_speculative_tokens=column([min(r.num_speculative_tokens, k) for r in requests], np.int32),
            max_len=column([r.max_len for r in requests], np.int32, 1),
            stop_ids=padded([r.stop_ids for r in requests], rows, room.stop_ids, -1),
        ),
        prompt_len=column([len(r.prompt) for r in requests], np.int32),
        processors=processors.of_requests(requests, rows, room, vocab_size) if used.processors else {},
        rule_options=filled(len(rule_options), rule_options, np.float32),
        control=Control(scalar(num_rounds, np.int32), scalar(max_ends, np.int32), scalar(worth, np.float32)),
    )


def check(request: Request, layout: CacheLayout, vocab_size: int) -> None:
    """Raises whatever keeps a request from being packed."""
    row_pages, k = len(request.pages), request.num_speculative_tokens
    used = dataclasses.replace(variant([request]), processors=True)
    prefill_variant([request])
    shape = ChunkShape(1, 16)
    chunk_input(pieces([request], [request.target_len], shape), layout, shape, row_pages=row_pages)
    launch_input([request], k, used, layout, (1, row_pages), num_rounds=1, vocab_size=vocab_size)


def most_logprobs(asked: Sequence[int | None]) -> int | None:
    """How many likeliest ids a program has to find: one of two numbers, so that few programs serve all."""
    wanted = [n for n in asked if n is not None]
    return next(n for n in (FEW_LOGPROBS, MAX_LOGPROBS) if n >= max(wanted)) if wanted else None


def variant(requests: Sequence[Request]) -> Variant:
    """The code paths that these requests need."""
    long_lists = not all(map(FEW.holds, requests))
    return Variant(
        rules=frozenset(r.rule for r in requests) - {rules.GREEDY},
        filters=any(r.params.filtered for r in requests if not r.params.greedy),
        logprobs=most_logprobs([r.params.logprobs for r in requests]),
        processors=any(r.bad_words or r.params.processed for r in requests) or long_lists,
        long_lists=long_lists,
    )


def prefill_variant(requests: Sequence[Request]) -> Variant:
    """Nothing is sampled; only log-probabilities of the prompt may be asked for."""
    return Variant(logprobs=most_logprobs([r.params.prompt_logprobs for r in requests if r.wants_prompt_logprobs]))


class Piece(NamedTuple):
    """The tokens [start, start + length) of a request: one row of a prefill pass."""

    request: Request
    start: int
    length: int


def pieces(
    requests: Sequence[Request], starts: Sequence[int], chunk: ChunkShape, *, ends: Sequence[int] | None = None
) -> list[Piece]:
    """The next tokens of each request from its start to its end, by default up to the last (pending) token: as many as
    a pass takes, those of the first requests first. A row reads what the rows before it write, so that a prompt may
    have several."""
    ends = [request.num_tokens - 1 for request in requests] if ends is None else ends
    cut = (
        Piece(request, at, min(chunk.width, end - at))
        for request, start, end in zip(requests, starts, ends, strict=True)
        for at in range(start, end, chunk.width)
    )
    return list(itertools.islice(cut, chunk.rows))


def chunk_input(
    rows: Sequence[Piece], layout: CacheLayout, chunk: ChunkShape, *, row_pages: int, following: bool = False
) -> Chunk:
    """The pass over these pieces. following: with each token's next, as where some request wants their
    log-probabilities."""
    count, width = chunk.padded(len(rows)), chunk.width
    listed = lambda ahead: [r.ids[start + ahead : start + ahead + n] for r, start, n in rows]
    following |= any(piece.request.wants_prompt_logprobs for piece in rows)
    return Chunk(
        tokens=padded(listed(0), count, width, 0),
        start=filled(count, [piece.start for piece in rows], np.int32),
        length=filled(count, [piece.length for piece in rows], np.int32),
        block_table=padded([piece.request.pages for piece in rows], count, row_pages, layout.num_pages),
        next_tokens=padded(listed(1), count, width, 0) if following else None,
    )


def copied_pages(copies: Sequence[tuple[int, int]], layout: CacheLayout) -> tuple[Any, Any]:
    """(sources, targets) of at most COPIES pages to be copied, filled up with targets that are dropped."""
    sources, targets = [source for source, _ in copies], [target for _, target in copies]
    return filled(COPIES, sources, np.int32), filled(COPIES, targets, np.int32, layout.num_pages)
