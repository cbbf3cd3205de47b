"""Gemma 4's calls: read as transformers reads them, and what its grammar allows is read."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies

from jaxspec.common.errors import UserError
from jaxspec.common.notations import GEMMA_QUOTE as MARK
from jaxspec.grammars import build
from jaxspec.grammars.calls import calls_node
from jaxspec.grammars.requests import StructuredOutputs
from jaxspec.server.gemma_calls import CallEnd, read_call
from tests.grammars.walks import Language, distances, tokens, walk

STRINGS = strategies.text(max_size=6) | strategies.sampled_from(
    ["{", "}]", '"', "\\", "<|", '<|"', "<tool_call|>", "<|tool_call>call:f{}", "a:1,b:2", "\n", "é🙂"]
)
SCALARS = strategies.none() | strategies.booleans() | strategies.integers() | strategies.floats(-1e9, 1e9)
NAMES = strategies.from_regex("[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True)
VALUES = strategies.recursive(
    SCALARS | STRINGS.filter(lambda text: MARK not in text and not {"\x01", "\x02"} & {*text}),
    lambda inner: strategies.lists(inner, max_size=3) | strategies.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


def written(value: Any) -> str:
    """A value as Gemma's chat template writes it, with null for None as its calls have it."""
    if isinstance(value, str):
        return f"{MARK}{value}{MARK}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{written(value[name])}" for name in sorted(value, key=str.lower)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value)


@settings(max_examples=200, deadline=None)
@given(strategies.dictionaries(NAMES, VALUES, max_size=4), strategies.integers(1, 9))
def test_arguments_are_those_of_transformers(arguments, step):
    parsers = pytest.importorskip("transformers.utils.chat_parsing.content_parsers")
    call = f"call:f.g-1{written(arguments)}"
    name, found = read_call(call)
    assert name == "f.g-1"
    assert json.loads(found) == arguments
    options = {"unquoted_keys": True, "string_delims": [[MARK, MARK]]}
    assert parsers.parse_content(written(arguments), "json", options) == arguments
    search = CallEnd()  # in pieces, with more text after the call
    text = f"{call}<tool_call|> x"
    ends = [search.find(text[:at], 0) for at in range(step, len(text), step)]
    assert set(ends) <= {None, len(call)}
    assert CallEnd().find(text, 0) == len(call)


NESTED = {
    "type": "object",
    "properties": {
        "b": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
        "A": {"enum": ["x", {"z": 1, "Y": ["<"]}, None]},
        "c": {"type": "object", "additionalProperties": {"type": "string"}},
        "d e": {"type": "string", "pattern": "^[a-c]{2}$"},
        "f": {"type": "string", "minLength": 1, "maxLength": 3},
        "g": {"type": "string"},
        "g:": {"const": True},
        "h": {"type": "object"},
    },
    "required": ["b", "A"],
}
FORM = {"tools": [["f", NESTED]], "most": 1, "arguments": "", "notation": "gemma", "free": False, "mark": "<c>"}
FORM |= {"open": "", "close": "", "begin": "<c>", "end": "</c>", "between": ""}


def test_the_grammar_of_a_schema():
    language = Language(calls_node(FORM, 2))
    first = f"A:{{Y:[{MARK}<{MARK}],z:1}},b:[3,-1]"
    right = (
        "",
        f",c:{{k-1:{MARK}}}{MARK}}}",
        f",d e:{MARK}ab{MARK}",
        f',g:{MARK}<|"{MARK}',
        ",h:{x:[1]}",
        f",{MARK}g:{MARK}:true",
    )
    wrong = (",c:{k:1}", f",d e:{MARK}xy{MARK}", f",f:{MARK}{MARK}", f",g:{MARK}a{MARK}b{MARK}", ",i:1", ", h:{}")
    assert all(f"<c>call:f{{{first}{more}}}</c>" in language for more in right)
    assert not any(f"<c>call:f{{{first}{more}}}</c>" in language for more in wrong)
    assert f"<c>call:f{{b:[3],A:{MARK}x{MARK}}}</c>" not in language  # in the order of the alphabet
    named = {"type": "object", "properties": {"b": {"const": 1}}, "required": ["b", "a"], "additionalProperties": {}}
    language = Language(calls_node(FORM | {"tools": [["f", named]]}, 2))
    assert "<c>call:f{a:null,b:1}</c>" in language
    assert "<c>call:f{b:1,a:null}</c>" not in language
    others = {"type": "object", "properties": {"g:": {}, "ab": {}}, "additionalProperties": {"type": "null"}}
    language = Language(calls_node(FORM | {"tools": [["f", others]]}, 2))
    assert all(f"<c>call:f{{{name}:null}}</c>" in language for name in ("ab", "abc", "g", "a"))
    assert not any(f"<c>call:f{{{name}:null}}</c>" in language for name in ("", "g:", "g:x", "a,b"))
    with pytest.raises(UserError, match=r"tool f: structured_outputs: .* cannot write"):
        calls_node(FORM | {"tools": [["f", {"const": {"a": f"b{MARK}"}}]]}, 2)


def test_what_the_grammar_allows_is_read():
    """Texts taken at random through the automaton over tokens. The mark of strings is a special token among them."""
    plain = tokens()
    mark_id = plain.size - 1
    vocabulary = dataclasses.replace(plain, marks={**plain.marks, MARK: mark_id})
    grammar = StructuredOutputs.of_calls(FORM | {"begin": "", "end": ""}, (MARK,))
    automaton = build.automaton(grammar, vocabulary)
    unspelled = build.automaton(dataclasses.replace(grammar, spelled=()), vocabulary)
    assert not any(unspelled.legal(state)[mark_id] for state in range(len(unspelled.next)))
    random, far = np.random.default_rng(0), distances(automaton)
    spelt = vocabulary.spelling((MARK,)).tokens
    used = 0
    for _ in range(100):
        ids = walk(automaton, random, int(random.integers(120)), far)
        used += mark_id in ids
        text = b"".join(spelt[i] or b"" for i in ids[:-1]).decode()
        assert CallEnd().find(text, 0) == len(text)
        found = json.loads(read_call(text)[1])
        assert {"A", "b"} <= found.keys() <= NESTED["properties"].keys()
        assert found["A"] in NESTED["properties"]["A"]["enum"]
        assert all(type(number) is int for number in found["b"])
        assert len(found.get("f", "abc")) in (1, 2, 3)
    assert used > 10
