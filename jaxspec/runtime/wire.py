"""One run of a program as bytes that name no code, for other processes to run it, too."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import jax
import numpy as np

from jaxspec.decode.state import Control, LaunchInput, RowLimits, Variant
from jaxspec.drafters.base import Chunk
from jaxspec.runtime.packing import Packed
from jaxspec.runtime.plans import Plan
from jaxspec.sampling.distribution import SamplingRows
from jaxspec.sampling.processors import PROCESSORS
from jaxspec.sampling.processors.bias import FewBiased

# What arguments are made of, by name; tuples, sets and plain values aside.
CLASSES: dict[str, Any] = {
    cls.__name__: cls
    for cls in (Chunk, Control, FewBiased, LaunchInput, RowLimits, SamplingRows, Variant, *PROCESSORS.values())
}
ARRAY = object()  # stands for each array where arguments are described


def to_bytes(plan: Plan, packed: Packed) -> bytes:
    """packed: the plan's arrays, in numpy words."""
    head = described(plan.program, plan.k, plan.variant, packed.structure, packed.leaves)
    return len(head).to_bytes(4, "little") + head + packed.words.tobytes()


def from_bytes(told: bytes) -> Plan:
    """The plan again, its arrays packed. Raises ValueError, KeyError or TypeError for what is none."""
    end = 4 + int.from_bytes(told[:4], "little")
    plan, packed = read(told[4:end])
    return dataclasses.replace(plan, arrays=dataclasses.replace(packed, words=np.frombuffer(told[end:], np.int32)))


@functools.lru_cache(maxsize=256)
def described(program: str, k: int, variant: Variant, structure: Any, leaves: Any) -> bytes:
    """All but the numbers: the same in launch after launch."""
    arrays = jax.tree.unflatten(structure, [ARRAY] * structure.num_leaves)
    return json.dumps([program, k, as_json(variant), as_json(arrays), leaves]).encode()


@functools.lru_cache(maxsize=256)
def read(head: bytes) -> tuple[Plan, Packed]:
    """The plan without its arrays, and these without their words."""
    program, k, variant, arrays, leaves = json.loads(head)
    shapes = tuple((tuple(shape), dtype) for shape, dtype in leaves)
    packed = Packed(None, jax.tree.structure(from_json(arrays)), shapes)
    return Plan(program, k=k, variant=from_json(variant)), packed


def as_json(x: Any) -> Any:
    """[what it is, of what]."""
    if x is ARRAY:
        return ["array"]
    if isinstance(x, tuple):
        return ["tuple", list(map(as_json, x))]
    if isinstance(x, dict):
        return ["dict", {name: as_json(value) for name, value in x.items()}]
    if isinstance(x, frozenset):
        return ["set", sorted(x)]
    if type(x).__name__ in CLASSES:
        return [type(x).__name__, {field.name: as_json(getattr(x, field.name)) for field in dataclasses.fields(x)}]
    if x is None or isinstance(x, bool | int | float | str):
        return ["value", x]
    raise TypeError(f"{type(x).__name__} is not told to other processes: list it in CLASSES")


def from_json(x: Any) -> Any:
    kind, *rest = x
    if kind == "array":
        return ARRAY
    if kind == "tuple":
        return tuple(map(from_json, rest[0]))
    if kind == "dict":
        return {name: from_json(value) for name, value in rest[0].items()}
    if kind == "set":
        return frozenset(rest[0])
    if kind == "value":
        return rest[0]
    return CLASSES[kind](**{name: from_json(value) for name, value in rest[0].items()})
