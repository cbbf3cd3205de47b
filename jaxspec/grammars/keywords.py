"""The keywords of JSON schemas (draft 2020-12): which are supported, and checks of their values."""

from __future__ import annotations

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


def enumerated(schema: Mapping[str, Any], at: str) -> list[Any] | None:
    """Return a schema's values if it lists them with enum or const, else None."""
    if "const" in schema:
        return [schema["const"]]
    return filled(schema["enum"], f"{at}/enum") if "enum" in schema else None


def filled(given: Any, at: str) -> list[Any]:
    """Return a list. Raise UserError for another value, and for an empty list."""
    if not isinstance(given, list) or not given:
        raise refused(at, f"is {quoted(given)}", "give a list that is not empty")
    return given


def members(schema: Mapping[str, Any], at: str) -> tuple[Mapping[str, Any], list[str]]:
    """Return the schemas of an object's members, and the names of those that have to be there."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping):
        raise refused(f"{at}/properties", f"is {quoted(properties)}", "give an object of schemas")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise refused(f"{at}/required", f"is {quoted(required)}", "give a list of names")
    return properties, required


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
