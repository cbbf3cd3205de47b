"""Reasoning over HTTP: parted from the content, before forms and calls, and turned on and off by its effort."""

from __future__ import annotations

import json

import openai
import pytest
from hypothesis import given, settings, strategies

from jaxspec import AsyncLLM
from jaxspec.api.grammars import REASONING, THINK, marks_of
from jaxspec.api.outputs import CompletionOutput, RequestOutput, StreamOutput
from jaxspec.engine.metrics import SpecDecodeMetrics
from jaxspec.server.fields import request_fields
from jaxspec.server.parted_answers import PartedAnswer, PartsReader
from jaxspec.server.refusal import Refusal
from tests.api.async_llm.calls import OPTIONS
from tests.server.running import MODEL, Running
from tests.server.test_structured import FORMAT, Item
from tests.server.test_tools import GEMMA, GOOD, READ, TOOLS, tool
from tests.support.model_folders import write_model, write_tokenizer

OPEN, CLOSE, _ = THINK
CHANNEL = REASONING[1]
# Qwen3's way: the model writes both marks, unless the prompt has them.
TEMPLATE = (
    "{% for m in messages %}<user>{{ m.reasoning_content }}{{ m.content }}{% endfor %}<bot>"
    "{% if tools %}<tool_call>arguments{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
CALLS = "{% if tools %}<tool_call>arguments{% endif %}"
OPENED = "{% for m in messages %}<user>{{ m.content.split('</think>')[-1] }}{% endfor %}<bot><think>\n"
# Gemma 4's way: the prompt has both marks where the model does not reason.
GEMMA_TEMPLATE = (
    "{% for m in messages %}<user>{{ m.content }}{% endfor %}<bot>"
    '{% if tools %}{# <|tool_call>call: <|"|> #}{% endif %}'
    "{% if not enable_thinking %}<|channel>thought\n<channel|>{% endif %}"
)
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}


def fields(body: dict, template: str = TEMPLATE, **more):
    return request_fields(
        CHAT | body, **{"chat": True, "model": MODEL, "room": 100, "chat_template": template, "reasoning": THINK} | more
    )


CASES = [
    (None, "<think>\nhm\n</think>\n\nYes.", "hm", "Yes.", []),
    (None, "\n <think>so", "so", None, []),
    (None, "No </think> Yes.", None, "No </think> Yes.", []),
    (None, " <thi", None, " <thi", []),
    (None, "<think>a</th</think>b </think> c", "a</th", "b </think> c", []),
    (None, "<think>\n\n</think>\n\nYes.", None, "Yes.", []),
    (None, "", None, "", []),
    (OPEN, "\nhm\n</think>\nYes. ", "hm", "Yes. ", []),
    (OPEN, "hm </thin", "hm </thin", None, []),
    (CLOSE, "<think>x</think>y", None, "<think>x</think>y", []),
    (None, f"<think>x</think><tool_call>{GOOD}</tool_call>", "x", None, [READ]),
    (None, f"<think><tool_call>{GOOD}</tool_call></think> No.", f"<tool_call>{GOOD}</tool_call>", "No.", []),
    (OPEN, f"x</think>\n\nSo:\n<tool_call>{GOOD}</tool_call>", "x", "So:", [READ]),
]
OF_GEMMA = [
    (None, "<|channel>thought\nhm\n<channel|>Yes.", "hm", "Yes.", []),
    (None, "<|channel>thought\n<channel|>Yes.", None, "Yes.", []),
    (None, "<|channel>thoughts\n<channel|>Yes.", "thoughts", "Yes.", []),
    (None, "<|channel>thought\n\n thought\n", "thought\n", None, []),
    (None, "<|channel>thou", "thou", None, []),
    (None, "<|channel", None, "<|channel", []),
    (None, "thought\nYes.<|channel>", None, "thought\nYes.<|channel>", []),
    (CHANNEL.close, "thought\nYes.", None, "thought\nYes.", []),
    (CHANNEL.open, "thought\nhm <channel|> Yes.", "hm", "Yes.", []),
    (None, f"<|channel>thought\nx<channel|>So: <|tool_call>{GEMMA}<tool_call|>", "x", "So:", [READ]),
    (None, f"<|channel>thought\n<|tool_call>{GEMMA}<channel|>", f"<|tool_call>{GEMMA}", None, []),
]


@pytest.mark.parametrize(
    ("marks", "mark", "text", "reasoning", "content", "calls"),
    [(THINK, *case) for case in CASES] + [(CHANNEL, *case) for case in OF_GEMMA],
)
@pytest.mark.parametrize("step", [1, 5, 1000])
def test_reasoning_is_parted_from_content(marks, mark, text, reasoning, content, calls, step):
    """Whole and in pieces, and before calls."""
    body = {"tools": TOOLS} if calls or "tool" in text else {}
    template = TEMPLATE if marks is THINK else GEMMA_TEMPLATE
    answer = PartedAnswer(MODEL, fields(body, template, reasoning=marks))
    answer.mark = mark
    output = RequestOutput("", None, [], [CompletionOutput(0, text, [5], "stop")], SpecDecodeMetrics())
    (choice,) = json.loads(answer.whole([output]))["choices"]
    message = choice["message"]
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)
    assert [call["function"]["arguments"] for call in message.get("tool_calls", ())] == calls
    said: dict[str, str] = {}
    pieces = [text[at : at + step] for at in range(0, len(text), step)] or [""]
    for i, piece in enumerate(pieces):
        for event in answer.piece(0, StreamOutput(piece, [5], "stop" if i == len(pieces) - 1 else None)):
            (choice,) = json.loads(event)["choices"]
            for name, more in choice["delta"].items():
                said[name] = said.get(name, "") + (more if isinstance(more, str) else "")
    assert (said.get("reasoning_content"), said.get("content") or "") == (reasoning, content or "")
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")


@settings(max_examples=250, deadline=None)
@given(
    strategies.lists(strategies.sampled_from(["open", "close", *"\n a<é", "half", "label"]), max_size=8),
    strategies.integers(1, 9),
    strategies.sampled_from([None, "open", "close"]),
    strategies.sampled_from([THINK, CHANNEL]),
)
def test_pieces_are_read_as_the_whole(parts, step, mark, marks):
    named = {"open": marks.open, "close": marks.close, "half": marks.close[:4], "label": "thought\n"}
    text, mark = "".join(named.get(part, part) for part in parts), named.get(mark)
    asked = fields({}, TEMPLATE if marks is THINK else GEMMA_TEMPLATE, reasoning=marks)
    whole = PartsReader(asked, mark).read(text, ended=True)
    reader, found = PartsReader(asked, mark), []
    for at in range(0, len(text), step):
        found.append(reader.read(text[at : at + step], ended=False))
    found.append(reader.read("", ended=True))
    joined = ["".join(part) for part in list(zip(*found, strict=True))[:2]]
    assert joined == [*whole[:2]]
    assert len("".join(joined).replace(" ", "").replace("\n", "")) >= len(
        text.replace(marks.open, "", 1).replace(marks.close, "", 1).replace(" ", "").replace("\n", "")
    ) - len(marks.label.strip())


def test_a_model_without_marks_has_no_reasoning():
    assert fields({}).reasoning
    assert not fields({}, "{{ messages[0].content }}").reasoning
    assert not fields({}, reasoning=None).reasoning
    assert not request_fields(
        {"model": MODEL, "prompt": "x"}, chat=False, model=MODEL, room=9, reasoning=THINK
    ).reasoning


EFFORT = "{% if reasoning_effort == 'high' %}x{% endif %}"
THINKS = "this model's chat template has no variable for it"


@pytest.mark.parametrize(
    ("body", "template", "found"),
    [
        ({"reasoning_effort": "none"}, TEMPLATE, {"enable_thinking": False}),
        ({"reasoning_effort": "low"}, TEMPLATE, {"enable_thinking": True}),
        ({"reasoning_effort": "high"}, EFFORT, {"reasoning_effort": "high"}),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"a": 1}},
            "{% if thinking %}",
            {"a": 1, "thinking": False},
        ),
        ({"reasoning_effort": "none"}, "{{ messages[0].content }}", {}),
        ({"reasoning_effort": None}, TEMPLATE, {}),
        ({"reasoning_effort": "none"}, OPENED, THINKS),
        ({"reasoning_effort": "high"}, "{{ messages[0].content }}", THINKS),
        ({"reasoning_effort": "much"}, TEMPLATE, "reasoning_effort='much' must be one of none, minimal"),
        ({"reasoning_effort": ["low"]}, TEMPLATE, "must be one of none, minimal"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            *(TEMPLATE, "and chat_template_kwargs, which give enable_thinking, differ: give one"),
        ),
    ],
)
def test_the_effort_is_a_variable_of_the_template(body, template, found):
    if isinstance(found, dict):
        assert fields(body, template).chat["chat_template_kwargs"] == found
        return
    with pytest.raises(Refusal) as error:
        fields(body, template)
    assert error.value.param == "reasoning_effort"
    assert found in error.value.message
    assert "\n" not in error.value.message


def test_earlier_reasoning_goes_to_the_template():
    said = {"role": "assistant", "content": "x", "reasoning_content": "hm"}
    assert fields({"messages": [said]}).messages == [said]
    asked = {"role": "user", "content": "x"}
    assert fields({"messages": [asked | {"reasoning_content": "hm"}]}).messages == [asked]
    with pytest.raises(Refusal, match=r"messages\[0\].reasoning_content=3 must be a string"):
        fields({"messages": [said | {"reasoning_content": 3}]})


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    """An AsyncLLM whose tokenizer has both marks."""
    folder = write_model(tmp_path_factory.mktemp("models") / "thinking")
    write_tokenizer(folder, marks=(OPEN, CLOSE))
    llm = AsyncLLM(str(folder), **OPTIONS)
    llm.llm.tokenizer.chat_template = TEMPLATE
    yield llm
    llm.shutdown()


@pytest.fixture
def server(thinking):
    running = Running(thinking)
    yield running
    running.stop()


def test_a_form_comes_after_the_reasoning(server):
    """A bias makes the marks likely, so that outputs with and without reasoning occur."""
    opened, closed = server.llm.llm.tokenizer.convert_tokens_to_ids([OPEN, CLOSE])
    bias = {str(opened): 4, str(closed): 6}
    asked = CHAT | {"response_format": FORMAT, "max_tokens": 200, "logit_bias": bias, "seed": 1, "n": 4}
    client = server.client()
    choices = client.chat.completions.create(**asked).choices
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices
    thoughts = [getattr(choice.message, "reasoning_content", None) for choice in choices]
    assert any(thoughts)
    assert not all(thoughts)
    for choice, same, thought in zip(choices, streamed, thoughts, strict=True):
        assert choice.finish_reason == "stop"
        assert Item.model_validate_json(choice.message.content)
        assert choice.message.content == same.message.content
        assert getattr(same.message, "reasoning_content", None) == thought
    direct = client.chat.completions.create(**asked, reasoning_effort="none").choices
    assert not any(getattr(choice.message, "reasoning_content", None) for choice in direct)
    assert all(Item.model_validate_json(choice.message.content) for choice in direct)


def test_a_prompt_that_opens_reasoning(server, monkeypatch):
    """The output begins inside of reasoning, which the form and a forced call come after."""
    monkeypatch.setattr(server.llm.llm.tokenizer, "chat_template", OPENED)
    closed = server.llm.llm.tokenizer.convert_tokens_to_ids(CLOSE)
    asked = CHAT | {"max_tokens": 200, "logit_bias": {str(closed): 5}, "seed": 2}
    message = server.client().chat.completions.create(**asked, response_format=FORMAT).choices[0].message
    assert message.reasoning_content
    assert Item.model_validate_json(message.content)
    monkeypatch.setattr(
        server.llm.llm.tokenizer,
        "chat_template",
        OPENED + TEMPLATE.split("endfor %}")[1].split("{% if enable")[0] + OPEN,
    )
    asked |= {"tools": TOOLS[1:], "tool_choice": "required", "parallel_tool_calls": False}
    message = server.client().chat.completions.create(**asked).choices[0].message
    assert message.reasoning_content
    assert json.loads(message.tool_calls[0].function.arguments)["colour"] in ("red", "blue")
    monkeypatch.setattr(server.llm.llm.tokenizer, "chat_template", OPENED)
    with pytest.raises(openai.BadRequestError, match="has no variable for it"):
        server.client().chat.completions.create(**CHAT, reasoning_effort="none")


def test_reasoning_may_stay_in_the_content(thinking, monkeypatch):
    monkeypatch.setattr(thinking.llm.tokenizer, "chat_template", OPENED)
    plain = Running(thinking, separate_reasoning=False)
    closed = thinking.llm.tokenizer.convert_tokens_to_ids(CLOSE)
    asked = CHAT | {"max_tokens": 4, "logit_bias": {str(closed): 100}}
    message = plain.client().chat.completions.create(**asked).choices[0].message
    assert message.content == CLOSE * 4
    assert not hasattr(message, "reasoning_content")
    plain.stop()


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """A server whose tokenizer has Gemma 4's marks as special tokens, inside of calls too."""
    folder = write_model(tmp_path_factory.mktemp("models") / "gemma")
    marks = (CHANNEL.open, CHANNEL.close, "<|tool_call>", "<tool_call|>", '<|"|>')
    write_tokenizer(folder, marks=marks, special=True)
    llm = AsyncLLM(str(folder), **OPTIONS)
    llm.llm.tokenizer.chat_template = GEMMA_TEMPLATE
    running = Running(llm)
    yield running
    running.stop()
    llm.shutdown()


@pytest.mark.parametrize("thinks", [False, True])
def test_special_marks_of_reasoning_and_calls(gemma, thinks):
    """Calls are guaranteed with and without reasoning before them, whole and streamed, and no mark is in a text."""
    tokenizer = gemma.llm.llm.tokenizer
    assert marks_of(tokenizer) is CHANNEL
    opened, closed, quote = tokenizer.convert_tokens_to_ids([CHANNEL.open, CHANNEL.close, '<|"|>'])
    bias = {str(opened): 5, str(closed): 7, str(quote): 3}
    asked = CHAT | {"max_tokens": 250, "logit_bias": bias, "seed": 1, "n": 4, "parallel_tool_calls": False}
    asked |= {"tools": TOOLS[1:], "tool_choice": "required", "reasoning_effort": "high" if thinks else "none"}
    client = gemma.client()
    choices = client.chat.completions.create(**asked).choices
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices
    thoughts = []
    for choice, same in zip(choices, streamed, strict=True):
        (call,), (again,) = choice.message.tool_calls, same.message.tool_calls
        assert json.loads(call.function.arguments)["colour"] in ("red", "blue")
        assert again.function.arguments == call.function.arguments
        thought = getattr(choice.message, "reasoning_content", None)
        assert getattr(same.message, "reasoning_content", None) == thought
        thoughts.append(thought)
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert CHANNEL.close not in (thought or "")
    assert any(thoughts) == thinks


def test_strings_of_calls_keep_what_they_hold(gemma):
    """The quotes of strings are special tokens. A text of any kind may stand between them."""
    quote = gemma.llm.llm.tokenizer.convert_tokens_to_ids('<|"|>')
    asked = CHAT | {"max_tokens": 300, "logit_bias": {str(quote): 4}, "tool_choice": "required", "n": 3, "seed": 5}
    say = tool("say", {"text": {"type": "string"}})
    for choice in gemma.client().chat.completions.create(**asked, tools=[say], parallel_tool_calls=False).choices:
        (call,) = choice.message.tool_calls
        assert [*json.loads(call.function.arguments)] == ["text"]


def test_strict_tools_may_be_called_behind_special_marks(gemma):
    """The mark of a call is made likely, or is left out. The text before it is content."""
    mark = gemma.llm.llm.tokenizer.convert_tokens_to_ids("<|tool_call>")
    asked = CHAT | {"max_tokens": 60, "seed": 3, "parallel_tool_calls": False, "reasoning_effort": "none"}
    asked |= {"tools": [tool("dog", {"colour": {"enum": ["red", "blue"]}}, strict=True)]}
    client = gemma.client()
    (choice,) = client.chat.completions.create(**asked, logit_bias={str(mark): 100}).choices
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments)["colour"] in ("red", "blue")
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (choice,) = client.chat.completions.create(**asked, logit_bias={str(mark): -100}).choices
    assert choice.message.tool_calls is None
    assert choice.message.content
