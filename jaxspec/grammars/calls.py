"""The node of outputs that call tools: the marks of a model's format around the JSON of each call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.common.errors import UserError
from jaxspec.grammars import machine
from jaxspec.grammars.json_text import COMMA, key, value_text
from jaxspec.grammars.keywords import ALONE
from jaxspec.grammars.nodes import (
    EMPTY,
    LAST,
    NOTHING,
    Node,
    chars,
    choice,
    complement,
    concat,
    literal,
    merged,
    repeat,
)
from jaxspec.grammars.schema import schema_node


def calls_node(form: Mapping[str, Any], max_depth: int) -> Node:
    """Return the node of one or more calls.

    form: `tools`, a list of [name, JSON schema of the arguments]; `most`, the largest number of calls, or None;
      `arguments`, the member that holds the arguments; the texts `open` and `close` around all calls, `begin` and `end`
      around each, and `between` them; `mark`, the text in front of the calls, or empty; `free`, whether a text without
      calls may stand in front of the calls or in their place. Such a text does not contain `mark`. If that is empty,
      the text is in place of a call and begins otherwise.

    Raises: UserError for a schema that cannot be kept exactly, which names the tool.
    """
    named = choice(*(function(name, schema, form["arguments"], max_depth) for name, schema in form["tools"]))
    call = concat(literal(form["begin"]), literal("{"), named, literal("}"), literal(form["end"]))
    most = None if form["most"] is None else form["most"] - 1
    more = repeat(concat(literal(form["between"]), call), 0, most)
    calls = concat(literal(form["open"]), call, more, literal(form["close"]))
    if not form["free"]:
        return calls
    if form["mark"]:
        return concat(without(form["mark"]), choice(EMPTY, calls))
    return choice(EMPTY, calls, concat(others(" \n\t\r{"), repeat(chars((0, LAST)))))


def function(name: str, schema: dict[str, Any], arguments: str, max_depth: int) -> Node:
    """Return the node of the members of a call of this function. arguments: name of the member with the arguments."""
    if not ALONE.keys() & schema.keys():
        schema = {"type": "object"} | schema
    try:
        node = schema_node(schema, max_depth)
        if schema.get("type") != "object" and not all_objects(node):
            raise UserError("the schema allows arguments that are no object: give it the type object")
    except UserError as error:
        raise error.within(f"tool {name}: ") from None
    return concat(key("name"), value_text(name), COMMA, key(arguments), node)


def all_objects(node: Node) -> bool:
    """Return whether all JSON texts of a node are objects."""
    try:
        table, _ = machine.compiled(node)
    except RecursionError:
        raise UserError("the schema is nested too deeply: flatten it") from None
    return [i for i, state in enumerate(table[0]) if state >= 0] == [ord("{")]


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


def others(characters: str) -> Node:
    """Return the node of a character that is none of these."""
    return chars(*complement(merged([(ord(c), ord(c)) for c in characters])))
