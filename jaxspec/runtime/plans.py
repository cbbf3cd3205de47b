"""One run of a device program, as an engine decides on it."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from jaxspec.decode.state import Variant
from jaxspec.runtime.packing import Packed

NOTHING = Variant()


@dataclasses.dataclass(frozen=True)
class Plan:
    """It is small and holds no device array, so that several processes can execute the same one.

    program: a name in decode.programs.FUNCTIONS; "renew": empty caches instead.
    arrays: its arguments next to parameters and caches, pytrees of numpy arrays, or packed already.
    k: drafts a round of a launch.
    variant: the code paths that its rows need.
    """

    program: Literal["launch", "prefill", "catch_up", "copy_pages", "renew"]
    arrays: tuple[Any, ...] | Packed = ()
    k: int = 0
    variant: Variant = NOTHING
