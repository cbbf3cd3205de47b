"""Counters and times of requests and of an engine."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass
class SpecDecodeMetrics:
    """Counters of speculative decoding, of one request or summed over many.

    num_drafts: rounds that proposed something.
    num_draft_tokens: draft tokens proposed.
    num_accepted_tokens: draft tokens accepted and kept in the output.
    num_accepted_tokens_per_pos: the same by position in the round.
    num_emitted_tokens: all output tokens.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = dataclasses.field(default_factory=list)
    num_emitted_tokens: int = 0

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.num_accepted_tokens_per_pos)

    @property
    def mean_acceptance_length(self) -> float:
        """Mean number of tokens that a drafting round yields: 1 + accepted / drafts. 1.0 without drafts."""
        return 1.0 + (self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted draft tokens / proposed draft tokens. 0.0 without drafts."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def system_efficiency(self) -> float:
        """Tokens emitted in drafting rounds / the maximum that they could have emitted. 0.0 without drafts."""
        most = self.num_draft_tokens + self.num_drafts
        return (self.num_accepted_tokens + self.num_drafts) / most if most else 0.0

    def __iadd__(self, other: SpecDecodeMetrics) -> SpecDecodeMetrics:
        a, b = self.num_accepted_tokens_per_pos, other.num_accepted_tokens_per_pos
        longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
        self.num_accepted_tokens_per_pos = [x + (shorter[i] if i < len(shorter) else 0) for i, x in enumerate(longer)]
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_emitted_tokens += other.num_emitted_tokens
        return self

    def as_dict(self) -> dict[str, Any]:
        """Return the counters and the values derived from them."""
        derived = ("num_accepted_tokens", "mean_acceptance_length", "draft_acceptance_rate", "system_efficiency")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in derived}


@dataclasses.dataclass
class RequestTiming:
    """Durations of a request's stages, in seconds. None: the request did not get that far.

    queue_seconds: from its arrival until it was given a row.
    prefill_seconds: from then until its prompt was in the caches.
    decode_seconds: from then until its end.
    time_to_first_token: from its arrival until the end of the round that made the first token. The rounds of a launch
      are assumed to take equally long. A stream shows the token then; any other call returns when all its tokens are
      there.
    time_per_output_token: from the first token to the end, divided by the number of tokens after the first.
    """

    queue_seconds: float | None = None
    prefill_seconds: float | None = None
    decode_seconds: float | None = None
    time_to_first_token: float | None = None
    time_per_output_token: float | None = None


@dataclasses.dataclass
class Timing:
    """Seconds spent since the LLM was made. tokens_per_second excludes loading and compiling.

    warm_up_seconds: time spent compiling in advance.
    compile_seconds: time that requests waited for programs to compile.
    num_compiled: number of programs that requests waited for.
    """

    load_seconds: float = 0.0
    warm_up_seconds: float = 0.0
    compile_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    num_tokens: int = 0
    num_compiled: int = 0

    @property
    def tokens_per_second(self) -> float:
        spent = self.prefill_seconds + self.decode_seconds
        return self.num_tokens / spent if spent else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and tokens_per_second."""
        return dataclasses.asdict(self) | {"tokens_per_second": self.tokens_per_second}
