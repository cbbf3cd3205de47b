"""The keywords of JSON schemas (draft 2020-12): which are supported, and checks of their values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jaxspec.common.errors import UserError, quoted

TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
# Keywords that do not change which JSON values a schema allows
NOTES: tuple[str, ...] = ("$schema", "$comment", "$defs", "definitions", "title", "description", "default", "examples")
NOTES += ("deprecated", "readOnly", "writeOnly")
# Keywords that stand for a whole schema, and the keywords that may stand beside each
ALONE: dict[str, tuple[str, ...]] = {
    "$ref": (),
    "anyOf": (),
    "oneOf": ("discriminator",),
    "allOf": (),
    "const": ("type",),
    "enum": ("type",),
}
# Keywords of each type
OF_TYPE: dict[str, tuple[str, ...]] = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
}
KNOWN = {*NOTES, *ALONE, "discriminator", "type", "$id", *(word for words in OF_TYPE.values() for word in words)}
# Keyword that is not supported -> remedy
REMEDIES = {
    "not": "write what is allowed",
    "if": "write the cases as anyOf",
    "then": "write the cases as anyOf",
    "else": "write the cases as anyOf",
    "multipleOf": "list the values as enum, or leave it out",
    "uniqueItems": "leave it out, or list the arrays as enum",
    "contains": "describe all items with items",
    "patternProperties": "name the properties, or use additionalProperties",
    "propertyNames": "name the properties, or leave it out",
    "minProperties": "list names in required, or leave it out",
    "maxProperties": "name the properties with additionalProperties false, or leave it out",
    "dependentRequired": "write the cases as anyOf",
    "dependentSchemas": "write the cases as anyOf",
    "unevaluatedProperties": "use additionalProperties",
    "unevaluatedItems": "use items",
    "$dynamicRef": "use $ref",
    "$anchor": "refer to the schema by its place, such as #/$defs/name",
    "discriminator": "it stands beside oneOf only",
    "nullable": 'use "type": [..., "null"]',
}


def refused(at: str, what: str, remedy: str) -> UserError:
    """Return the error for a place of a schema. at: JSON pointer of the place."""
    return UserError(f"structured_outputs: the schema at {quoted(at, 200)[1:-1]} {what}: {remedy}")


def escaped(name: str) -> str:
    """Return a name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def pointer(given: Any, at: str) -> str:
    """Return a $ref's JSON pointer. Raise UserError for a $ref to another document."""
    if not isinstance(given, str) or not (given == "#" or given.startswith("#/")):
        raise refused(at, f"is {quoted(given)}", "refer to a place of the same document, such as #/$defs/name")
    return given


def types(schema: Mapping[str, Any], at: str) -> tuple[str, ...]:
    """Return the types of a schema's values. Without the keyword `type`, those that its keywords are about, or all."""
    given = schema.get("type")
    if "type" not in schema:
        found = tuple(kind for kind, words in OF_TYPE.items() if any(word in schema for word in words))
        return found or ("object", "array", "string", "number", "boolean", "null")
    listed = given if isinstance(given, list) else [given]
    for kind in listed:
        if kind not in TYPES:
            raise refused(f"{at}/type", f"is {quoted(given)}", f"use {', '.join(TYPES)}, or a list of those")
    if not listed:
        raise refused(f"{at}/type", "is an empty list", f"use {', '.join(TYPES)}, or a list of those")
    return tuple(kind for kind in dict.fromkeys(listed) if not (kind == "integer" and "number" in listed))


def kinds_of(schema: Mapping[str, Any], at: str) -> set[str]:
    """Return the types that values of a schema can have in JSON Schema, with integers as numbers."""
    if (values := schema.get("enum", [schema["const"]] if "const" in schema else None)) is not None:
        return {"number" if kind == "integer" else kind for v in values for kind in TYPES if has_type(v, kind)}
    if "type" not in schema:
        return {*TYPES}
    return {"number" if kind == "integer" else kind for kind in types(schema, at)}


def listed(schema: Mapping[str, Any]) -> set[str] | None:
    """Return the texts of a schema's values if it lists them with enum or const, else None."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return None if values is None else {json.dumps(canonical(value), sort_keys=True) for value in values}


def canonical(value: Any) -> Any:
    """Return a JSON value with floats that are integers as integers, which JSON Schema does not tell apart."""
    if isinstance(value, list):
        return [canonical(item) for item in value]
    if isinstance(value, dict):
        return {name: canonical(item) for name, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def has_type(value: Any, kind: str) -> bool:
    """Return whether a JSON value has a type of JSON Schema."""
    if isinstance(value, bool) or value is None:
        return kind == ("null" if value is None else "boolean")
    if isinstance(value, int | float):
        return kind == "number" or (kind == "integer" and value == int(value))
    return kind == ("string" if isinstance(value, str) else "array" if isinstance(value, list) else "object")


def counts(schema: Mapping[str, Any], low: str, high: str, at: str) -> tuple[int, int | None]:
    """Return the values of two keywords that bound a count."""
    found: list[int | None] = []
    for word in (low, high):
        value = schema.get(word, 0 if word == low else None)
        if word in schema:
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
                raise refused(f"{at}/{word}", f"is {quoted(value)}", "give a whole number from 0")
            value = int(value)
        found.append(value)
    return found[0] or 0, found[1]
