"""Compiled programs, one a static shape and variant, with the time that compiling took."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Sharding

from jaxspec.cache.pages import copy_pages
from jaxspec.decode.loop import launch
from jaxspec.decode.prefill import catch_up, prefill
from jaxspec.decode.state import LaunchResult, Variant
from jaxspec.hardware.platforms import facts
from jaxspec.parallel.placement import Placement
from jaxspec.runtime import stored
from jaxspec.runtime.packing import Packed, pack
from jaxspec.sampling.logprobs import Logprobs
from pallas_kernels.lowering import quick_lowering

WORTH_COMPILING = 16  # launches
one_at_a_time = threading.RLock()

# Name -> function(config, params, cache, *arrays) -> (cache, the rest).
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "launch": launch,
    "prefill": prefill,
    "catch_up": catch_up,
    "copy_pages": copy_pages,
}


class Program(Future[Callable[..., Any]]):
    """A compiled program, or one in the making: whoever wants it first lowers it, and whoever comes to it first then
    compiles it.

    lowered: what compiles it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lowered: Future[Callable[[], Any]] = Future()
        self.taken = threading.RLock()  # by the thread that compiles it, for good


@dataclasses.dataclass
class Programs:
    """Compiles each (function, static config, shapes) once, ahead of its first run. The caches are donated.

    folder: where lowered programs are kept, if they are.
    watch: what a run that has to wait is done in, given the program's name.
    num_compiled: programs; num_waits, compile_seconds: of runs that had to wait for theirs.
    calm: whether no run waits; who makes programs in advance begins none meanwhile.
    """

    placement: Placement
    folder: Path | None = None
    watch: Callable[[str], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    num_compiled: int = 0
    num_waits: int = 0
    compile_seconds: float = 0.0
    compiled: dict[Any, Program] = dataclasses.field(default_factory=dict)  # which threads share
    calm: threading.Event = dataclasses.field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.calm.set()

    def run(self, name: str, config: Any, params: Any, cache: Any, packed: Packed) -> Any:
        """Calls the program `name` with packed numpy arrays, which the call itself sends -> (cache, the rest, packed on
        the device)."""
        program = self.compiled.get(key_of(name, config, params, cache, packed))
        if program is None or not program.done() or program.cancelled():
            started = time.perf_counter()
            self.calm.clear()
            try:
                with self.watch(name):
                    program = self.compile(name, config, params, cache, packed)
            finally:
                self.calm.set()
            self.compile_seconds += time.perf_counter() - started
            self.num_waits += 1
        return program.result()(params, cache, packed)

    def begin(self, name: str, config: Any, params: Any, cache: Any, packed: Packed) -> Program:
        """Lower the program, unless another thread has begun to."""
        key, mine = key_of(name, config, params, cache, packed), Program()
        with self.making(key, mine):
            if (known := self.compiled.setdefault(key, mine)) is mine:
                mine.lowered.set_result(self.lower(name, config, params, cache, packed))
        return known

    def compile(self, name: str, config: Any, params: Any, cache: Any, packed: Packed) -> Program:
        """Return the program when it is there, made by this thread or by another."""
        key = key_of(name, config, params, cache, packed)
        while True:
            program = self.begin(name, config, params, cache, packed)
            try:
                finish = program.lowered.result()
                if not program.done() and program.taken.acquire(blocking=False):
                    with self.making(key, program):
                        program.set_result(finish())
                        self.num_compiled += 1
                program.result()
                return program
            except CancelledError:  # another thread failed; this one may not, or says why
                continue

    @contextlib.contextmanager
    def making(self, key: Any, program: Program) -> Iterator[None]:
        """Give a program up that is not made inside, so that it can be made again."""
        try:
            yield
        except BaseException:
            if self.compiled.get(key) is program:
                del self.compiled[key]
            program.lowered.cancel()
            program.cancel()
            raise

    def lower(self, name: str, config: Any, params: Any, cache: Any, packed: Packed) -> Callable[[], Any]:
        """Lowers the program, which holds Python -> what compiles it, which does not."""
        words = jax.ShapeDtypeStruct(packed.words.shape, packed.words.dtype, sharding=self.placement.sharding())
        placed = dataclasses.replace(packed, words=words)
        if self.folder is not None and (kept := digest_of(name, config, params, cache, placed)):
            with contextlib.suppress(ValueError, NotImplementedError):  # jax does not export all that it compiles
                return from_disk(self.folder, kept, name, config, params, cache, placed)
        return functools.partial(compiled, lower(name, config, params, cache, placed))


@dataclasses.dataclass
class Variants:
    """Which variants of a program there are. A batch that needs less than what was compiled already uses that for a
    while: its own program is compiled only where it is wanted again and again."""

    compiled: dict[Hashable, set[Variant]] = dataclasses.field(default_factory=dict)
    wanted: Counter[tuple[Hashable, Variant]] = dataclasses.field(default_factory=Counter)

    def choose(self, program: Hashable, exact: Variant) -> Variant:
        """The variant to run; the caller compiles it if it is new."""
        there = self.compiled.setdefault(program, set())
        self.wanted[program, exact] += 1
        if exact not in there and self.wanted[program, exact] <= WORTH_COMPILING:
            for wider in there:
                if wider.covers(exact):
                    return wider
        there.add(exact)
        return exact


def key_of(name: str, config: Any, params: Any, cache: Any, packed: Packed) -> Any:
    """What makes a program another."""
    caches, structure = jax.tree.flatten(cache)
    pages = tuple((x.shape, x.dtype) for x in caches)
    return name, config, jax.tree.structure(params), structure, pages, packed.structure, packed.leaves


def lower(name: str, config: Any, params: Any, cache: Any, packed: Packed) -> jax.stages.Lowered:
    """The program, lowered for these arguments (arrays, or ShapeDtypeStructs with shardings), the cache donated.

    The cache leaves where and as it came in, so that it aliases; everything else is small and replicated.
    """

    def program(params: Any, cache: Any, packed: Packed) -> tuple[Any, Packed]:
        cache, rest = FUNCTIONS[name](config, params, cache, *packed.unpack())
        return cache, pack(rest)

    pages, place = jax.tree.map(lambda x: x.format, cache), packed.words.sharding
    options: dict[str, Any] = {
        "donate_argnums": (1,),
        "in_shardings": (where(params), pages, where(packed)),
        "out_shardings": (pages, place),
        "compiler_options": compiler_options(place),
    }
    with lowering():
        return jax.jit(program, **options).lower(params, cache, packed)


def where(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, tree)


def digest_of(name: str, config: Any, params: Any, cache: Any, packed: Packed) -> str | None:
    """By which a lowered program is found on disk; None for one that is not kept."""
    arrays, tree = jax.tree.flatten((params, cache, packed))
    variant: Any = ()
    if config is not None:  # a set's order is another in every process
        variant = dataclasses.replace(config.variant, rules=frozenset()), sorted(config.variant.rules)
        config = dataclasses.replace(config, variant=Variant())
    return stored.digest(name, config, variant, tree, [(x.shape, x.dtype, x.sharding) for x in arrays])


def lower_from_disk(
    folder: Path, kept: str, name: str, config: Any, params: Any, cache: Any, packed: Packed
) -> tuple[jax.stages.Lowered, Any, Callable[[], None]]:
    """As `lower`, but over flat arrays, and traced only if it is not on disk by the name `kept` -> also the shapes and
    dtypes of what it gives beside the caches, and what keeps it on disk."""
    arrays, tree = jax.tree.flatten((params, cache, packed))
    pages, place = jax.tree.leaves(cache), packed.words.sharding
    traced: list[Packed] = []

    def program(*arrays: Any) -> list[Any]:
        params, cache, packed = jax.tree.unflatten(tree, arrays)
        cache, rest = FUNCTIONS[name](config, params, cache, *packed.unpack())
        traced[:] = [pack(rest)]
        return [*jax.tree.leaves(cache), traced[0].words]

    formats, before = [page.format for page in pages], len(arrays) - len(pages) - 1
    options: dict[str, Any] = {
        "donate_argnums": tuple(range(before, before + len(pages))),
        "in_shardings": (*where(arrays[:before]), *formats, place),
        "out_shardings": [*formats, place],
        "compiler_options": compiler_options(place),
    }
    with lowering():
        found, new = stored.load(folder, kept), None
        if found is None:
            # Of one device they say nothing, and are most of what takes time to write.
            lie = {"in_shardings": where(arrays), "out_shardings": [*where(pages), place]}
            plain = jax.jit(program, **(lie if len(place.device_set) > 1 else {}))
            new = stored.exported(plain, arrays)
            found = stored.Stored(new.call, traced[0].leaves)
        lowered = jax.jit(found.call, **options).lower(*arrays)
    return lowered, found.note, lambda: None if new is None else stored.store(folder, kept, new, found.note)


def from_disk(folder: Path, kept: str, name: str, config: Any, *arguments: Any) -> Callable[[], Callable[..., Any]]:
    """What compiles, and keeps, the program of `lower_from_disk`, which then takes what that of `lower` takes."""
    lowered, note, keep = lower_from_disk(folder, kept, name, config, *arguments)

    def finish() -> Callable[..., Any]:
        keep()
        program, structure = compiled(lowered), jax.tree.structure(answer(name, config))
        leaves = tuple((tuple(shape), dtype) for shape, dtype in note)

        def run(params: Any, cache: Any, packed: Packed) -> tuple[Any, Packed]:
            *pages, words = program(*jax.tree.leaves((params, cache, packed)))
            return jax.tree.unflatten(jax.tree.structure(cache), pages), Packed(words, structure, leaves)

        return run

    return finish


def compiled(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    return lowered.compile()


def answer(name: str, config: Any) -> Any:
    """What a program gives beside the caches, with anything for its arrays."""
    scores = Logprobs(0, 0, 0, 0) if config and config.variant.logprobs is not None else None  # type: ignore[arg-type]
    if name != "launch":
        return scores
    names = (field.name for field in dataclasses.fields(LaunchResult))
    return LaunchResult(**{**dict.fromkeys(names, 0), "logprobs": scores})  # type: ignore[arg-type]


@contextlib.contextmanager
def lowering() -> Iterator[None]:
    """What is lowered names its operations ("while/body/..."), but not the lines of source that they come from.

    libtpu 0.0.42 compares the stacks of those lines while it inlines, and for some of them never comes to an end:
    whether a program compiles would hang on who called `generate`, and on where a function stands in its file.

    Python collects its garbage afterwards: among so many new objects it would look for some again and again.
    """
    name = "jax_traceback_in_locations_limit"
    with one_at_a_time, quick_lowering():  # the options are the process's, not the thread's
        before, collects = getattr(jax.config, name), gc.isenabled()
        jax.config.update(name, 0)
        gc.disable()
        try:
            yield
        finally:
            jax.config.update(name, before)
            if collects:
                gc.enable()


def compiler_options(place: Sharding) -> dict[str, Any] | None:
    """For a program over arrays that lie there."""
    device: Any = next(iter(place.device_set))
    return dict(facts(device.platform).compiler_options) or None
