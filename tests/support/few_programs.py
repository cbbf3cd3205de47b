"""Fewer and cheaper device programs, for tests only.

Every number of rows, and of pieces of prompts, would have a program of its own. Tests of these take the fixture
`exact_shapes`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from jaxspec.engine.catalogue import OpenCatalogue
from jaxspec.hardware import platforms

LEAST = 8  # rows of a launch, and pieces of a pass over prompts; fewer in an engine that has fewer
# XLA's passes that change no result: one checks what the compiler itself made, the other annotates loops.
PASSES = "hlo-verifier,while-loop-trip-count-annotator"
OWN_SHAPE, OWN_FACTS = OpenCatalogue.shape, platforms.PLATFORMS["cpu"]
OWN_OPTIONS = OWN_FACTS.compiler_options
OPTIONS = {**OWN_OPTIONS, "xla_disable_hlo_passes": f"{OWN_OPTIONS['xla_disable_hlo_passes']},{PASSES}"}


def shape(self: OpenCatalogue, num_rows: int, num_pages: int) -> tuple[int, int]:
    return OWN_SHAPE(self, max(num_rows, min(LEAST, max(self.spare))), num_pages)


def compile_few() -> None:
    """Let engines that compile when a batch first needs it have few shapes, and compile without PASSES."""
    platforms.PLATFORMS["cpu"] = dataclasses.replace(OWN_FACTS, compiler_options=OPTIONS, least_pieces=LEAST)
    OpenCatalogue.shape = shape  # type: ignore[method-assign]


@contextlib.contextmanager
def exact_shapes() -> Iterator[None]:
    """Return a context in which launches, and passes of engines made in it, have the shapes of users' engines."""
    platforms.PLATFORMS["cpu"] = dataclasses.replace(OWN_FACTS, compiler_options=OPTIONS)
    OpenCatalogue.shape = OWN_SHAPE  # type: ignore[method-assign]
    try:
        yield
    finally:
        compile_few()
