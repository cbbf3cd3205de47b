"""The state of a prompt while the engine decodes it: its samples, their growing text, and the result."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from jaxspec.api.detokenizer import Detokenizer
from jaxspec.api.origins import Origins
from jaxspec.api.outputs import CompletionOutput, Logprob, RequestOutput, StreamOutput
from jaxspec.api.prompts import PromptRequest
from jaxspec.api.tokens import Token, Vocabulary
from jaxspec.common.errors import error_line
from jaxspec.engine.metrics import RequestTiming, SpecDecodeMetrics
from jaxspec.engine.request import Request, Times, TokenLogprobs


class Sample:
    """One of the n samples of a prompt: its growing text, and how much of the text was streamed.

    tokenizer: tokenizer of the target.
    prompt_request: the sample's prompt with its parameters.
    request: the engine's request for this sample.
    method: as in `Origins`.
    """

    def __init__(
        self, tokenizer: Any, prompt_request: PromptRequest, request: Request, method: str | None = None
    ) -> None:
        self.prompt_request = prompt_request
        self.request = request
        self.params = request.params
        self.detokenizer = Detokenizer(
            tokenizer,
            stop=tuple(self.params.stop),
            min_tokens=self.params.min_tokens,
            skip_special_tokens=self.params.skip_special_tokens,
            placed=self.params.logprobs is not None or self.params.token_origins,
        )
        self.origins = Origins(request, method) if self.params.token_origins else None
        if self.params.stop:
            request.find_stop = self.detokenizer.find_stop
        if not self.params.include_stop_str_in_output:
            self.detokenizer.hidden = frozenset(request.stop_ids)
        self.shown = 0  # number of characters in the streamed pieces so far
        self.sent = 0  # number of token ids in the streamed pieces so far
        self.streamed = False  # whether the sample's final piece was returned

    def text_so_far(self) -> str:
        """Return the text that will not change any more.

        If the tokenizer fails, this sample ends with an error. Other samples go on.
        """
        try:
            return self.read()
        except Exception as error:
            self.request.finish_reason, self.request.error = "error", error_line(error)
            return self.detokenizer.text

    def read(self) -> str:
        """Return the text that will not change any more. Errors of the tokenizer are not caught."""
        if self.request.finish_reason is not None:
            text = self.detokenizer.finish(self.request.output, include_stop=self.params.include_stop_str_in_output)
            if self.request.finish_reason == "length" and self.detokenizer.stop_string is not None:
                # The text that was held back completes a stop string, just as the last id could have completed it.
                self.request.finish_reason = "stop"
            return text
        if not self.params.stop:
            self.detokenizer.feed(self.request.output)
        return self.detokenizer.text[: self.detokenizer.settled()]

    def piece(self) -> StreamOutput | None:
        """Return the text and ids that are new since the last piece, or None if there are no new ids.

        The piece after the sample's end is the final one. It is returned even if it holds no ids.
        """
        request = self.request
        prompt_request = self.prompt_request
        if self.streamed or not (request.finish_reason or len(request.output) > self.sent):
            return None
        text = self.text_so_far()[self.shown :]
        ids = request.output[self.sent :]
        ended = request.finish_reason is not None
        piece = StreamOutput(
            text,
            ids,
            request.finish_reason,
            prompt_request.index,
            request.index,
            request.error,
            prompt_request.request_id,
        )
        if ended:
            piece.stop_reason = self.stop_reason()
        if self.params.logprobs is not None:
            piece.logprobs = self.described(self.sent, self.params.logprobs)
        if self.origins:
            piece.token_origins = self.origins.since(self.sent, self.tokens(self.sent))
        self.shown, self.sent, self.streamed = self.shown + len(text), self.sent + len(ids), ended
        return piece

    def described(self, start: int, most: int) -> list[dict[int, Logprob]]:
        """Return the log-probabilities of the output's tokens from index `start` on, a dict by id for each token.

        The dict holds the Logprob of the token itself, and of up to `most` of the most probable ids in its place.
        """
        request = self.request
        scores = request.logprobs[start:]
        return described(self.detokenizer.known, request.output[start:], self.tokens(start), scores, most)

    def tokens(self, start: int) -> list[Token]:
        """Return the output's tokens from index `start` on, each with the text that it adds."""
        return self.detokenizer.tokens(self.request.output, start, ended=self.request.finish_reason is not None)

    def stop_reason(self) -> str | int | None:
        """Return the stop string or the id of stop_token_ids that ended the sample.

        Return None if the model's own stop id or anything else ended the sample, as vLLM does.
        """
        last = self.request.output[-1:]
        if self.detokenizer.stop_string is None and self.request.finish_reason == "stop":
            return last[0] if last[0] in self.params.stop_token_ids else None
        return self.detokenizer.stop_string

    def completion(self) -> CompletionOutput:
        """Return the sample's result."""
        request = self.request
        text = self.text_so_far()
        output = CompletionOutput(
            request.index,
            text,
            request.output,
            request.finish_reason,
            self.stop_reason(),
            request.error,
        )
        if self.params.logprobs is not None:
            output.logprobs = self.described(0, self.params.logprobs)
            output.cumulative_logprob = sum(entry.logprob for entry in request.logprobs)
        if self.origins:
            output.token_origins = self.origins.since(0, self.tokens(0))
        return output


class PromptRun:
    """One prompt with its n samples, from its admission to its end.

    tokenizer: tokenizer of the target.
    prompt_request: the prompt with its parameters.
    request: the engine's request for the first sample. Its field `samples` lists the requests of all samples.
    method: as in `Sample`.
    """

    def __init__(
        self, tokenizer: Any, prompt_request: PromptRequest, request: Request, method: str | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.prompt_request = prompt_request
        self.samples = [Sample(tokenizer, prompt_request, sample, method) for sample in request.samples]

    @property
    def requests(self) -> list[Request]:
        """The engine's requests, one for each sample."""
        return [sample.request for sample in self.samples]

    @property
    def ended(self) -> bool:
        """Return whether all samples have ended."""
        return all(request.finish_reason is not None for request in self.requests)

    @property
    def streamed(self) -> bool:
        """Return whether the final piece of every sample was returned."""
        return all(sample.streamed for sample in self.samples)

    def pieces(self) -> list[StreamOutput]:
        """Return the output that is new since the last call: a piece for each sample with new ids or a new end."""
        scoring = self.requests[0]
        if scoring.wants_prompt_logprobs and scoring.finish_reason is None:
            return []  # another sample may be ahead, but the first pieces hold the prompt's log-probabilities
        pieces = []
        for sample in self.samples:
            first = not sample.sent
            if piece := sample.piece():
                piece.prompt_logprobs = self.prompt_logprobs if first else None
                pieces.append(piece)
        return pieces

    def final_output(self) -> list[RequestOutput]:
        """Return a list with the prompt's result, or an empty list until all samples have ended."""
        return [self.output()] if self.ended else []

    def output(self) -> RequestOutput:
        """Return the prompt's result. All samples must have ended."""
        metrics = SpecDecodeMetrics()
        for request in self.requests:
            metrics += request.metrics
        return RequestOutput(
            self.prompt_request.request_id,
            self.prompt_request.text,
            self.prompt_request.ids,
            [sample.completion() for sample in self.samples],
            metrics,
            self.prompt_logprobs,
            timing_of(self.requests),
        )

    @functools.cached_property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """The log-probabilities of the prompt's tokens, as in RequestOutput. They must have been computed."""
        most = self.prompt_request.params.prompt_logprobs
        if most is None:
            return None
        ids = self.prompt_request.ids
        detokenizer = Detokenizer(self.tokenizer, skip_special_tokens=False, placed=True)
        with contextlib.suppress(Exception):  # if the tokenizer fails, each later token gets its text by itself
            detokenizer.feed(ids)
        tokens = detokenizer.tokens(ids, 1, ended=True)
        return [None, *described(detokenizer.known, ids[1:], tokens, self.requests[0].prompt_logprobs, most)]


def described(
    known: Vocabulary, ids: Sequence[int], tokens: Sequence[Token], entries: Iterable[TokenLogprobs], most: int
) -> list[dict[int, Logprob]]:
    """Return a dict of Logprobs by token id for each of `ids`: first that of the id itself, then of the top ids.

    known: texts of the tokenizer's tokens, for the top ids.
    ids: chosen token ids.
    tokens: text that each chosen id adds to the whole text.
    entries: log-probabilities of each chosen id and of the most probable ids at its position. A request that failed
      may have fewer entries than ids.
    most: largest number of top ids.
    """
    found = []
    for chosen, token, entry in zip(ids, tokens, entries, strict=False):
        top = itertools.islice(zip(entry.top_ids, entry.top_logprobs, itertools.count(1)), most)
        row = {chosen: logprob_of(token, entry.logprob, entry.rank)}
        row |= {i: logprob_of(known[i], logprob, rank) for i, logprob, rank in top if i != chosen}
        found.append(row)
    return found


def logprob_of(token: Token, logprob: float, rank: int) -> Logprob:
    """Return the Logprob of a token: its log-probability and rank, with its text and bytes."""
    return Logprob(logprob, rank, token.text, None if token.data is None else tuple(token.data))


def timing_of(requests: Sequence[Request]) -> RequestTiming:
    """Return the durations of a prompt from those of its samples.

    The prompt ends when its last sample ends. It reaches each other event, such as the first token, with its first
    sample.
    """
    moments: dict[str, Any] = {}
    for name, chosen in {"admitted": min, "prefilled": min, "first_token": min, "finished": max}.items():
        times = [getattr(request.times, name) for request in requests]
        reached = [time for time in times if time is not None]
        moments[name] = chosen(reached) if reached else None
    return Times(requests[0].times.arrived, **moments).timing(max(len(r.output) for r in requests))


def failures(outputs: Iterable[RequestOutput]) -> str | None:
    """Return one line about the completions that ended with an error, or None."""
    completions = [completion for output in outputs for completion in output.outputs]
    failed = [completion for completion in completions if completion.finish_reason == "error"]
    if not failed:
        return None
    return f"{len(failed)} of {len(completions)} completions ended with an error, the first: {failed[0].error}"
