"""The thread that owns an AsyncLLM's engine, and the calls that it serves."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any

from jaxspec.api.completions import PromptRun
from jaxspec.api.llm import LLM
from jaxspec.api.prompts import PromptRequest
from jaxspec.engine.request import Request


@dataclasses.dataclass(eq=False)
class Call:
    """One caller's request, with the means to send results from the engine's thread to the caller's event loop.

    take: function that returns a list of the new results of a prompt's run after a step of the engine.
    streaming: whether the caller streams, so that launches (runs of the device program) have to be short.
    results: queue that the caller's loop reads. Its last entry is an exception or None.
    prompt_run: run that collects the prompt's output, made by the engine's thread.
    left: whether the caller has gone before there was a run.
    """

    prompt_request: PromptRequest
    take: Callable[[PromptRun], list[Any]]
    streaming: bool
    loop: asyncio.AbstractEventLoop
    results: asyncio.Queue[Any] = dataclasses.field(default_factory=asyncio.Queue)
    prompt_run: PromptRun | None = None
    left: bool = False

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
    """The thread that owns the engine. Between the engine's steps, it calls functions that other threads post."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(name="jaxspec-engine", daemon=True)
        self.llm = llm
        self.inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.calls: dict[Request, Call] = {}  # open call of each request (sample) in the engine
        self.stopping = False
        self.ended: tuple[str, BaseException | None] | None = None  # reason why the thread ended, and the error if any

    # The following methods may be called by any thread.

    def post(self, function: Callable[..., None], *args: Any) -> None:
        """Make the engine's thread call this function between two steps."""
        self.inbox.put(functools.partial(function, *args))

    def submit(self, call: Call) -> None:
        """Make the engine's thread open a call, once its grammar's automaton is built. Other calls do not wait."""
        automaton = call.prompt_request.automaton
        if automaton is None:
            self.post(self.open, call)
        else:
            automaton.add_done_callback(lambda _: self.open_later(call))

    def open_later(self, call: Call) -> None:
        """Make this thread open a call. If the thread has ended meanwhile, send the caller the error."""
        self.post(self.open, call)
        if self.ended:
            call.send(self.refusal())

    def check_open(self) -> None:
        """Raise RuntimeError if the thread has ended."""
        if self.ended:
            raise self.refusal()

    def refusal(self) -> RuntimeError:
        """Return the error for calls that are still open when the thread ends, and for calls made afterwards."""
        reason, cause = self.ended or ("", None)
        error = RuntimeError(reason)
        error.__cause__ = cause
        return error

    def stop(self) -> None:
        self.post(setattr, self, "stopping", True)
        if threading.current_thread() is not self:  # in garbage collection it can be, and a thread cannot join itself
            self.join()

    # The following methods are called by this thread only.

    def run(self) -> None:
        ended: tuple[str, BaseException | None] = ("the AsyncLLM was shut down", None)
        try:
            while self.listen():
                self.advance()
        except BaseException as error:  # every error is caught, so that no caller waits forever
            ended = (f"the engine failed: {error!r}", error)
        self.ended = ended
        # Each call is ended on its own, so that a failure in one does not keep the error from the other callers.
        for call in dict.fromkeys(self.calls.values()):
            with contextlib.suppress(BaseException):
                call.send(self.refusal())
            with contextlib.suppress(BaseException):
                self.close(call)
        while not self.inbox.empty():  # since `ended` is set, `open` refuses the calls that are still in the inbox
            with contextlib.suppress(BaseException):
                self.inbox.get_nowait()()
        if self.llm._warming is not None:
            self.llm._warming.stop()

    def listen(self) -> bool:
        """Run the inbox's functions. While no `Call` is open, wait for more. Return False if the thread has to stop."""
        while not self.stopping:
            try:
                self.inbox.get(block=not self.calls)()
            except queue.Empty:
                return True
        return False

    def open(self, call: Call) -> None:
        """Queue a call's prompt in the engine. A call that was closed or aborted meanwhile is not opened."""
        if call.left or call.prompt_run is not None:
            return
        if self.ended:
            call.send(self.refusal())
            return
        try:
            call.prompt_run = self.llm._submit(call.prompt_request)
        except Exception as error:  # an error of this call only, which the other calls survive
            call.send(error)
            return
        self.calls |= dict.fromkeys(call.prompt_run.requests, call)

    def close(self, call: Call) -> None:
        """Forget a call that has ended or that its caller has left. End those of its samples that have not ended."""
        call.left = True
        if call.prompt_run is None:
            return
        for request in call.prompt_run.requests:
            self.calls.pop(request, None)
        self.llm._abort(call.prompt_run)

    def abort(self, call: Call) -> None:
        """End a call, and send the caller the output so far."""
        if call.prompt_run is None and not call.left:  # its automaton is not built yet
            params = dataclasses.replace(call.prompt_request.params, structured_outputs=None)
            call.prompt_request = dataclasses.replace(call.prompt_request, params=params, automaton=None)
            self.open(call)
        if call.prompt_run is not None and not call.prompt_run.ended:
            self.llm._abort(call.prompt_run)
            self.submit_call(call)

    def advance(self) -> None:
        """Run one step of the engine, and send each call's new results to its caller."""
        ran = self.llm._step(streaming=any(call.streaming for call in self.calls.values()))
        for call in dict.fromkeys(self.calls[request] for request in ran if request in self.calls):
            self.submit_call(call)

    def submit_call(self, call: Call) -> None:
        """Send a call's new results. Close the call if it has ended or failed, or if its caller's loop is closed."""
        assert call.prompt_run is not None
        try:
            results = call.take(call.prompt_run)
        except Exception as error:  # an error of this call only, which the other calls survive
            call.send(error)
            self.close(call)
            return
        last = (None,) if call.prompt_run.ended else ()
        if not call.send(*results, *last) or last:
            self.close(call)
