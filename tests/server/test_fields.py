"""Every field is served, harmless, or refused by its name; nothing is ignored."""

from __future__ import annotations

import dataclasses
import json
import typing

import pytest
from hypothesis import given, settings, strategies
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from jaxspec import SamplingParams
from jaxspec.server import fields
from jaxspec.server.conversation import ROLES
from jaxspec.server.refusal import Refusal

TEXT = {"model": "tiny", "prompt": "x"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}


def wish(body: dict, *, chat: bool = False, **more) -> fields.RequestFields:
    return fields.request_fields((CHAT if chat else TEXT) | body | more, chat=chat, model="tiny", room=100)


def refused(body: dict, *, chat: bool = False) -> Refusal:
    with pytest.raises(Refusal) as stop:
        wish(body, chat=chat)
    return stop.value


@pytest.mark.parametrize(
    ("params", "chat"),
    [
        (completion_create_params.CompletionCreateParamsStreaming, False),
        (chat_create_params.CompletionCreateParamsStreaming, True),
    ],
)
def test_each_of_openais_fields_is_known(params, chat):
    """Of the installed client: one that it gains has to be looked at."""
    own = {*fields.OWN, *fields.SAMPLING, *(fields.CHAT if chat else fields.TEXT)}
    known = own | {*fields.HARMLESS} | fields.ONLY.keys()
    assert not typing.get_type_hints(params).keys() - known, "refused as unknown"
    assert own & fields.ONLY.keys() <= {"echo"}  # completions only


# A value of each field of SamplingParams that is not its default.
OTHER = {
    **{"n": 2, "max_tokens": 7, "min_tokens": 2, "temperature": 0.5, "top_p": 0.5, "top_k": 4, "min_p": 0.1},
    **{"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 1.0, "logit_bias": {"5": 1}},
    **{"allowed_token_ids": [5], "bad_words": ["a"], "seed": 1, "stop": "b", "stop_token_ids": [3]},
    **{"ignore_eos": True, "include_stop_str_in_output": True, "skip_special_tokens": False, "logprobs": 2},
    **{"prompt_logprobs": 1, "num_speculative_tokens": 0, "structured_outputs": {"regex": "a+"}},
    "token_origins": True,
}


@pytest.mark.parametrize("name", OTHER)
def test_each_sampling_field_arrives(name):
    assert wish({name: OTHER[name]}).params == SamplingParams(**{name: OTHER[name]})
    assert wish({name: None}).params == SamplingParams()
    if name != "logprobs":
        assert getattr(wish({name: OTHER[name]}, chat=True).params, name) == getattr(
            SamplingParams(**{name: OTHER[name]}), name
        )


def test_no_sampling_field_is_left_out():
    assert OTHER.keys() == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize("name", fields.ONLY)
def test_what_is_missing_is_refused_by_its_name(name):
    values, instead = fields.ONLY[name]
    for value in ("other", 3, 1.0, {"a": 1}, [{"type": "function"}], "json_object", 0):
        error = refused({name: value}, chat=True)
        assert (error.status, error.param) == (400, name)
        assert error.message.startswith(f"{name}=")
        assert instead in error.message
    for value in (*values, None):
        wish({name: value})
        wish({name: value}, chat=True)


@pytest.mark.parametrize(
    ("body", "chat", "status", "param", "message"),
    [
        ({"top_kk": 3}, False, 400, "top_kk", "unknown field 'top_kk' of the request: did you mean 'top_k'?"),
        (
            {"guided_json": {}},
            True,
            400,
            "guided_json",
            "unknown field 'guided_json' of the request: known fields: model, ",
        ),
        ({"messages": []}, False, 400, "messages", "unknown field 'messages'"),
        ({"prompt": "x"}, True, 400, "prompt", "unknown field 'prompt'"),
        ({"temperature": "hot"}, False, 400, "temperature", "temperature='hot' must be a number"),
        ({"temperature": -1}, True, 400, "temperature", "temperature=-1.0 must lie in [0, 1e6]"),
        ({"max_tokens": 1.5}, False, 400, "max_tokens", "max_tokens=1.5 must be a whole number"),
        ({"max_tokens": 10**400}, False, 400, "max_tokens", "is above 2147483647"),
        ({"n": 0}, False, 400, "n", "n=0 is below 1"),
        ({"logit_bias": {"5": 101}}, False, 400, "logit_bias", "logit_bias of id 5 is 101.0"),
        ({"logit_bias": 3}, False, 400, "logit_bias", "logit_bias=3 must map token ids"),
        ({"stop": [""]}, False, 400, "stop", "must hold non-empty strings"),
        ({"stop": ["a"] * 65}, False, 400, "stop", "stop has 65 entries, the server takes at most 64"),
        ({"stop": {"a": 1}}, False, 400, "stop", "must hold non-empty strings"),
        (
            {"max_tokens": 0},
            False,
            400,
            "max_tokens",
            "max_tokens=0 is below 1, and only a request with prompt_logprobs",
        ),
        ({"max_completion_tokens": 0}, True, 400, "max_completion_tokens", "max_completion_tokens=0 is below 1"),
        ({"echo": "yes"}, False, 400, "echo", "echo='yes' must be True or False"),
        ({"echo": True}, True, 400, "echo", "echo=True is not supported: completions echo their prompt"),
        ({"echo": True, "logprobs": "a"}, False, 400, "logprobs", "logprobs='a' must be a whole number"),
        ({"min_tokens": 20}, False, 400, "min_tokens", "min_tokens=20 is above max_tokens, 16"),
        ({"ignore_eos": 1}, False, 400, "ignore_eos", "must be True or False"),
        ({"logprobs": True}, False, 400, "logprobs", "logprobs=True must be a whole number"),
        ({"logprobs": 3}, True, 400, "logprobs", "logprobs=3 must be True or False"),
        ({"top_logprobs": 3}, True, 400, "top_logprobs", "top_logprobs=3 needs logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, True, 400, "top_logprobs", "top_logprobs=21 is above 20"),
        ({"max_completion_tokens": 3, "max_tokens": 4}, True, 400, "max_completion_tokens", "differ: give one"),
        ({"stream": "yes"}, False, 400, "stream", "stream='yes' must be True or False"),
        ({"stream_options": {"include_usage": True}}, False, 400, "stream_options", "are for stream=true"),
        ({"stream": True, "stream_options": {"x": 1}}, False, 400, "stream_options", "unknown field 'x'"),
        ({"stream": True, "stream_options": 3}, False, 400, "stream_options", "must be an object"),
        ({"stream": True, "prompt_logprobs": 1}, False, 400, "prompt_logprobs", "leave stream out"),
        ({"model": "gpt-5"}, False, 404, "model", "model 'gpt-5' is not served here: give 'tiny'"),
        ({"model": None}, False, 400, "model", "model is missing"),
        ({"model": ["tiny"]}, False, 404, "model", "is not served here"),
        ({"prompt": None}, False, 400, "prompt", "prompt is missing"),
        ({"prompt": []}, False, 400, "prompt", "must be a string, a list of strings"),
        ({"prompt": 3}, False, 400, "prompt", "must be a string, a list of strings"),
        ({"prompt": {"prompt": "x"}}, False, 400, "prompt", "must be a string, a list of strings"),
        ({"prompt": [{"prompt": "x"}]}, False, 400, "prompt", "must be a string, a list of strings"),
        ({"messages": None}, True, 400, "messages", "messages is missing"),
        ({"messages": []}, True, 400, "messages", "not empty"),
        ({"messages": ["x"]}, True, 400, "messages[0]", "messages[0]='x' must be an object"),
        ({"messages": [{"role": "user"}]}, True, 400, "messages[0].content", "must be a string"),
        ({"messages": [{"content": "x"}]}, True, 400, "messages[0].role", "role=None must be one of system"),
        ({"messages": [{"role": "tool", "content": "x"}]}, True, 400, "messages[0].role", "template uses no tools"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}]},
            *(True, 400, "messages[0].tool_calls", "is not supported: this model's chat template uses no tools"),
        ),
        ({"messages": [{"role": [], "content": "x"}]}, True, 400, "messages[0].role", "role=None"),
        *(
            ({"messages": [{"role": "assistant", name: value}]}, True, 400, f"messages[0].{name}", "is not supported: ")
            for name, value in {"function_call": {}, "audio": {"id": "1"}, "refusal": "No."}.items()
        ),
        ({"continue_final_message": 1}, True, 400, "continue_final_message", "must be True or False"),
        ({"add_generation_prompt": "no"}, True, 400, "add_generation_prompt", "must be True or False"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            *(True, 400, "add_generation_prompt", "continues the last one: give one of them"),
        ),
        ({"continue_final_message": True}, False, 400, "continue_final_message", "unknown field"),
        (
            {"messages": [{"role": "user", "content": "x", "name": 3}]},
            *(True, 400, "messages[0].name", "messages[0].name=3 must be a string"),
        ),
        ({"stop": ["a", "b" * 1001]}, False, 400, "stop", "of 1001 characters: the server takes at most 1000"),
        ({"stop": "b" * 1001}, False, 400, "stop", "of 1001 characters: the server takes at most 1000"),
        ({"bad_words": ["b" * 257]}, False, 400, "bad_words", "of 257 characters: the server takes at most 256"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "description": "weather of the world"}}]},
            *(True, 400, "tools", "tools are not supported: this model's chat template uses no tools"),
        ),
        ({"x" * 90: 1}, False, 400, "x" * 80, f"unknown field '{'x' * 79}...' of the request: "),
        ({"option_x": 1}, False, 400, "option_x", "unknown field 'option_x' of the request: "),
        (
            {"messages": [*CHAT["messages"], {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            *(True, 400, "messages[1].content[0].type", "type='image_url' is not supported: text is"),
        ),
    ],
)
def test_what_is_wrong_is_told_by_field(body, chat, status, param, message):
    error = refused(body, chat=chat)
    assert (error.status, error.param) == (status, param)
    assert message in error.message
    assert "\n" not in error.message


def test_what_changes_no_output_is_taken():
    extra = {name: {"any": "thing"} for name in fields.HARMLESS}
    assert wish(extra).params == SamplingParams()


def test_the_tier_of_a_service_changes_nothing():
    """All tiers that OpenAI's client names are taken."""
    kind = typing.get_type_hints(chat_create_params.CompletionCreateParamsBase)["service_tier"]
    tiers = [tier for literal in typing.get_args(kind) for tier in typing.get_args(literal)]
    assert "flex" in tiers
    for tier in tiers:
        assert wish({"service_tier": tier}, chat=True).params == wish({}, chat=True).params


def test_an_echo_asks_for_the_prompts_log_probabilities():
    """As many as of the output; the field prompt_logprobs keeps its own number."""
    for body, computed, shown in (
        ({"echo": True}, None, None),
        ({"echo": False, "logprobs": 3}, None, None),
        ({"echo": True, "logprobs": 3}, 3, None),
        ({"echo": True, "logprobs": 0, "prompt_logprobs": 2}, 2, 2),
        ({"echo": True, "logprobs": 3, "prompt_logprobs": 1}, 3, 1),
        ({"echo": True, "max_tokens": 0}, 0, None),
        ({"max_tokens": 0, "prompt_logprobs": 1}, 1, 1),
    ):
        found = wish(body)
        assert (found.params.prompt_logprobs, found.prompt_logprobs) == (computed, shown), body
        assert found.echo == body.get("echo", False)
    assert wish({"max_completion_tokens": 0, "prompt_logprobs": 1}, chat=True).params.max_tokens == 0


def test_who_speaks_is_told_to_the_template():
    said = {"role": "user", "content": "x", "name": "Ann"}
    assert wish({"messages": [said]}, chat=True).messages == [said]


def test_a_messages_unknown_fields_are_ignored():
    """Clients send their own, and those of answers back; OpenAI's server ignores them, too."""
    own = {"id": "m1", "type": "text", "cache_control": {"type": "ephemeral"}, "tool_calls": [], "refusal": None}
    part = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    said = {"role": "user", "content": [part], "tool_call_id": "1"} | own
    assert wish({"messages": [said]}, chat=True).messages == [{"role": "user", "content": "x"}]


def test_whose_message_a_chats_output_is():
    """The last message's, where no new one is opened; so in vLLM."""
    assert wish({}, chat=True).role == "assistant"
    assert wish({"add_generation_prompt": False}, chat=True).role == "user"
    assert wish({"continue_final_message": True}, chat=True).role == "user"


def test_a_chat_has_its_own_names():
    assert wish({"top_logprobs": 0}, chat=True).params.logprobs is None
    assert wish({"logprobs": True}, chat=True).params.logprobs == 0
    assert wish({"logprobs": True, "top_logprobs": 4}, chat=True).params.logprobs == 4
    assert wish({"logprobs": False}, chat=True).params.logprobs is None
    assert wish({"max_completion_tokens": 5}, chat=True).params.max_tokens == 5
    assert not wish({"max_completion_tokens": 5}, chat=True).fill
    assert wish({}, chat=True).fill
    assert not wish({}).fill


JSON = strategies.recursive(
    strategies.none()
    | strategies.booleans()
    | strategies.integers()
    | strategies.floats()
    | strategies.text(max_size=5),
    lambda inner: strategies.lists(inner, max_size=4) | strategies.dictionaries(strategies.text(max_size=4), inner),
    max_leaves=8,
)
NAMES = sorted({*fields.OWN, *fields.SAMPLING, *fields.CHAT, *fields.TEXT, *fields.ONLY, *fields.HARMLESS})
CONTENT = JSON | strategies.lists(strategies.fixed_dictionaries({"type": JSON | strategies.just("text"), "text": JSON}))
MESSAGES = strategies.lists(
    strategies.fixed_dictionaries({"role": strategies.sampled_from([*ROLES]) | JSON, "content": CONTENT}), max_size=3
)


@settings(max_examples=150)
@given(
    strategies.dictionaries(strategies.sampled_from(NAMES), JSON, max_size=4),
    strategies.none() | MESSAGES,
    strategies.booleans(),
)
def test_whatever_a_field_holds_is_taken_or_refused(body, messages, chat):
    """In one line, which any encoding takes; nothing else is raised."""
    more = {} if messages is None else {"messages": messages}
    found: fields.RequestFields | Refusal
    try:
        found = wish(body | more, chat=chat, model="tiny")
    except Refusal as refusal:
        found = refusal
    if isinstance(found, Refusal):
        assert found.status in (400, 404)
        assert "\n" not in found.message
        assert json.loads(found.response().body)["error"]["message"]
    else:
        assert isinstance(found.params, SamplingParams)
