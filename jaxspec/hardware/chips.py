"""Several accelerators by name, "v5e:2x4" or "h200:4", whether they are here or not."""

from __future__ import annotations

import dataclasses
import math

from jaxspec.common.errors import UserError, quoted
from jaxspec.hardware.accelerators import Accelerator, accelerator

MOST = 10_000  # more than any one machine has


@dataclasses.dataclass(frozen=True)
class Chips:
    """So many of one kind."""

    kind: Accelerator
    count: int

    @property
    def name(self) -> str:
        """By which `chips` finds as many."""
        return f"{self.kind.name}:{self.count}"


def chips(text: str) -> Chips:
    """ "v5e:2x4" -> 8 of them, as "v5e:8"; "v5e" is one. Raises UserError for what is no such name."""
    name, colon, topology = text.partition(":")
    kind = accelerator(name, "--chips")
    sizes = topology.split("x") if colon else ["1"]
    grid = "x".join(["2"] * kind.axes)
    shown = f"{kind.name}:4" + (f" or {kind.name}:{grid}" if kind.axes > 1 else "")
    # Digits are counted first: Python itself refuses to read very many.
    if len(sizes) > kind.axes or not all(size.isascii() and size.isdigit() and len(size) < 10 for size in sizes):
        raise UserError(f"--chips {quoted(text)}: {quoted(topology)} is no number of {kind.name}: give it as {shown}")
    count = math.prod(map(int, sizes))
    if not 1 <= count <= MOST:
        raise UserError(f"--chips {quoted(text)} are {count} devices, which must lie in 1..{MOST}: give it as {shown}")
    return Chips(kind, count)
