"""What generation gives back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from jaxspec.engine.metrics import RequestTiming, SpecDecodeMetrics


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
