"""The results of generation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from jaxspec.engine.metrics import RequestTiming, SpecDecodeMetrics


@dataclasses.dataclass(slots=True)  # there may be a million of them
class Logprob:
    """The log-probability of one token under the target's raw logits, before temperature, penalties and filters.

    logprob: natural logarithm of the probability.
    rank: rank among all ids; 1 is the most probable.
    decoded_token: text of the token. For a token of the output this is what it adds to the text, so that these strings
      join to the text: "" for a part of a character, and the whole character for the token that completes it. For any
      other token, and for one that the text leaves out, it is the text of the token by itself.
    token_bytes: bytes of the token, also of a part of a character. None for a token that the text leaves out.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None
    token_bytes: tuple[int, ...] | None = None


@dataclasses.dataclass
class CompletionOutput:
    """The completion of one sample.

    finish_reason: "stop", "length", "abort" or "error".
    stop_reason: the stop string or the id of stop_token_ids that ended it; None for the model's own end, as in vLLM.
    error: the reason why it failed.
    logprobs: for each token, where asked for, a dict by id with the Logprob of the chosen id and of the top ids.
    cumulative_logprob: sum of the log-probabilities of the chosen ids.
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
    """The result of one prompt.

    request_id: the caller's name for the request, or one that was made.
    prompt: None if the prompt was given as token ids.
    outputs: completions of the n samples.
    prompt_logprobs: like a completion's logprobs, where asked for; None for the first token.
    metrics: counters summed over all samples.
    timing: durations until the last sample ended.
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
        """Return whether every sample has ended."""
        return all(completion.finish_reason is not None for completion in self.outputs)


def whole(outputs: Iterable[RequestOutput]) -> list[RequestOutput]:
    """Return the outputs as a list. Raise RuntimeError if a sample failed, so that no incomplete output is measured."""
    outputs = list(outputs)
    for output in outputs:
        for completion in output.outputs:
            if completion.error:
                raise RuntimeError(f"an answer failed: {completion.error}")
    return outputs


@dataclasses.dataclass
class StreamOutput:
    """A piece of a stream: the text and token ids that are new since the last piece of the same sample.

    The last piece has a finish_reason.

    prompt_index: the number of the prompt among the caller's prompts.
    sample: the number of the sample among the prompt's n.
    request_id: the name of the prompt's request.
    stop_reason: as in CompletionOutput.
    logprobs: as in CompletionOutput, for the new ids.
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
