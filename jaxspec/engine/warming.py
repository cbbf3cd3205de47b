"""Warm-up: compiling all programs of an engine in advance, before its first request or while it serves requests."""

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

from jaxspec.engine import batch, grammar_pool
from jaxspec.engine.catalogue import ClosedCatalogue, Launch, Prefill
from jaxspec.engine.engine import Engine
from jaxspec.runtime.plans import Plan

logger = logging.getLogger(__name__)

ProgramName = Prefill | Launch | str  # a program of the catalogue; its str() is the name that users see
Report = Callable[[int, int, str], None]  # function of (programs done, all programs, name of the last one done)
COMPILERS = max(2, os.cpu_count() or 1)  # largest number of programs compiled at a time, each in several threads
THREADS = "jaxspec-compiling"  # prefix of the names of threads that compile


class Watch(Protocol):
    """A function that returns a context manager for a warm-up. The context manager yields a function, the `Report`.

    beside: whether requests are served during the warm-up.
    """

    def __call__(self, *, beside: bool) -> contextlib.AbstractContextManager[Report]: ...


def begin(engine: Engine, watch: Watch, *, alone: bool) -> Background | None:
    """Warm up the engine (compile its programs in advance) if its options ask for it.

    Return the thread that warms up while requests are served, or None if nothing is left to compile in advance.

    watch: function that shows the progress.
    alone: whether the job has one process. With several, or with the option wait_for_warm_up, the warm-up ends before
      this function returns.
    """
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
    """The thread of a warm-up that runs while the engine serves requests."""

    def __init__(self, engine: Engine, watch: Watch) -> None:
        super().__init__(name=THREADS, daemon=True)
        self.engine = engine
        self.watch = watch
        self.stopped = Future[None]()
        atexit.register(self.stop)  # a thread that lowers a program while the interpreter exits would crash

    def run(self) -> None:
        with contextlib.suppress(CancelledError), self.watch(beside=True) as report:
            warm_up(self.engine, report, beside=self)
        atexit.unregister(self.stop)

    def stop(self) -> None:
        """Stop the warm-up and wait for its thread to end. Compilations under way go on in their own threads."""
        with contextlib.suppress(InvalidStateError):  # raised if `stop` was called before
            self.stopped.set_result(None)
        if threading.current_thread() is not self:
            self.join()


def no_report(done: int, total: int, name: str) -> None:
    """Ignore the progress of a warm-up."""


def warm_up(engine: Engine, report: Report = no_report, beside: Background | None = None) -> None:
    """Compile all programs in the engine's catalogue.

    beside: the thread that calls this function while requests are served; None if no requests are served yet. With a
      thread, a program that a request waits for is compiled before the next one here, and a program that cannot be
      compiled is logged. Raises CancelledError if the thread was stopped.
    """
    # Lowering holds the interpreter's lock, so one program is lowered at a time, while others compile. Before requests
    # are served, the programs that take longest to compile come first. Afterwards those that most requests need do.
    if beside:
        wanted = sorted(plans(engine), key=lambda each: by_use(each[0]))
    else:
        wanted = list(plans(engine))[::-1]
    to_begin = len(wanted)
    started = time.perf_counter()
    programs = engine.runner.programs
    catalogue = engine.catalogue
    pool = ThreadPoolExecutor(max(COMPILERS - bool(beside), 1), thread_name_prefix=THREADS)
    under_way: dict[Future[None], ProgramName] = {}

    def compile_one(program: ProgramName, plan: Plan) -> None:
        programs.calm.wait()
        engine.runner.compile(plan)
        if isinstance(catalogue, ClosedCatalogue) and isinstance(program, Launch):
            catalogue.made.add(program)

    def settle(done: Iterable[Future[None]]) -> None:
        for future in done:
            program = under_way.pop(future)
            with log_failure(program, beside):
                future.result()
            report(len(wanted) - len(under_way) - to_begin, len(wanted), str(program))

    try:
        report(0, len(wanted), "")
        for i, (program, plan) in enumerate(wanted):
            programs.calm.wait()
            if beside and beside.stopped.done():
                raise CancelledError
            to_begin = len(wanted) - i - 1
            with log_failure(program, beside):
                engine.runner.begin(plan)
                under_way[pool.submit(compile_one, program, plan)] = program
            settle([future for future in under_way if future.done()])
        while under_way:
            awaited = [*under_way, beside.stopped] if beside else list(under_way)
            done, _ = wait(awaited, return_when=FIRST_COMPLETED)
            if beside and beside.stopped.done():
                raise CancelledError
            settle(done)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # an interrupt must not wait for the compiler
        engine.timing.warm_up_seconds += time.perf_counter() - started


@contextlib.contextmanager
def log_failure(program: ProgramName, beside: Background | None) -> Iterator[None]:
    """Return a context manager for lowering or compiling a program. It logs an error if requests are served meanwhile.

    A request that needs the program gets the error later. If no requests are served, the error is raised.

    beside: as in `warm_up`.
    """
    try:
        yield
    except Exception as error:
        if beside is None:
            raise
        logger.warning("compiling in advance failed for %s: %s", program, error)


def by_use(program: ProgramName) -> tuple[Any, ...]:
    """Return a program's key for sorting by use: programs that most requests can use come first.

    Passes over prompts and the small programs come first. Launches (runs of many rounds) follow, those with penalties,
    biases or forbidden ids after the others, and those with grammars last. The other criteria are, in this order:
    filters (top-k, top-p, min-p) before none, more draft tokens before fewer, more rows before fewer.
    """
    if not isinstance(program, Launch):
        return (0,)
    variant = program.variant
    return 1, variant.grammars, variant.processors, not variant.filters, -program.k, -program.rows, -program.row_pages


def plans(engine: Engine) -> Iterator[tuple[ProgramName, Plan]]:
    """Yield each program of the engine's catalogue, with a plan (a run of the program) whose rows are all padding.

    Yield nothing for an engine that does not compile its programs in advance.
    """
    catalogue, layout = engine.catalogue, engine.layout
    if not isinstance(catalogue, ClosedCatalogue):
        return
    options = engine.speculative.rule_options if engine.speculative else ()
    yield from ((program, prefill(engine, program)) for program in catalogue.prefills)
    yield from ((program, launch(engine, program, options)) for program in catalogue.launches)
    others = Plan("copy_pages", batch.copied_pages([], layout)), grammar_pool.write(grammar_pool.EMPTY, 0)
    yield from ((plan.program, plan) for plan in others if plan.program in catalogue.others)


def prefill(engine: Engine, program: Prefill) -> Plan:
    """Return the plan for one run of this program, a pass over prompts. All its rows are padding."""
    following = program.variant.logprobs is not None
    chunk = batch.chunk_input([], engine.layout, program.shape, row_pages=program.row_pages, following=following)
    return Plan(program.name, (chunk,), variant=program.variant)


def launch(engine: Engine, program: Launch, rule_options: Any) -> Plan:
    """Return the plan for one run of this program, a launch of no rounds. All its rows are padding."""
    shape = (program.rows, program.row_pages)
    inputs = batch.launch_input(
        [],
        program.k,
        program.variant,
        engine.layout,
        shape,
        spare=engine.spare_rows(program.rows),
        num_rounds=0,
        rule_options=rule_options,
        vocab_size=engine.limits.vocab_size,
    )
    return Plan("launch", (inputs,), k=program.k, variant=program.variant)
