"""response_format and structured_outputs over HTTP."""

from __future__ import annotations

import asyncio
import json
import threading

import openai
import pydantic
import pytest
from fastapi import Request

from jaxspec.grammars.requests import StructuredOutputs
from jaxspec.server import body as bodies
from tests.server.running import MODEL
from tests.server.test_fields import refused, wish

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "count": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "item", "strict": True, "schema": SCHEMA}}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 60}


class Item(pydantic.BaseModel):
    colour: str = pydantic.Field(pattern="^(red|blue)$")
    count: int = pydantic.Field(ge=1, le=9)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    ("body", "form"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": FORMAT}, {"json": SCHEMA}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"regex": "a+", "after": "</think>"}}, {"regex": "a+", "after": "</think>"}),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"max_depth": 2}},
            {"json_object": True, "max_depth": 2},
        ),
        ({"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}}, {"regex": "a"}),
    ],
)
def test_each_form_arrives(body, form, chat):
    assert wish(body, chat=chat).params.structured_outputs == StructuredOutputs.of(form)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"response_format": "json"}, "response_format", "its type must be one of text, json_object, json_schema"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "its type must be one of"),
        ({"response_format": {"type": ["text"]}}, "response_format", "its type must be one of"),
        (
            {"response_format": {"type": "text", "x": 1}},
            "response_format",
            "has 'x', which is not supported beside",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format", "must be an object with name and schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format",
            "with name and",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "schma": 1}}},
            *("response_format", "json_schema has 'schma', which is not supported: use name, description,"),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
            *("response_format", "the schema at # has 'not', which is not supported: write what is allowed"),
        ),
        (
            {"response_format": FORMAT, "structured_outputs": {"regex": "a"}},
            *("response_format", "and response_format differ: give one"),
        ),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "the regular expression '(' is wrong"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs", "grammar (a context-free grammar)"),
        ({"structured_outputs": {"max_depth": 2}}, "structured_outputs", "has no form"),
        ({"structured_outputs": []}, "structured_outputs", "must be a dict with one of"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_its_field(body, param, message, chat):
    error = refused(body, chat=chat)
    assert (error.status, error.param) == (400, param)
    assert message in error.message
    assert "\n" not in error.message


def test_a_chat_answers_in_the_schema(server):
    client = server.client()
    for strict in (True, False, None):
        form = {"type": "json_schema", "json_schema": FORMAT["json_schema"] | {"strict": strict}}
        (choice,) = client.chat.completions.create(**CHAT, response_format=form).choices
        assert choice.finish_reason == "stop"
        assert Item.model_validate_json(choice.message.content)
    pieces = client.chat.completions.create(**CHAT, response_format=FORMAT, stream=True)
    assert Item.model_validate_json("".join(piece.choices[0].delta.content or "" for piece in pieces))


def test_openais_client_parses_a_pydantic_model(server):
    said = server.client().chat.completions.parse(**CHAT, response_format=Item)
    assert 1 <= said.choices[0].message.parsed.count <= 9


def test_a_completion_answers_in_each_form(server):
    client = server.client()
    ask = lambda **body: client.completions.create(model=MODEL, prompt="x", max_tokens=60, extra_body=body).choices[0]
    assert ask(structured_outputs={"choice": ["red", "blue"]}).text in ("red", "blue")
    assert json.loads(ask(response_format=FORMAT).text)["colour"] in ("red", "blue")
    cut = ask(structured_outputs={"regex": "(?:ab){60}"}, max_tokens=4)
    assert cut.finish_reason == "length"


@pytest.mark.parametrize(
    ("body", "apart"),
    [({"response_format": FORMAT}, True), ({"structured_outputs": {}}, True), ({"tools": []}, True), ({}, False)],
)
def test_a_schema_is_checked_outside_the_event_loop(body, apart):
    async def receive():
        return {"type": "http.request", "body": json.dumps(body).encode()}

    scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
    take = lambda given: threading.current_thread() is not threading.main_thread()
    assert asyncio.run(bodies.read(Request(scope, receive), 10**4, 9.0, take)) == apart


def test_a_form_that_cannot_be_built_is_that_requests_error(server):
    client = server.client()
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model=MODEL, prompt="x", extra_body={"structured_outputs": {"regex": ".*a.{20}"}})
    assert error.value.param == "structured_outputs"
    assert "the grammar has more than 16384 states" in error.value.message
    other = client.completions.create(model=MODEL, prompt="x", max_tokens=2, extra_body={"ignore_eos": True})
    assert other.choices[0].finish_reason == "length"
