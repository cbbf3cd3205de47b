"""One request's life: what was asked, what has been decoded, which pages it holds."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxspec.engine.adaptive import Acceptance
from jaxspec.engine.metrics import RequestTiming, SpecDecodeMetrics
from jaxspec.options.sampling_params import SamplingParams

# Looks at the output ids from this index on; returns how many output ids to keep, or None to go on.
FindStop = Callable[[list[int], int], int | None]


class TokenLogprobs(NamedTuple):
    """Of one token: its log-probability and rank, and the likeliest ids with theirs, best first."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@dataclasses.dataclass
class Times:
    """Moments of a request's life, in seconds of time.perf_counter; None: not yet."""

    arrived: float = dataclasses.field(default_factory=time.perf_counter)
    admitted: float | None = None
    prefilled: float | None = None
    first_token: float | None = None
    finished: float | None = None

    def timing(self, num_output: int) -> RequestTiming:
        between = lambda a, b: None if a is None or b is None else b - a
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
    seed: 64 bits, fixed for the request's life.
    rule: the acceptance rule that it is under.
    stop_ids: ids that end it.
    max_len: prompt + output at most.
    bad_words: id sequences that never occur in the output.
    index: which of the n samples.
    samples: all of them, this one included.

    pages hold positions [0, len(pages) * page_size); the target's cache is valid for [0, target_len), the draft's for
    [0, draft_len).

    logprobs: one entry an output token.
    prompt_logprobs: one for each prompt token but the first.
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
    digests: list[bytes] = dataclasses.field(default_factory=list, repr=False)  # of its full pages, as computed so far
    num_registered: int = 0  # pages that others can find already
    num_drafted: int = 0  # of which the draft was known to have read so many
    acceptance: Acceptance = dataclasses.field(default_factory=lambda: Acceptance(0))
    packed: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32), repr=False)  # see `ids`

    def __post_init__(self) -> None:
        self.samples = self.samples or [self]

    @property
    def ids(self) -> np.ndarray:
        """Its tokens, i32[num_tokens]. Only what came since the last time is made an array: a launch takes thousands
        of which few are new."""
        known, count = len(self.packed), self.num_tokens
        if known < len(self.prompt) or known > count:  # none yet, or a stop string took some back
            self.packed = np.array(self.tokens, np.int32)
        elif known < count:
            self.packed = np.concatenate([self.packed, np.array(self.output[known - len(self.prompt) :], np.int32)])
        return self.packed

    def lose_pages(self) -> None:
        """Nothing of it is in the caches."""
        self.pages = []
        self.target_len = self.draft_len = self.num_registered = self.num_drafted = 0

    @property
    def prefilled(self) -> bool:
        """Whether only the pending token is left to compute."""
        return self.target_len >= self.num_tokens - 1

    @property
    def wants_prompt_logprobs(self) -> bool:
        """They come from computing the prompt, once for all samples."""
        asked = self.index == 0 and self.params.prompt_logprobs is not None
        return asked and len(self.prompt_logprobs) < len(self.prompt) - 1

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)
