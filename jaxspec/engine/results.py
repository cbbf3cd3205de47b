"""Functions that apply the results of device programs to requests: tokens, lengths, log-probabilities, counters."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec.decode.state import FINISH_REASONS, NO_ID, NOT_FINITE, DecodeConfig, LaunchResult
from jaxspec.engine.account import counters
from jaxspec.engine.adaptive import Acceptance
from jaxspec.engine.metrics import SpecDecodeMetrics
from jaxspec.engine.request import Place, Request, TokenLogprobs
from jaxspec.grammars.automaton import START

NO_ID_ALLOWED = (
    "no token id was allowed: allowed_token_ids, bad_words and min_tokens together forbid every one; relax one of them"
)
NO_LEGAL_ID = "no token id was allowed: the grammar allows none after this text; correct structured_outputs"
NOT_FINITE_MESSAGE = (
    "the target's logits were not finite: its weights are damaged, or its dtype is too narrow for this text; check the "
    "file, or use dtype='float32'"
)


def error_of(finish: int, request: Request, num_output: int) -> str | None:
    """Return the error message of a row that ended for this reason after num_output tokens; None if it is no error."""
    if finish == NOT_FINITE:
        return NOT_FINITE_MESSAGE
    if finish != NO_ID:
        return None
    if request.automaton is None:
        return NO_ID_ALLOWED
    params = request.params
    forbids = {
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": bool(request.bad_words),
        "min_tokens": num_output < params.min_tokens,
    }
    names = " and ".join(["structured_outputs", *(name for name, is_set in forbids.items() if is_set)])
    if not any(forbids.values()):
        return NO_LEGAL_ID
    return f"no token id was allowed: {names} together forbid every one; relax one of them"


@dataclasses.dataclass(frozen=True)
class Lag:
    """The distance, in positions, by which the draft's KV cache may trail the target's.

    limit: maximum number of positions of a row in the draft's cache.
    most: maximum distance before a round (`Drafter.max_lag`); None for a drafter without a cache.
    lookahead: number of later tokens on which an entry of the draft's cache depends (`Drafter.lookahead`).
    """

    limit: int
    most: int | None
    lookahead: int

    @classmethod
    def of(cls, config: DecodeConfig) -> Lag:
        """Return the lag that the drafter of this configuration allows."""
        drafter = config.drafter
        most, lookahead = (drafter.max_lag, drafter.lookahead) if drafter else (None, 0)
        return cls(config.position_limit, most, lookahead)

    def held(self, length: int, target_len: int) -> int:
        """Return the number of a row's valid positions in the draft's cache: `length`, but at most `limit`.

        For a drafter without a cache it is target_len, the number of valid positions in the target's cache.
        """
        return target_len if self.most is None else max(min(length, self.limit), 0)

    def too_far(self, request: Request) -> bool:
        """Return whether the draft's cache trails the target's by more tokens than the next round's draft can read.

        This is False for a request that has as many tokens as the draft's cache has positions for a row, or more.
        """
        if self.most is None or request.num_tokens >= self.limit:
            return False
        return request.draft_len < request.target_len - self.most


def absorb_chunk(request: Request, row: int, length: int, scores: Any, lag: Lag) -> None:
    """Record that a prefill pass wrote `length` more tokens of the request to the target's cache.

    Store their log-probabilities, too, if the request wants those of its prompt.

    row: the request's row in the pass.
    scores: log-probabilities of the pass's prompt tokens, or None.
    """
    if request.wants_prompt_logprobs:
        n = request.params.prompt_logprobs or 0
        request.prompt_logprobs[request.target_len :] = token_logprobs(scores, row, length, n)
    target_len = request.target_len + length
    vars(request).update(target_len=target_len, draft_len=lag.held(request.draft_len, target_len))


def absorb_row(request: Request, row: int, result: LaunchResult, lag: Lag) -> int:
    """Apply a launch's result to the request in this row. Return the number of output tokens that the request gained.

    The number is negative if a stop string removed more tokens than the launch added.
    """
    count = int(result.num_new[row])
    finish = int(result.finish[row])
    new = result.new_tokens[row, :count].tolist()
    output = request.output + new
    reason = FINISH_REASONS[finish]
    error = error_of(finish, request, len(output))
    keep = request.find_stop(output, len(request.output)) if request.find_stop else None
    if keep is not None:
        count -= len(output) - keep
        reason, error = "stop", None
        del output[keep:]
    logprobs = request.logprobs
    asked = request.params.logprobs
    if asked is not None:  # cut below: a stop string may have begun in an earlier launch
        logprobs = [*logprobs, *token_logprobs(result.logprobs, row, max(count, 0), asked)][: len(output)]
    places = request.places
    if request.params.token_origins:
        places = [*places, *places_of(result, row, places[-1].round + 1 if places else 0)][: len(output)]
    target_len = len(request.prompt) + len(output) - 1
    # One call updates all fields, so that an interrupt leaves either the old values or the new ones.
    vars(request).update(
        output=output,
        grammar_state=request.automaton.advance(request.grammar_state, new) if request.automaton else START,
        logprobs=logprobs,
        places=places,
        finish_reason=reason,
        error=error,
        target_len=target_len,
        draft_len=lag.held(min(int(result.draft_len[row]), target_len), target_len),
    )
    return count


def token_logprobs(scores: Any, row: int, count: int, n: int) -> list[TokenLogprobs]:
    """Return the log-probabilities of a row's first `count` tokens, each with its n top ids."""
    arrays = (scores.chosen, scores.rank, scores.top_ids[..., :n], scores.top[..., :n])
    return [TokenLogprobs(*values) for values in zip(*(x[row, :count].tolist() for x in arrays), strict=True)]


def places_of(result: LaunchResult, row: int, first: int) -> list[Place]:
    """Return the place of each token that a row gained in a launch. first: number of the row's first round."""
    columns = (result.proposed, result.accepted, result.emitted, result.looked_up)
    rounds = np.stack([column[row] for column in columns], axis=1)
    gaining = rounds[rounds[:, 2] > 0].tolist()
    return [
        Place(number, position, proposed, position < accepted, position < min(accepted, looked_up))
        for number, (proposed, accepted, emitted, looked_up) in enumerate(gaining, first)
        for position in range(emitted)
    ]


def keep_count(
    requests: Sequence[Request],
    kept: Sequence[int],
    result: LaunchResult,
    metrics: SpecDecodeMetrics,
    overall: Acceptance,
    seconds: float = 0.0,
) -> None:
    """Add the counters of a launch to the requests' own counters, to `metrics` and to `overall`.

    kept: number of output tokens that each request gained.
    metrics: counters of the engine.
    overall: acceptance counts of all requests together.
    seconds: how long the launch took. All its rounds are assumed to take equally long.
    """
    now = time.perf_counter()
    size = result.num_speculative_tokens
    round_seconds = seconds / max(int(result.num_rounds), 1)
    # index of the first round of the launch in which each row gained a token
    rounds_before = np.argmax(result.emitted[: len(requests)] > 0, axis=1).tolist()
    for request, counted, before in zip(requests, counters(result, kept), rounds_before, strict=True):
        if request.output and request.times.first_token is None:
            request.times.first_token = now - seconds + (before + 1) * round_seconds
        if request.finish_reason:
            request.times.finished = now
        request.metrics += counted
        metrics += counted
    if not size:
        return
    gained = result.emitted[: len(requests)] > 0
    accepted = result.accepted[: len(requests), :, None]
    position = np.arange(size)
    rounds = gained.sum(axis=1)
    tries = np.sum((accepted >= position) & gained[:, :, None], axis=1)
    hits = np.sum((accepted > position) & gained[:, :, None], axis=1)
    own = np.array([min(size, request.num_speculative_tokens) for request in requests])
    for row, (request, k) in enumerate(zip(requests, own.tolist(), strict=True)):
        if k:
            request.acceptance.count(int(rounds[row]), tries[row, :k], hits[row, :k])
    for k in sorted({*own.tolist()} - {0}):
        of_k = own == k
        overall.count(int(rounds[of_k].sum()), tries[of_k, :k].sum(axis=0), hits[of_k, :k].sum(axis=0))
