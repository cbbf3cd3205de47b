"""One request: its parameters, the tokens decoded so far, the pages it holds."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxspec.engine.adaptive import Acceptance
from jaxspec.engine.metrics import RequestTiming, SpecDecodeMetrics
from jaxspec.options.sampling_params import SamplingParams

# find_stop(output ids, start) looks at the ids from index start on. It returns how many output ids to keep if a stop
# string is complete, else None.
FindStop = Callable[[list[int], int], int | None]


class TokenLogprobs(NamedTuple):
    """The log-probability and rank of one token, and the top ids with their log-probabilities, best first."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


def between(start: float | None, end: float | None) -> float | None:
    """Return the seconds from start to end, or None if one of them is not known."""
    return None if start is None or end is None else end - start


@dataclasses.dataclass
class Times:
    """The times of a request's events, in seconds of time.perf_counter. None: not reached yet."""

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
    """One sample of one prompt.

    prompt: token ids.
    seed: 64 bits, the same for the request's whole life.
    rule: the acceptance rule of the request.
    stop_ids: ids that end the output.
    max_len: maximum number of tokens of prompt and output together.
    bad_words: id sequences that never occur in the output.
    index: the number of this sample among the n samples.
    samples: all n samples, this one included.
    pages: ids of its pages, for positions [0, len(pages) * page_size).
    target_len: the target's cache is valid for positions [0, target_len).
    draft_len: the draft's cache is valid for positions [0, draft_len).
    logprobs: one entry for each output token.
    prompt_logprobs: one entry for each prompt token but the first.
    digests: digests of its full pages, as far as computed.
    num_registered: number of its pages registered for reuse.
    num_drafted: number of its pages registered as read by the draft.
    packed: the array behind `ids`.
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
    index: int = 0
    find_stop: FindStop | None = None

    output: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    pages: list[int] = dataclasses.field(default_factory=list)
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
        """The tokens of prompt and output, i32[num_tokens].

        Only tokens new since the last call are converted: a launch reads thousands of tokens, few of them new.
        """
        known = len(self.packed)
        count = self.num_tokens
        if known < len(self.prompt) or known > count:  # nothing packed yet, or a stop string removed tokens
            self.packed = np.array(self.tokens, np.int32)
        elif known < count:
            self.packed = np.concatenate([self.packed, np.array(self.output[known - len(self.prompt) :], np.int32)])
        return self.packed

    def lose_pages(self) -> None:
        """Record that nothing of the request is in the caches."""
        self.pages = []
        self.target_len = self.draft_len = self.num_registered = self.num_drafted = 0

    @property
    def prefilled(self) -> bool:
        """Return whether only the pending token is left to compute."""
        return self.target_len >= self.num_tokens - 1

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Return whether log-probabilities of the prompt are still to be computed.

        The first of the n samples computes them for all.
        """
        asked = self.index == 0 and self.params.prompt_logprobs is not None
        return asked and len(self.prompt_logprobs) < len(self.prompt) - 1

    @property
    def tokens(self) -> list[int]:
        """The tokens of prompt and output."""
        return self.prompt + self.output

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)
