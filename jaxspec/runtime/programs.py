"""The compiled device programs, one for each static configuration and shapes, and the time that compiling took."""

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
from jaxspec.runtime import program_files
from jaxspec.runtime.packing import Packed, pack
from jaxspec.sampling.logprobs import Logprobs
from jaxspec.sampling.processors.grammar import write_grammar
from pallas_kernels.lowering import quick_lowering

WORTH_COMPILING = 16  # number of batches that use a more general variant before their exact one is compiled
one_at_a_time = threading.RLock()  # lock that is held while a program is lowered

# Python functions of the device programs: functions of (config, params, cache, *arrays) returning (cache, results). The
# cache of write_grammar is the pool of grammars' tables.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (launch, prefill, catch_up, copy_pages, write_grammar)
}


class Program(Future[Callable[..., Any]]):
    """The future of a compiled program. One thread lowers the program; the first thread that needs it compiles it.

    lowered: future of the function that compiles the lowered program.
    taken: lock that the compiling thread acquires and never releases, so that no other thread compiles the program.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lowered: Future[Callable[[], Any]] = Future()
        self.taken = threading.RLock()


@dataclasses.dataclass
class Programs:
    """The device programs. Each (function, static config, shapes) is compiled once, with the caches donated.

    folder: folder in which lowered programs are kept for later starts; None to keep none.
    watch: function of a program's name that returns a context; a run waits inside it for its program to be compiled.
    num_compiled: number of programs compiled.
    num_waits, compile_seconds: number of runs that had to wait for their program, and the seconds that they waited.
    compiled: programs, compiled or under way, by their keys (`key_of`); shared by threads.
    calm: event that is cleared while a run waits for its program. Threads that compile in advance wait for this event.
    """

    placement: Placement
    folder: Path | None = None
    watch: Callable[[str], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    num_compiled: int = 0
    num_waits: int = 0
    compile_seconds: float = 0.0
    compiled: dict[Any, Program] = dataclasses.field(default_factory=dict)
    calm: threading.Event = dataclasses.field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.calm.set()

    def run(self, name: str, config: Any, params: Any, cache: Any, packed: Packed) -> Any:
        """Run a program on packed numpy arrays, compiled first if necessary. Return (cache, packed results)."""
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
        """Lower a program, unless another thread has begun to lower it. Return the program, compiled or not."""
        key = key_of(name, config, params, cache, packed)
        mine = Program()
        with self.making(key, mine):
            known = self.compiled.setdefault(key, mine)
            if known is mine:
                mine.lowered.set_result(self.lower(name, config, params, cache, packed))
        return known

    def compile(self, name: str, config: Any, params: Any, cache: Any, packed: Packed) -> Program:
        """Return the compiled program; wait if another thread is compiling it."""
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
            except CancelledError:  # another thread failed to make the program: try it in this thread
                continue

    @contextlib.contextmanager
    def making(self, key: Any, program: Program) -> Iterator[None]:
        """Return a context for making a program. On an error, remove the program, so that it can be made again."""
        try:
            yield
        except BaseException:
            if self.compiled.get(key) is program:
                del self.compiled[key]
            program.lowered.cancel()
            program.cancel()
            raise

    def lower(self, name: str, config: Any, params: Any, cache: Any, packed: Packed) -> Callable[[], Any]:
        """Lower a program, which holds Python's global lock. Return a function that compiles it without the lock."""
        words = jax.ShapeDtypeStruct(packed.words.shape, packed.words.dtype, sharding=self.placement.sharding())
        placed = dataclasses.replace(packed, words=words)
        if self.folder is not None and (kept := digest_of(name, config, params, cache, placed)):
            with contextlib.suppress(ValueError, NotImplementedError):  # raised if JAX cannot export the program
                return from_disk(self.folder, kept, name, config, params, cache, placed)
        return functools.partial(compiled, lower(name, config, params, cache, placed))


@dataclasses.dataclass
class Variants:
    """The compiled variants (sets of code paths) of each program.

    At first a batch uses a compiled variant that covers more than the batch needs, if there is one. The variant that
    fits the batch exactly is compiled after batches have wanted it more than WORTH_COMPILING times.

    compiled: compiled variants by program.
    wanted: number of batches that wanted each (program, exact variant).
    """

    compiled: dict[Hashable, set[Variant]] = dataclasses.field(default_factory=dict)
    wanted: Counter[tuple[Hashable, Variant]] = dataclasses.field(default_factory=Counter)

    def choose(self, program: Hashable, exact: Variant) -> Variant:
        """Return the variant to run for a batch that needs the variant `exact`. The caller compiles a new variant."""
        known = self.compiled.setdefault(program, set())
        self.wanted[program, exact] += 1
        if exact not in known and self.wanted[program, exact] <= WORTH_COMPILING:
            for wider in known:
                if wider.covers(exact):
                    return wider
        known.add(exact)
        return exact


def key_of(name: str, config: Any, params: Any, cache: Any, packed: Packed) -> Any:
    """Return the key of a program: everything whose change requires another compilation."""
    caches, structure = jax.tree.flatten(cache)
    pages = tuple((x.shape, x.dtype) for x in caches)
    return name, config, jax.tree.structure(params), structure, pages, packed.structure, packed.leaves


def lower(name: str, config: Any, params: Any, cache: Any, packed: Packed) -> jax.stages.Lowered:
    """Lower a program for these arguments (arrays, or ShapeDtypeStructs with shardings), with the cache donated.

    The returned cache has the argument's layout and sharding: it is updated in place. Other results are replicated.
    """

    def program(params: Any, cache: Any, packed: Packed) -> tuple[Any, Packed]:
        cache, rest = FUNCTIONS[name](config, params, cache, *packed.unpack())
        return cache, pack(rest)

    pages = jax.tree.map(lambda x: x.format, cache)
    place = packed.words.sharding
    options: dict[str, Any] = {
        "donate_argnums": (1,),
        "in_shardings": (where(params), pages, where(packed)),
        "out_shardings": (pages, place),
        "compiler_options": compiler_options(place),
    }
    with lowering():
        return jax.jit(program, **options).lower(params, cache, packed)


def where(tree: Any) -> Any:
    """Return a tree of the shardings of a tree's arrays."""
    return jax.tree.map(lambda x: x.sharding, tree)


def digest_of(name: str, config: Any, params: Any, cache: Any, packed: Packed) -> str | None:
    """Return the file name of a lowered program; None for a program that is not kept on disk."""
    arrays, tree = jax.tree.flatten((params, cache, packed))
    variant: Any = ()
    if config is not None:  # the rules are sorted, because the order of a set differs between processes
        variant = dataclasses.replace(config.variant, rules=frozenset()), sorted(config.variant.rules)
        config = dataclasses.replace(config, variant=Variant())
    return program_files.digest(name, config, variant, tree, [(x.shape, x.dtype, x.sharding) for x in arrays])


def lower_from_disk(
    folder: Path, kept: str, name: str, config: Any, params: Any, cache: Any, packed: Packed
) -> tuple[jax.stages.Lowered, Any, Callable[[], None]]:
    """Lower a program over a list of arrays, reading it from the folder instead of tracing it where possible.

    Return (lowered program, shapes and dtypes of its results beside the caches, function that writes it to the folder).
    kept: the program's file name. Other arguments: as in `lower`.
    """
    arrays, tree = jax.tree.flatten((params, cache, packed))
    pages = jax.tree.leaves(cache)
    place = packed.words.sharding
    traced: list[Packed] = []

    def program(*arrays: Any) -> list[Any]:
        params, cache, packed = jax.tree.unflatten(tree, arrays)
        cache, rest = FUNCTIONS[name](config, params, cache, *packed.unpack())
        traced[:] = [pack(rest)]
        return [*jax.tree.leaves(cache), traced[0].words]

    formats = [page.format for page in pages]
    before = len(arrays) - len(pages) - 1  # number of parameter arrays
    options: dict[str, Any] = {
        "donate_argnums": tuple(range(before, before + len(pages))),
        "in_shardings": (*where(arrays[:before]), *formats, place),
        "out_shardings": [*formats, place],
        "compiler_options": compiler_options(place),
    }
    with lowering():
        found = program_files.load(folder, kept)
        new = None
        if found is None:
            shardings: dict[str, Any] = {}
            if len(place.device_set) > 1:  # on one device, shardings only cost time
                shardings = {"in_shardings": where(arrays), "out_shardings": [*where(pages), place]}
            plain = jax.jit(program, **shardings)
            new = program_files.exported(plain, arrays)
            found = program_files.Stored(new.call, traced[0].leaves)
        lowered = jax.jit(found.call, **options).lower(*arrays)

    def keep() -> None:
        if new is not None:
            program_files.store(folder, kept, new, found.note)

    return lowered, found.note, keep


def from_disk(folder: Path, kept: str, name: str, config: Any, *arguments: Any) -> Callable[[], Callable[..., Any]]:
    """Lower a program by `lower_from_disk`. Return a function that writes it to the folder and returns it compiled.

    The compiled program has the same arguments and results as a program from `lower`.
    """
    lowered, note, keep = lower_from_disk(folder, kept, name, config, *arguments)

    def finish() -> Callable[..., Any]:
        keep()
        program = compiled(lowered)
        structure = jax.tree.structure(answer(name, config))
        leaves = tuple((tuple(shape), dtype) for shape, dtype in note)

        def run(params: Any, cache: Any, packed: Packed) -> tuple[Any, Packed]:
            *pages, words = program(*jax.tree.leaves((params, cache, packed)))
            return jax.tree.unflatten(jax.tree.structure(cache), pages), Packed(words, structure, leaves)

        return run

    return finish


def compiled(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compile a lowered program."""
    return lowered.compile()


def answer(name: str, config: Any) -> Any:
    """Return a pytree with the structure of a program's results beside the caches; its leaves have no meaning."""
    scores = Logprobs(0, 0, 0, 0) if config and config.variant.logprobs is not None else None  # type: ignore[arg-type]
    if name != "launch":
        return scores
    names = (field.name for field in dataclasses.fields(LaunchResult))
    return LaunchResult(**{**dict.fromkeys(names, 0), "logprobs": scores})  # type: ignore[arg-type]


@contextlib.contextmanager
def lowering() -> Iterator[None]:
    """Return a context for lowering without operations' source lines, but with their names ("while/body/...").

    libtpu 0.0.42 compares the stacks of source lines when it inlines functions, and for some stacks never ends. Whether
    it compiles a program would then depend on the caller of `generate`, and on the place of a function in its file.
    Garbage collection is off in this context, because lowering makes so many objects that Python would often collect.
    """
    name = "jax_traceback_in_locations_limit"
    with one_at_a_time, quick_lowering():  # one thread at a time: JAX's settings are those of the whole process
        before = getattr(jax.config, name)
        collects = gc.isenabled()
        jax.config.update(name, 0)
        gc.disable()
        try:
            yield
        finally:
            jax.config.update(name, before)
            if collects:
                gc.enable()


def compiler_options(place: Sharding) -> dict[str, Any] | None:
    """Return the compiler options of a program over arrays with this sharding; None for the defaults."""
    device: Any = next(iter(place.device_set))
    return dict(facts(device.platform).compiler_options) or None
