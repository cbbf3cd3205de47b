"""One sample of a request: its sampling parameters, the tokens decoded so far, and the pages that it holds."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxspec.engine.adaptive import Acceptance
from jaxspec.engine.metrics import RequestTiming, SpecDecodeMetrics
from jaxspec.grammars.automaton import START, Automaton
from jaxspec.options.sampling_params import SamplingParams

# A function find_stop(output ids, start) that looks for a stop string that ends at or after output index `start`. It
# returns how many output ids to keep if a stop string is complete, else None.
FindStop = Callable[[list[int], int], int | None]


class TokenLogprobs(NamedTuple):
    """The log-probability and rank of one token, and the position's top ids with log-probabilities, best first."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class Place(NamedTuple):
    """The place of an output token in its round.

    round: number of the round among those in which the request gained tokens, from 0.
    position: index of the token in its round, from 0.
    num_drafts: number of draft tokens that the round proposed.
    accepted: whether the token is an accepted draft token; else it is the target's own.
    looked_up: whether prompt lookup found the draft token, before another method's.
    """

    round: int
    position: int
    num_drafts: int
    accepted: bool
    looked_up: bool


def between(start: float | None, end: float | None) -> float | None:
    """Return the seconds from start to end, or None if one of the two times is None."""
    return None if start is None or end is None else end - start


@dataclasses.dataclass
class Times:
    """The times of a request's events, in seconds of time.perf_counter. None: the event has not happened yet."""

    arrived: float = dataclasses.field(default_factory=time.perf_counter)
    admitted: float | None = None
    prefilled: float | None = None
    first_token: float | None = None
    finished: float | None = None

    def timing(self, num_output: int) -> RequestTiming:
        """Return the durations between these times. num_output: number of output tokens."""
        rest = between(self.first_token, self.finished)
        return RequestTiming(
            queue_seconds=between(self.arrived, self.admitted),
            prefill_seconds=between(self.admitted, self.prefilled),
            decode_seconds=between(self.prefilled, self.finished),
            time_to_first_token=between(self.arrived, self.first_token),
            time_per_output_token=None if rest is None or num_output < 2 else rest / (num_output - 1),
        )


@dataclasses.dataclass(eq=False)
class Request:
    """One of the n samples that continue one prompt. The engine schedules each sample on its own.

    prompt: token ids of the prompt.
    seed: random seed of 64 bits, the same for the request's whole life.
    rule: name of the request's acceptance rule.
    stop_ids: token ids that end the output.
    max_len: maximum number of tokens of prompt and output together.
    num_speculative_tokens: maximum number of draft tokens a round.
    bad_words: sequences of token ids that never occur in the output.
    automaton: automaton of the grammar of the output; None without a grammar.
    index: index of this sample among the n samples.
    find_stop: function that finds stop strings in the output; None without stop strings.
    samples: all n samples of the prompt, this one included.
    grammar_state: the automaton's state after the output.
    grammar_at: index of the automaton's table in the pool of grammars; None while the request does not run.
    pages: ids of the request's pages in the KV caches, for positions [0, len(pages) * page_size).
    window_pages: ids of their window pages (`WindowPages`) from the first page on; empty if there is no such pool.
    window_first: index of the first page whose window page the request holds.
    beginnings: lengths, in pages, of the beginnings in common with earlier requests: that which is reused, and the
      longest one, of which layers with a window may have lost the end.
    target_len: number of positions [0, target_len) for which the target's cache is valid.
    draft_len: number of positions [0, draft_len) for which the draft's cache is valid.
    logprobs: log-probabilities, one entry for each output token.
    places: place of each output token in its round; empty without SamplingParams.token_origins.
    prompt_logprobs: log-probabilities, one entry for each prompt token but the first.
    digests: digests of the request's first full pages, as many as were computed so far.
    num_registered: number of the request's pages that are registered for reuse by other requests.
    num_drafted: number of the request's pages that are registered as read by the draft.
    acceptance: counts of the request's accepted draft tokens, by position in the round.
    packed: the last array that `ids` returned.
    """

    id: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    rule: str
    stop_ids: tuple[int, ...]
    max_len: int
    num_speculative_tokens: int
    bad_words: tuple[tuple[int, ...], ...] = ()
    automaton: Automaton | None = None
    index: int = 0
    find_stop: FindStop | None = None

    output: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    places: list[Place] = dataclasses.field(default_factory=list, repr=False)
    prompt_logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    grammar_state: int = START
    grammar_at: int | None = None
    pages: list[int] = dataclasses.field(default_factory=list)
    window_pages: list[int] = dataclasses.field(default_factory=list)
    window_first: int = 0
    beginnings: tuple[int, ...] = ()
    target_len: int = 0
    draft_len: int = 0
    finish_reason: str | None = None
    error: str | None = None
    metrics: SpecDecodeMetrics = dataclasses.field(default_factory=SpecDecodeMetrics)
    times: Times = dataclasses.field(default_factory=Times)
    samples: list[Request] = dataclasses.field(default_factory=list, repr=False)
    digests: list[bytes] = dataclasses.field(default_factory=list, repr=False)
    num_registered: int = 0
    num_drafted: int = 0
    acceptance: Acceptance = dataclasses.field(default_factory=lambda: Acceptance(0))
    packed: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32), repr=False)

    def __post_init__(self) -> None:
        self.samples = self.samples or [self]

    @property
    def ids(self) -> np.ndarray:
        """The tokens of prompt and output as an array i32[num_tokens].

        Only tokens that are new since the last use are converted. A request may have thousands of tokens, few of them
        new.
        """
        known = len(self.packed)
        count = self.num_tokens
        if known < len(self.prompt) or known > count:  # nothing packed yet, or a stop string removed tokens
            self.packed = np.array(self.tokens, np.int32)
        elif known < count:
            self.packed = np.concatenate([self.packed, np.array(self.output[known - len(self.prompt) :], np.int32)])
        return self.packed

    def lose_pages(self) -> None:
        """Record that the request holds no pages and no table, and that the caches hold none of its tokens."""
        self.pages = []
        self.window_pages, self.window_first, self.beginnings = [], 0, ()
        self.grammar_at = None
        self.target_len = self.draft_len = self.num_registered = self.num_drafted = 0

    @property
    def prefilled(self) -> bool:
        """Return whether the target has read all tokens but the last one, which the next round reads."""
        return self.target_len >= self.num_tokens - 1

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Return whether log-probabilities of the prompt are still to be computed for this request.

        Only the first of the n samples of a prompt computes the prompt's log-probabilities.
        """
        asked = self.index == 0 and self.params.prompt_logprobs is not None
        return asked and len(self.prompt_logprobs) < len(self.prompt) - 1

    @property
    def tokens(self) -> list[int]:
        """The token ids of prompt and output, in one list."""
        return self.prompt + self.output

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)
