"""Nodes of JSON text: strings, scalars, arrays and objects."""

from __future__ import annotations

import functools
import json
from typing import Any

from jaxspec.grammars.formats import INTEGER, NUMBER
from jaxspec.grammars.nodes import (
    NOTHING,
    Node,
    Ranges,
    chars,
    choice,
    complement,
    concat,
    listing,
    literal,
    merged,
    repeat,
)
from jaxspec.grammars.regex import whole

# Characters that a JSON string holds only in an escaped form, and their short forms.
SHORT = {ord(c): f"\\{short}" for c, short in zip('"\\\b\f\n\r\t', '"\\bfnrt', strict=True)}
ESCAPED = merged([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)])
PLAIN = complement(ESCAPED)

QUOTE = literal('"')
SPACE = repeat(literal(" "), 0, 1)
COMMA = concat(literal(","), SPACE)
COLON = concat(literal(":"), SPACE)
CHARACTER = choice(chars(*PLAIN), concat(literal("\\"), whole('["\\\\/bfnrt]')))
# A \u form of four digits. Halves of surrogate pairs stand only in pairs.
LONG = whole(
    r"\\u(?:[0-9a-cefA-CEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}"
    r"|[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)


def quoted(inner: Node) -> Node:
    """Return the node of a JSON string with this text between its quotes."""
    return concat(QUOTE, inner, QUOTE)


def string(least: int = 0, most: int | None = None) -> Node:
    """Return the node of JSON strings of `least` to `most` characters. Under bounds the long escapes are left out."""
    if (least, most) == (0, None):
        return quoted(repeat(choice(CHARACTER, LONG)))
    return quoted(repeat(CHARACTER, least, most))


def escaped(ranges: Ranges) -> Node:
    """Return the node of one character of these ranges as a JSON string holds it, in its shortest form."""
    options = [chars(*intersection(ranges, PLAIN))]
    for low, high in intersection(ranges, ESCAPED):
        options += [literal(SHORT.get(point, f"\\u{point:04x}")) for point in range(low, high + 1)]
    return choice(*options)


def intersection(some: Ranges, others: Ranges) -> Ranges:
    """Return the characters in both of two ranges."""
    return complement(merged([*complement(some), *complement(others)]))


def value_text(value: Any) -> Node:
    """Return the node of a JSON value's text. Members of objects have the value's order."""
    if isinstance(value, dict):
        members = [concat(key(name), value_text(item)) for name, item in value.items()]
        return concat(literal("{"), separated(members), literal("}"))
    if isinstance(value, list):
        return concat(literal("["), separated([value_text(item) for item in value]), literal("]"))
    return literal(json.dumps(value, ensure_ascii=False))


def separated(items: list[Node]) -> Node:
    """Return the node of these items with commas between them."""
    return concat(*[part for item in items for part in (COMMA, item)][1:])


def key(name: str) -> Node:
    """Return the node of a member's name, with the colon after it."""
    return concat(literal(json.dumps(name, ensure_ascii=False)), COLON)


def other_key(names: list[str]) -> Node:
    """Return the node of a member's name that is none of these, with the colon after it. It holds no escapes."""
    return concat(QUOTE, unlike([name for name in names if all_plain(name)]), QUOTE, COLON)


def all_plain(name: str) -> bool:
    """Return whether a JSON string holds this text without escapes."""
    return all(ord(c) >= 0x20 and c not in '"\\' for c in name)


def unlike(names: list[str]) -> Node:
    """Return the node of the texts of plain characters that are none of these.

    The path is the beginning that most names share, to its end. A text leaves it at one of its characters.
    """
    path, leaves = "", list[Node]()
    while True:
        rests: dict[str, list[str]] = {}
        for name in names:
            if name:
                rests.setdefault(name[0], []).append(name[1:])
        following = max(rests, key=lambda c: len(rests[c]), default=None)
        other = chars(*intersection(PLAIN, complement(merged([(ord(c), ord(c)) for c in rests]))))
        options = [concat(literal(c), unlike(rest)) for c, rest in rests.items() if c != following]
        options += [concat(other, repeat(chars(*PLAIN))), *([] if "" in names else [literal("")])]
        leaves.append(choice(*options))
        if following is None:
            return along(path, leaves)
        path, names = path + following, rests[following]


def along(path: str, leaves: list[Node]) -> Node:
    """Return the node of the texts that leave a path, at its beginning or after each of its characters.

    It is halved, because a node inside another for each character would be nested too deeply.
    """
    if not path:
        return leaves[0]
    half = len(leaves) // 2
    return choice(
        along(path[: half - 1], leaves[:half]), concat(literal(path[:half]), along(path[half:], leaves[half:]))
    )


def array(items: list[Node], rest: Node, least: int, most: int | None) -> Node:
    """Return the node of arrays of `least` to `most` items: first these, then any number of `rest`."""
    if most is not None and most < least:
        return NOTHING
    items = items[:most]
    left = None if most is None else most - len(items)
    if not items and (least, most) == (0, None):
        inner = listing([], rest, COMMA)
    elif not items and least == 0:
        inner = repeat(array_tail(rest, 1, most), 0, 1)
    elif not items:
        inner = array_tail(rest, least, most)
    else:
        inner = repeat(concat(COMMA, rest), max(least - len(items), 0), left)
        for index in reversed(range(len(items))):
            inner = concat(*([COMMA] if index else []), items[index], inner)
            inner = inner if index < least else repeat(inner, 0, 1)
    return concat(literal("["), inner, literal("]"))


def array_tail(item: Node, least: int, most: int | None) -> Node:
    """Return the node of `least` to `most` items, at least one, with commas between them."""
    return concat(item, repeat(concat(COMMA, item), least - 1, None if most is None else most - 1))


def members(known: list[tuple[Node, bool]], more: Node) -> Node:
    """Return the node of objects. known: (member, whether it has to be there) in order. more: any further member."""
    inner = listing(known, more, COMMA)
    return NOTHING if inner == NOTHING else concat(literal("{"), inner, literal("}"))


SCALARS = {
    "null": literal("null"),
    "boolean": choice(literal("true"), literal("false")),
    "integer": whole(INTEGER),
    "number": whole(NUMBER),
    "string": string(),
}


@functools.cache
def any_value(depth: int) -> Node:
    """Return the node of any JSON value with at most `depth` arrays and objects inside each other."""
    scalars = [SCALARS[kind] for kind in ("null", "boolean", "number", "string")]
    if not depth:
        return choice(*scalars)
    return choice(*scalars, any_array(depth), any_object(depth))


def any_array(depth: int) -> Node:
    """Return the node of any JSON array with at most `depth` arrays and objects inside each other, itself included."""
    return array([], any_value(depth - 1), 0, None) if depth else NOTHING


def any_object(depth: int) -> Node:
    """Return the node of any JSON object with at most `depth` arrays and objects inside each other, itself included."""
    return members([], concat(string(), COLON, any_value(depth - 1))) if depth else NOTHING
