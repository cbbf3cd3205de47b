"""JSON schemas (draft 2020-12) as nodes. Every keyword is kept exactly, or refused with its place.

The node's texts are valid for the schema. They are not all valid texts: members of objects stand in the schema's order,
for example, and members that the schema does not name are left out where it does not ask for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from jaxspec.common.errors import UserError, quoted
from jaxspec.grammars.disjoint import Pairs
from jaxspec.grammars.formats import FORMATS
from jaxspec.grammars.json_text import JSON, SCALARS, JsonText
from jaxspec.grammars.keywords import (
    ALONE,
    KNOWN,
    NOTES,
    OF_TYPE,
    REMEDIES,
    TYPES,
    counts,
    escaped,
    filled,
    has_type,
    members,
    pointer,
    refused,
    types,
)
from jaxspec.grammars.nodes import NOTHING, Node, choice, concat, too_large
from jaxspec.grammars.numbers import Bound, numbers
from jaxspec.grammars.regex import searched, whole

MAX_SCHEMAS = 5000  # largest number of schemas inside a schema, one at each $ref counted again

MAX_DIGITS = 100  # largest number of digits of a number's bound, without zeros at the end


def schema_node(schema: Any, max_depth: int, text: JsonText = JSON) -> Node:
    """Return the node of the JSON texts that a schema allows.

    max_depth: how often a $ref may lead to a schema inside itself, and how deep values may be of which the schema says
      nothing.
    text: notation of the values, if it is another than JSON.

    Raises: UserError for a schema that cannot be kept exactly, with the JSON pointer of the place, and for one that
      allows no text.
    """
    try:
        found = Walk(schema, max_depth, text).node(schema, "#", Counter())
    except RecursionError:
        raise UserError("structured_outputs: the schema is nested too deeply: flatten it") from None
    if found == NOTHING:
        raise UserError(f"structured_outputs: no JSON text is valid for the schema within max_depth={max_depth}")
    return found


class Walk:
    """A walk through a schema.

    root: the whole schema, to which $ref refers.
    max_depth, text: as in `schema_node`.
    count: number of schemas so far.
    references: number of $refs so far.
    known: id of a schema without a $ref inside -> its node, which is the same wherever a $ref leads to it.
    """

    def __init__(self, root: Any, max_depth: int, text: JsonText = JSON) -> None:
        self.root = root
        self.max_depth = max_depth
        self.text = text
        self.count = 0
        self.references = 0
        self.known: dict[int, Node] = {}
        self.pairs = Pairs(self.find)

    def node(self, schema: Any, at: str, inside: Counter[str]) -> Node:
        """Return the node of a schema. at: its JSON pointer. inside: how often each $ref led to this place."""
        self.count += 1
        if self.count > MAX_SCHEMAS:
            raise too_large("schemas inside it, with each $ref counted", MAX_SCHEMAS)
        if schema is True:
            return self.text.any_value(self.max_depth)
        if schema is False:
            return NOTHING
        if id(schema) not in self.known:
            references = self.references
            found = self.walked(schema, at, inside)
            if self.references > references:
                return found
            self.known[id(schema)] = found
        return self.known[id(schema)]

    def walked(self, schema: Any, at: str, inside: Counter[str]) -> Node:
        """Return the node of a schema, as `node` does."""
        self.check(schema, at)
        for word in ALONE:
            if word in schema:
                self.check_alone(schema, word, at)
                return self.alone(schema, word, at, inside)
        kinds = types(schema, at)
        for kind in ("object", "array", "string", "number"):
            if kind not in kinds and not (kind == "number" and "integer" in kinds):
                for word in OF_TYPE[kind]:
                    if word in schema:
                        raise refused(at, f"has {word}, which says nothing of its type", "leave it out")
        return choice(*(self.typed(kind, schema, at, inside) for kind in kinds))

    def check(self, schema: Any, at: str) -> None:
        """Raise UserError for what is no schema, and for a keyword that is not supported."""
        if not isinstance(schema, Mapping):
            raise refused(at, f"is {quoted(schema)}", "give an object, true or false")
        for word in schema:
            misplaced = (word == "$id" and at != "#") or (word == "discriminator" and "oneOf" not in schema)
            if word not in KNOWN or misplaced:
                remedy = REMEDIES.get(word, "leave it out")
                raise refused(at, f"has {quoted(word, 40)}, which is not supported", remedy)

    def check_alone(self, schema: Mapping[str, Any], word: str, at: str) -> None:
        """Raise UserError for a keyword beside one of ALONE with which it would have to hold at once."""
        for other in schema:
            if other not in (word, "$id", *NOTES, *ALONE[word]):
                raise refused(at, f"has {other} beside {word}", f"write both as one schema, without {word}")

    def alone(self, schema: Mapping[str, Any], word: str, at: str, inside: Counter[str]) -> Node:
        """Return the node of a schema with this keyword of ALONE."""
        given = schema[word]
        here = f"{at}/{word}"
        if word == "$ref":
            self.references += 1
            target = pointer(given, here)
            if inside[target] > self.max_depth:
                return NOTHING
            return self.node(self.find(target, here), target, inside + Counter([target]))
        if word == "const":
            return self.values(schema, [given], at)
        filled(given, here)
        if word == "enum":
            return self.values(schema, given, at)
        if word == "allOf" and len(given) > 1:
            raise refused(here, f"has {len(given)} schemas that would have to hold at once", "write them as one schema")
        options = [self.node(option, f"{here}/{i}", inside) for i, option in enumerate(given)]
        if word == "oneOf":  # after the walk, which refuses what is no schema with its place
            self.pairs.check(given, here)
        return choice(*options)

    def find(self, target: str, at: str) -> Any:
        """Return the schema at a JSON pointer. at: place of the $ref, for the message."""
        found = self.root
        for part in target.split("/")[1:]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, Mapping) and name in found:
                found = found[name]
            else:
                raise refused(at, f"refers to {quoted(target)}, which is not there", "name a schema of this document")
        return found

    def values(self, schema: Mapping[str, Any], given: list[Any], at: str) -> Node:
        """Return the node of those of the given values that have the schema's type."""
        kinds = types(schema, at) if "type" in schema else TYPES
        return choice(*(self.text.value_text(v) for v in given if any(has_type(v, kind) for kind in kinds)))

    def typed(self, kind: str, schema: Mapping[str, Any], at: str, inside: Counter[str]) -> Node:
        """Return the node of the values of one type that a schema allows."""
        if kind == "object":
            return self.object(schema, at, inside)
        if kind == "array":
            return self.array(schema, at, inside)
        if kind == "string":
            return string(schema, at, self.text)
        if kind in ("integer", "number"):
            return number(schema, at, whole_only=kind == "integer")
        return SCALARS[kind]

    def object(self, schema: Mapping[str, Any], at: str, inside: Counter[str]) -> Node:
        """Return the node of objects: the named members in the schema's order, then others where it asks for them."""
        properties, required = members(schema, at)
        others = schema.get("additionalProperties", True)
        if "properties" not in schema and others is True:
            names: dict[str, Any] = {}
            other = self.text.any_value(self.max_depth - 1) if self.max_depth else NOTHING
        else:
            names = dict(properties)
            other = self.node(others, f"{at}/additionalProperties", inside) if self.asks(schema, required) else NOTHING
        nodes = {name: self.node(names[name], f"{at}/properties/{escaped(name)}", inside) for name in names}
        missing = [name for name in dict.fromkeys(required) if name not in names]
        nodes |= dict.fromkeys(missing, other)
        known = [(concat(self.text.key(name), nodes[name]), name in required) for name in self.text.ordered(nodes)]
        more = other if self.open(schema) else NOTHING
        return self.text.members(known, concat(self.text.other_key([*names, *missing]), more))

    def asks(self, schema: Mapping[str, Any], required: list[str]) -> bool:
        """Return whether an object may have members that `properties` does not name."""
        return self.open(schema) or any(name not in schema.get("properties", {}) for name in required)

    def open(self, schema: Mapping[str, Any]) -> bool:
        """Return whether further members are written: not where additionalProperties is left out beside properties."""
        return "additionalProperties" in schema or not {"properties", "required"} & schema.keys()

    def array(self, schema: Mapping[str, Any], at: str, inside: Counter[str]) -> Node:
        """Return the node of arrays."""
        if "uniqueItems" in schema and schema["uniqueItems"] is not False:
            raise refused(at, "has uniqueItems, which is not supported", REMEDIES["uniqueItems"])
        prefix = schema.get("prefixItems", [])
        if not isinstance(prefix, list):
            raise refused(f"{at}/prefixItems", f"is {quoted(prefix)}", "give a list of schemas")
        if isinstance(schema.get("items"), list):
            raise refused(f"{at}/items", "is a list", "use prefixItems")
        least, most = counts(schema, "minItems", "maxItems", at)
        if "items" in schema:
            rest = self.node(schema["items"], f"{at}/items", inside)
        elif prefix and least <= len(prefix):  # items after those of prefixItems may be missing
            rest = NOTHING
        else:
            rest = self.text.any_value(self.max_depth - 1) if self.max_depth else NOTHING
        items = [self.node(item, f"{at}/prefixItems/{i}", inside) for i, item in enumerate(prefix)]
        return self.text.array(items, rest, least, most)


def string(schema: Mapping[str, Any], at: str, text: JsonText) -> Node:
    """Return the node of strings."""
    words = [word for word in OF_TYPE["string"] if word in schema]
    least, most = counts(schema, "minLength", "maxLength", at)
    if "pattern" not in words and "format" not in words:
        return text.string(least, most) if most is None or least <= most else NOTHING
    if len(words) > 1:
        raise refused(at, f"has {words[0]} beside {words[1]}", "write both as one pattern")
    given = schema[words[0]]
    here = f"{at}/{words[0]}"
    if not isinstance(given, str):
        raise refused(here, f"is {quoted(given)}", "give a string")
    if "format" in words:
        if given not in FORMATS:
            raise refused(here, f"is {quoted(given)}", f"use {', '.join(FORMATS)}, or write it as a pattern")
        return text.quoted(whole(FORMATS[given]))
    try:
        return text.quoted(searched(given, text.escaped))
    except UserError as error:
        raise error.within(f"structured_outputs: the schema at {here}: ") from None


def number(schema: Mapping[str, Any], at: str, *, whole_only: bool) -> Node:
    """Return the node of numbers, or of integers if whole_only."""
    bounds: dict[str, list[Bound]] = {"low": [], "high": []}
    for word in OF_TYPE["number"]:
        if word in schema:
            value = schema[word]
            if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
                raise refused(f"{at}/{word}", f"is {quoted(value)}", "give a number")
            side = "low" if word.endswith("inimum") else "high"
            bound = Decimal(repr(value))
            _, digits, exponent = bound.as_tuple()
            if max(len("".join(map(str, digits)).rstrip("0")), -int(exponent)) > MAX_DIGITS:
                raise refused(f"{at}/{word}", f"is {quoted(value)}, of more than {MAX_DIGITS} digits", "round it")
            bounds[side].append(Bound(bound, word.startswith("exclusive")))
    if not any(bounds.values()):
        return SCALARS["integer" if whole_only else "number"]
    low = max(bounds["low"], key=lambda bound: (bound.value, bound.strict), default=None)
    high = min(bounds["high"], key=lambda bound: (bound.value, not bound.strict), default=None)
    found = numbers(low, high, whole=whole_only)
    return NOTHING if found is None else whole(found)
