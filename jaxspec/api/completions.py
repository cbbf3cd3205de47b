"""A prompt on its way through the engine: its samples, their text as it grows, and the result."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from jaxspec.api.detokenizer import Detokenizer
from jaxspec.api.outputs import CompletionOutput, Logprob, RequestOutput, StreamOutput
from jaxspec.api.prompts import Ask
from jaxspec.api.tokens import Token, Vocabulary
from jaxspec.common.errors import said
from jaxspec.engine.metrics import RequestTiming, SpecDecodeMetrics
from jaxspec.engine.request import Request, Times, TokenLogprobs


class Sample:
    """One sample's text, and how much of it a stream has shown."""

    def __init__(self, tokenizer: Any, ask: Ask, request: Request) -> None:
        self.ask, self.request, self.params = ask, request, request.params
        self.detokenizer = Detokenizer(
            tokenizer,
            stop=tuple(self.params.stop),
            min_tokens=self.params.min_tokens,
            skip_special_tokens=self.params.skip_special_tokens,
            placed=self.params.logprobs is not None,
        )
        if self.params.stop:
            request.find_stop = self.detokenizer.find_stop
        if not self.params.include_stop_str_in_output:
            self.detokenizer.hidden = frozenset(request.stop_ids)
        self.shown = self.sent = 0  # characters and ids that pieces have had
        self.streamed = False  # whether the last piece is out

    def text_so_far(self) -> str:
        """Text that will not change any more. A tokenizer that fails ends this sample with an error, and no other."""
        try:
            return self.read()
        except Exception as error:
            self.request.finish_reason, self.request.error = "error", said(error)
            return self.detokenizer.text

    def read(self) -> str:
        if self.request.finish_reason is not None:
            text = self.detokenizer.finish(self.request.output, include_stop=self.params.include_stop_str_in_output)
            if self.request.finish_reason == "length" and self.detokenizer.stop_string is not None:
                self.request.finish_reason = "stop"  # as where the last id completes a stop string
            return text
        if not self.params.stop:
            self.detokenizer.feed(self.request.output)
        return self.detokenizer.text[: self.detokenizer.settled()]

    def piece(self) -> StreamOutput | None:
        """What is new since the last piece, or None."""
        request, ask = self.request, self.ask
        if self.streamed or not (request.finish_reason or len(request.output) > self.sent):
            return None
        text, ids = self.text_so_far()[self.shown :], request.output[self.sent :]
        ended = request.finish_reason is not None
        piece = StreamOutput(text, ids, request.finish_reason, ask.index, request.index, request.error, ask.request_id)
        if ended:
            piece.stop_reason = self.stop_reason()
        if (asked := self.params.logprobs) is not None:
            piece.logprobs = self.described(self.sent, asked)
        self.shown, self.sent, self.streamed = self.shown + len(text), self.sent + len(ids), ended
        return piece

    def described(self, start: int, most: int) -> list[dict[int, Logprob]]:
        """Return the log-probabilities of the output's tokens from index start on."""
        request = self.request
        tokens = self.detokenizer.tokens(request.output, start, ended=request.finish_reason is not None)
        return described(self.detokenizer.known, request.output[start:], tokens, request.logprobs[start:], most)

    def stop_reason(self) -> str | int | None:
        """The stop string that ended it, or which of the ids that were asked for; as in vLLM None for the model's own
        end."""
        last = self.request.output[-1:]
        if self.detokenizer.stop_string is None and self.request.finish_reason == "stop":
            return last[0] if last[0] in self.params.stop_token_ids else None
        return self.detokenizer.stop_string

    def completion(self) -> CompletionOutput:
        request, asked, text = self.request, self.params.logprobs, self.text_so_far()
        output = CompletionOutput(
            request.index,
            text,
            request.output,
            request.finish_reason,
            self.stop_reason(),
            request.error,
        )
        if asked is not None:
            output.logprobs = self.described(0, asked)
            output.cumulative_logprob = sum(entry.logprob for entry in request.logprobs)
        return output


class Job:
    """One prompt with its n samples. request: sample 0's, as the engine gave it."""

    def __init__(self, tokenizer: Any, ask: Ask, request: Request) -> None:
        self.tokenizer, self.ask = tokenizer, ask
        self.samples = [Sample(tokenizer, ask, sample) for sample in request.samples]

    @property
    def requests(self) -> list[Request]:
        return [sample.request for sample in self.samples]

    @property
    def ended(self) -> bool:
        return all(request.finish_reason is not None for request in self.requests)

    @property
    def streamed(self) -> bool:
        """Whether every sample's last piece is out."""
        return all(sample.streamed for sample in self.samples)

    def pieces(self) -> list[StreamOutput]:
        """What is new since the last call, of every sample that has something."""
        return [piece for sample in self.samples if (piece := sample.piece())]

    def output(self) -> RequestOutput:
        """The result; to be asked for when all samples have ended."""
        first, params = self.requests[0], self.ask.params
        metrics = SpecDecodeMetrics()
        for request in self.requests:
            metrics += request.metrics
        output = RequestOutput(
            self.ask.request_id,
            self.ask.text,
            self.ask.ids,
            [sample.completion() for sample in self.samples],
            metrics,
            timing=timing_of(self.requests),
        )
        if params.prompt_logprobs is not None:
            ids, detokenizer = self.ask.ids, Detokenizer(self.tokenizer, skip_special_tokens=False, placed=True)
            with contextlib.suppress(Exception):  # a tokenizer that fails at an id: each token is described by itself
                detokenizer.feed(ids)
            tokens, most = detokenizer.tokens(ids, 1, ended=True), params.prompt_logprobs
            entries = described(detokenizer.known, ids[1:], tokens, first.prompt_logprobs, most)
            output.prompt_logprobs = [None, *entries]
        return output


def described(
    known: Vocabulary, ids: Sequence[int], tokens: Sequence[Token], entries: Iterable[TokenLogprobs], most: int
) -> list[dict[int, Logprob]]:
    """Return for each id of the text a dict by id: its own Logprob first, then those of the `most` likeliest. tokens:
    what each id adds to the text; the others are described by themselves. A request that failed may have fewer entries
    than ids."""
    found = []
    for chosen, token, entry in zip(ids, tokens, entries, strict=False):
        likeliest = itertools.islice(zip(entry.top_ids, entry.top_logprobs, itertools.count(1)), most)
        row = {chosen: logprob_of(token, entry.logprob, entry.rank)}
        row |= {i: logprob_of(known[i], logprob, rank) for i, logprob, rank in likeliest if i != chosen}
        found.append(row)
    return found


def logprob_of(token: Token, logprob: float, rank: int) -> Logprob:
    return Logprob(logprob, rank, token.text, None if token.data is None else tuple(token.data))


def timing_of(requests: Sequence[Request]) -> RequestTiming:
    """A request's moments are those of the first of its samples to reach them; its end is the last one's."""
    moments: dict[str, Any] = {}
    for name, chosen in {"admitted": min, "prefilled": min, "first_token": min, "finished": max}.items():
        reached = [at for r in requests if (at := getattr(r.times, name)) is not None]
        moments[name] = chosen(reached) if reached else None
    return Times(requests[0].times.arrived, **moments).timing(max(len(r.output) for r in requests))


def failures(outputs: Iterable[RequestOutput]) -> str | None:
    """One line on the completions that ended with an error, or None."""
    completions = [completion for output in outputs for completion in output.outputs]
    failed = [completion for completion in completions if completion.finish_reason == "error"]
    if not failed:
        return None
    return f"{len(failed)} of {len(completions)} completions ended with an error, the first: {failed[0].error}"
