"""Plans (runs of device programs) as bytes, for the job's other processes. The bytes contain data only, no code."""

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

# Classes that the arguments of a plan may contain, by name, besides tuples, dicts, sets and plain values.
CLASSES: dict[str, Any] = {
    cls.__name__: cls
    for cls in (Chunk, Control, FewBiased, LaunchInput, RowLimits, SamplingRows, Variant, *PROCESSORS.values())
}
ARRAY = object()  # placeholder of an array in a description of a plan's arguments


def to_bytes(plan: Plan, packed: Packed) -> bytes:
    """Return a plan as bytes. packed: the arrays of the plan, packed into one numpy array."""
    head = described(plan.program, plan.k, plan.variant, packed.structure, packed.leaves)
    words: bytes = packed.words.tobytes()
    return len(head).to_bytes(4, "little") + head + words


def from_bytes(data: bytes) -> Plan:
    """Return the plan that `to_bytes` made into these bytes, with its arrays packed.

    Raises:
      ValueError, KeyError, TypeError: the bytes are not a plan.
    """
    end = 4 + int.from_bytes(data[:4], "little")
    plan, packed = read(data[4:end])
    words = np.frombuffer(data[end:], np.int32)
    return dataclasses.replace(plan, arrays=dataclasses.replace(packed, words=words))


@functools.lru_cache(maxsize=256)
def described(program: str, k: int, variant: Variant, structure: Any, leaves: Any) -> bytes:
    """Return all of a plan but the values of its arrays, as bytes. Successive plans often share these cached bytes."""
    arrays = jax.tree.unflatten(structure, [ARRAY] * structure.num_leaves)
    return json.dumps([program, k, as_json(variant), as_json(arrays), leaves]).encode()


@functools.lru_cache(maxsize=256)
def read(head: bytes) -> tuple[Plan, Packed]:
    """Return (the plan without its arrays, the packed arrays without their values) from bytes of `described`."""
    program, k, variant, arrays, leaves = json.loads(head)
    shapes = tuple((tuple(shape), dtype) for shape, dtype in leaves)
    packed = Packed(None, jax.tree.structure(from_json(arrays)), shapes)
    return Plan(program, k=k, variant=from_json(variant)), packed


def as_json(x: Any) -> Any:
    """Return a plan's argument as JSON data: [kind, content], and only ["array"] for ARRAY."""
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
    raise TypeError(f"{type(x).__name__} cannot be sent to other processes: list it in CLASSES")


def from_json(x: Any) -> Any:
    """Return the argument that `as_json` made into this JSON data."""
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
