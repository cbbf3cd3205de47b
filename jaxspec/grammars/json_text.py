"""Nodes of JSON text: strings, scalars, arrays and objects."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
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
CHARACTER = choice(chars(*PLAIN), concat(literal("\\"), whole('["\\\\/bfnrt]')))
# A \u form of four digits. Halves of surrogate pairs stand only in pairs.
LONG = whole(
    r"\\u(?:[0-9a-cefA-CEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}"
    r"|[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)
# Nodes of the scalars that are no strings.
SCALARS = {
    "null": literal("null"),
    "boolean": choice(literal("true"), literal("false")),
    "integer": whole(INTEGER),
    "number": whole(NUMBER),
}


class JsonText:
    """The notation of JSON. A subclass is another notation of the same values."""

    comma = concat(literal(","), SPACE)
    colon = concat(literal(":"), SPACE)

    def quoted(self, inner: Node) -> Node:
        """Return the node of a string with this text between its quotes."""
        return concat(QUOTE, inner, QUOTE)

    def string(self, least: int = 0, most: int | None = None) -> Node:
        """Return the node of strings of `least` to `most` characters. Under bounds the long escapes are left out."""
        if (least, most) == (0, None):
            return self.quoted(repeat(choice(CHARACTER, LONG)))
        return self.quoted(repeat(CHARACTER, least, most))

    def escaped(self, ranges: Ranges) -> Node:
        """Return the node of one character of these ranges as a string holds it, in its shortest form."""
        options = [chars(*intersection(ranges, PLAIN))]
        for low, high in intersection(ranges, ESCAPED):
            options += [literal(SHORT.get(point, f"\\u{point:04x}")) for point in range(low, high + 1)]
        return choice(*options)

    def string_text(self, text: str) -> Node:
        """Return the node of exactly this string."""
        return literal(json.dumps(text, ensure_ascii=False))

    def key(self, name: str) -> Node:
        """Return the node of a member's name, with the colon after it."""
        return concat(self.string_text(name), self.colon)

    def other_key(self, names: list[str]) -> Node:
        """Return the node of a member's name that is none of these, with the colon after it. It holds no escapes."""
        return concat(self.quoted(unlike([name for name in names if all_plain(name)])), self.colon)

    def ordered(self, names: Iterable[str]) -> list[str]:
        """Return the names of an object's members in the order in which they are written."""
        return list(names)

    def call(self, name: str, arguments: Node, member: str) -> Node:
        """Return the node of a call of a function. member: name of the member that holds the arguments."""
        first = concat(self.key("name"), self.string_text(name))
        return concat(literal("{"), first, self.comma, self.key(member), arguments, literal("}"))

    def value_text(self, value: Any) -> Node:
        """Return the node of exactly this value."""
        if isinstance(value, dict):
            members = [concat(self.key(name), self.value_text(value[name])) for name in self.ordered(value)]
            return concat(literal("{"), self.separated(members), literal("}"))
        if isinstance(value, list):
            return concat(literal("["), self.separated([self.value_text(item) for item in value]), literal("]"))
        return self.string_text(value) if isinstance(value, str) else literal(json.dumps(value))

    def separated(self, items: list[Node]) -> Node:
        """Return the node of these items with commas between them."""
        return concat(*[part for item in items for part in (self.comma, item)][1:])

    def array(self, items: list[Node], rest: Node, least: int, most: int | None) -> Node:
        """Return the node of arrays of `least` to `most` items: first these, then any number of `rest`."""
        if most is not None and most < least:
            return NOTHING
        items = items[:most]
        left = None if most is None else most - len(items)
        if not items and (least, most) == (0, None):
            inner = listing([], rest, self.comma)
        elif not items and least == 0:
            inner = repeat(self.array_tail(rest, 1, most), 0, 1)
        elif not items:
            inner = self.array_tail(rest, least, most)
        else:
            inner = repeat(concat(self.comma, rest), max(least - len(items), 0), left)
            for index in reversed(range(len(items))):
                inner = concat(*([self.comma] if index else []), items[index], inner)
                inner = inner if index < least else repeat(inner, 0, 1)
        return concat(literal("["), inner, literal("]"))

    def array_tail(self, item: Node, least: int, most: int | None) -> Node:
        """Return the node of `least` to `most` items, at least one, with commas between them."""
        return concat(item, repeat(concat(self.comma, item), least - 1, None if most is None else most - 1))

    def members(self, known: list[tuple[Node, bool]], more: Node) -> Node:
        """Return the node of objects. known: (member, whether it has to be there) in order. more: further members."""
        inner = listing(known, more, self.comma)
        return NOTHING if inner == NOTHING else concat(literal("{"), inner, literal("}"))

    @functools.cache  # noqa: B019 (notations are constants)
    def any_value(self, depth: int) -> Node:
        """Return the node of any value with at most `depth` arrays and objects inside each other."""
        scalars = [SCALARS["null"], SCALARS["boolean"], SCALARS["number"], self.string()]
        if not depth:
            return choice(*scalars)
        return choice(*scalars, self.any_array(depth), self.any_object(depth))

    def any_array(self, depth: int) -> Node:
        """Return the node of any array with at most `depth` arrays and objects inside each other, itself included."""
        return self.array([], self.any_value(depth - 1), 0, None) if depth else NOTHING

    def any_object(self, depth: int) -> Node:
        """Return the node of any object with at most `depth` arrays and objects inside each other, itself included."""
        return self.members([], concat(self.any_key(), self.any_value(depth - 1))) if depth else NOTHING

    def any_key(self) -> Node:
        """Return the node of any member's name, with the colon after it."""
        return concat(self.string(), self.colon)


def intersection(some: Ranges, others: Ranges) -> Ranges:
    """Return the characters in both of two ranges."""
    return complement(merged([*complement(some), *complement(others)]))


def all_plain(name: str) -> bool:
    """Return whether a JSON string holds this text without escapes."""
    return all(ord(c) >= 0x20 and c not in '"\\' for c in name)


def unlike(names: list[str], alphabet: Ranges = PLAIN) -> Node:
    """Return the node of the texts of these characters that are none of the names.

    The path is the beginning that most names share, to its end. A text leaves it at one of its characters.
    """
    path, leaves = "", list[Node]()
    while True:
        rests: dict[str, list[str]] = {}
        for name in names:
            if name:
                rests.setdefault(name[0], []).append(name[1:])
        following = max(rests, key=lambda c: len(rests[c]), default=None)
        other = chars(*intersection(alphabet, complement(merged([(ord(c), ord(c)) for c in rests]))))
        options = [concat(literal(c), unlike(rest, alphabet)) for c, rest in rests.items() if c != following]
        options += [concat(other, repeat(chars(*alphabet))), *([] if "" in names else [literal("")])]
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


JSON = JsonText()
