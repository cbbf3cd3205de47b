"""What generation gives back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any


@dataclasses.dataclass
class SpecDecodeMetrics:
    """Speculation's counters, of one request or summed over many.

    num_drafts: rounds that proposed something.
    num_draft_tokens: proposed.
    num_accepted_tokens: of them kept in the output.
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
        """Tokens a drafting round yields: 1 + accepted / drafts. 1.0 without drafts."""
        return 1.0 + (self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0)

    @property
    def draft_acceptance_rate(self) -> float:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def system_efficiency(self) -> float:
        """Tokens emitted in drafting rounds / the most that they could have emitted."""
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
        derived = ("num_accepted_tokens", "mean_acceptance_length", "draft_acceptance_rate", "system_efficiency")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in derived}


@dataclasses.dataclass(slots=True)  # there may be a million of them
class Logprob:
    """Of one token, under the target's raw logits: before temperature, penalties and filters.

    logprob: natural logarithm of its probability.
    rank: among all ids; 1 is the likeliest.
    decoded_token: its text. That of a token of the text is what it adds to the text, so that these join to it: "" for a
        part of a character, and the whole character for the token that completes it. That of any other token, and of
        one that the text leaves out, is what it says by itself.
    token_bytes: its bytes, also of a part of a character. None for a token that the text leaves out.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None
    token_bytes: tuple[int, ...] | None = None


@dataclasses.dataclass
class CompletionOutput:
    """One sample.

    finish_reason: "stop", "length", "abort" or "error".
    stop_reason: the stop string that ended it, or which of stop_token_ids; None for the model's own end, as in vLLM.
    error: why it failed.
    logprobs: for each token id, the chosen one's and the likeliest ones' Logprob by id, where asked for.
    cumulative_logprob: the sum of the chosen ones'.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None


@dataclasses.dataclass
class RequestTiming:
    """Seconds, from the request's arrival; None: it did not get that far.

    queue_seconds: until it was given a row.
    prefill_seconds: from then until its prompt was in the caches.
    decode_seconds: from then until its end.
    time_to_first_token: until the round that made it had ended, where a launch's rounds count as equally long. A stream
        shows it then; any other call returns when all its tokens are there.
    time_per_output_token: from the first token to the end, per further token.
    """

    queue_seconds: float | None = None
    prefill_seconds: float | None = None
    decode_seconds: float | None = None
    time_to_first_token: float | None = None
    time_per_output_token: float | None = None


@dataclasses.dataclass
class RequestOutput:
    """A request's result, in the order of the prompts. prompt is None where token ids were given.

    request_id: the caller's, else made.
    outputs: n samples.
    prompt_logprobs: as a completion's logprobs, None for the first token, where asked for.
    metrics: over all samples.
    timing: until the last of them.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: SpecDecodeMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    timing: RequestTiming = dataclasses.field(default_factory=RequestTiming)

    @property
    def finished(self) -> bool:
        """Whether every sample has ended."""
        return all(completion.finish_reason is not None for completion in self.outputs)


def whole(outputs: Iterable[RequestOutput]) -> list[RequestOutput]:
    """What is measured has to be: raises RuntimeError where a sample failed."""
    outputs = list(outputs)
    for output in outputs:
        if failed := next((completion.error for completion in output.outputs if completion.error), None):
            raise RuntimeError(f"an answer failed: {failed}")
    return outputs


@dataclasses.dataclass
class StreamOutput:
    """A piece of a stream: the new text and token ids since the last piece of the same sample. The last one has a
    finish_reason.

    prompt_index: which of the prompts.
    sample: which of its n samples.
    request_id: the prompt's.
    stop_reason, logprobs: as a completion's; logprobs of the new ids.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    prompt_index: int = 0
    sample: int = 0
    error: str | None = None
    request_id: str = ""
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None


@dataclasses.dataclass
class Timing:
    """Seconds spent, since the LLM was made. tokens_per_second leaves loading and compiling out.

    warm_up_seconds: compiling in advance.
    compile_seconds, num_compiled: for which, and for how many programs, requests had to wait.
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
        return dataclasses.asdict(self) | {"tokens_per_second": self.tokens_per_second}
