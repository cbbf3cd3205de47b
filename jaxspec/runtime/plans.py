"""Plans: the engine's decisions about single runs of device programs."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from jaxspec.decode.state import Variant
from jaxspec.runtime.packing import Packed

NOTHING = Variant()


@dataclasses.dataclass(frozen=True)
class Plan:
    """One run of a device program.

    A plan is small and holds no device arrays, so that several processes can execute the same plan.

    program: name in `FUNCTIONS` of runtime/programs.py; "renew" runs no program but creates empty caches.
    arrays: arguments of the program after parameters and caches: pytrees of numpy arrays, or packed already.
    k: number of draft tokens a round, in a launch.
    variant: code paths that the rows of the plan need.
    """

    program: Literal["launch", "prefill", "catch_up", "copy_pages", "renew"]
    arrays: tuple[Any, ...] | Packed = ()
    k: int = 0
    variant: Variant = NOTHING
