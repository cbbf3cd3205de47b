"""The automata of a model's requests: each is built once, in a thread, and kept in memory and on disk."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxspec.common.trust import keep, trusted
from jaxspec.grammars import build
from jaxspec.grammars.automaton import Automaton
from jaxspec.grammars.requests import StructuredOutputs
from jaxspec.grammars.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

MOST = 256  # largest number of automata that are kept in memory
MOST_BYTES = 256 << 20  # largest number of bytes of the automata that are kept in memory
MOST_FILES = 1024  # largest number of automata that are kept on disk


class Library:
    """The automata of one vocabulary. Any thread may use it.

    vocabulary: function that returns the vocabulary; it is called once, in the library's thread.
    folder: folder of the automata on disk; None keeps none there.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], folder: Path | None) -> None:
        self.make_vocabulary = vocabulary
        self.folder = folder
        self.vocabulary: Vocabulary | None = None
        self.thread = concurrent.futures.ThreadPoolExecutor(1, "jaxspec-grammars")
        self.lock = threading.Lock()  # protects `known`
        self.known: dict[StructuredOutputs, concurrent.futures.Future[Automaton]] = {}  # last used comes last

    def build(self, grammar: StructuredOutputs) -> concurrent.futures.Future[Automaton]:
        """Return the future automaton of a grammar. Equal grammars share one, unless its build failed."""
        with self.lock:
            future = self.known.pop(grammar, None)
            if future is None or (future.done() and future.exception() is not None):
                future = self.thread.submit(self.automaton, grammar)
            self.known[grammar] = future
            while len(self.known) > MOST or (len(self.known) > 1 and self.nbytes() > MOST_BYTES):
                del self.known[next(iter(self.known))]
            return future

    def nbytes(self) -> int:
        """Return the total size in bytes of the automata whose build has ended."""
        built = (future for future in self.known.values() if future.done() and not future.exception())
        return sum(future.result().nbytes for future in built)

    def automaton(self, grammar: StructuredOutputs) -> Automaton:
        """Return the automaton of a grammar, from disk if it is there. Raise UserError as `build.automaton` does."""
        if self.vocabulary is None:
            self.vocabulary = self.make_vocabulary()
        started = time.perf_counter()
        path = self.folder and self.folder / f"{build.digest(grammar, self.vocabulary)}.npz"
        found = read(path) if path else None
        if found is None:
            found = build.automaton(grammar, self.vocabulary)
            if path:
                write(path, found)
        states, classes = found.next.shape
        logger.info(
            "built a grammar of %d states and %d classes of tokens, %d bytes, in %.2f s",
            states,
            classes,
            found.nbytes,
            time.perf_counter() - started,
        )
        return found


def read(path: Path) -> Automaton | None:
    """Return the automaton in a file; None if the file is missing or damaged, or if another user could write it."""
    try:
        with trusted(path) as file, np.load(file, allow_pickle=False) as arrays:
            return Automaton(arrays["classes"], arrays["next"], str(arrays["digest"]))
    except Exception:  # of numpy, zipfile or zlib, depending on the place of the damage
        return None


def write(path: Path, automaton: Automaton) -> None:
    """Write an automaton to a file for later starts, and remove the oldest files. A failure to write is ignored."""

    def save(new: Path) -> None:
        with open(new, "wb") as file:
            np.savez_compressed(file, classes=automaton.classes, next=automaton.next, digest=np.array(automaton.digest))

    keep(path, save)
    with contextlib.suppress(OSError):
        files = sorted(path.parent.glob("*.npz"), key=lambda file: file.stat().st_mtime)
        for file in files[:-MOST_FILES]:
            file.unlink()
