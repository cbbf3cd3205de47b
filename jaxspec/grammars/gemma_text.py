"""Nodes of values as Gemma 4 writes them in calls of tools: quotes are marks, and names of members have none."""

from __future__ import annotations

from collections.abc import Iterable
from string import ascii_letters, digits

from jaxspec.common.errors import UserError, quoted
from jaxspec.common.notations import GEMMA_NAME
from jaxspec.common.notations import GEMMA_QUOTE as MARK
from jaxspec.grammars.json_text import JsonText, intersection, unlike
from jaxspec.grammars.nodes import Node, Ranges, chars, complement, concat, literal, merged, repeat, without

LETTERS = frozenset(ascii_letters + digits + "_-")  # of names of members that the schema does not give
PLAIN = merged([(ord(c), ord(c)) for c in LETTERS])
# Characters of strings whose length or form is given: all but the first of MARK, so that no string contains it.
INNER = complement(((ord(MARK[0]), ord(MARK[0])),))


class GemmaText(JsonText):
    """The notation of Gemma 4. Its values are those of JSON, except for strings that contain MARK."""

    comma = literal(",")
    colon = literal(":")

    def quoted(self, inner: Node) -> Node:
        return concat(literal(MARK), inner, literal(MARK))

    def string(self, least: int = 0, most: int | None = None) -> Node:
        return self.quoted(without(MARK) if (least, most) == (0, None) else repeat(chars(*INNER), least, most))

    def escaped(self, ranges: Ranges) -> Node:
        return chars(*intersection(ranges, INNER))

    def string_text(self, text: str) -> Node:
        if MARK in text:
            raise UserError(f"structured_outputs: {quoted(text)} holds {MARK}, which this model's calls cannot write")
        return self.quoted(literal(text))

    def key(self, name: str) -> Node:
        return concat(literal(name) if GEMMA_NAME.fullmatch(name) else self.string_text(name), self.colon)

    def other_key(self, names: list[str]) -> Node:
        return concat(unlike(["", *(name for name in names if {*name} <= LETTERS)], PLAIN), self.colon)

    def any_key(self) -> Node:
        return self.other_key([])

    def ordered(self, names: Iterable[str]) -> list[str]:
        return sorted(names, key=str.lower)  # as Gemma's chat template writes them

    def call(self, name: str, arguments: Node, member: str) -> Node:
        return concat(literal(f"call:{name}"), arguments)


GEMMA = GemmaText()
