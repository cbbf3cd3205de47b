"""AsyncLLM: many callers in one event loop, and one engine that decodes their requests together."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import queue
import threading
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any, Unpack

from jaxspec.api.chat import as_prompt, conversations, rendering
from jaxspec.api.chat_process import TemplateProcess
from jaxspec.api.completions import PromptRun
from jaxspec.api.llm import LLM
from jaxspec.api.outputs import RequestOutput, StreamOutput
from jaxspec.api.prompts import AnyPrompt, Prompt, PromptRequest
from jaxspec.common.errors import UserError, quoted
from jaxspec.common.progress import compiling
from jaxspec.engine.engine import FEWER_ROUNDS
from jaxspec.engine.metrics import SpecDecodeMetrics, Timing
from jaxspec.engine.request import Request
from jaxspec.options.keywords import ChatOptions, EngineOptions
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.options.speculative import SpeculativeConfig


class AsyncLLM:
    """An LLM for asyncio: the same arguments, one prompt a call. Calls that overlap share the engine's batches.

    A thread owns the engine and sleeps while there is no request. Leaving a stream (break, cancellation, an exception)
    or cancelling a generate ends that request and no other. (A stream that is kept in a variable is left by its
    aclose(), or contextlib.aclosing.) If the engine itself fails, every open call raises RuntimeError with that
    failure, and so does every later one.

    Close it with shutdown(), or use it in `async with`. `llm` is the LLM inside: read its tokenizer; its generate and
    stream belong to the thread.

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
        if options.get("rounds_per_launch") is None:  # other requests may come while a launch runs
            options["rounds_per_launch"] = FEWER_ROUNDS
        self.llm = LLM(model, speculative_config=speculative_config, **options)
        self.llm.engine.runner.programs.watch = functools.partial(compiling, bar=False)  # others may print meanwhile
        self._thread = EngineThread(self.llm)
        self._thread.start()
        self.templates = TemplateProcess()
        self._calls: dict[str, Call] = {}  # calls under way, by request_id
        # Runs when this object is garbage-collected, and at the latest before the interpreter ends.
        self._finalizer = weakref.finalize(self, end, self._thread, self.templates)

    def shutdown(self) -> None:
        """End open calls with RuntimeError, then the thread. May be called again."""
        self._finalizer()

    async def check_health(self) -> None:
        """Raise RuntimeError if no call can be served any more: the engine failed, or was shut down."""
        self._thread.check_open()

    @property
    def metrics(self) -> SpecDecodeMetrics:
        """Counters over all requests."""
        return self.llm.metrics

    @property
    def timing(self) -> Timing:
        return self.llm.timing

    def prepare(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> PromptRequest:
        """Return a prompt, checked with its parameters, that `generate` and `stream` take without further work. Any
        thread may call this. Raises UserError as they do."""
        asked = self.llm._prepare(prompt, sampling_params)
        if len(asked) != 1:
            raise UserError(f"one prompt a call, got {len(asked)}: calls that overlap are decoded together")
        return asked[0]

    def stream(
        self, prompt: AnyPrompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[StreamOutput, None]:
        """Yield pieces of a prompt's completion as they are made, for each of its n samples. An invalid prompt or
        parameter raises UserError at once, before anything is queued.

        request_id: a name for `abort` and for the pieces; by default one is made. It is in use from the first piece
          that is asked for to the last; a name in use is refused.
        """
        return self._results(self._prepare(prompt, sampling_params, request_id), PromptRun.pieces, streaming=True)

    async def generate(
        self, prompt: AnyPrompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> RequestOutput:
        """Complete a prompt. Raises UserError for a prompt that cannot be served. If a completion fails on the way, its
        output has finish_reason "error". request_id: as in `stream`."""
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
        """Answer a conversation (a list of {"role", "content"}) as `generate` completes a prompt. For a stream, give
        `stream` the prompt that render_chat returns. options: as in LLM.render_chat."""
        prompts: Any = [await self.render_chat(conversation, **options) for conversation in conversations(messages)]
        return await self.generate(prompts, sampling_params, request_id)  # refuses more than one

    async def render_chat(self, messages: Any, **options: Unpack[ChatOptions]) -> Mapping[str, Any]:
        """Render as LLM.render_chat does, but in another process: a template that never ends is refused, and blocks no
        other call."""
        tokenizer = self.llm.tokenizer
        return as_prompt(tokenizer, await self.templates.text(rendering(tokenizer, messages, **options)))

    async def abort(self, request_id: str) -> None:
        """End a request. Its output so far is returned with finish_reason "abort", as a result or as a stream's last
        piece. Do nothing if no such request is under way."""
        call = self._calls.get(request_id)
        if call is not None:
            self._thread.tell(self._thread.abort, call)

    def _prepare(self, prompt: Any, sampling_params: SamplingParams | None, request_id: str | None) -> PromptRequest:
        """Return the prompt as a request that has a request_id."""
        self._thread.check_open()
        if isinstance(prompt, PromptRequest) and sampling_params is not None:
            raise UserError("sampling_params belong to `prepare` where the prompt is prepared: leave them out here")
        prompt_request = prompt if isinstance(prompt, PromptRequest) else self.prepare(prompt, sampling_params)
        if request_id is None:
            request_id = uuid.uuid4().hex
        if not isinstance(request_id, str) or not request_id:
            raise UserError(f"request_id={quoted(request_id)} must be a string that is not empty")
        return dataclasses.replace(prompt_request, request_id=request_id)

    async def _results(
        self, prompt_request: PromptRequest, take: Callable[[PromptRun], list[Any]], *, streaming: bool = False
    ) -> AsyncGenerator[Any, None]:
        """Yield what `take` finds in the job after each step, until the run has ended."""
        call = Call(prompt_request, take, streaming, asyncio.get_running_loop())
        if self._calls.setdefault(prompt_request.request_id, call) is not call:
            raise UserError(f"request_id={quoted(prompt_request.request_id)} is in use: choose another, or give none")
        try:
            self._thread.tell(self._thread.open, call)
            self._thread.check_open()  # only now: a thread that ended before does not see this call
            while (result := await call.results.get()) is not None:
                if isinstance(result, Exception):
                    raise result
                yield result
        finally:
            del self._calls[prompt_request.request_id]
            self._thread.tell(self._thread.close, call)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await asyncio.to_thread(self.shutdown)


def end(thread: EngineThread, templates: TemplateProcess) -> None:
    thread.stop()
    templates.close()


@dataclasses.dataclass(eq=False)
class Call:
    """One caller's request, and the way back to its event loop.

    take: function that returns the results to hand over after a step.
    streaming: whether launches have to be short meanwhile.
    results: queue that the caller's loop reads; an exception or None is the last entry.
    """

    prompt_request: PromptRequest
    take: Callable[[PromptRun], list[Any]]
    streaming: bool
    loop: asyncio.AbstractEventLoop
    results: asyncio.Queue[Any] = dataclasses.field(default_factory=asyncio.Queue)
    prompt_run: PromptRun | None = None

    def send(self, *results: Any) -> bool:
        """Send results from the engine's thread to the caller's loop. Return False if the loop is closed."""
        try:
            self.loop.call_soon_threadsafe(self.receive, results)
        except RuntimeError:
            return False
        return True

    def receive(self, results: Iterable[Any]) -> None:
        for result in results:
            self.results.put_nowait(result)


class EngineThread(threading.Thread):
    """The thread that owns the engine, which is not thread-safe. Other threads put functions in its inbox, which it
    calls between steps."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(name="jaxspec-engine", daemon=True)
        self.llm = llm
        self.inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.calls: dict[Request, Call] = {}  # by sample that is under way
        self.stopping = False
        self.ended: tuple[str, BaseException | None] | None = None  # why the thread ended, and the error

    # For any thread.

    def tell(self, function: Callable[..., None], *args: Any) -> None:
        """Have the thread call this function between two steps."""
        self.inbox.put(functools.partial(function, *args))

    def check_open(self) -> None:
        """Raise RuntimeError if the thread has ended."""
        if self.ended:
            raise self.refusal()

    def refusal(self) -> RuntimeError:
        """Return the error of calls that come after the thread has ended."""
        reason, cause = self.ended or ("", None)
        error = RuntimeError(reason)
        error.__cause__ = cause
        return error

    def stop(self) -> None:
        self.tell(setattr, self, "stopping", True)
        if threading.current_thread() is not self:  # garbage collection may call this in the thread itself
            self.join()

    # For this thread.

    def run(self) -> None:
        ended: tuple[str, BaseException | None] = ("the AsyncLLM was shut down", None)
        try:
            while self.listen():
                self.advance()
        except BaseException as error:  # whatever the error, no caller may wait forever
            ended = (f"the engine failed: {error!r}", error)
        self.ended = ended
        # Any of these calls may fail again; each caller gets the error nevertheless.
        for call in dict.fromkeys(self.calls.values()):
            with contextlib.suppress(BaseException):
                call.send(self.refusal())
            with contextlib.suppress(BaseException):
                self.close(call)
        while not self.inbox.empty():  # only now that `ended` is set: `open` refuses the calls left
            with contextlib.suppress(BaseException):
                self.inbox.get_nowait()()
        if self.llm._warming is not None:
            self.llm._warming.stop()

    def listen(self) -> bool:
        """Call the functions in the inbox; without open calls, wait for one. Return False to stop."""
        while not self.stopping:
            try:
                self.inbox.get(block=not self.calls)()
            except queue.Empty:
                return True
        return False

    def open(self, call: Call) -> None:
        if self.ended:
            call.send(self.refusal())
            return
        try:
            call.prompt_run = self.llm._submit(call.prompt_request)
        except Exception as error:  # concerns this call only
            call.send(error)
            return
        self.calls |= dict.fromkeys(call.prompt_run.requests, call)

    def close(self, call: Call) -> None:
        """End the samples of a call that the caller no longer waits for."""
        if call.prompt_run is None:
            return
        for request in call.prompt_run.requests:
            self.calls.pop(request, None)
        self.llm._abort(call.prompt_run)

    def abort(self, call: Call) -> None:
        """End a call, and give the caller its output so far."""
        if call.prompt_run is not None and not call.prompt_run.ended:
            self.llm._abort(call.prompt_run)
            self.submit_call(call)

    def advance(self) -> None:
        """Run one step, and give each call the new results of its run."""
        ran = self.llm._step(streaming=any(call.streaming for call in self.calls.values()))
        for call in dict.fromkeys(self.calls[request] for request in ran if request in self.calls):
            self.submit_call(call)

    def submit_call(self, call: Call) -> None:
        """Give a call the new results of its run, and close a call that has ended or that nobody listens to."""
        assert call.prompt_run is not None
        try:
            results = call.take(call.prompt_run)
        except Exception as error:  # concerns this call only
            call.send(error)
            self.close(call)
            return
        last = (None,) if call.prompt_run.ended else ()
        if not call.send(*results, *last) or last:
            self.close(call)
