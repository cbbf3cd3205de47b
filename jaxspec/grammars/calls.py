"""The node of outputs that call tools: the marks of a model's format around each call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.common.errors import UserError
from jaxspec.grammars import machine
from jaxspec.grammars.gemma_text import GEMMA
from jaxspec.grammars.json_text import JSON, JsonText
from jaxspec.grammars.keywords import ALONE
from jaxspec.grammars.nodes import EMPTY, LAST, Node, chars, choice, concat, literal, others, repeat, without
from jaxspec.grammars.schema import schema_node

NOTATIONS: dict[str, JsonText] = {"json": JSON, "gemma": GEMMA}  # ways of writing a call and its arguments


def calls_node(form: Mapping[str, Any], max_depth: int) -> Node:
    """Return the node of one or more calls.

    form: `tools`, a list of [name, JSON schema of the arguments]; `most`, the largest number of calls, or None;
      `notation`, one of NOTATIONS, "json" if it is missing; `arguments`, the member that holds the arguments in JSON;
      the texts `open` and `close` around all calls, `begin` and `end` around each, and `between` them; `mark`, the text
      in front of the calls, or empty; `free`, whether a text without calls may stand in front of the calls or in their
      place. Such a text does not contain `mark`. If that is empty, the text is in place of a call and begins otherwise.

    Raises: UserError for a schema that cannot be kept exactly, which names the tool.
    """
    named = choice(*(call_node(name, schema, form, max_depth) for name, schema in form["tools"]))
    call = concat(literal(form["begin"]), named, literal(form["end"]))
    most = None if form["most"] is None else form["most"] - 1
    more = repeat(concat(literal(form["between"]), call), 0, most)
    calls = concat(literal(form["open"]), call, more, literal(form["close"]))
    if not form["free"]:
        return calls
    if form["mark"]:
        return concat(without(form["mark"]), choice(EMPTY, calls))
    return choice(EMPTY, calls, concat(others(" \n\t\r{"), repeat(chars((0, LAST)))))


def call_node(name: str, schema: dict[str, Any], form: Mapping[str, Any], max_depth: int) -> Node:
    """Return the node of a call of this function, without the marks around it. form: as in `calls_node`."""
    notation = NOTATIONS[form.get("notation", "json")]
    if not ALONE.keys() & schema.keys():
        schema = {"type": "object"} | schema
    try:
        node = schema_node(schema, max_depth, notation)
        if schema.get("type") != "object" and not all_objects(node):
            raise UserError("the schema allows arguments that are no object: give it the type object")
    except UserError as error:
        raise error.within(f"tool {name}: ") from None
    return notation.call(name, node, form["arguments"])


def all_objects(node: Node) -> bool:
    """Return whether all texts of a node are objects."""
    try:
        table, _ = machine.compiled(node)
    except RecursionError:
        raise UserError("the schema is nested too deeply: flatten it") from None
    return [i for i, state in enumerate(table[0]) if state >= 0] == [ord("{")]
