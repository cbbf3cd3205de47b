"""The grammar of calls of tools."""

from __future__ import annotations

import pytest

from jaxspec.common.errors import UserError
from jaxspec.grammars.calls import calls_node
from tests.grammars.walks import Language


def test_the_grammar_of_calls():
    form = {"tools": [["f", {"type": "object", "properties": {}}]], "most": 2, "arguments": "arguments", "free": False}
    form |= {"open": "", "close": "", "begin": "<t>\n", "end": "\n</t>", "between": "\n"}
    call = '<t>\n{"name": "f", "arguments": {}}\n</t>'
    forced = Language(calls_node(form, 4))
    free = Language(calls_node(form | {"free": True}, 4))
    assert all(call in language and f"{call}\n{call}" in language for language in (forced, free))
    assert all(f"{call}\n{call}\n{call}" not in language for language in (forced, free))
    assert all(text in free and text not in forced for text in ("", "<", "<<t", "a <b> <t", "<t </t>", f"é<{call}"))
    assert all(text not in free for text in ("<t>", "a<<t>b", call[:-1], f"<t>{call}"))
    bare = Language(calls_node(form | {"free": True, "begin": "", "end": "", "most": 1}, 4))
    assert all(text in bare for text in ("", "a{", '{"name":"f","arguments":{}}'))
    assert all(text not in bare for text in ("{", " {", "{}"))


def test_a_tools_schema_is_refused_by_the_tools_name():
    form = {"tools": [["f", {"not": {}}]], "most": 1, "arguments": "arguments", "free": False}
    form |= {"open": "", "close": "", "begin": "", "end": "", "between": ""}
    with pytest.raises(UserError, match="tool f: .*the schema at # has 'not'"):
        calls_node(form, 4)
