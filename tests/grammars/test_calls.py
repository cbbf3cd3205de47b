"""The grammar of calls of tools."""

from __future__ import annotations

import pytest

from jaxspec.common.errors import UserError
from jaxspec.grammars.calls import calls_node
from tests.grammars.walks import Language


def test_the_grammar_of_calls():
    form = {"tools": [["f", {"type": "object", "properties": {}}]], "most": 2, "arguments": "arguments", "free": False}
    form |= {"open": "", "close": "", "mark": "<t>", "begin": "<t>\n", "end": "\n</t>", "between": "\n"}
    call = '<t>\n{"name": "f", "arguments": {}}\n</t>'
    forced = Language(calls_node(form, 4))
    free = Language(calls_node(form | {"free": True}, 4))
    assert all(call in language and f"{call}\n{call}" in language for language in (forced, free))
    assert all(f"{call}\n{call}\n{call}" not in language for language in (forced, free))
    assert all(text in free and text not in forced for text in ("", "<", "<<t", "a <b> <t", "<t </t>", f"é<{call}"))
    assert all(text not in free for text in ("<t>", "a<<t>b", call[:-1], f"<t>{call}"))
    bare = Language(calls_node(form | {"free": True, "mark": "", "begin": "", "end": "", "most": 1}, 4))
    assert all(text in bare for text in ("", "a{", '{"name":"f","arguments":{}}'))
    assert all(text not in bare for text in ("{", " {", "{}"))


ONE = {
    "most": 1,
    "arguments": "arguments",
    "free": False,
    "open": "",
    "close": "",
    "begin": "",
    "end": "",
    "between": "",
}


def test_arguments_are_objects():
    """Whatever the schema says; a text that is no object would be no call."""
    union = {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "object"}], "$defs": {"a": {"properties": {"b": {"const": 1}}}}}
    for schema in ({}, {"type": "object"}, {"properties": {"b": {"type": "integer"}}}, union):
        language = Language(calls_node(ONE | {"tools": [["f", schema]]}, 4))
        assert '{"name": "f", "arguments": {"b": 1}}' in language
        assert '{"name": "f", "arguments": 1}' not in language


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"not": {}}, "has 'not'"),
        ({"type": "string"}, "no object"),
        ({"type": ["object", "null"]}, "no object"),
        ({"anyOf": [{"type": "object"}, {"type": "array"}]}, "no object"),
    ],
)
def test_a_schema_is_refused_by_the_tools_name(schema, message):
    with pytest.raises(UserError, match=f"tool f: .*{message}"):
        calls_node(ONE | {"tools": [["f", schema]]}, 4)
