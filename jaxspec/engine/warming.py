"""Compiling all programs of an engine before its first request, several at a time."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from typing import Any

from jaxspec.decode.plans import Plan
from jaxspec.decode.programs import Turn
from jaxspec.engine import batch
from jaxspec.engine.catalogue import Closed, Launch, Prefill
from jaxspec.engine.engine import Engine


def warm_up(engine: Engine, report: Callable[[int, int, str], None] = lambda done, total, name: None) -> None:
    """Compiles what the engine may need, all of it known where it was made to warm up. report(done, of how many, which
    was the last)."""
    # Lowering holds Python, and is done for one after the other, while others compile. So what takes the compiler
    # longest comes first: launches with all that a request may ask for.
    started, wanted = time.perf_counter(), list(plans(engine))[::-1]
    pool, turns = ThreadPoolExecutor(max(len(wanted), 1)), Turns(len(wanted))
    try:
        names = {pool.submit(turns.take, i, engine.runner.compile, plan): name for i, (name, plan) in enumerate(wanted)}
        report(0, len(wanted), "")
        for done, compiled in enumerate(as_completed(names)):
            compiled.result()
            report(done + 1, len(wanted), names[compiled])
    finally:
        turns.end()
        pool.shutdown(wait=False)  # who interrupts it is not to wait for the compiler
        engine.timing.warm_up_seconds += time.perf_counter() - started


class Turns:
    """Lets threads that have started in any order lower in theirs, until they are told to end."""

    def __init__(self, count: int) -> None:
        self.ended, self.come = False, [threading.Event() for _ in range(count + 1)]
        self.come[0].set()

    def take(self, i: int, compile: Callable[[Plan, Turn], None], plan: Plan) -> None:
        """What the thread i does."""
        try:
            compile(plan, functools.partial(self.turn, i))
        finally:
            self.come[i + 1].set()

    @contextlib.contextmanager
    def turn(self, i: int) -> Iterator[None]:
        self.come[i].wait()
        if self.ended:
            raise CancelledError
        try:
            yield
        finally:
            self.come[i + 1].set()

    def end(self) -> None:
        self.ended = True
        for event in self.come:
            event.set()


def plans(engine: Engine) -> Iterator[tuple[str, Plan]]:
    """(name, a run over nothing) of each program."""
    catalogue, layout = engine.catalogue, engine.layout
    if not isinstance(catalogue, Closed):
        return
    options = engine.speculative.rule_options if engine.speculative else ()
    yield from ((str(program), prefill(engine, program)) for program in catalogue.prefills)
    yield from ((str(program), launch(engine, program, options)) for program in catalogue.launches)
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
