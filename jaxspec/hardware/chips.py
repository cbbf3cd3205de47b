"""Parsing of names for several accelerators of one kind, such as "v5e:2x4" or "h200:4", present or not."""

from __future__ import annotations

import dataclasses
import math

from jaxspec.common.errors import UserError, quoted
from jaxspec.hardware.accelerators import Accelerator, accelerator

MOST = 10_000  # largest number of accelerators that a name may give, more than any machine has


@dataclasses.dataclass(frozen=True)
class Chips:
    """A number of accelerators of one kind."""

    kind: Accelerator
    count: int

    @property
    def name(self) -> str:
        """Name for which `chips` returns an equal object."""
        return f"{self.kind.name}:{self.count}"


def chips(text: str) -> Chips:
    """Parse the name of several accelerators: "v5e:2x4" and "v5e:8" are 8 chips, "v5e" is one.

    Raises: UserError for an unknown accelerator, a text of another form, or a number outside of 1..MOST.
    """
    name, colon, topology = text.partition(":")
    kind = accelerator(name, "--chips")
    sizes = topology.split("x") if colon else ["1"]
    grid = "x".join(["2"] * kind.axes)
    shown = f"{kind.name}:4" + (f" or {kind.name}:{grid}" if kind.axes > 1 else "")
    # The length of each number is checked, because Python refuses to convert very long strings of digits.
    if len(sizes) > kind.axes or not all(size.isascii() and size.isdigit() and len(size) < 10 for size in sizes):
        raise UserError(
            f"--chips {quoted(text)}: {quoted(topology)} is not a number of {kind.name} devices: give it as {shown}"
        )
    count = math.prod(map(int, sizes))
    if not 1 <= count <= MOST:
        raise UserError(f"--chips {quoted(text)} are {count} devices, which must lie in 1..{MOST}: give it as {shown}")
    return Chips(kind, count)
