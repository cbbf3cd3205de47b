"""AsyncLLM: a model for many callers in one event loop, whose requests one engine decodes together."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Unpack

from jaxspec.api.chat import as_prompt, conversations, rendering
from jaxspec.api.chat_process import TemplateProcess
from jaxspec.api.completions import PromptRun
from jaxspec.api.engine_thread import Call, EngineThread
from jaxspec.api.llm import LLM
from jaxspec.api.outputs import RequestOutput, StreamOutput
from jaxspec.api.prompts import AnyPrompt, Prompt, PromptRequest
from jaxspec.common.errors import UserError, quoted
from jaxspec.common.progress import compiling
from jaxspec.engine.engine import FEWER_ROUNDS
from jaxspec.engine.metrics import SpecDecodeMetrics, Timing
from jaxspec.options.keywords import ChatOptions, EngineOptions
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.options.speculative import SpeculativeConfig


class AsyncLLM:
    """An LLM for asyncio, with the same arguments. Each call takes one prompt; concurrent calls are decoded together.

    A thread owns the engine and sleeps while there is no request. A request ends early if its caller leaves the stream
    (by break, cancellation or an exception) or cancels the call of generate; other requests go on. A stream that is
    kept in a variable is left by its aclose(), or by contextlib.aclosing. If the engine itself fails, every open call
    and every later call raises RuntimeError with that failure.

    Close the object with shutdown(), or use it in `async with`. The attribute `llm` is the LLM inside, whose tokenizer
    may be used. Only the thread may call generate and stream of that LLM.

    Example:
      >>> async with AsyncLLM("smollm2-135m-instruct") as llm:  # doctest: +SKIP
      ...     async for piece in llm.stream("Once upon a time"):
      ...         print(piece.text, end="")
    """

    def __init__(
        self,
        model: str,
        *,
        speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        if options.get("rounds_per_launch") is None:  # short launches, because new requests wait for a launch's end
            options["rounds_per_launch"] = FEWER_ROUNDS
        self.llm = LLM(model, speculative_config=speculative_config, **options)
        # No progress bar is drawn for compiling, because other code may print meanwhile.
        self.llm.engine.runner.programs.watch = functools.partial(compiling, bar=False)
        self._thread = EngineThread(self.llm)
        self._thread.start()
        self.templates = TemplateProcess()
        self._calls: dict[str, Call] = {}  # open calls by request_id
        # `end` runs when this object is garbage-collected, and at the latest before the interpreter exits.
        self._finalizer = weakref.finalize(self, end, self._thread, self.templates)

    def shutdown(self) -> None:
        """End open calls with RuntimeError. Stop the engine's thread and the template process. May be called again."""
        self._finalizer()

    async def check_health(self) -> None:
        """Raise RuntimeError if calls cannot be served any more, because the engine failed or was shut down."""
        self._thread.check_open()

    @property
    def metrics(self) -> SpecDecodeMetrics:
        """Counters of drafts and tokens, summed over all requests."""
        return self.llm.metrics

    @property
    def timing(self) -> Timing:
        return self.llm.timing

    def prepare(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> PromptRequest:
        """Return a checked prompt for `generate` or `stream`. Any thread may call this. Raise UserError as they do."""
        asked = self.llm._prepare(prompt, sampling_params)
        if len(asked) != 1:
            raise UserError(f"one prompt a call, got {len(asked)}: calls that overlap are decoded together")
        return asked[0]

    def stream(
        self, prompt: AnyPrompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[StreamOutput, None]:
        """Yield pieces of a prompt's completion while they are generated, for each of its n samples.

        An invalid prompt or parameter raises UserError at once, before anything is queued.

        request_id: name of the request for `abort` and in the pieces; by default a generated name. Reading the first
          piece raises UserError if a request of this name is open.
        """
        return self._results(self._prepare(prompt, sampling_params, request_id), PromptRun.pieces, streaming=True)

    async def generate(
        self, prompt: AnyPrompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> RequestOutput:
        """Complete a prompt. request_id: as in `stream`.

        Raises: UserError for a prompt that cannot be served. A completion that fails later has finish_reason "error".
        """
        prompt_request = self._prepare(prompt, sampling_params, request_id)
        async with contextlib.aclosing(self._results(prompt_request, PromptRun.final_output)) as results:
            return await anext(results)

    async def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> RequestOutput:
        """Complete a conversation, a list of {"role", "content"}. options: as in LLM.render_chat.

        To stream the completion instead, call `stream` with the prompt that render_chat returns.
        """
        prompts: Any = [await self.render_chat(conversation, **options) for conversation in conversations(messages)]
        return await self.generate(prompts, sampling_params, request_id)  # raises UserError for several prompts

    async def render_chat(self, messages: Any, **options: Unpack[ChatOptions]) -> Mapping[str, Any]:
        """Do what LLM.render_chat does, in another process. A template that takes too long raises UserError, too."""
        tokenizer = self.llm.tokenizer
        return as_prompt(tokenizer, await self.templates.text(rendering(tokenizer, messages, **options)))

    async def abort(self, request_id: str) -> None:
        """End a request if it is open. The request's caller gets the output so far, with finish_reason "abort"."""
        call = self._calls.get(request_id)
        if call is not None:
            self._thread.post(self._thread.abort, call)

    def _prepare(self, prompt: Any, sampling_params: SamplingParams | None, request_id: str | None) -> PromptRequest:
        """Return the prompt as a checked request with this request_id, or with a generated one."""
        self._thread.check_open()
        if isinstance(prompt, PromptRequest) and sampling_params is not None:
            raise UserError("the prompt was prepared with sampling_params of its own: leave sampling_params out")
        prompt_request = prompt if isinstance(prompt, PromptRequest) else self.prepare(prompt, sampling_params)
        if request_id is None:
            request_id = uuid.uuid4().hex
        if not isinstance(request_id, str) or not request_id:
            raise UserError(f"request_id={quoted(request_id)} must be a string that is not empty")
        return dataclasses.replace(prompt_request, request_id=request_id)

    async def _results(
        self, prompt_request: PromptRequest, take: Callable[[PromptRun], list[Any]], *, streaming: bool = False
    ) -> AsyncGenerator[Any, None]:
        """Submit a prompt. After each step, yield the results that the function `take` returns, until the run ends."""
        call = Call(prompt_request, take, streaming, asyncio.get_running_loop())
        if self._calls.setdefault(prompt_request.request_id, call) is not call:
            raise UserError(f"request_id={quoted(prompt_request.request_id)} is in use: choose another, or give none")
        try:
            self._thread.submit(call)
            self._thread.check_open()  # after `post`, because a thread that has ended ignores the posted call
            while (result := await call.results.get()) is not None:
                if isinstance(result, Exception):
                    raise result
                yield result
        finally:
            del self._calls[prompt_request.request_id]
            self._thread.post(self._thread.close, call)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await asyncio.to_thread(self.shutdown)


def end(thread: EngineThread, templates: TemplateProcess) -> None:
    """Stop the engine's thread and the process that renders chat templates."""
    thread.stop()
    templates.close()
