"""Compiling all programs of an engine in advance, several at a time: before its first request, or beside requests."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, InvalidStateError, ThreadPoolExecutor, wait
from typing import Any, Protocol

from jaxspec.engine import batch
from jaxspec.engine.catalogue import Closed, Launch, Prefill
from jaxspec.engine.engine import Engine
from jaxspec.runtime.plans import Plan

logger = logging.getLogger(__name__)

Named = Prefill | Launch | str  # a program: its str() is shown
Report = Callable[[int, int, str], None]  # programs done, of how many, and the last one's name
COMPILERS = max(2, os.cpu_count() or 1)  # at a time; the compiler uses several threads for one
THREADS = "jaxspec-compiling"  # what their names begin with


class Watch(Protocol):
    """What a warm-up is done in; it yields its `Report`."""

    def __call__(self, *, beside: bool) -> contextlib.AbstractContextManager[Report]: ...


def begin(engine: Engine, watch: Watch, *, alone: bool) -> Background | None:
    """Warm up an engine that was made for it; return what does so beside requests, unless that is to be waited for.
    alone: no other process runs what this one does."""
    if not engine.config.warm_up:
        return None
    if not alone or engine.config.wait_for_warm_up:
        with watch(beside=False) as report:
            warm_up(engine, report)
        return None
    background = Background(engine, watch)
    background.start()
    return background


class Background(threading.Thread):
    """A warm-up beside requests."""

    def __init__(self, engine: Engine, watch: Watch) -> None:
        super().__init__(name=THREADS, daemon=True)
        self.engine, self.watch, self.stopped = engine, watch, Future[None]()
        atexit.register(self.stop)  # a thread that lowers crashes in a Python that is being taken down

    def run(self) -> None:
        with contextlib.suppress(CancelledError), self.watch(beside=True) as report:
            warm_up(self.engine, report, beside=self)
        atexit.unregister(self.stop)

    def stop(self) -> None:
        """Begin no other program. What the compiler has begun goes on."""
        with contextlib.suppress(InvalidStateError):  # it was already
            self.stopped.set_result(None)
        if threading.current_thread() is not self:
            self.join()


def warm_up(engine: Engine, report: Report = lambda done, total, name: None, beside: Background | None = None) -> None:
    """Compiles what the engine may need, all of it known where it was made to warm up.

    beside: runs while requests are served: what one of them waits for goes before everything else, and a program that
    cannot be made is logged. Raises CancelledError where it was stopped.
    """
    # Lowering holds Python, and is done for one after the other, while others compile. So what takes the compiler
    # longest comes first; beside requests, what most of them need.
    wanted = sorted(plans(engine), key=lambda each: by_use(each[0])) if beside else list(plans(engine))[::-1]
    started, programs, catalogue = time.perf_counter(), engine.runner.programs, engine.catalogue
    pool = ThreadPoolExecutor(max(COMPILERS - bool(beside), 1), thread_name_prefix=THREADS)
    under_way: dict[Future[None], Named] = {}

    def compile(program: Named, plan: Plan) -> None:
        programs.calm.wait()
        engine.runner.compile(plan)
        if isinstance(catalogue, Closed) and isinstance(program, Launch):
            catalogue.made.add(program)

    def settle(done: Iterable[Future[None]]) -> None:
        for future in done:
            program = under_way.pop(future)
            with forgiving(program, beside):
                future.result()
            report(len(wanted) - len(under_way) - to_begin, len(wanted), str(program))

    try:
        report(0, len(wanted), "")
        for i, (program, plan) in enumerate(wanted):
            programs.calm.wait()
            if beside and beside.stopped.done():
                raise CancelledError
            to_begin = len(wanted) - i - 1
            with forgiving(program, beside):
                engine.runner.begin(plan)
                under_way[pool.submit(compile, program, plan)] = program
            settle([future for future in under_way if future.done()])
        while under_way:
            done, _ = wait([*under_way, *([beside.stopped] if beside else [])], return_when=FIRST_COMPLETED)
            if beside and beside.stopped.done():
                raise CancelledError
            settle(done)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # who interrupts it is not to wait for the compiler
        engine.timing.warm_up_seconds += time.perf_counter() - started


@contextlib.contextmanager
def forgiving(program: Named, beside: Background | None) -> Iterator[None]:
    """Let requests be served though a program cannot be made: whoever needs it will hear why."""
    try:
        yield
    except Exception as error:
        if beside is None:
            raise
        logger.warning("compiling in advance failed for %s: %s", program, error)


def by_use(program: Named) -> tuple[Any, ...]:
    """Sort key by which the programs that most requests can use come first: passes over prompts, then launches that
    serve any number of rows."""
    if not isinstance(program, Launch):
        return (0,)
    variant = program.variant
    return 1, variant.processors, not variant.filters, -program.k, -program.rows, -program.row_pages


def plans(engine: Engine) -> Iterator[tuple[Named, Plan]]:
    """Each program, with a run of it over nothing."""
    catalogue, layout = engine.catalogue, engine.layout
    if not isinstance(catalogue, Closed):
        return
    options = engine.speculative.rule_options if engine.speculative else ()
    yield from ((program, prefill(engine, program)) for program in catalogue.prefills)
    yield from ((program, launch(engine, program, options)) for program in catalogue.launches)
    yield "copy_pages", Plan("copy_pages", batch.copied_pages([], layout))


def prefill(engine: Engine, program: Prefill) -> Plan:
    following = program.variant.logprobs is not None
    chunk = batch.chunk_input([], engine.layout, program.shape, row_pages=program.row_pages, following=following)
    return Plan(program.name, (chunk,), variant=program.variant)


def launch(engine: Engine, program: Launch, rule_options: Any) -> Plan:
    shape = (program.rows, program.row_pages)
    inputs = batch.launch_input(
        [],
        program.k,
        program.variant,
        engine.layout,
        shape,
        num_rounds=0,
        rule_options=rule_options,
        vocab_size=engine.limits.vocab_size,
    )
    return Plan("launch", (inputs,), k=program.k, variant=program.variant)
