"""One run of a program as bytes that name no code, for other processes to run it, too."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import jax
import numpy as np

from jaxspec.decode.packing import Packed
from jaxspec.decode.state import Control, LaunchInput, RowLimits, Variant
from jaxspec.drafters.base import Chunk
from jaxspec.sampling.distribution import SamplingRows
from jaxspec.sampling.processors import FewBiased, Processors

# What arguments are made of, by name; tuples, sets and plain values aside.
CLASSES: dict[str, Any] = {
    cls.__name__: cls for cls in (Chunk, Control, FewBiased, LaunchInput, Processors, RowLimits, SamplingRows, Variant)
}
ARRAY = object()  # stands for each array where arguments are described


def to_bytes(program: str, k: int, variant: Variant, packed: Packed) -> bytes:
    """packed: numpy words."""
    head = described(program, k, variant, packed.structure, packed.leaves)
    return len(head).to_bytes(4, "little") + head + packed.words.tobytes()


def from_bytes(told: bytes) -> tuple[str, int, Variant, Packed]:
    """The same again. Raises ValueError, KeyError or TypeError for what is no such thing."""
    end = 4 + int.from_bytes(told[:4], "little")
    *what, packed = read(told[4:end])
    return (*what, dataclasses.replace(packed, words=np.frombuffer(told[end:], np.int32)))  # type: ignore[return-value]


@functools.lru_cache(maxsize=256)
def described(program: str, k: int, variant: Variant, structure: Any, leaves: Any) -> bytes:
    """All but the numbers: the same in launch after launch."""
    arrays = jax.tree.unflatten(structure, [ARRAY] * structure.num_leaves)
    return json.dumps([program, k, as_json(variant), as_json(arrays), leaves]).encode()


@functools.lru_cache(maxsize=256)
def read(head: bytes) -> tuple[str, int, Variant, Packed]:
    program, k, variant, arrays, leaves = json.loads(head)
    shapes = tuple((tuple(shape), dtype) for shape, dtype in leaves)
    return program, k, from_json(variant), Packed(None, jax.tree.structure(from_json(arrays)), shapes)


def as_json(x: Any) -> Any:
    """[what it is, of what]."""
    if x is ARRAY:
        return ["array"]
    if isinstance(x, tuple):
        return ["tuple", list(map(as_json, x))]
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
    if kind == "set":
        return frozenset(rest[0])
    if kind == "value":
        return rest[0]
    return CLASSES[kind](**{name: from_json(value) for name, value in rest[0].items()})
