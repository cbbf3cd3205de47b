"""AsyncLLM: many callers in one event loop, one engine that decodes them together."""

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
from jaxspec.api.completions import Job
from jaxspec.api.llm import LLM
from jaxspec.api.outputs import RequestOutput, StreamOutput
from jaxspec.api.prompts import Ask, Prompt
from jaxspec.common.errors import UserError, quoted
from jaxspec.common.progress import compiling
from jaxspec.engine.engine import FEWER_ROUNDS
from jaxspec.engine.metrics import SpecDecodeMetrics, Timing
from jaxspec.engine.request import Request
from jaxspec.options.keywords import ChatOptions, EngineOptions
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.options.speculative import SpeculativeConfig


class AsyncLLM:
    """An LLM for asyncio: the same arguments, one prompt a call; calls that overlap share the engine's batches.

    A thread owns the engine and sleeps while nothing is asked of it. Leaving a stream (break, cancellation, an
    exception) or cancelling a generate ends that request and no other. (A stream that is kept in a variable is left by
    its aclose(), or contextlib.aclosing.) If the engine itself fails, every open call raises RuntimeError with that
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
        self.llm.engine.runner.programs.watch = functools.partial(compiling, bar=False)  # others may write meanwhile
        self._thread = EngineThread(self.llm)
        self._thread.start()
        self.templates = TemplateProcess()
        self._calls: dict[str, Call] = {}  # those under way, by request_id
        # Runs when this is dropped and, at the latest, before the interpreter ends.
        self._finalizer = weakref.finalize(self, end, self._thread, self.templates)

    def shutdown(self) -> None:
        """Ends open calls with RuntimeError, then the thread. May be called again."""
        self._finalizer()

    async def check_health(self) -> None:
        """Raises RuntimeError where no call can be served any more: the engine failed, or this was shut down."""
        self._thread.check_open()

    @property
    def metrics(self) -> SpecDecodeMetrics:
        """Counters over all requests."""
        return self.llm.metrics

    @property
    def timing(self) -> Timing:
        return self.llm.timing

    def prepare(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Ask:
        """Return a prompt, checked with its parameters, that `generate` and `stream` take without further work. Any
        thread may call this. Raises UserError as they do."""
        asked = self.llm._prepare(prompt, sampling_params)
        if len(asked) != 1:
            raise UserError(f"one prompt a call, got {len(asked)}: calls that overlap are decoded together")
        return asked[0]

    def stream(
        self, prompt: Prompt | Ask, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[StreamOutput, None]:
        """Yields pieces of a prompt's completion as they are made, of each of its n samples. What is wrong with the
        prompt or the parameters is raised here, before anything is queued.

        request_id: a name for `abort` and for the pieces; one is made where none is given. It is in use from the first
        piece that is asked for to the last; one that is in use is refused.
        """
        return self._results(self._prepare(prompt, sampling_params, request_id), Job.pieces, streaming=True)

    async def generate(
        self, prompt: Prompt | Ask, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> RequestOutput:
        """Completes a prompt. Raises UserError for one that cannot be served; an output whose completion failed on the
        way has finish_reason "error". request_id: as of `stream`."""
        whole = lambda job: [job.output()] if job.ended else []
        asked = self._prepare(prompt, sampling_params, request_id)
        async with contextlib.aclosing(self._results(asked, whole)) as results:
            return await anext(results)

    async def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> RequestOutput:
        """Answers a conversation (a list of {"role", "content"}) as `generate` completes a prompt. To read along,
        stream what render_chat makes of it. options: as of LLM.render_chat."""
        prompts: Any = [await self.render_chat(conversation, **options) for conversation in conversations(messages)]
        return await self.generate(prompts, sampling_params, request_id)  # of which one is taken

    async def render_chat(self, messages: Any, **options: Unpack[ChatOptions]) -> Mapping[str, Any]:
        """Render as LLM.render_chat does, in another process: a template without an end is refused, and holds up
        nobody."""
        tokenizer = self.llm.tokenizer
        return as_prompt(tokenizer, await self.templates.text(rendering(tokenizer, messages, **options)))

    async def abort(self, request_id: str) -> None:
        """Ends a request with what there is and finish_reason "abort": its call returns, its stream has a last piece.
        Does nothing where no such request is under way."""
        if (call := self._calls.get(request_id)) is not None:
            self._thread.tell(self._thread.abort, call)

    def _prepare(self, prompt: Any, sampling_params: SamplingParams | None, request_id: str | None) -> Ask:
        self._thread.check_open()
        if isinstance(prompt, Ask) and sampling_params is not None:
            raise UserError("sampling_params belong to `prepare` where the prompt is prepared: leave them out here")
        ask = prompt if isinstance(prompt, Ask) else self.prepare(prompt, sampling_params)
        if request_id is None:
            request_id = uuid.uuid4().hex
        if not isinstance(request_id, str) or not request_id:
            raise UserError(f"request_id={quoted(request_id)} must be a string that is not empty")
        return dataclasses.replace(ask, request_id=request_id)

    async def _results(
        self, ask: Ask, take: Callable[[Job], list[Any]], *, streaming: bool = False
    ) -> AsyncGenerator[Any, None]:
        """Yields what `take` finds in the job after each step, until the job has ended."""
        call = Call(ask, take, streaming, asyncio.get_running_loop())
        if self._calls.setdefault(ask.request_id, call) is not call:
            raise UserError(f"request_id={quoted(ask.request_id)} is in use: choose another, or give none")
        try:
            self._thread.tell(self._thread.open, call)
            self._thread.check_open()  # afterwards: a thread that ended before does not hear this call
            while (result := await call.results.get()) is not None:
                if isinstance(result, Exception):
                    raise result
                yield result
        finally:
            del self._calls[ask.request_id]
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

    take: what of the job is handed over after a step.
    streaming: launches are to be short meanwhile.
    results: read in the caller's loop, an exception or None is the last.
    """

    ask: Ask
    take: Callable[[Job], list[Any]]
    streaming: bool
    loop: asyncio.AbstractEventLoop
    results: asyncio.Queue[Any] = dataclasses.field(default_factory=asyncio.Queue)
    job: Job | None = None

    def send(self, *results: Any) -> bool:
        """From the engine's thread; False: the caller's loop is closed, nobody listens."""
        try:
            self.loop.call_soon_threadsafe(self.receive, results)
        except RuntimeError:
            return False
        return True

    def receive(self, results: Iterable[Any]) -> None:
        for result in results:
            self.results.put_nowait(result)


class EngineThread(threading.Thread):
    """Owns the engine, which is not made for several threads. The others reach it through its inbox of functions, which
    it calls between steps."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(name="jaxspec-engine", daemon=True)
        self.llm = llm
        self.inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.calls: dict[Request, Call] = {}  # of every sample that is under way
        self.stopping = False
        self.ended: tuple[str, BaseException | None] | None = None  # why it hears nothing any more

    # For any thread.

    def tell(self, function: Callable[..., None], *args: Any) -> None:
        self.inbox.put(functools.partial(function, *args))

    def check_open(self) -> None:
        """Raises RuntimeError where the thread has ended."""
        if self.ended:
            raise self.refusal()

    def refusal(self) -> RuntimeError:
        reason, cause = self.ended or ("", None)
        error = RuntimeError(reason)
        error.__cause__ = cause
        return error

    def stop(self) -> None:
        self.tell(setattr, self, "stopping", True)
        if threading.current_thread() is not self:  # where garbage is collected in this very thread
            self.join()

    # For this thread.

    def run(self) -> None:
        ended: tuple[str, BaseException | None] = ("the AsyncLLM was shut down", None)
        try:
            while self.listen():
                self.advance()
        except BaseException as error:  # whatever it was, nobody may wait for ever
            ended = (f"the engine failed: {error!r}", error)
        self.ended = ended
        # What failed may fail again, at every step of this; each caller is told nevertheless.
        for call in dict.fromkeys(self.calls.values()):
            with contextlib.suppress(BaseException):
                call.send(self.refusal())
            with contextlib.suppress(BaseException):
                self.close(call)
        while not self.inbox.empty():  # only now: who is told after `ended` was set looks at it
            with contextlib.suppress(BaseException):
                self.inbox.get_nowait()()
        if self.llm._warming is not None:
            self.llm._warming.stop()

    def listen(self) -> bool:
        """Does what it is told, waiting for it where nothing is under way. False: to stop."""
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
            call.job = self.llm._submit(call.ask)
        except Exception as error:  # this call's own
            call.send(error)
            return
        self.calls |= dict.fromkeys(call.job.requests, call)

    def close(self, call: Call) -> None:
        """Ends what the caller does not wait for any more."""
        if call.job is None:
            return
        for request in call.job.requests:
            self.calls.pop(request, None)
        self.llm._abort(call.job)

    def abort(self, call: Call) -> None:
        """Ends a call, and gives the caller what there is."""
        if call.job is not None and not call.job.ended:
            self.llm._abort(call.job)
            self.hand_over(call)

    def advance(self) -> None:
        """One step, and to every call what is new in its job."""
        ran = self.llm._step(streaming=any(call.streaming for call in self.calls.values()))
        for call in dict.fromkeys(self.calls[request] for request in ran if request in self.calls):
            self.hand_over(call)

    def hand_over(self, call: Call) -> None:
        assert call.job is not None
        try:
            results = call.take(call.job)
        except Exception as error:  # this call's own
            call.send(error)
            self.close(call)
            return
        last = (None,) if call.job.ended else ()
        if not call.send(*results, *last) or last:
            self.close(call)
