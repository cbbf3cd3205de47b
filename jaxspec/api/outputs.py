"""The classes of generation's results: RequestOutput, CompletionOutput, StreamOutput and Logprob."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from jaxspec.engine.metrics import RequestTiming, SpecDecodeMetrics


@dataclasses.dataclass(slots=True)  # slots save memory: there may be a million objects
class Logprob:
    """The log-probability of one token under the target's raw logits, before temperature, penalties and filters.

    logprob: natural logarithm of the probability.
    rank: rank among all ids; the most probable id has rank 1.
    decoded_token: text of the token. For a token of the output this is the text that the token adds, so that these
      strings join to the output's text: "" for a part of a character, and the whole character for the token that
      completes it. For any other token, or a token that is left out of the text, this is the token's text by itself.
    token_bytes: bytes of the token, even if they are only a part of a character. None for a token that is left out of
      the text, such as a stop token.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None
    token_bytes: tuple[int, ...] | None = None


@dataclasses.dataclass(slots=True)
class TokenOrigin:
    """The origin of one output token: the target itself or a draft, and the round that made it.

    A round is one pass of the target, which accepts some of the proposed draft tokens. Its tokens are these, then at
    most one token of the target's own.

    text: text that the token adds to the output, so that these strings join to the output's text: "" for a part of a
      character, or for a token that is left out of the text.
    origin: "draft" for an accepted draft token, "target" for a token of the target's own.
    method: name of the drafting method, such as "ngram" or "eagle3"; None for a token of the target's own. With the
      method "ngram+eagle3" it is the one of the two that proposed the token.
    round: number of the round among those that gave the output tokens, from 0.
    position: index of the token in its round, from 0. For a token of the target's own it is the number of accepted
      draft tokens before it.
    num_drafts: number of draft tokens that the round proposed; 0 without speculation.
    num_legal: number of token ids that the grammar of the output allowed in the token's place; None without a grammar.
    """

    text: str
    origin: str
    method: str | None
    round: int
    position: int
    num_drafts: int
    num_legal: int | None = None


@dataclasses.dataclass
class CompletionOutput:
    """The output of one sample of a prompt.

    index: number of the sample among the prompt's n samples, from 0.
    finish_reason: "stop", "length", "abort" or "error".
    stop_reason: the stop string or the id of stop_token_ids that ended the sample; None if anything else did, such as
      the model's own stop id, as in vLLM.
    error: reason of the failure if finish_reason is "error", else None.
    logprobs: for each token, a dict by id with the Logprob of the chosen id and of the most probable ids; None if
      SamplingParams.logprobs is None.
    cumulative_logprob: sum of the log-probabilities of the chosen ids; None if logprobs is None.
    token_origins: origin of each token; None without SamplingParams.token_origins.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    token_origins: list[TokenOrigin] | None = None


@dataclasses.dataclass
class RequestOutput:
    """The result of one prompt.

    request_id: the caller's name for the request, or a generated name.
    prompt: the prompt's text; None if the prompt was given as token ids.
    outputs: outputs of the n samples.
    prompt_logprobs: for each token of the prompt, a dict like those of CompletionOutput.logprobs, and None for the
      first token; None altogether if SamplingParams.prompt_logprobs is None.
    metrics: counters of drafts and tokens, summed over all samples.
    timing: durations of the request's stages. The request ends when its last sample ends.
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
    """Return the outputs as a list, for measurements. Raise RuntimeError if a sample failed."""
    outputs = list(outputs)
    for output in outputs:
        for completion in output.outputs:
            if completion.error:
                raise RuntimeError(f"an answer failed: {completion.error}")
    return outputs


@dataclasses.dataclass
class StreamOutput:
    """A piece of streamed output: the text and token ids that are new since the last piece of the same sample.

    finish_reason: as in CompletionOutput; None unless this is the sample's last piece.
    prompt_index: number of the prompt among the caller's prompts, from 0.
    sample: number of the sample among the prompt's n samples, from 0.
    error: as in CompletionOutput.
    request_id: name of the prompt's request.
    stop_reason: as in CompletionOutput.
    logprobs: as in CompletionOutput, for the new ids.
    prompt_logprobs: as in RequestOutput, in the first piece of each sample; None in later pieces.
    token_origins: as in CompletionOutput, for the new ids.
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
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    token_origins: list[TokenOrigin] | None = None
