"""Tools over HTTP, with the client of OpenAI: calls that a grammar guarantees, calls that are read, and messages."""

from __future__ import annotations

import dataclasses
import json

import openai
import pytest
from hypothesis import given, settings, strategies

from jaxspec.api.outputs import CompletionOutput, RequestOutput, StreamOutput
from jaxspec.engine.metrics import SpecDecodeMetrics
from jaxspec.server.fields import request_fields
from jaxspec.server.parted_answers import PartedAnswer
from jaxspec.server.refusal import Refusal
from jaxspec.server.tool_formats import FORMATS
from tests.grammars.walks import Language
from tests.server.running import MODEL

SHOWN = "{% if tools %}{{ tools | length }}{% endif %}{% for m in messages %}<user>{{ m.content }}"
CALLS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
TEMPLATES = {
    "Hermes and Qwen": f"{SHOWN}{CALLS}{{% endfor %}}<bot>",
    "Llama 3": f'{SHOWN}{{% endfor %}}{{# ipython {{"name", "parameters"}} #}}<bot>',
    "Mistral": f"{SHOWN}{{% endfor %}}{{# [TOOL_CALLS] #}}<bot>",
    "Gemma 4": f'{SHOWN}{{% endfor %}}{{# <|tool_call>call: <|"|> #}}<bot>',
}


def tool(name: str, properties: dict, **more) -> dict:
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": "x", "parameters": parameters, **more}}


COUNT = {"count": {"type": "integer", "minimum": 1, "maximum": 9}}
TOOLS = [tool("total", COUNT), tool("dog", {"colour": {"enum": ["red", "blue"]}})]
TALK = [{"role": "user", "content": "x"}]
CHAT = {"model": MODEL, "messages": TALK, "max_tokens": 120, "tools": TOOLS}


def valid(name: str, arguments: str) -> bool:
    found = json.loads(arguments)
    return found["count"] in range(1, 10) if name == "total" else found["colour"] in ("red", "blue")


@pytest.fixture(params=TEMPLATES)
def family(request, server, monkeypatch):
    """The server with the template of each family. The tiny tokenizer's special token stands for special marks."""
    monkeypatch.setitem(FORMATS, "Mistral", dataclasses.replace(FORMATS["Mistral"], mark="<user>"))
    monkeypatch.setitem(FORMATS, "Gemma 4", dataclasses.replace(FORMATS["Gemma 4"], mark="<user>", spelled=("<user>",)))
    monkeypatch.setattr(server.llm.llm.tokenizer, "chat_template", TEMPLATES[request.param])
    return request.param


@pytest.fixture
def hermes(server, monkeypatch):
    monkeypatch.setattr(server.llm.llm.tokenizer, "chat_template", TEMPLATES["Hermes and Qwen"])
    return server


def test_a_call_is_guaranteed(family, server):
    client = server.client()
    for seed in range(3):
        asked = CHAT | {"tool_choice": "required", "parallel_tool_calls": False, "seed": seed}
        (choice,) = client.chat.completions.create(**asked).choices
        (call,) = choice.message.tool_calls
        assert (choice.finish_reason, choice.message.content, call.type) == ("tool_calls", None, "function")
        assert valid(call.function.name, call.function.arguments)
    named = {"type": "function", "function": {"name": "dog"}}
    said = client.chat.completions.create(**CHAT, tool_choice=named, n=3)
    assert [[call.function.name for call in choice.message.tool_calls] for choice in said.choices] == [["dog"]] * 3
    assert len({choice.message.tool_calls[0].id for choice in said.choices}) == 3


def test_a_streamed_call_is_what_openais_client_accumulates(family, server):
    asked = CHAT | {"tool_choice": "required", "parallel_tool_calls": False, "seed": 1, "n": 2, "logprobs": True}
    client = server.client()
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion()
    whole = client.chat.completions.create(**asked)
    for one, other in zip(streamed.choices, whole.choices, strict=True):
        (call,), (same,) = one.message.tool_calls, other.message.tool_calls
        assert (call.function.name, call.function.arguments) == (same.function.name, same.function.arguments)
        assert one.finish_reason == other.finish_reason == "tool_calls"
        assert len(one.logprobs.content) == len(other.logprobs.content)


def test_strict_tools_are_called_rightly_or_not_at_all(server, monkeypatch):
    """Llama's calls begin with {, which is made likely; it is legal only where the call has it."""
    tokenizer = server.llm.llm.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATES["Llama 3"])
    (brace,) = tokenizer.encode("{", add_special_tokens=False)
    client = server.client()
    strict = CHAT | {"tools": [tool("total", COUNT, strict=True)], "seed": 1}
    (choice,) = client.chat.completions.create(**strict, logit_bias={str(brace): 100}).choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert valid(call.function.name, call.function.arguments)
    (choice,) = client.chat.completions.create(**strict, logit_bias={str(brace): -100}).choices
    assert choice.message.tool_calls is None
    assert choice.message.content


def test_an_output_that_is_cut_keeps_its_text(hermes):
    (choice,) = hermes.client().chat.completions.create(**CHAT | {"tool_choice": "required", "max_tokens": 20}).choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
    assert "<tool_call>\n{".startswith(choice.message.content[:13])


def test_messages_with_calls_and_results_are_rendered(hermes, expected):
    call = {"id": "c1", "type": "function", "function": {"name": "total", "arguments": '{"count": 2}'}}
    talk = [*TALK, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c1", "content": "4"}]
    said = hermes.client().chat.completions.create(model=MODEL, messages=talk, max_tokens=1, tools=TOOLS)
    prompt = '2<user>x<user><tool_call>{"count": 2}</tool_call><user>4<bot>'
    assert said.usage.prompt_tokens == len(hermes.llm.llm.tokenizer.encode(prompt, add_special_tokens=False))
    said = hermes.client().chat.completions.create(
        model=MODEL, messages=talk, max_tokens=1, tools=TOOLS, tool_choice="none"
    )
    assert said.usage.prompt_tokens == len(hermes.llm.llm.tokenizer.encode(prompt[1:], add_special_tokens=False))


def test_a_result_has_its_functions_name():
    call = {"id": "c1", "type": "function", "function": {"name": "total", "arguments": ""}}
    result = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "4"}]}
    _, called, found = fields({"messages": [*TALK, {"role": "assistant", "tool_calls": [call]}, result]}).messages
    assert called["tool_calls"] == [{"id": "c1", "type": "function", "function": {"name": "total", "arguments": {}}}]
    assert found == {"role": "tool", "tool_call_id": "c1", "content": "4", "name": "total"}


def test_a_function_without_parameters_has_no_arguments():
    tools = fields({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}).tools
    none = {"type": "object", "properties": {}}
    assert tools.described == [{"type": "function", "function": {"name": "f", "parameters": none}}]
    assert tools.grammar is not None


def fields(
    body: dict, template: str | None = TEMPLATES["Hermes and Qwen"], special: tuple[str, ...] = ("[TOOL_CALLS]",)
):
    return request_fields(
        CHAT | {"max_tokens": 9} | body,
        **{"chat": True, "model": MODEL, "room": 100, "chat_template": template, "special_tokens": special},
    )


CALL = {"type": "function", "function": {"name": "total", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"tools": "x"}, "tools", "must be a list"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools", 'must be {"type": "function"'),
        ({"tools": [tool("a b", {})]}, "tools", "tools[0].function.name='a b' must have"),
        ({"tools": [tool("f", {}), tool("f", {})]}, "tools", "each may occur once"),
        ({"tools": TOOLS * 65}, "tools", "tools has 130 entries, the server takes at most 128"),
        ({"tools": [tool("f", {}) | {"function": {"name": "f", "parameters": 3}}]}, "tools", "must be a JSON schema"),
        ({"tools": [tool("f", {}, strict="yes")]}, "tools", "tools: f: strict='yes' must be True or False"),
        ({"tool_choice": "any"}, "tool_choice", "tool_choice='any' is not supported"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "none of the tools: total"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "must be True or False"),
        (
            {"tools": [tool("f", {"x": {"not": {}}}, strict=True)]},
            *("tools", "tools: tool f: the schema at #/properties/x has 'not', which is not supported"),
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [3]}]}, "messages[0].tool_calls[0]", "must be {"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "["}}]}]},
            *("messages[0].tool_calls[0]", "function.arguments='[' must be the JSON text of an object"),
        ),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 3}]}, "messages[0].tool_call_id", "a string"),
    ],
)
def test_what_is_wrong_with_tools_is_told(body, param, message):
    with pytest.raises(Refusal) as error:
        fields(body)
    assert error.value.status == 400
    assert error.value.param == param
    assert message in error.value.message
    assert "\n" not in error.value.message


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "this model's chat template uses no tools"),
        ("{{ messages[0].content }} tools", "this model's chat template uses no tools"),
        ("{% if tools %}<tool_call><function=f>arguments", "in a form that is not read: those of Hermes and Qwen"),
    ],
)
def test_a_model_without_a_template_for_tools_is_refused(template, message):
    with pytest.raises(Refusal, match=message):
        fields({}, template)
    assert fields({"tool_choice": "none"}, template).tools is None


def test_strict_auto_needs_a_mark_of_text():
    strict = {"tools": [tool("total", COUNT, strict=True)]}
    for body in (strict, {"response_format": {"type": "json_object"}}):
        with pytest.raises(Refusal, match="is a special token: leave them out"):
            fields(body, TEMPLATES["Mistral"])
    assert fields({}, TEMPLATES["Mistral"]).params.skip_special_tokens is False
    assert fields(strict | {"tool_choice": "required"}, TEMPLATES["Mistral"]).tools.opening == "[TOOL_CALLS]"
    of_text = fields(strict, TEMPLATES["Mistral"], ()).tools
    assert of_text.opening == ""
    language = Language(of_text.grammar.node())
    assert "[TOOL_" in language
    assert 'a [TOOL_CALLS][{"name": "total", "arguments": {"count": 1}}]' in language
    assert "[TOOL_CALLS][]" not in language


def test_special_marks_that_are_spelled_are_legal():
    """Gemma's marks are special tokens, inside of calls too. The output shows them, and text may stand before calls."""
    special = ("<|tool_call>", "<tool_call|>", '<|"|>')
    strict = {
        "tools": [tool("total", COUNT, strict=True), tool("say", {"b": {"type": "string"}, "A": {}}, strict=True)]
    }
    found = fields(strict, TEMPLATES["Gemma 4"], special)
    assert found.params.skip_special_tokens is False
    assert found.params.structured_outputs.spelled == special
    assert found.tools.opening == ""
    free = Language(found.tools.grammar.node())
    forced = Language(fields(strict | {"tool_choice": "required"}, TEMPLATES["Gemma 4"], special).tools.grammar.node())
    call = "<|tool_call>call:total{count:3}<tool_call|>"
    said = '<|tool_call>call:say{A:{x:[<|"|>1<|"|>,null]},b:<|"|>a"\n<|"b<|"|>}<tool_call|>'
    assert all(text in free and text in forced for text in (call, said, said + call))
    assert all(text in free and text not in forced for text in ("", "hm", f"hm {call}"))
    wrong = ["{}", "{count:0}", "{count: 3}", "{count:3,}", '{<|"|>count<|"|>:3}']
    assert not any(f"<|tool_call>call:total{text}<tool_call|>" in free for text in wrong)
    assert call[:-1] not in free
    plain = fields(strict, TEMPLATES["Gemma 4"], ())
    assert plain.params.structured_outputs.spelled == ()
    assert plain.params.skip_special_tokens is True


def test_a_form_stands_in_place_of_calls():
    """Agents with a type of output ask so; a call that is forced leaves no room for it."""
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": [1]}}}}
    call = '<tool_call>\n{"name": "total", "arguments": {"count": 1}}\n</tool_call>'
    found = fields(form)
    language = Language(found.params.structured_outputs.node())
    assert "[1]" in language
    assert call in language
    assert f"[1]{call}" not in language
    assert "[2]" not in language
    assert "[1]" not in Language(fields(form | {"tool_choice": "required"}).params.structured_outputs.node())
    after = fields(form | {"structured_outputs": {"after": "</s>"}}).params.structured_outputs
    assert after.after == "</s>"


def test_one_call_follows_a_special_mark_without_an_array():
    tools = fields({"tool_choice": "required"}, special=("<tool_call>", "</tool_call>")).tools
    text = '{"name": "total", "arguments": {"count": 1}}'
    language = Language(tools.grammar.node())
    assert text in language
    assert f"{text}\n{text}" not in language
    assert tools.reader().read(text, ended=True)[0] == ""


GOOD = '{"name": "total", "arguments": {"a": "}</tool_call>\\"", "b": [1.50, {}]}}'
READ = '{"a": "}</tool_call>\\"", "b": [1.50, {}]}'
LLAMA = GOOD.replace("arguments", "parameters")
GEMMA = 'call:total{a:<|"|>}</tool_call>"<|"|>,b:[1.50,{}]}'
HOLDS = 'call:total{x:<|"|>{[<tool_call|><|tool_call>call:total{}<|"<|"|>}'  # strings that hold the marks of calls


@pytest.mark.parametrize(
    ("family", "text", "content", "calls"),
    [
        ("Hermes and Qwen", "Hello there. ", "Hello there. ", []),
        ("Hermes and Qwen", f"Let me see.\n<tool_call>\n{GOOD}\n</tool_call>", "Let me see.", [READ]),
        ("Hermes and Qwen", f"<tool_call>{GOOD}</tool_call>\n<tool_call>{GOOD}</tool_call>\n", None, [READ] * 2),
        ("Hermes and Qwen", f"<tool_call>{GOOD}</tool_call>\nDone.", "\nDone.", [READ]),
        ("Hermes and Qwen", f"<tool_call>{GOOD}", None, [READ]),
        ("Hermes and Qwen", f"a <tool_call>x</tool_call> <tool_call>{GOOD}", "a <tool_call>x</tool_call>", [READ]),
        ("Hermes and Qwen", f"<tool_call>{GOOD[:-1]}", f"<tool_call>{GOOD[:-1]}", []),
        (
            "Hermes and Qwen",
            "<tool_call>" + GOOD.replace("total", "rm"),
            "<tool_call>" + GOOD.replace("total", "rm"),
            [],
        ),
        ("Hermes and Qwen", '<tool_call>{"name": "total"}', '<tool_call>{"name": "total"}', []),
        (
            "Hermes and Qwen",
            '<tool_call>{"name": ["total"], "arguments": {}}',
            *('<tool_call>{"name": ["total"], "arguments": {}}', []),
        ),
        ("Hermes and Qwen", "<tool_call>" + "{" * 3000, "<tool_call>" + "{" * 3000, []),
        ("Hermes and Qwen", "1 < 2 <tool_", "1 < 2 <tool_", []),
        ("Llama 3", f"\n{LLAMA}", None, [READ]),
        ("Llama 3", f"I call {LLAMA}", f"I call {LLAMA}", []),
        ("Llama 3", '{"a": 1} is JSON.', '{"a": 1} is JSON.', []),
        ("Llama 3", f"{LLAMA}; {LLAMA}", f"; {LLAMA}", [READ]),
        ("Mistral", f"Now:[TOOL_CALLS] [{GOOD}, {GOOD}]", "Now:", [READ] * 2),
        ("Mistral", f"[{GOOD}]", f"[{GOOD}]", []),
        ("Mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
        ("Mistral", "[TOOL_CALLS][1]", "[TOOL_CALLS][1]", []),
        ("Gemma 4", f"Now: <|tool_call>{GEMMA}<tool_call|>", "Now:", [READ]),
        ("Gemma 4", f"<|tool_call>{GEMMA}<tool_call|><|tool_call>{GEMMA}<tool_call|>", None, [READ] * 2),
        ("Gemma 4", f"<|tool_call>{GEMMA}<tool_call|> Done.", " Done.", [READ]),
        ("Gemma 4", f"<|tool_call>{GEMMA}", None, [READ]),
        (
            "Gemma 4",
            f"<|tool_call>{HOLDS}<tool_call|>",
            *(None, ['{"x": "{[<tool_call|><|tool_call>call:total{}<|\\""}']),
        ),
        (
            "Gemma 4",
            '<|tool_call> call:total { a : true , <|"|>b:c<|"|>:[null, None,[ ] ,-1e05]\n}\n<tool_call|>',
            *(None, ['{"a": true, "b:c": [null, null, [], -1e05]}']),
        ),
        ("Gemma 4", "<|tool_call>call:total{}<tool_call|>", None, ["{}"]),
        ("Gemma 4", "a <|tool_call>call:rm{}<tool_call|>", "a <|tool_call>call:rm{}<tool_call|>", []),
        *(
            ("Gemma 4", f"<|tool_call>{text}", f"<|tool_call>{text}", [])
            for text in (
                *("", "c", "call:", "call:total", "call:total{", "call:total(a:1)", "total{a:1}", GOOD),
                *("call:total{a:1", 'call:total{a:<|"|>b}', "call:total{a}", "call:total{a:}", "call:total{a:word}"),
                *(
                    "call:total{:1}",
                    'call:total{"a":1}',
                    "call:total{a b :1,c  d:2}",
                    "call:total{a:1,}",
                    "call:total{a:[1}]",
                    "call:total{a:01}",
                    "call:total{a:1 b:2}",
                ),
                *(
                    'call:total{a:"b"}',
                    "call:total{a:1.}",
                    "call:total{a:-Infinity}",
                    "call:total{a:NaN}",
                    "call:total{a:trueish}",
                    "call:total{a:[" + "[" * 3000,
                ),
                *("call:" + "x" * 200 + "{}", "call:total{a:" + "[" * 3000 + "]" * 3000 + "}"),
            )
        ),
    ],
)
@pytest.mark.parametrize("step", [1, 2, 3, 5, 7, 10_000])
def test_calls_are_read_from_a_text(family, text, content, calls, step):
    """Whole and in pieces; a text that is no valid call stays content, and nothing is lost."""
    asked = fields({"stream_options": {"include_usage": True}, "stream": True}, TEMPLATES[family])
    answer = PartedAnswer(MODEL, asked)
    output = RequestOutput("", None, [], [CompletionOutput(0, text, [5], "stop")], SpecDecodeMetrics())
    (choice,) = json.loads(PartedAnswer(MODEL, asked).whole([output]))["choices"]
    message = choice["message"]
    assert message["content"] == content
    assert [call["function"]["arguments"] for call in message.get("tool_calls", ())] == calls
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    said, found, reasons = "", [], []
    pieces = [text[at : at + step] for at in range(0, len(text), step)]
    for i, piece in enumerate(pieces):
        for event in answer.piece(0, StreamOutput(piece, [5], "stop" if i == len(pieces) - 1 else None)):
            (choice,) = json.loads(event)["choices"]
            said += choice["delta"].get("content") or ""
            found += choice["delta"].get("tool_calls") or []
            reasons.append(choice["finish_reason"])
    assert said == (content or "")
    assert [(call["index"], call["function"]["arguments"]) for call in found] == [*enumerate(calls)]
    assert reasons[-1] == ("tool_calls" if calls else "stop")


def test_further_calls_stay_content_without_parallel_calls():
    reader = fields({"parallel_tool_calls": False}).tools.reader()
    call = f"<tool_call>{GOOD}</tool_call>"
    content, calls = reader.read(call + call, ended=True)
    assert (content, len(calls)) == (call, 1)


def test_a_mark_in_an_answer_begins_no_call():
    """The grammar lets calls stand in place of the answer, so a string of the answer is no call."""
    form = {"response_format": {"type": "json_object"}}
    special = ("<|tool_call>", "<tool_call|>", '<|"|>')
    call = "<|tool_call>call:total{count:1}<tool_call|>"
    answer = f'{{"a": "{call}"}}'
    for text, expected in ((answer, (answer, 0)), (call, ("", 1)), (f"\n{call}", ("", 1))):
        for step in (1, 4, len(text)):
            reader = fields(form, TEMPLATES["Gemma 4"], special).tools.reader()
            parts = [text[at : at + step] for at in range(0, len(text), step)]
            read = [reader.read(part, ended=i == len(parts) - 1) for i, part in enumerate(parts)]
            found = "".join(content for content, _ in read), sum(len(calls) for _, calls in read)
            assert (found[0].strip(), found[1]) == expected


@pytest.mark.parametrize("text", ["call:total(a:1)", "call: x y{", "call:" + " " * 50 + "!"])
def test_what_is_no_call_of_gemmas_is_content_at_once(text):
    reader = fields({}, TEMPLATES["Gemma 4"], ()).tools.reader()
    content, _ = reader.read(f"<|tool_call>{text} and more of it", ended=False)
    assert text in content


def test_refused_control_tokens_in_tools(another):
    strict = another(refuse_control_tokens=True)
    tokenizer = strict.llm.llm.tokenizer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "chat_template", TEMPLATES["Hermes and Qwen"])
        with pytest.raises(openai.BadRequestError, match="a control token of the model") as error:
            strict.client().chat.completions.create(**CHAT | {"tools": [tool("f", {"x": {"const": "</s>"}})]})
        assert error.value.param == "tools"


PARTS = [
    GOOD,
    LLAMA,
    GEMMA,
    HOLDS,
    f"[{GOOD}]",
    *'{}[]"\\<: ax,',
    '<|"|>',
    "<|tool_call>",
    "<tool_call|>",
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "\n",
    "<tool",
    "é",
]


@settings(max_examples=200, deadline=None)
@given(
    strategies.sampled_from([*TEMPLATES]),
    strategies.lists(strategies.sampled_from(PARTS), max_size=8),
    strategies.integers(1, 9),
    strategies.booleans(),
)
def test_pieces_of_a_text_are_read_as_the_whole(family, parts, step, parallel):
    tools = fields({"parallel_tool_calls": parallel}, TEMPLATES[family]).tools
    text = "".join(parts)
    content, calls = tools.reader().read(text, ended=True)
    reader, said, found = tools.reader(), "", []
    for at in range(0, len(text), step):
        more, fresh = reader.read(text[at : at + step], ended=False)
        said, found = said + more, found + fresh
    more, fresh = reader.read("", ended=True)
    assert (said + more, [call.arguments for call in found + fresh]) == (content, [call.arguments for call in calls])
    assert calls or content == text


LEAVES = strategies.none() | strategies.booleans() | strategies.integers() | strategies.floats()
JSON = strategies.recursive(
    LEAVES | strategies.text(max_size=5),
    lambda inner: strategies.lists(inner, max_size=3) | strategies.dictionaries(strategies.text(max_size=4), inner),
    max_leaves=6,
)
FUNCTION = {"name": JSON | strategies.just("f"), "parameters": JSON, "strict": JSON | strategies.just(True)}
TOOL = {"type": strategies.just("function") | JSON, "function": JSON | strategies.fixed_dictionaries(FUNCTION)}
LISTED = JSON | strategies.lists(strategies.fixed_dictionaries(TOOL), max_size=2)
CHOICE = JSON | strategies.sampled_from(["auto", "required", {"type": "function", "function": {"name": "f"}}])


@settings(max_examples=150, deadline=None)
@given(strategies.sampled_from([*TEMPLATES.values()]), LISTED, CHOICE, LISTED)
def test_whatever_the_fields_hold_is_taken_or_refused(template, tools, choice, calls):
    called = {"messages": [{"role": "assistant", "tool_calls": calls}]}
    for body in ({"tools": tools, "tool_choice": choice}, called):
        found: object
        try:
            found = fields(body, template)
        except Refusal as refusal:
            found = refusal
        if isinstance(found, Refusal):
            assert found.status == 400
            assert "\n" not in found.message
