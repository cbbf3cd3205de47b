"""OpenAI's Responses API: its client reads the answers, and builds the same response of a stream."""

from __future__ import annotations

import json
import typing

import openai
import pytest
from hypothesis import given, settings, strategies
from openai.types.responses import Response, response_create_params

from jaxspec.api.grammars import THINK
from jaxspec.api.outputs import CompletionOutput, RequestOutput, StreamOutput
from jaxspec.engine.metrics import SpecDecodeMetrics
from jaxspec.server import fields, responses
from jaxspec.server.parted_answers import PartsReader
from jaxspec.server.refusal import Refusal
from jaxspec.server.response_answers import ResponseAnswer
from tests.server.running import MODEL
from tests.server.test_fields import JSON
from tests.server.test_reasoning import TEMPLATE
from tests.server.test_structured import SCHEMA, Item
from tests.server.test_tools import GOOD, READ, TEMPLATES, valid
from tests.server.test_tools import TOOLS as CHAT_TOOLS

TOOLS = [{"type": "function", **tool["function"]} for tool in CHAT_TOOLS]
ASKED = {"model": MODEL, "input": "x"}


def read(body: dict, template: str = TEMPLATE) -> responses.ResponseFields:
    def parse(chat: dict) -> fields.RequestFields:
        return fields.request_fields(
            chat, chat=True, model=MODEL, room=100, chat_template=template, special_tokens=(), reasoning=THINK
        )

    return responses.response_fields(ASKED | body, parse)


def test_each_of_openais_fields_is_known():
    named = typing.get_type_hints(response_create_params.ResponseCreateParamsStreaming).keys()
    known = {*responses.RENAMED, *responses.SAME, *responses.OWN, *responses.STATELESS, *fields.SAMPLING}
    assert not named - known - {*fields.HARMLESS}


def test_the_input_is_a_conversation():
    """The items of one turn of the assistant are one message."""
    call = {"type": "function_call", "call_id": "c1", "name": "total", "arguments": '{"count": 2}'}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So"}]},
        call,
        call | {"call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "4"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "5"}]},
        call | {"call_id": "c3"},
        {"role": "developer", "content": "c"},
    ]
    found = read({"input": items, "instructions": "Be brief.", "tools": TOOLS}).chat
    made = {"type": "function", "function": {"name": "total", "arguments": {"count": 2}}}
    turn = {"role": "assistant", "content": "So", "reasoning_content": "hm"}
    assert found.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        turn | {"tool_calls": [{"id": "c1", **made}, {"id": "c2", **made}]},
        {"role": "tool", "content": "4", "tool_call_id": "c1", "name": "total"},
        {"role": "tool", "content": "5", "tool_call_id": "c2", "name": "total"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c3", **made}]},
        {"role": "system", "content": "c"},
    ]
    assert found.source == "input"


def test_each_field_arrives():
    form = {"type": "json_schema", "name": "item", "schema": SCHEMA, "strict": True}
    more = {
        "temperature": 0.5,
        "top_p": 0.5,
        "max_output_tokens": 7,
        "top_k": 4,
        "store": False,
        "metadata": {"a": "b"},
    }
    found = read({"text": {"format": form}, "reasoning": {"effort": "none", "summary": "auto"}, **more}).chat
    params = found.params
    assert (params.temperature, params.top_p, params.max_tokens, params.top_k) == (0.5, 0.5, 7, 4)
    assert (params.logprobs, json.loads(params.structured_outputs.text)) == (None, SCHEMA)
    assert found.chat["chat_template_kwargs"] == {"enable_thinking": False}
    assert read({"include": [responses.LOGPROBS]}).chat.params.logprobs == 0
    assert read({"top_logprobs": 2}).chat.params.logprobs == 2
    assert read({}).chat.fill
    named = {"tools": TOOLS, "tool_choice": {"type": "function", "name": "dog"}}
    assert read(named).chat.tools.described[0]["function"]["name"] == "dog"


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        *(
            ({name: "x"}, name, f"{name}='x' is not supported: {instead}")
            for name, (_, instead) in responses.STATELESS.items()
        ),
        ({"store": True}, "store", "store=True is not supported: nothing is stored"),
        ({"input": None}, "input", "input is missing"),
        ({"input": []}, "input", "must be a string, or a list of items, not empty"),
        ({"input": [3]}, "input", "input[0]=3 must be an object"),
        (
            {"input": [{"type": "item_reference"}]},
            "input",
            "input[0].type='item_reference' is not supported",
        ),
        ({"input": [{"type": ["x"]}]}, "input", "is not supported: message, reasoning"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input",
            "'input_image' is not supported",
        ),
        ({"input": [{"role": "bot", "content": "x"}]}, "input", "role='bot' must be one of"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "["}]}, "input", "must be the JSON text"),
        ({"instructions": 3}, "instructions", "instructions=3 must be a string"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools[0].type='web_search' is not supported: function is"),
        ({"tools": {}}, "tools", "tools={} must be a list"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "none of the tools"),
        ({"include": ["file_search_call.results"]}, "include", "include has 'file_search_call.results'"),
        ({"text": "x"}, "text", "text='x' must be an object"),
        ({"text": {"form": 1}}, "text", "text has 'form', which is not supported: use format, verbosity"),
        ({"text": {"verbosity": "low"}}, "text", "verbosity='low' is not supported"),
        ({"text": {"format": {"type": "xml"}}}, "text", "its type must be one of text, json_object, json_schema"),
        ({"reasoning": {"effort": "much"}}, "reasoning", "must be one of none, minimal"),
        ({"max_output_tokens": 0}, "max_output_tokens", "is below 1"),
        ({"messages": []}, "messages", "unknown field 'messages'"),
        ({"n": 2}, "n", "unknown field 'n'"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", "are for stream=true"),
    ],
)
def test_what_is_wrong_is_told_by_field(body, param, message):
    with pytest.raises(Refusal) as error:
        read(body)
    assert (error.value.status, error.value.param) == (400, param)
    assert message in error.value.message
    assert "\n" not in error.value.message


def test_a_users_empty_message_stays_the_users():
    items = [{"role": "user", "content": ""}, {"role": "assistant", "content": "x"}]
    assert read({"input": items}).chat.messages == items


KEYS = strategies.sampled_from(["type", "role", "content", "name", "arguments", "call_id", "output", "summary", "text"])
KINDS = JSON | strategies.sampled_from([*responses.ITEMS, *responses.TEXTS, "user", "assistant"])
PART = strategies.dictionaries(KEYS, KINDS, max_size=3)
ITEM = strategies.dictionaries(KEYS, KINDS | strategies.lists(PART, max_size=2), max_size=4)
NAMES = sorted({*responses.RENAMED, *responses.SAME, *responses.OWN, *responses.STATELESS})


@settings(max_examples=150, deadline=None)
@given(strategies.dictionaries(strategies.sampled_from(NAMES), JSON, max_size=3), strategies.lists(ITEM, max_size=3))
def test_whatever_a_field_holds_is_taken_or_refused(body, items):
    for asked in (body, {"input": items}):
        found: object
        try:
            found = read(asked | {"model": MODEL})
        except Refusal as refusal:
            found = refusal
        if isinstance(found, Refusal):
            assert found.status == 400
            assert "\n" not in found.message


@pytest.mark.parametrize("step", [1, 6, 1000])
@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("Yes.", ["message"]),
        ("", ["message"]),
        ("<think>hm</think>Yes.", ["reasoning", "message"]),
        ("<think>hm", ["reasoning"]),
        (f"<think>hm</think>So:<tool_call>{GOOD}</tool_call>", ["reasoning", "message", "function_call"]),
        (f"<tool_call>{GOOD}</tool_call>\n<tool_call>{GOOD}</tool_call>", ["function_call"] * 2),
    ],
)
def test_events_build_the_response(text, kinds, step):
    """The client's own accumulator reads them: each item is added, grows and is done, in order."""
    asked = read({"tools": TOOLS, "stream": True})

    def answer() -> ResponseAnswer:
        made = ResponseAnswer(MODEL, asked)
        made.reader = PartsReader(asked.chat, None)
        return made

    output = RequestOutput("", None, [], [CompletionOutput(0, text, [5], "stop")], SpecDecodeMetrics())
    whole = json.loads(answer().whole([output]))
    assert [item["type"] for item in whole["output"]] == kinds
    streamed = answer()
    pieces = [text[at : at + step] for at in range(0, len(text), step)] or [""]
    events = [*streamed.first()]
    for i, piece in enumerate(pieces):
        events += streamed.piece(0, StreamOutput(piece, [5], "stop" if i == len(pieces) - 1 else None))
    events = [json.loads(event) for event in [*events, *streamed.last()]]
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    last = events[-1]["response"]
    assert events[-1]["type"] == "response.completed"
    assert streamed.heading(json.dumps(events[0])) == "event: response.created\ndata: "
    without_ids = lambda items: [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]
    assert without_ids(last["output"]) == without_ids(whole["output"])
    assert [call["arguments"] for call in last["output"] if call["type"] == "function_call"] == [
        READ for kind in kinds if kind == "function_call"
    ]
    grown: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            grown[event["output_index"]] = grown.get(event["output_index"], "") + event["delta"]
    for index, item in enumerate(last["output"]):
        said = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert grown.get(index, "") == said
        named = [event["type"] for event in events if event.get("output_index") == index]
        assert (named[0], named[-1]) == ("response.output_item.added", "response.output_item.done")


def test_a_response_is_answered_and_streamed(server, expected):
    client = server.client()
    asked = ASKED | {"temperature": 0, "max_output_tokens": 12, "top_logprobs": 1, "extra_body": {"ignore_eos": True}}
    said = client.responses.create(**asked)
    assert isinstance(said, Response)
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 12, "temperature": 0}
    same = client.chat.completions.create(**chat, extra_body={"ignore_eos": True})
    assert said.output_text == same.choices[0].message.content
    assert (said.status, said.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (said.usage.input_tokens, said.usage.output_tokens) == (same.usage.prompt_tokens, 12)
    assert len(said.output[0].content[0].logprobs) == 12
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.incomplete"
    done = list(client.responses.create(**asked, stream=True))[-1].response
    assert done.output_text == said.output_text
    with pytest.raises(openai.BadRequestError, match="nothing is stored: send the earlier items") as error:
        client.responses.create(**asked, previous_response_id="resp_1")
    assert error.value.param == "previous_response_id"


def test_openais_client_parses_a_form_and_a_call(server, monkeypatch):
    monkeypatch.setattr(server.llm.llm.tokenizer, "chat_template", TEMPLATES["Hermes and Qwen"])
    client = server.client()
    said = client.responses.parse(**ASKED, max_output_tokens=60, text_format=Item)
    assert 1 <= said.output_parsed.count <= 9
    asked = ASKED | {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 120}
    with client.responses.stream(**asked, extra_body={"seed": 1}) as stream:
        (call,) = stream.get_final_response().output
    assert valid(call.name, call.arguments)
    (same,) = client.responses.create(**asked, extra_body={"seed": 1}).output
    assert (same.name, same.arguments) == (call.name, call.arguments)
    assert THINK.open not in same.arguments


def test_a_failure_ends_the_stream_with_an_error():
    answer = ResponseAnswer(MODEL, read({}))
    event = json.loads(answer.error(Refusal(500, "the server failed")))
    assert (event["type"], event["message"], event["error"]["type"]) == ("error", "the server failed", "server_error")
