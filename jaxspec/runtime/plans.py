"""Plans. A plan describes one run of a device program, for example one prefill pass: the program and its arguments."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from jaxspec.decode.state import Variant
from jaxspec.runtime.packing import Packed

NOTHING = Variant()


@dataclasses.dataclass(frozen=True)
class Plan:
    """A description of one run of a device program: the program's name and its arguments.

    A plan is small and holds no device arrays, so that several processes can run the same plan.

    program: name in `FUNCTIONS` of runtime/programs.py; "renew" runs no program but replaces the caches by empty ones.
    arrays: arguments of the program besides parameters and caches: pytrees of numpy arrays, or these arrays packed.
    k: number of draft tokens in each round of the program "launch"; 0 for other programs.
    variant: code paths that the program is compiled with.
    """

    program: Literal["launch", "prefill", "catch_up", "copy_pages", "write_grammar", "renew"]
    arrays: tuple[Any, ...] | Packed = ()
    k: int = 0
    variant: Variant = NOTHING
