"""Regular languages, sets of strings, as trees of nodes. The strings of a node's language are called its texts.

The functions below make the nodes. They leave out options whose language is empty.
"""

from __future__ import annotations

import dataclasses
import sys

from jaxspec.common.errors import UserError, quoted

Ranges = tuple[tuple[int, int], ...]  # sorted, disjoint ranges of code points, both ends included
LAST = sys.maxunicode
SURROGATES = (0xD800, 0xDFFF)  # first and last code point of those that no string of Unicode text holds


class Hashed:
    """A node that computes its hash once. `choice` hashes its options, and each would read all nodes below."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "known_hash", hash((type(self), *vars(self).values())))

    def __hash__(self) -> int:
        return int(vars(self)["known_hash"])


@dataclasses.dataclass(frozen=True)
class Chars(Hashed):
    """One character of these ranges."""

    ranges: Ranges
    __hash__ = Hashed.__hash__


@dataclasses.dataclass(frozen=True)
class Concat(Hashed):
    """The texts of the parts, one after the other."""

    parts: tuple[Node, ...]
    __hash__ = Hashed.__hash__


@dataclasses.dataclass(frozen=True)
class Choice(Hashed):
    """A text of one of the options."""

    options: tuple[Node, ...]
    __hash__ = Hashed.__hash__


@dataclasses.dataclass(frozen=True)
class Repeat(Hashed):
    """At least `least` and at most `most` texts of the item, one after the other. most: None for any number."""

    item: Node
    least: int
    most: int | None
    __hash__ = Hashed.__hash__


@dataclasses.dataclass(frozen=True)
class Listing(Hashed):
    """Members in their order, then any number of texts of `more`, with a separator between two that are there.

    required: whether each member has to be there.
    """

    members: tuple[Node, ...]
    required: tuple[bool, ...]
    more: Node
    separator: Node
    __hash__ = Hashed.__hash__


Node = Chars | Concat | Choice | Repeat | Listing

NOTHING = Choice(())  # the empty language, which has no text, not even the empty string
EMPTY = Concat(())  # the language of the empty string alone


def too_large(what: str, most: int) -> UserError:
    """Return the error for a grammar that exceeds a limit of its size."""
    return UserError(
        f"structured_outputs: the grammar has more than {most} {what}: shorten lengths, bounds of arrays and lists of "
        "choices, or lower max_depth"
    )


def chars(*ranges: tuple[int, int]) -> Node:
    """Return the node of one character of these ranges, which may overlap. Surrogates are left out."""
    return Chars(found) if (found := merged(ranges)) else NOTHING


def merged(ranges: tuple[tuple[int, int], ...] | list[tuple[int, int]]) -> Ranges:
    """Return ranges of code points sorted and disjoint, without surrogates."""
    low, high = SURROGATES
    parts = [(a, min(b, low - 1)) for a, b in ranges] + [(max(a, high + 1), b) for a, b in ranges]
    found: list[tuple[int, int]] = []
    for a, b in sorted(part for part in parts if part[0] <= part[1]):
        if found and a <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(b, found[-1][1]))
        else:
            found.append((a, b))
    return tuple(found)


def complement(ranges: Ranges) -> Ranges:
    """Return the ranges of all characters that are not in these."""
    starts = [0, *(b + 1 for _, b in ranges)]
    ends = [*(a - 1 for a, _ in ranges), LAST]
    return merged([(a, b) for a, b in zip(starts, ends, strict=True) if a <= b])


def literal(text: str) -> Node:
    """Return the node of exactly this text. Raise UserError for half of a surrogate pair, which no text holds."""
    if any(SURROGATES[0] <= ord(c) <= SURROGATES[1] for c in text):
        raise UserError(f"structured_outputs: {quoted(text)} has half of a surrogate pair: write the whole character")
    return concat(*(chars((ord(c), ord(c))) for c in text))


def concat(*parts: Node) -> Node:
    """Return the node of these parts, one after the other."""
    if NOTHING in parts:
        return NOTHING
    flat = [p for part in parts for p in (part.parts if isinstance(part, Concat) else (part,))]
    return flat[0] if len(flat) == 1 else Concat(tuple(flat))


def choice(*options: Node) -> Node:
    """Return the node of one of these options."""
    left = tuple(dict.fromkeys(option for option in options if option != NOTHING))
    return left[0] if len(left) == 1 else Choice(left)


def repeat(item: Node, least: int = 0, most: int | None = None) -> Node:
    """Return the node of at least `least` and at most `most` of the item. most: None for any number."""
    if most is not None and most < least:
        return NOTHING
    if item == NOTHING:
        return NOTHING if least else EMPTY
    if item == EMPTY:  # adds no state, so that no limit would end a repetition of it
        return EMPTY
    return item if least == most == 1 else Repeat(item, least, most)


def listing(members: list[tuple[Node, bool]], more: Node, separator: Node) -> Node:
    """Return the node of (member, whether it has to be there) in order, then any number of `more`."""
    if any(required and node == NOTHING for node, required in members):
        return NOTHING
    left = [member for member in members if member[0] != NOTHING]
    return Listing(tuple(node for node, _ in left), tuple(required for _, required in left), more, separator)


def others(characters: str) -> Node:
    """Return the node of a character that is none of these."""
    return chars(*complement(merged([(ord(c), ord(c)) for c in characters])))


def without(mark: str) -> Node:
    """Return the node of the texts that do not contain a mark, whose first character occurs in it only once."""
    assert mark[0] not in mark[1:]

    def rest(i: int) -> Node:
        """Return the node of texts without the mark's first character that do not complete it. i: characters read."""
        if i == len(mark):
            return NOTHING
        unlike = concat(others(mark[0] + mark[i]), repeat(others(mark[0])))
        return choice(EMPTY, unlike, concat(literal(mark[i]), rest(i + 1)))

    return concat(repeat(others(mark[0])), repeat(concat(literal(mark[0]), rest(1))))
