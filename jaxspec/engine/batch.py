"""Packing of requests into the arrays that the device programs take.

The lists of the requests on the host are the source of truth. The arrays are packed anew for every run of a program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxspec.cache.pages import CacheLayout
from jaxspec.common.values import LARGEST
from jaxspec.decode.state import Control, LaunchInput, RowLimits, Variant
from jaxspec.drafters.base import Chunk
from jaxspec.engine import admission
from jaxspec.engine.request import Request
from jaxspec.options.sampling_params import MAX_LOGPROBS
from jaxspec.sampling import processors
from jaxspec.sampling.arrays import filled, padded
from jaxspec.sampling.distribution import SamplingRows
from jaxspec.sampling.rng import seed_words
from jaxspec.verify import rules

FEW_LOGPROBS = 5
RESERVED = 4  # one of RESERVED rows of each prefill pass is for the oldest prompt, the others for the shortest ones
COPIES = 16  # maximum number of pages that one run of the program "copy_pages" copies
NEVER = LARGEST  # value of `Control.max_ends` that is more than any launch's rows, so that ended rows end no launch


@dataclasses.dataclass(frozen=True)
class Room:
    """The sizes of the arrays that hold a row's lists of token ids. Each size needs compiled programs of its own.

    stop_ids: maximum number of ids that end the row.
    biased: maximum number of allowed ids, and also of biased ids; None for arrays over the whole vocabulary.
    bad_words: maximum number of forbidden words, and of ids of each word.
    """

    stop_ids: int
    biased: int | None
    bad_words: tuple[int, int]

    def holds(self, request: Request) -> bool:
        """Return whether the request's lists of token ids fit into arrays of these sizes."""
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
MANY = Room(stop_ids=admission.MAX_STOP_IDS, biased=None, bad_words=admission.MAX_BAD_WORDS)


@dataclasses.dataclass(frozen=True)
class ChunkShape:
    """The shape of the token array of a prefill pass: at most `rows` rows of `width` prompt tokens each.

    least_rows: the fewest rows that a program is compiled for.
    finer: whether 6, 12, 24, ... rows (3/4 of a power of two) are used, too, not only powers of two (`Platform.finer`).
    several: whether a request may have several rows in one pass. Models with a recurrent state forbid this: a row would
      need the state after the row before it.
    """

    rows: int
    width: int
    least_rows: int = 1
    finer: bool = False
    several: bool = True

    def padded(self, count: int) -> int:
        """Return the number of rows of the program that serves `count` rows. It is rounded up to have few programs."""
        whole = power_of_two(count)
        if self.finer and whole >= 8 and count <= whole * 3 // 4:
            whole = whole * 3 // 4
        return min(max(whole, self.least_rows), self.rows)

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of rows that programs are compiled for, in ascending order."""
        return tuple(sorted({self.padded(count) for count in range(1, self.rows + 1)}))


def power_of_two(n: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least n and at least `least`, itself a power of two."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def scalar(value: float, dtype: type) -> Any:
    """Return the value as a numpy array without axes."""
    return np.array(value, dtype)


def launch_input(
    requests: Sequence[Request],
    k: int,
    used: Variant,
    layout: CacheLayout,
    shape: tuple[int, int],
    *,
    spare: int = 0,
    num_rounds: int,
    max_ends: int = NEVER,
    worth: float = 0.0,
    rule_options: Sequence[float] = (),
    vocab_size: int = 0,
) -> LaunchInput:
    """Return the input arrays of a launch (one run of the device program, many rounds), one row for each request.

    Rows beyond the requests are padding and are marked as not live.

    k: number of draft tokens a round that the program is compiled for.
    used: code paths that the program is compiled with.
    shape: (B, N) of the program: the number of rows of a round, and of pages in a row's block table.
    spare: number of further rows, for requests that take the place of a row that ends.
    num_rounds, max_ends, worth: as in `Control`.
    rule_options: values of the acceptance rule's options.
    vocab_size: V, which only arrays for long lists of ids need.
    """
    params = [r.params for r in requests]
    active, row_pages = shape
    rows = active + spare
    room = MANY if used.long_lists else FEW
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
        processors=processors.of_requests(used.processor_names, requests, rows, room, vocab_size),
        rule_options=filled(len(rule_options), rule_options, np.float32),
        active=filled(active, range(active), np.int32),
        window_table=window_table(requests, layout, rows, row_pages),
        control=Control(scalar(num_rounds, np.int32), scalar(max_ends, np.int32), scalar(worth, np.float32)),
    )


def window_table(requests: Sequence[Request], layout: CacheLayout, rows: int, row_pages: int) -> Any:
    """Return the page ids i32[rows, row_pages] in layers with a window; None if these have no pool of their own."""
    if layout.num_window_pages is None:
        return None
    return padded([r.window_pages for r in requests], rows, row_pages, layout.num_window_pages)


def check(request: Request, layout: CacheLayout, vocab_size: int) -> None:
    """Pack a request alone and discard the arrays, so that an error in packing is raised for this request."""
    row_pages = len(request.pages)
    used = dataclasses.replace(variant([request]), processors=True)
    prefill_variant([request])
    shape = ChunkShape(1, 16)
    chunk_input(pieces([request], [request.target_len], shape), layout, shape, row_pages=row_pages)
    launch_input(
        [request], request.num_speculative_tokens, used, layout, (1, row_pages), num_rounds=1, vocab_size=vocab_size
    )


def most_logprobs(asked: Sequence[int | None]) -> int | None:
    """Return how many top ids a program has to find at each position; None if no request wants log-probabilities.

    Only two numbers are possible, so that few programs serve all requests.

    asked: number of top ids that each request wants; None for a request without log-probabilities.
    """
    wanted = [n for n in asked if n is not None]
    return next(n for n in (FEW_LOGPROBS, MAX_LOGPROBS) if n >= max(wanted)) if wanted else None


def variant(requests: Sequence[Request]) -> Variant:
    """Return the code paths of the device program that these requests need in a launch."""
    long_lists = not all(map(FEW.holds, requests))
    return Variant(
        rules=frozenset(r.rule for r in requests) - {rules.GREEDY},
        filters=any(r.params.filtered for r in requests if not r.params.greedy),
        logprobs=most_logprobs([r.params.logprobs for r in requests]),
        processors=any(r.bad_words or r.params.processed for r in requests) or long_lists,
        long_lists=long_lists,
        grammars=any(r.automaton for r in requests),
    )


def prefill_variant(requests: Sequence[Request]) -> Variant:
    """Return the code paths that these requests need in a prefill pass.

    The pass samples no tokens, but requests may want log-probabilities of their prompts.
    """
    return Variant(logprobs=most_logprobs([r.params.prompt_logprobs for r in requests if r.wants_prompt_logprobs]))


class Piece(NamedTuple):
    """One row of a prefill pass: the tokens [start, start + length) of a request."""

    request: Request
    start: int
    length: int


def pieces(
    requests: Sequence[Request],
    starts: Sequence[int],
    chunk: ChunkShape,
    *,
    ends: Sequence[int] | None = None,
    turn: int = 0,
) -> list[Piece]:
    """Return the rows of the next prefill pass, in the order of the requests.

    A quarter of a pass's rows goes to the oldest prompts, the others go to the shortest ones. So a short prompt does
    not wait for a long one, and a long one takes at most four times as many passes as if the oldest were read first.

    If `chunk.several`, a request may have several rows: a row can attend to keys and values that earlier rows of the
    pass write.

    starts, ends: bounds of the tokens that each request has left to prefill. The default end excludes the request's
      last token, which the next round reads.
    turn: number of the pass. Passes of fewer than RESERVED rows take turns in reading the oldest prompt first.
    """
    if ends is None:
        ends = [request.num_tokens - 1 for request in requests]
    unread = [end - start for start, end in zip(starts, ends, strict=True)]
    counts = shares(unread, chunk, turn)
    return [
        Piece(request, at, min(chunk.width, end - at))
        for request, start, end, count in zip(requests, starts, ends, counts, strict=True)
        for at in range(start, start + count * chunk.width, chunk.width)
    ]


def shares(unread: Sequence[int], chunk: ChunkShape, turn: int) -> list[int]:
    """Return how many rows of a prefill pass each request gets.

    unread: number of tokens that each request has left to prefill, the oldest request first.
    chunk, turn: as in `pieces`.
    """
    most = [-(-count // chunk.width) if chunk.several else min(count, 1) for count in unread]
    counts = [0] * len(unread)
    oldest_first = range(len(unread))
    shortest_first = sorted(oldest_first, key=unread.__getitem__)
    room = chunk.rows
    reserved = (room + RESERVED - 1 - turn % RESERVED) // RESERVED
    for order, least_room in ((oldest_first, room - reserved), (shortest_first, 0)):
        for i in order:
            more = min(most[i] - counts[i], room - least_room)
            counts[i] += more
            room -= more
    return counts


def chunk_input(
    rows: Sequence[Piece], layout: CacheLayout, chunk: ChunkShape, *, row_pages: int, following: bool = False
) -> Chunk:
    """Return the input arrays of a prefill pass over these pieces of prompts.

    row_pages: N, the width of the block table.
    following: whether to include each token's next token. If a request wants log-probabilities of its prompt, next
      tokens are included in any case.
    """
    count, width = chunk.padded(len(rows)), chunk.width
    requests = [piece.request for piece in rows]

    def tokens(ahead: int) -> list[np.ndarray]:
        return [r.ids[start + ahead : start + ahead + n] for r, start, n in rows]

    following |= any(r.wants_prompt_logprobs for r in requests)
    return Chunk(
        tokens=padded(tokens(0), count, width, 0),
        start=filled(count, [piece.start for piece in rows], np.int32),
        length=filled(count, [piece.length for piece in rows], np.int32),
        block_table=padded([r.pages for r in requests], count, row_pages, layout.num_pages),
        next_tokens=padded(tokens(1), count, width, 0) if following else None,
        window_table=window_table(requests, layout, count, row_pages),
    )


def copied_pages(copies: Sequence[tuple[int, ...]], layout: CacheLayout) -> tuple[Any, ...]:
    """Return the arguments of the program "copy_pages" for at most COPIES copies: ids of source and target pages.

    The ids of window pages follow if there are any. Padding has targets that are ignored.
    """
    padding = [0, layout.num_pages]
    if layout.num_window_pages is not None:
        padding += [0, layout.num_window_pages]
    return tuple(filled(COPIES, [copy[i] for copy in copies], np.int32, pad) for i, pad in enumerate(padding))
