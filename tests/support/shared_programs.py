"""Device programs that all engines of a test process share.

Tests make many engines of the same models. Each would trace, lower and fetch its programs again, which takes a third
of a second for each program. A program follows from its function, its static configuration and the form of its
arguments, so engines after the first get the program that the first one made. While a test patches anything, its
engines make their own programs: the patched line may be one that is traced.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from typing import Any

import jax
import pytest
from jax._src import config as jax_config

from jaxspec.engine.adaptive import Controller
from jaxspec.engine.engine import Engine
from jaxspec.engine.runner import Runner
from jaxspec.runtime import programs

MOST = 100  # number of programs kept; each maps some memory
HOST = (pytest.Config, Engine, Runner, Controller, programs.Programs)  # objects of which no method is traced
patches: weakref.WeakSet[pytest.MonkeyPatch] = weakref.WeakSet()
lock = threading.RLock()  # engines that warm up lower programs in threads of their own


class Lowered:
    """A lowered program that is compiled once with the same options, whoever asks."""

    def __init__(self, lowered: jax.stages.Lowered):
        self.lowered = lowered
        self.lock = threading.Lock()
        self.compiled: dict[str, jax.stages.Compiled] = {}

    def compile(self, **options: Any) -> jax.stages.Compiled:
        with self.lock:
            if str(options) not in self.compiled:
                self.compiled[str(options)] = self.lowered.compile(**options)
            return self.compiled[str(options)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lowered, name)


class Shared:
    """`programs.lower`, which returns a known program where there is one; `cache_clear` forgets all."""

    def __init__(self):
        self.known: OrderedDict[Any, Lowered] = OrderedDict()
        self.lower = programs.lower
        self.cache_clear = self.known.clear

    def __call__(self, name: str, config: Any, params: Any, cache: Any, packed: Any) -> Any:
        if patched():
            return self.lower(name, config, params, cache, packed)
        arrays, structure = jax.tree.flatten((params, cache, packed))
        forms = tuple((x.shape, x.dtype, x.sharding, getattr(x, "format", None)) for x in arrays)
        key = programs.FUNCTIONS[name], config, structure, forms, jax_config.trace_context()
        with lock:
            found = self.known.pop(key, None)
        found = found or Lowered(self.lower(name, config, params, cache, packed))
        if not patched():  # a test may have begun to patch while a thread of the one before lowered
            with lock:
                self.known[key] = found
                while len(self.known) > MOST:
                    self.known.popitem(last=False)
        return found


def patched() -> bool:
    """Return whether a test has patched what may be traced, and has not restored it."""
    with lock:
        found = list(patches)
    return any(patch._setitem or any(not isinstance(target, HOST) for target, *_ in patch._setattr) for patch in found)


def share() -> None:
    """Let the engines of this process share their programs from now on."""
    init = pytest.MonkeyPatch.__init__

    def known(self: pytest.MonkeyPatch) -> None:
        init(self)
        with lock:
            patches.add(self)

    pytest.MonkeyPatch.__init__ = known
    programs.lower = shared


shared = Shared()
