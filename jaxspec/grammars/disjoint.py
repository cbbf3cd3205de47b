"""The check of oneOf: no value may be valid for two of its options."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxspec.common.errors import UserError
from jaxspec.grammars.keywords import TYPES, enumerated, has_type, members, pointer, refused, types

MAX_PAIRS = 20_000  # largest number of pairs of schemas that are compared, about 0.1 s
WHOLE = ("$ref", "anyOf", "oneOf", "allOf")  # keywords of schemas that are not compared


@dataclasses.dataclass(frozen=True)
class Facts:
    """Facts about a schema that a comparison with another schema needs.

    texts: the texts of its values if it lists them with enum or const, else None.
    kinds: the types of its values, with integers as numbers; None if they are not compared.
    properties: the schemas of an object's members.
    required: the names of an object's members that have to be there, in order.
    """

    texts: frozenset[str] | None = None
    kinds: frozenset[str] | None = None
    properties: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    required: Mapping[str, None] = dataclasses.field(default_factory=dict)


class Pairs:
    """Comparisons of the schemas of one document, each of which is read once.

    find: function of a JSON pointer and the place of the $ref with it, which returns the schema there.
    """

    def __init__(self, find: Callable[[str, str], Any]) -> None:
        self.find = find
        self.read: dict[int, Facts] = {}  # key: id of the schema, which the document keeps
        self.known: dict[tuple[int, int], bool] = {}
        self.checked: set[int] = set()  # ids of lists of options
        self.count = 0

    def check(self, options: list[Any], at: str) -> None:
        """Raise UserError unless no value can be valid for two of the options. A list is compared once."""
        if id(options) in self.checked:
            return
        self.checked.add(id(options))
        for i, one in enumerate(options):
            for j, other in enumerate(options[:i]):
                if not self.disjoint(one, other, at):
                    raise refused(
                        at,
                        f"has options {j} and {i}, which one value may fit both",
                        "use anyOf, or a required property with another const in each",
                    )

    def disjoint(self, one: Any, other: Any, at: str) -> bool:
        """Return whether it is plain that no value is valid for both schemas."""
        self.count += 1
        if self.count > MAX_PAIRS:
            raise UserError(
                f"structured_outputs: the schema's oneOf have more than {MAX_PAIRS} pairs of schemas to compare: "
                "use anyOf, or give each oneOf fewer options"
            )
        pair = (id(one), id(other))
        if pair not in self.known:
            self.known[pair] = False  # a pair inside itself proves nothing
            self.known[pair] = self.compared(self.facts(one, at), self.facts(other, at), at)
        return self.known[pair]

    def compared(self, one: Facts, other: Facts, at: str) -> bool:
        """Return whether it is plain from these facts that no value is valid for both schemas."""
        if one.texts is not None and other.texts is not None:
            return one.texts.isdisjoint(other.texts)
        if one.kinds is None or other.kinds is None:
            return False
        if not one.kinds & other.kinds:
            return True
        return any(
            self.disjoint(one.properties.get(name, True), other.properties.get(name, True), at)
            for name in one.required
            if name in other.required
        )

    def facts(self, schema: Any, at: str) -> Facts:
        """Return the facts of a schema, or of the schema that its $ref refers to in the end."""
        if id(schema) not in self.read:
            self.read[id(schema)] = facts(self.resolved(schema, at), at)
        return self.read[id(schema)]

    def resolved(self, schema: Any, at: str) -> Any:
        """Return the schema that a schema with $ref refers to in the end, or the schema itself."""
        seen: set[str] = set()
        while isinstance(schema, Mapping) and "$ref" in schema:
            target = pointer(schema["$ref"], at)
            if target in seen:
                break
            seen.add(target)
            schema = self.find(target, at)
        return schema


def facts(schema: Any, at: str) -> Facts:
    """Return the facts of a schema without a $ref."""
    if not isinstance(schema, Mapping):
        return Facts()
    if (values := enumerated(schema, at)) is not None:
        kinds = as_numbers(kind for value in values for kind in TYPES if has_type(value, kind))
        return Facts(frozenset(json.dumps(canonical(value), sort_keys=True) for value in values), kinds)
    if any(word in schema for word in WHOLE):
        return Facts()
    kinds = as_numbers(types(schema, at)) if "type" in schema else frozenset(TYPES)
    if kinds != {"object"}:
        return Facts(kinds=kinds)
    properties, required = members(schema, at)
    return Facts(None, kinds, properties, dict.fromkeys(required))


def as_numbers(kinds: Iterable[str]) -> frozenset[str]:
    """Return types with integers as numbers."""
    return frozenset("number" if kind == "integer" else kind for kind in kinds)


def canonical(value: Any) -> Any:
    """Return a JSON value with floats that are integers as integers, which JSON Schema does not tell apart."""
    if isinstance(value, list):
        return [canonical(item) for item in value]
    if isinstance(value, dict):
        return {name: canonical(item) for name, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value
