"""Each supported keyword: every text of the automaton is valid for the schema, and these texts are in it or not."""

from __future__ import annotations

import datetime
import json
import re
from collections import Counter
from typing import Any

import jsonschema
import jsonschema_specifications
import numpy as np
import pytest
from hypothesis import given, strategies

from jaxspec.common.errors import UserError
from jaxspec.grammars import build, disjoint, keywords, schema
from jaxspec.grammars.formats import FORMATS
from jaxspec.grammars.regex import searched
from jaxspec.grammars.schema import Walk
from tests.grammars.walks import Language, form, texts, tokens


def objects(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required or [], **more}


TREE = {
    "$defs": {"node": objects({"value": {"type": "integer"}, "kids": {"items": {"$ref": "#/$defs/node"}}}, ["value"])},
    "$ref": "#/$defs/node",
}
PETS = {
    "oneOf": [
        objects({"kind": {"const": "cat"}, "lives": {"type": "integer"}}, ["kind"]),
        objects({"kind": {"enum": ["dog", "wolf"]}, "name": {"type": "string"}}, ["kind"]),
    ],
    "discriminator": {"propertyName": "kind"},
}
AB = {"a": {"type": "integer"}, "b": {"type": "boolean"}}

# (schema, texts of its automaton, texts that are not)
CASES: list[tuple[Any, list[str], list[str]]] = [
    ({"type": "null"}, ["null"], ["", "nul", "true"]),
    ({"type": "boolean"}, ["true", "false"], ["True", "1"]),
    ({"type": "integer"}, ["0", "-7", "120", "-0"], ["01", "1.0", "+1", "1e3", "--1", ""]),
    ({"type": "number"}, ["0", "-7.25", "1e10", "2.5E-3"], ["01", ".5", "1.", "1e", "NaN"]),
    (
        {"type": "string"},
        ['""', '"a b"', '"é😀"', r'"\n\"\\"', r'"\u00e9\ud83d\ude00"'],
        ['"', '"\n"', r'"\x"', r'"\ud83d"'],
    ),
    ({"type": ["integer", "null"]}, ["3", "null"], ["true"]),
    ({"type": ["integer", "number"]}, ["3", "3.5"], ['"3"']),
    (True, ["3", '"a"', "[1, {}]", '{"a": [null]}'], ["", "[1", "{a: 1}"]),
    ({}, ["3", "[]"], ["x"]),
    ({"const": {"a": [1, "x"]}}, ['{"a": [1, "x"]}', '{"a":[1,"x"]}'], ['{"a": [1, "y"]}', '{"a":[1,  "x"]}']),
    ({"const": 'say "hi"\n'}, [r'"say \"hi\"\n"'], ['"say hi"']),
    ({"enum": ["a", 1, None, False, 0.5]}, ['"a"', "1", "null", "false", "0.5"], ['"b"', "0", "true"]),
    ({"enum": ["a", 1, 2.0, True], "type": "integer"}, ["1", "2.0"], ['"a"', "true"]),
    ({"const": "a", "type": ["string", "null"]}, ['"a"'], ["null"]),
    ({"type": "string", "minLength": 2}, ['"ab"', r'"a\n"', '"é😀"', '"abc"'], ['"a"', '"😀"', r'"\n"', '""']),
    ({"type": "string", "maxLength": 2}, ['""', '"ab"', '"😀é"', r'"\\\""'], ['"abc"']),
    ({"type": "string", "minLength": 1, "maxLength": 3.0}, ['"a"', '"abc"'], ['""', '"abcd"']),
    ({"type": "string", "pattern": "^[a-c]+$"}, ['"abc"'], ['"abcd"', '""', '"xabc"']),
    ({"type": "string", "pattern": "b"}, ['"abc"', '"b"', r'"\nb"'], ['"ac"']),
    ({"type": "string", "pattern": r'^[^a]"\\$'}, [r'"b\"\\"', r'"\n\"\\"'], [r'"a\"\\"', r'"b"\\"']),
    ({"type": "string", "pattern": r"^\d{3}-\w$"}, ['"123-x"', '"123-_"'], ['"123-é"', '"١٢٣-x"']),
    ({"type": "integer", "minimum": 3, "maximum": 9}, ["3", "9"], ["2", "10", "-3", "33", "3.0"]),
    ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 5.5}, ["4", "5"], ["3", "6"]),
    ({"type": "integer", "minimum": -(10**29 - 1), "maximum": 0}, [f"-{10**29 - 1}", "0"], [f"-{10**29}", "1"]),
    ({"type": "integer", "minimum": -12, "maximum": 105}, ["-12", "0", "-1", "99", "105"], ["-13", "106", "-120"]),
    ({"type": "number", "minimum": 0, "exclusiveMaximum": 1}, ["0", "0.999", "0.0"], ["1", "1.0", "-0.1", "1e-3"]),
    ({"type": "number", "maximum": -0.25}, ["-0.25", "-0.250", "-3", "-0.3"], ["-0.2", "0", "0.25", "-0.249"]),
    ({"type": "array", "items": {"type": "integer"}}, ["[]", "[1]", "[1,2, 3]"], ["[1,]", "[,1]", "[true]", "[1 ,2]"]),
    ({"type": "array", "items": {"type": "null"}, "minItems": 1}, ["[null]", "[null,null]"], ["[]"]),
    ({"items": {"const": 1}, "minItems": 2, "maxItems": 3}, ["[1,1]", "[1,1,1]"], ["[1]", "[1,1,1,1]", "[]"]),
    ({"items": {"const": 1}, "maxItems": 0}, ["[]"], ["[1]"]),
    ({"items": False, "type": "array"}, ["[]"], ["[1]"]),
    ({"prefixItems": [{"const": 1}, {"const": 2}]}, ["[]", "[1]", "[1,2]"], ["[2]", "[1,2,3]"]),
    ({"prefixItems": [{"const": 1}], "items": {"const": 0}, "minItems": 2}, ["[1,0]", "[1,0,0]"], ["[1]", "[0,0]"]),
    ({"prefixItems": [{"const": 1}, {"const": 2}], "minItems": 2, "maxItems": 2}, ["[1, 2]"], ["[1]", "[1,2,2]"]),
    ({"prefixItems": [{"const": 1}], "minItems": 2}, ["[1, null]", '[1, "x", 3]'], ["[1]"]),
    ({"type": "array", "uniqueItems": False, "items": {"const": 1}}, ["[1,1]"], ["[2]"]),
    (
        objects(AB, ["a", "b"]),
        ['{"a":1,"b":true}', '{"a": 1, "b": false}'],
        ['{"b":true,"a":1}', '{"a":1}', '{"a":1,}'],
    ),
    (objects(AB), ["{}", '{"a":1}', '{"b":true}', '{"a":1,"b":true}'], ['{"b":true,"a":1}', '{"c":1}', '{,"a":1}']),
    (objects(AB, ["b"]), ['{"b":true}', '{"a":1,"b":true}'], ["{}", '{"a":1}']),
    (objects(AB, ["c"]), ['{"c":null}', '{"a":1,"c":[]}'], ["{}", '{"a":1}', '{"c":1,"d":1}']),
    (objects({"a": False, "b": {"const": 1}}), ["{}", '{"b":1}'], ['{"a":1}']),
    (objects(AB, additionalProperties=False), ['{"a":1}'], ['{"c":1}']),
    (
        objects({"a": {"const": 1}}, additionalProperties={"type": "boolean"}),
        ["{}", '{"a":1}', '{"b":true}', '{"a":1,"aa":true,"":false}'],
        ['{"a":true}', '{"b":1}', '{"b":true,"a":1}', r'{"\u0061":true}'],
    ),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, ["{}", '{"x":1,"y":2}'], ['{"x":true}']),
    ({"type": "object"}, ["{}", '{"a":{"b":[]}}'], ["[]"]),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, ["1", "null"], ["true"]),
    ({"anyOf": [False, {"const": 1}]}, ["1"], ["2"]),
    ({"allOf": [{"type": "integer"}], "default": 3}, ["1"], ["true"]),
    ({"oneOf": [{"type": "integer"}, {"type": ["string", "null"]}]}, ["1", '"a"', "null"], ["true"]),
    ({"oneOf": [{"const": "a"}, {"enum": ["b", "c"]}]}, ['"a"', '"c"'], ['"d"']),
    (PETS, ['{"kind":"cat","lives":9}', '{"kind":"dog"}', '{"kind":"wolf","name":""}'], ['{"kind":"dog","lives":9}']),
    (TREE, ['{"value":1}', '{"value":1,"kids":[{"value":2,"kids":[]}]}'], ['{"kids":[]}', '{"value":1,"kids":[1]}']),
    (
        {"properties": {"a/b": {"$ref": "#/$defs/x~1y%20z"}}, "$defs": {"x/y z": {"const": 1}}, "required": ["a/b"]},
        ['{"a/b":1}'],
        ["{}"],
    ),
    (
        {"$id": "https://a.b/c", "$schema": "https://json-schema.org/draft/2020-12/schema", "$comment": "x"}
        | {"title": "t", "description": "d", "default": 1, "examples": [1], "deprecated": True, "type": "integer"}
        | {"readOnly": True, "writeOnly": False, "definitions": {"unused": {"not": {}}}},
        ["1"],
        ["true"],
    ),
    (
        {"type": "string", "format": "date"},
        ['"2024-02-29"', '"1999-12-31"'],
        ['"2023-02-29"', '"2024-04-31"', '"2024-1-1"'],
    ),
    ({"type": "string", "format": "time"}, ['"23:59:59Z"', '"00:00:00.5+02:00"'], ['"24:00:00Z"', '"12:00:00"']),
    ({"type": "string", "format": "date-time"}, ['"2024-02-29T01:02:03Z"'], ['"2024-02-29 01:02:03Z"', '"2024-02-29"']),
    ({"type": "string", "format": "duration"}, ['"P1Y2M3DT4H5M6S"', '"P3W"', '"PT1H"'], ['"P"', '"PT"', '"P1W2D"']),
    ({"type": "string", "format": "email"}, ['"a.b+c@d-e.org"'], ['"a@b"', '"@b.c"', '"a..b@c.d"', '"a b@c.d"']),
    ({"type": "string", "format": "ipv4"}, ['"0.10.255.1"'], ['"256.0.0.1"', '"1.2.3"', '"01.2.3.4"']),
    ({"type": "string", "format": "uri"}, ['"https://a.b/c?d=e#f"', '"http://a.b:80"'], ['"a.b"', '"https://a b.c"']),
    (
        {"type": "string", "format": "uuid"},
        ['"123e4567-e89b-12d3-a456-426614174000"'],
        ['"123e4567e89b12d3a456426614174000"'],
    ),
]
NAMES = [json.dumps(schema)[:70] for schema, _, _ in CASES]

checker = jsonschema.FormatChecker(formats=())
for name in ("time", "date-time"):
    checker.checks(name, ValueError)(
        lambda value, name=name: datetime.datetime.fromisoformat(f"2000-01-01T{value}" if name == "time" else value)
    )
checker.checks("date", ValueError)(datetime.date.fromisoformat)
for name, regex in {
    "duration": r"P(?=.)(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(?=.)(\d+H)?(\d+M)?(\d+S)?)?)",
    "email": r"[^@\s]+@[^@\s]+\.[^@\s]+",
    "ipv4": r"(\d{1,3}\.){3}\d{1,3}",
    "uri": r"https?://[^\s/]+\S*",
    "uuid": r"[0-9a-fA-F-]{36}",
}.items():
    checker.checks(name)(lambda value, regex=regex: re.fullmatch(regex, value) is not None)


def is_valid(schema: Any, text: str) -> bool:
    validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
    return validator.is_valid(json.loads(text))


@pytest.mark.parametrize(("schema", "inside", "outside"), CASES, ids=NAMES)
def test_these_texts_are_in_it_and_these_are_not(schema, inside, outside):
    language = Language(form(json=schema).node())
    assert [text for text in inside if text not in language] == []
    assert [text for text in outside if text in language] == []
    assert [text for text in inside if not is_valid(schema, text)] == []


@pytest.mark.parametrize(("schema", "inside", "outside"), CASES, ids=NAMES)
def test_every_text_is_valid(schema, inside, outside):
    """Random ones, token by token; what a change of one character makes of them is valid, too, or is not in it."""
    grammar = form(json=schema)
    language = Language(grammar.node())
    random = np.random.default_rng(0)
    for text in texts(build.automaton(grammar, tokens()), tokens(), 12):
        assert text in language
        assert is_valid(schema, text), text
        for _ in range(6):
            at = int(random.integers(len(text)))
            changed = text[:at] + str(random.choice(list('01a".,-]}{ '))) * int(random.integers(2)) + text[at + 1 :]
            if changed in language:
                assert is_valid(schema, changed), changed


def words(schema: Any) -> set[str]:
    """The keywords of a schema and of those inside it."""
    if isinstance(schema, list):
        return {word for item in schema for word in words(item)}
    if not isinstance(schema, dict):
        return set()
    names = {"properties", "$defs", "definitions"}
    found = {*schema}
    for word, inner in schema.items():
        found |= words([*inner.values()] if word in names else inner) if word != "const" else set()
    return found


def test_every_supported_keyword_and_format_has_a_case():
    assert {word for schema, _, _ in CASES for word in words(schema)} >= keywords.KNOWN
    assert set(FORMATS) == {
        schema["format"] for schema, _, _ in CASES if isinstance(schema, dict) and "format" in schema
    }


VOCABULARIES = ("core", "applicator", "unevaluated", "validation", "meta-data", "format-annotation", "content")
BASE = "https://json-schema.org/draft/2020-12/"
DRAFT = {
    word
    for name in VOCABULARIES
    for word in jsonschema_specifications.REGISTRY.contents(f"{BASE}meta/{name}")["properties"]
} | {*jsonschema_specifications.REGISTRY.contents(f"{BASE}schema")["properties"]}


@pytest.mark.parametrize("word", sorted({*DRAFT, "nullable", "example", "x-own", "Type"} - keywords.KNOWN))
def test_every_other_keyword_is_refused_with_its_place(word):
    schema = objects({"a": {"items": {"type": "string", word: 1}}})
    with pytest.raises(UserError) as error:
        form(json=schema)
    message = str(error.value)
    assert message.startswith(f"structured_outputs: the schema at #/properties/a/items has {word!r}, which is not supp")
    assert "\n" not in message


def test_the_draft_is_known():
    assert len(DRAFT) > 50
    assert {"discriminator"} == keywords.KNOWN - DRAFT
    assert {*keywords.REMEDIES} - DRAFT == {"nullable", "discriminator"}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "text"}, "at #/type is 'text': use object, array, string"),
        ({"type": []}, "at #/type is an empty list"),
        ({"type": "string", "minimum": 3}, "at # has minimum, which says nothing of its type: leave it out"),
        ({"type": "string", "minLength": -1}, "at #/minLength is -1: give a whole number from 0"),
        ({"type": "string", "minLength": "3"}, "at #/minLength is '3'"),
        ({"type": "string", "maxLength": True}, "at #/maxLength is True"),
        ({"type": "string", "pattern": "(?=a)"}, "at #/pattern: the regular expression '(?=a)' has a lookaround"),
        ({"type": "string", "pattern": 3}, "at #/pattern is 3: give a string"),
        ({"type": "string", "pattern": "a", "minLength": 3}, "has minLength beside pattern: write both as one pattern"),
        ({"type": "string", "format": "ipv6"}, "at #/format is 'ipv6': use date, time,"),
        ({"type": "integer", "minimum": "3"}, "at #/minimum is '3': give a number"),
        ({"type": "integer", "exclusiveMinimum": True}, "at #/exclusiveMinimum is True: give a number"),
        ({"type": "integer", "multipleOf": 5}, "has 'multipleOf', which is not supported: list the values as enum"),
        ({"type": "array", "uniqueItems": True}, "has uniqueItems, which is not supported"),
        ({"type": "array", "items": [{}]}, "at #/items is a list: use prefixItems"),
        ({"type": "array", "prefixItems": {}}, "at #/prefixItems is {}: give a list of schemas"),
        ({"type": "object", "properties": []}, "at #/properties is []: give an object of schemas"),
        ({"type": "object", "required": "a"}, "at #/required is 'a': give a list of names"),
        (objects({"a~/b": 3}), "at #/properties/a~0~1b is 3: give an object, true or false"),
        ({"enum": []}, "at #/enum is []: give a list that is not empty"),
        ({"enum": ["a"], "minLength": 1}, "has minLength beside enum"),
        ({"anyOf": [{}], "type": "object"}, "has type beside anyOf: write both as one schema, without anyOf"),
        ({"anyOf": {}}, "at #/anyOf is {}: give a list that is not empty"),
        ({"allOf": [{}, {}]}, "at #/allOf has 2 schemas that would have to hold at once"),
        (
            {"oneOf": [{"type": "integer"}, {"type": "number"}]},
            "at #/oneOf has options 0 and 1, which one value may fit",
        ),
        ({"oneOf": [{"type": "string"}, {"enum": ["a"]}]}, "at #/oneOf has options 0 and 1"),
        ({"oneOf": [{}, {"type": "null"}]}, "at #/oneOf has options 0 and 1"),
        ({"oneOf": [objects({"a": {"const": 1}}), objects({"a": {"const": 2}})]}, "has options 0 and 1"),
        ({"oneOf": [{"type": "object", "required": 5}] * 2}, "at #/oneOf/0/required is 5: give a list of names"),
        ({"oneOf": [{"type": "object", "required": [["x"]]}] * 2}, "at #/oneOf/0/required is [['x']]"),
        ({"oneOf": [{"type": "object", "properties": 5, "required": ["a"]}] * 2}, "at #/oneOf/0/properties is 5"),
        ({"oneOf": [{"enum": 5}] * 2}, "at #/oneOf/0/enum is 5: give a list that is not empty"),
        ({"oneOf": [{"$ref": []}] * 2}, "at #/oneOf/0/$ref is []: refer to a place of the same document"),
        ({"oneOf": [{"type": 5}] * 2}, "at #/oneOf/0/type is 5"),
        ({"oneOf": [5] * 2}, "at #/oneOf/0 is 5: give an object, true or false"),
        ({"oneOf": [{"const": i} for i in range(300)]}, "oneOf have more than 20000 pairs of schemas to compare: use"),
        ({"type": "number", "minimum": 5e-324}, "at #/minimum is 5e-324, of more than 100 digits: round it"),
        ({"enum": ["a", "\ud800"]}, r"""'"\ud800"' has half of a surrogate pair: write the whole character"""),
        (objects({"\udfff": {}}), "has half of a surrogate pair"),
        ('{"type": "object", "type": "null"}', "the schema has 'type' twice in one object: give it once"),
        ({"$ref": "#/$defs/a"}, "at #/$ref refers to '#/$defs/a', which is not there"),
        ({"$ref": "other.json"}, "at #/$ref is 'other.json': refer to a place of the same document"),
        ({"$ref": "#name"}, "at #/$ref is '#name'"),
        ({"$ref": "#", "type": "object"}, "has type beside $ref"),
        ({"$ref": "#"}, "no JSON text is valid for the schema within max_depth=4"),
        (False, "no JSON text is valid for the schema"),
        ({"enum": ["a"], "type": "integer"}, "no JSON text is valid"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "no JSON text is valid"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "no JSON text is valid"),
        (objects({"a": {"$ref": "#"}}, ["a"]), "no JSON text is valid"),
        (
            {"discriminator": {}, "type": "object"},
            "has 'discriminator', which is not supported: it stands beside oneOf",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused(schema, message):
    with pytest.raises(UserError) as error:
        form(json=schema)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_option_of_one_of_is_checked_before_the_walk_comes_to_it():
    """The first oneOf is compared inside the first property, and the second property has not been walked yet."""
    bad = {"type": "object", "required": 5}
    inner = {"oneOf": [{"$ref": "#/$defs/a"}, objects({"x": True, "y": {**bad}}, ["y"])]}
    for fault in ({**bad}, {"enum": 5}, {"$ref": []}, {"type": "object", "properties": 5}):
        known = {"a": objects({"x": inner, "y": fault}, ["y"])}
        with pytest.raises(UserError, match=r"is (5|\[\]): "):
            form(json={"$defs": known, "$ref": "#/$defs/a"})


def test_each_pair_of_options_is_compared_once(monkeypatch):
    """Two required properties a level would double the comparisons with each level."""
    monkeypatch.setattr(disjoint, "MAX_PAIRS", 400)
    known: dict[str, Any] = {f"{side}0": {"type": "string"} for side in "ab"}
    for i in range(1, 9):
        below = lambda side, i=i: {"$ref": f"#/$defs/{side}{i - 1}"}
        known |= {f"{s}{i}": objects({"x": below(s), "y": below(s)}, ["x", "y"]) for s in "ab"}
    with pytest.raises(UserError, match="at #/oneOf has options 0 and 1"):
        form(json={"$defs": known, "oneOf": [{"$ref": "#/$defs/a8"}, {"$ref": "#/$defs/b8"}]})


def test_long_names_and_bounds_are_not_nested():
    name = "ab" * 150
    language = Language(form(json=objects({name: {"const": 1}}, additionalProperties={"const": 2})).node())
    assert json.dumps({name: 1, name[:-1]: 2, name + "a": 2}) in language
    assert json.dumps({name: 2}) not in language
    most = 1.7976931348623157e308
    assert "-3" in Language(form(json={"type": "integer", "minimum": -most}).node())
    assert "3" in Language(form(json={"type": "number", "minimum": 1e-99}).node())
    assert "3" in Language(form(json={"type": "number", "maximum": int("12" * 50)}).node())


def test_a_schema_without_references_is_walked_once(monkeypatch):
    calls = []
    monkeypatch.setattr(schema, "searched", lambda *args: calls.append(1) or searched(*args))
    form(json={"$defs": {"a": {"type": "string", "pattern": "a"}}, "anyOf": [{"$ref": "#/$defs/a"}] * 100})
    assert len(calls) == 1


def test_options_that_lead_to_themselves_are_not_disjoint():
    node = objects({"next": {"$ref": "#/$defs/b"}}, ["next"])
    known = {"a": objects({"next": {"$ref": "#/$defs/a"}}, ["next"]), "b": node}
    with pytest.raises(UserError, match="has options 0 and 1, which one value may fit both"):
        form(json={"$defs": known, "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]})


def test_recursion_goes_as_deep_as_the_option_says():
    inside = lambda depth: '{"value":1,"kids":[' * depth + '{"value":1}' + "]}" * depth
    for most in (1, 2, 5):
        language = Language(form(json=TREE, max_depth=most).node())
        assert [depth for depth in range(8) if inside(depth) in language] == [*range(most + 1)]


def test_a_json_object_is_as_deep_as_the_option_says():
    inside = lambda depth: '{"a":' * depth + "1" + "}" * depth
    for most in (1, 2, 4):
        language = Language(form(json_object=True, max_depth=most).node())
        assert [depth for depth in range(7) if inside(depth) in language] == [*range(1, most + 1)]
    assert "[]" not in language


def test_many_references_end_in_a_line():
    wide = objects({f"p{i}": {"$ref": "#"} for i in range(20)})
    with pytest.raises(UserError, match="more than 5000 schemas inside it"):
        form(json=wide, max_depth=8)
    deep: dict[str, Any] = {}
    for _ in range(300):
        deep = {"items": deep}
    with pytest.raises(UserError, match="nested too deeply"):
        form(json=deep)


NUMBERS = strategies.decimals(-30, 30, places=2).map(float) | strategies.integers(-300, 300)


@given(
    strategies.sampled_from(["integer", "number"]),
    strategies.dictionaries(strategies.sampled_from(keywords.OF_TYPE["number"]), NUMBERS, max_size=3),
    strategies.lists(NUMBERS, max_size=8),
)
def test_bounds_hold_exactly(kind, bounds, values):
    """At the bounds and beside them, written with and without zeros at the end."""
    schema = {"type": kind, **bounds}
    near = [round(bound + step, 3) for bound in bounds.values() for step in (-1, -0.01, -0.001, 0, 0.001, 0.01, 1)]
    written = {text for value in [*values, *near, 0] for text in (f"{value}", f"{value:.3f}", f"{value:g}")}
    written = {text.removesuffix(".0") if kind == "integer" else text for text in written}
    expected = {text for text in written if "e" not in text and is_valid(schema, text)}
    if kind == "integer":
        expected = {text for text in expected if "." not in text}
    language = Language(Walk(schema, 3).node(schema, "#", Counter()))
    found = {text for text in written if text in language}
    assert found - {"-0", "-0.000"} == expected - {"-0", "-0.000"}
