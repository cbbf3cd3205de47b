"""Counters of speculative decoding, and times, of one request or of an engine."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass
class SpecDecodeMetrics:
    """Counters of speculative decoding, of one request or summed over many.

    num_drafts: number of rounds that proposed at least one draft token.
    num_draft_tokens: number of draft tokens proposed.
    num_accepted_tokens: number of draft tokens accepted and kept in the output.
    num_accepted_tokens_per_pos: number of accepted draft tokens by their position in the round.
    num_emitted_tokens: number of output tokens.
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
        """Mean number of output tokens of a round with draft tokens: 1 + accepted / rounds. 1.0 without such rounds."""
        return 1.0 + (self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted draft tokens / proposed draft tokens. 0.0 without draft tokens."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def system_efficiency(self) -> float:
        """Tokens emitted in rounds with draft tokens / maximum that these could emit. 0.0 without such rounds."""
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
        """Return the counters, and the values derived from the counters, by name."""
        derived = ("num_accepted_tokens", "mean_acceptance_length", "draft_acceptance_rate", "system_efficiency")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in derived}


@dataclasses.dataclass
class RequestTiming:
    """Durations of a request's stages, in seconds. None: the request did not reach the end of this stage.

    queue_seconds: time from the request's arrival until it was admitted to a row.
    prefill_seconds: time from its admission until its prompt was in the KV caches.
    decode_seconds: time from the end of its prefill until its end.
    time_to_first_token: time from the request's arrival until the end of the round that made its first token. All
      rounds of a launch (one run of the device program) are assumed to take equally long.
    time_per_output_token: time from the first token to the end, divided by the number of tokens after the first; None
      for fewer than two tokens.
    """

    queue_seconds: float | None = None
    prefill_seconds: float | None = None
    decode_seconds: float | None = None
    time_to_first_token: float | None = None
    time_per_output_token: float | None = None


@dataclasses.dataclass
class Timing:
    """Seconds spent by an `LLM` since it was made, by stage, and its number of output tokens.

    warm_up_seconds: time spent compiling programs in advance.
    compile_seconds: time that requests waited for programs to compile.
    num_tokens: number of output tokens of all requests.
    num_compiled: number of programs whose compilation requests waited for.
    tokens_per_second: num_tokens divided by the time of prefill and decoding, without loading and compiling.
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
        """Return the fields, and tokens_per_second, by name."""
        return dataclasses.asdict(self) | {"tokens_per_second": self.tokens_per_second}
