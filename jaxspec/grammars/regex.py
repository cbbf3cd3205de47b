"""Regular expressions in the syntax of Python's module re, as nodes. What cannot be kept exactly is refused by name."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from jaxspec.common.errors import UserError, error_line, quoted
from jaxspec.grammars.nodes import (
    LAST,
    Node,
    Ranges,
    chars,
    choice,
    complement,
    concat,
    merged,
    repeat,
)

DIGITS = ((0x30, 0x39),)
WORD = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
# White space of ECMA-262, whose regular expressions JSON Schema takes.
SPACES = merged(
    [
        *((9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F)),
        *((0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
    ]
)
LINE_ENDS = merged([(10, 10), (13, 13), (0x2028, 0x2029)])  # characters that . does not stand for
CATEGORIES = {
    ops.CATEGORY_DIGIT: DIGITS,
    ops.CATEGORY_NOT_DIGIT: complement(DIGITS),
    ops.CATEGORY_WORD: WORD,
    ops.CATEGORY_NOT_WORD: complement(WORD),
    ops.CATEGORY_SPACE: SPACES,
    ops.CATEGORY_NOT_SPACE: complement(SPACES),
}
# Operation that is refused -> (its name, remedy)
REFUSED = {
    ops.AT: ("an anchor", "only ^ at the beginning and $ at the end are taken"),
    ops.ASSERT: ("a lookaround", "write what may stand there"),
    ops.ASSERT_NOT: ("a lookaround", "write what may stand there"),
    ops.FAILURE: ("a lookaround", "write what may stand there"),
    ops.GROUPREF: ("a backreference", "write the texts out"),
    ops.GROUPREF_EXISTS: ("a conditional group", "write the texts out"),
    ops.ATOMIC_GROUP: ("an atomic group", "use a plain group"),
    ops.POSSESSIVE_REPEAT: ("a possessive quantifier", "use a plain one"),
}
BEGIN = (ops.AT, ops.AT_BEGINNING)
Make = Callable[[Ranges], Node]  # function that returns the node of a character of these ranges


def parsed(text: str) -> Any:
    """Return a regular expression as Python's parser gives it. Raise UserError if the parser refuses it."""
    try:
        found = parser.parse(text)
    except (re.error, OverflowError, FutureWarning) as error:
        raise UserError(f"the regular expression {quoted(text)} is wrong: {error_line(error)}") from None
    except RecursionError:
        raise UserError(f"the regular expression {quoted(text)} is nested too deeply: flatten it") from None
    if found.state.flags != re.UNICODE:
        raise UserError(f"the regular expression {quoted(text)} sets flags, such as (?i), which are not supported")
    return found


def whole(text: str) -> Node:
    """Return the node of the texts that match a regular expression as a whole, as re.fullmatch does."""
    return choice(*(node for _, node, _ in alternatives(text, lambda ranges: chars(*ranges))))


def searched(text: str, make: Make) -> Node:
    """Return the node of the texts in which a regular expression matches somewhere, as re.search does.

    make: function that returns the node of one character of these ranges.
    """
    rest = repeat(make(((0, LAST),)))
    options = []
    for begins, node, ends in alternatives(text, make):
        options.append(concat(*([] if begins else [rest]), node, *([] if ends else [rest])))
    return choice(*options)


def alternatives(text: str, make: Make) -> list[tuple[bool, Node, bool]]:
    """Return (whether ^ stands before it, node, whether $ stands after it) of each alternative at the top of a regex.

    text: the regular expression.
    make: function that makes a node of a parsed part of the expression.
    """
    return [(begins, made(text, left, make), ends) for begins, left, ends in anchored(list(parsed(text)))]


def anchored(sequence: list[Any]) -> Iterable[tuple[bool, list[Any], bool]]:
    """Yield each alternative without its anchors, and whether it had them at its beginning and at its end."""
    begins = ends = False
    while sequence and sequence[0] == BEGIN:
        begins, sequence = True, sequence[1:]
    while sequence and sequence[-1] in ((ops.AT, ops.AT_END), (ops.AT, ops.AT_END_STRING)):
        ends, sequence = True, sequence[:-1]
    *before, (operation, argument) = sequence or [(None, None)]
    if operation == ops.BRANCH:
        branches = argument[1]
    elif operation == ops.SUBPATTERN and not any(argument[1:3]):
        branches = [argument[3]]
    else:
        yield begins, sequence, ends
        return
    found = [alternative for branch in branches for alternative in anchored(list(branch))]
    if not before:
        yield from ((begins or first, left, ends or last) for first, left, last in found)
    elif not any(last for _, _, last in found):
        yield begins, sequence, ends
    else:  # Python's parser makes ^a(?:$|b$) of ^a$|^ab$
        for side in (False, True):
            same = [[BEGIN, *left] if first else left for first, left, last in found if last == side]
            if same:
                yield begins, [*before, (ops.BRANCH, (None, same))], ends or side


def made(text: str, sequence: Iterable[Any], make: Make) -> Node:
    """Return the node of a parsed sequence. text: the whole expression, for messages."""
    again = functools.partial(made, text, make=make)
    parts: list[Node] = []
    for operation, argument in sequence:
        if operation in REFUSED:
            name, remedy = REFUSED[operation]
            raise UserError(f"the regular expression {quoted(text)} has {name}, which is not supported: {remedy}")
        if operation == ops.BRANCH:
            parts.append(choice(*map(again, argument[1])))
        elif operation == ops.SUBPATTERN:
            if any(argument[1:3]):
                raise UserError(f"the regular expression {quoted(text)} sets flags, such as (?i:...): leave them out")
            parts.append(again(argument[3]))
        elif operation in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            least, most, item = argument
            parts.append(repeat(again(item), least, None if most == ops.MAXREPEAT else most))
        else:
            parts.append(make(ranges_of(operation, argument)))
    return concat(*parts)


def ranges_of(operation: Any, argument: Any) -> Ranges:
    """Return the characters of an operation that stands for one character."""
    if operation == ops.LITERAL:
        return ((argument, argument),)
    if operation == ops.NOT_LITERAL:
        return complement(((argument, argument),))
    if operation == ops.ANY:
        return complement(LINE_ENDS)
    if operation == ops.RANGE:
        return (argument,)
    if operation == ops.CATEGORY:
        return CATEGORIES[argument]
    assert operation == ops.IN, operation
    negated = argument[0][0] == ops.NEGATE
    found = merged([r for item in argument[negated:] for r in ranges_of(*item)])
    return complement(found) if negated else found
