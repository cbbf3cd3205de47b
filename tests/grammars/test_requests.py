"""SamplingParams.structured_outputs: one form for what is equal, and a line for what is wrong."""

from __future__ import annotations

import dataclasses

import pydantic
import pytest

from jaxspec import SamplingParams
from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.grammars.requests import StructuredOutputs
from tests.grammars.walks import Language, form

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


class Person(pydantic.BaseModel):
    name: str
    age: int = pydantic.Field(ge=0, le=150)
    email: str | None = None
    tags: list[str] = []


def test_equal_forms_are_equal():
    assert form(json=SCHEMA) == form(json='{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}')
    assert form(choice=["a", "b"]) == form(choice=("b", "a"))
    assert form(json_object=True) == form(json_object=True, max_depth=None, regex=None)
    assert form(json_object=True) != form(json_object=True, max_depth=2)
    assert len({form(json=SCHEMA), form(json=dict(SCHEMA))}) == 1
    assert form(json=Person) == form(json=Person.model_json_schema())


def test_a_pydantic_model_is_a_schema():
    language = Language(form(json=Person).node())
    assert '{"name": "Ann", "age": 30}' in language
    assert '{"name": "Ann", "age": 30, "email": null, "tags": ["x"]}' in language
    assert '{"name": "Ann", "age": 151}' not in language


def test_a_model_without_a_schema_is_refused():
    class Odd(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
        thing: Language

    with pytest.raises(UserError, match="has no JSON schema: PydanticInvalidForJsonSchema"):
        SamplingParams(structured_outputs={"json": Odd})


def test_parameters_keep_it_and_stay_hashable():
    params = SamplingParams(structured_outputs={"json": SCHEMA})
    assert params.structured_outputs == form(json=SCHEMA)
    assert dataclasses.replace(params, n=2).structured_outputs is params.structured_outputs
    assert hash(params) == hash(SamplingParams(structured_outputs={"json": SCHEMA}))
    assert SamplingParams().structured_outputs is None
    assert StructuredOutputs.of(None) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "structured_outputs=3 must be a dict with one of json, json_object, regex, choice, grammar"),
        ({}, "structured_outputs has no form: give one of json,"),
        ({"json": None}, "structured_outputs has no form"),
        ({"max_depth": 3}, "structured_outputs has no form"),
        ({"json": {}, "regex": "a"}, "structured_outputs has json, regex: give one of json,"),
        ({"jsn": {}}, "unknown key 'jsn' of structured_outputs: did you mean 'json'?"),
        ({"structural_tag": "x"}, "unknown key 'structural_tag' of structured_outputs: known keys: json,"),
        (
            {"json": 3},
            "structured_outputs: json=3 must be a JSON schema: a dict, its text as JSON, or a",
        ),
        ({"json": "{"}, "json='{' must be a JSON schema"),
        ({"json": {"const": float("nan")}}, "must be a JSON schema"),
        ({"json": {"const": {1, 2}}}, "must be a JSON schema"),
        ({"json": {"type": "x"}}, "structured_outputs: the schema at #/type is 'x'"),
        ({"regex": 3}, "structured_outputs: regex=3 must be a string"),
        ({"regex": "("}, "the regular expression '(' is wrong"),
        ({"regex": "a" * (1 << 19)}, "structured_outputs: regex has 524288 characters, at most 262144 may be"),
        ({"choice": "ab"}, "structured_outputs: choice='ab' must be a list of strings that are not empty"),
        ({"choice": []}, "choice=[] must be a list of strings"),
        ({"choice": ["a", ""]}, "must be a list of strings that are not empty"),
        ({"choice": ["a", "\ud800"]}, r"'\ud800' has half of a surrogate pair: write the whole character"),
        ({"choice": [1]}, "must be a list of strings"),
        ({"json_object": False}, "structured_outputs: json_object=False must be True, or left out"),
        ({"json_object": True, "max_depth": 0}, "structured_outputs: max_depth=0 is below 1"),
        ({"json_object": True, "max_depth": 9}, "structured_outputs: max_depth=9 is above 8"),
        ({"json_object": True, "max_depth": "3"}, "max_depth='3' must be a whole number"),
        ({"json_object": True, "after": 3}, "structured_outputs: after=3 must be the text of a token"),
        ({"json_object": True, "after": ""}, "after='' must be the text of a token"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(given, message):
    with pytest.raises(UserError) as error:
        SamplingParams(structured_outputs=given)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_context_free_grammars_are_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"grammar \(a context-free grammar\) is not supported"):
        SamplingParams(structured_outputs={"grammar": "root ::= 'a'"})
