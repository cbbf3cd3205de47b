"""What a device program brings back -> requests: tokens, lengths, log-probabilities, reasons to end, counters."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec.decode.state import FINISH_REASONS, NO_ID, NO_LAW, DecodeConfig, LaunchResult
from jaxspec.engine.account import counters
from jaxspec.engine.adaptive import Acceptance
from jaxspec.engine.metrics import SpecDecodeMetrics
from jaxspec.engine.request import Request, TokenLogprobs

NO_ID_ALLOWED = (
    "no token id was allowed: allowed_token_ids, bad_words and min_tokens together forbid every one; relax one of them"
)
NO_NUMBERS = (
    "the target's logits were no numbers: its weights are damaged, or its dtype is too narrow for this text; check the "
    "file, or take dtype='float32'"
)
ERRORS = {NO_ID: NO_ID_ALLOWED, NO_LAW: NO_NUMBERS}


@dataclasses.dataclass(frozen=True)
class Lag:
    """How far the draft's cache may be behind the target's.

    limit: the most positions that it may hold.
    most: as `Drafter.max_lag`; None: there is no such cache, and nothing could lag.
    lookahead: as `Drafter.lookahead`.
    """

    limit: int
    most: int | None
    lookahead: int

    @classmethod
    def of(cls, config: DecodeConfig) -> Lag:
        """As the drafter of these programs has it."""
        drafter = config.drafter
        most, lookahead = (drafter.max_lag, drafter.lookahead) if drafter else (None, 0)
        return cls(config.position_limit, most, lookahead)

    def held(self, length: int, target_len: int) -> int:
        """Positions that the draft's cache holds, where the device counted so many."""
        return target_len if self.most is None else max(min(length, self.limit), 0)

    def too_far(self, request: Request) -> bool:
        """Whether the draft is further behind the target than a round's first pass reads."""
        if self.most is None or request.num_tokens >= self.limit:
            return False
        return request.draft_len < request.target_len - self.most


def absorb_chunk(request: Request, row: int, length: int, scores: Any, lag: Lag) -> None:
    """length more tokens of the request are in the target's cache; scores: log-probabilities of the chunk, or None."""
    if request.wants_prompt_logprobs:
        n = request.params.prompt_logprobs or 0
        request.prompt_logprobs[request.target_len :] = token_logprobs(scores, row, length, n)
    target_len = request.target_len + length
    vars(request).update(target_len=target_len, draft_len=lag.held(request.draft_len, target_len))


def absorb_row(request: Request, row: int, result: LaunchResult, lag: Lag) -> int:
    """The tokens that this launch added to the output; below 0 where a stop string took back earlier ones."""
    count, known, finish = int(result.num_new[row]), len(request.output), int(result.finish[row])
    output = request.output + result.new_tokens[row, :count].tolist()
    reason, error = FINISH_REASONS[finish], ERRORS.get(finish)
    if request.find_stop and (keep := request.find_stop(output, known)) is not None:
        count -= len(output) - keep
        reason, error = "stop", None
        del output[keep:]
    logprobs, asked = request.logprobs, request.params.logprobs
    if asked is not None:  # a stop string may have begun in an earlier launch
        logprobs = [*logprobs, *token_logprobs(result.logprobs, row, max(count, 0), asked)][: len(output)]
    target_len = len(request.prompt) + len(output) - 1
    # All or nothing: an interrupt cannot come within one call.
    vars(request).update(
        output=output,
        logprobs=logprobs,
        finish_reason=reason,
        error=error,
        target_len=target_len,
        draft_len=lag.held(min(int(result.draft_len[row]), target_len), target_len),
    )
    return count


def token_logprobs(scores: Any, row: int, count: int, n: int) -> list[TokenLogprobs]:
    """The first `count` of a row, with their n likeliest ids."""
    arrays = (scores.chosen, scores.rank, scores.top_ids[..., :n], scores.top[..., :n])
    return [TokenLogprobs(*values) for values in zip(*(x[row, :count].tolist() for x in arrays), strict=True)]


def keep_count(
    requests: Sequence[Request],
    kept: Sequence[int],
    result: LaunchResult,
    metrics: SpecDecodeMetrics,
    overall: Acceptance,
    seconds: float = 0.0,
) -> None:
    """Adds what a launch did to the requests' own counters and to those of all, `metrics` and `overall`. kept: tokens
    that each request gained. seconds: how long the launch took; each of its rounds is taken to be as long."""
    now, size = time.perf_counter(), result.num_speculative_tokens
    a_round = seconds / max(int(result.num_rounds), 1)
    rounds_before = np.argmax(result.emitted[: len(requests)] > 0, axis=1).tolist()  # the first token's
    for request, seen, before in zip(requests, counters(result, kept), rounds_before, strict=True):
        if request.output and request.times.first_token is None:
            request.times.first_token = now - seconds + (before + 1) * a_round
        if request.finish_reason:
            request.times.finished = now
        request.metrics += seen
        metrics += seen
    if not size:
        return
    gained, accepted, position = result.emitted[: len(requests)] > 0, result.accepted[: len(requests)], np.arange(size)
    count = lambda kept: np.sum(kept & gained[:, :, None], axis=1)
    rounds, tries, hits = (
        gained.sum(axis=1),
        *map(count, (accepted[..., None] >= position, accepted[..., None] > position)),
    )
    own = np.array([min(size, request.num_speculative_tokens) for request in requests])
    for row, (request, k) in enumerate(zip(requests, own.tolist(), strict=True)):
        if k:
            request.acceptance.count(int(rounds[row]), tries[row, :k], hits[row, :k])
    for k in sorted({*own.tolist()} - {0}):
        of_k = own == k
        overall.count(int(rounds[of_k].sum()), tries[of_k, :k].sum(axis=0), hits[of_k, :k].sum(axis=0))
