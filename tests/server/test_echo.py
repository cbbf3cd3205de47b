"""Prompts that completions echo, with and without log-probabilities, and prompts that are only scored."""

from __future__ import annotations

import json

import openai
import pytest

from jaxspec import SamplingParams
from jaxspec.api.prompts import PromptRequest
from jaxspec.server.echo import echo_of
from tests.api.async_llm.calls import PROMPTS
from tests.server.running import GREEDY, MODEL, posted
from tests.server.test_answers import joined
from tests.server.test_bodies import answered
from tests.support.vocabularies import ids_of, tokenizer_of

LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def near(values):
    return [x if x is None or isinstance(x, str) else pytest.approx(x, abs=1e-4) for x in values]


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_come_before_their_outputs(server, stream):
    """Each sample's; those of ids as their text."""
    client, ids = server.client(), server.llm.llm.tokenizer.encode(PROMPTS[1])
    asked = {"prompt": [PROMPTS[0], PROMPTS[1]], "n": 2, **GREEDY}
    plain = client.completions.create(**asked)
    answer = client.completions.create(**asked, echo=True, stream=stream)
    parts = list(answer) if stream else [answer]
    texts = [joined(parts, index) for index in range(4)]
    assert texts == [PROMPTS[i // 2] + choice.text for i, choice in enumerate(plain.choices)]
    if not stream:
        assert answer.usage == plain.usage
    by_ids = client.completions.create(**asked | {"prompt": [ids], "n": 1}, echo=True)
    assert by_ids.choices[0].text == "<s>" + texts[2]


@pytest.mark.parametrize(
    ("logprobs", "more"), [(2, {}), (0, {}), (1, {"prompt_logprobs": 3}), (3, {"prompt_logprobs": 0})]
)
def test_the_prompts_tokens_are_scored_as_the_library_scores_them(server, expected, logprobs, more):
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=logprobs, prompt_logprobs=logprobs)
    (wanted,) = expected.generate(PROMPTS[1], params)
    ids = [*wanted.prompt_token_ids, *wanted.outputs[0].token_ids]
    rows = [*wanted.prompt_logprobs[1:], *wanted.outputs[0].logprobs]
    extra = {"extra_body": {"ignore_eos": True, **more}}
    asked = {"prompt": PROMPTS[1], "echo": True, "logprobs": logprobs, **GREEDY, "max_tokens": 5, **extra}
    (choice,) = server.client().completions.create(**asked).choices
    found = choice.logprobs
    assert {len(getattr(found, name)) for name in LISTS} == {len(ids)}
    assert (found.tokens[0], found.token_logprobs[0], found.top_logprobs[0]) == ("<s>", None, None)
    assert found.token_logprobs[1:] == near(row[i].logprob for i, row in zip(ids[1:], rows, strict=True))
    assert [len(top) for top in found.top_logprobs[1:]] == [len(row) for row in rows]
    assert choice.text == PROMPTS[1] + wanted.outputs[0].text
    for token, start in zip(found.tokens[1:], found.text_offset[1:], strict=True):
        assert choice.text[start : start + len(token)] == token
    assert hasattr(choice, "prompt_logprobs") == bool(more)
    for row in choice.prompt_logprobs[1:] if more else ():
        assert more["prompt_logprobs"] <= len(row) <= more["prompt_logprobs"] + 1


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_streams_have_what_whole_answers_have(server, max_tokens):
    asked = {"prompt": PROMPTS[:2], "n": 2, "echo": True, "logprobs": 2, **GREEDY, "max_tokens": max_tokens}
    whole = server.client().completions.create(**asked)
    chunks = list(server.client().completions.create(**asked, stream=True))
    for choice in whole.choices:
        parts = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        for name in LISTS:
            streamed = [x for part in parts for x in getattr(part.logprobs, name)]
            assert streamed == near(getattr(choice.logprobs, name)), name
        assert parts[-1].finish_reason == choice.finish_reason == "length"


def test_prompts_are_scored_without_output(server):
    """As by OpenAI's server: only the prompt, in no launch."""
    client, engine = server.client(), server.llm.llm.engine
    asked = GREEDY | {"max_tokens": 0}
    one = client.completions.create(prompt=PROMPTS[0], echo=True, logprobs=1, **GREEDY | {"max_tokens": 1})
    launched = engine.timing.decode_seconds
    none = client.completions.create(prompt=PROMPTS[0], echo=True, logprobs=1, **asked)
    assert (none.choices[0].text, none.usage.completion_tokens) == (PROMPTS[0], 0)
    assert none.choices[0].finish_reason == "length"
    for name in LISTS:
        assert getattr(none.choices[0].logprobs, name) == near(getattr(one.choices[0].logprobs, name)[:-1])
    assert client.completions.create(prompt=PROMPTS, echo=True, **asked).choices[2].text == PROMPTS[2]
    asked["extra_body"] = {"prompt_logprobs": 1}
    scored = client.completions.create(prompt=PROMPTS[0], **asked).choices[0]
    assert (scored.text, len(scored.prompt_logprobs)) == ("", one.usage.prompt_tokens)
    talk = [{"role": "user", "content": "x"}]
    chat = client.chat.completions.create(messages=talk, **asked)
    assert (chat.choices[0].message.content, len(chat.prompt_logprobs)) == ("", chat.usage.prompt_tokens)
    assert engine.timing.decode_seconds == launched
    with pytest.raises(openai.BadRequestError, match="max_tokens=0 is below 1"):
        client.completions.create(prompt="x", **GREEDY | {"max_tokens": 0})


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_the_log_likelihood_of_continuations(server, expected, max_tokens):
    """The request of lm-eval's local-completions, and how it reads the answer."""
    tokenizer = server.llm.llm.tokenizer
    context = tokenizer.encode("The quick")
    prompts = [context + tokenizer.encode(end, add_special_tokens=False) for end in (" brown fox", " dog")]
    asked = {"model": MODEL, "prompt": prompts, "temperature": 0, "max_tokens": max_tokens, "logprobs": 1}
    sent = posted(asked | {"seed": 1234, "echo": True})
    answer = json.loads(server.raw(sent).partition(b"\r\n\r\n")[2])
    for choice, ids in zip(answer["choices"], prompts, strict=True):
        found = choice["logprobs"]
        part = slice(len(context), -1 if max_tokens else None)
        (wanted,) = expected.generate([ids], SamplingParams(max_tokens=0, prompt_logprobs=1))
        rows = [(row[i], row) for i, row in zip(ids, wanted.prompt_logprobs, strict=True) if row][len(context) - 1 :]
        assert sum(found["token_logprobs"][part]) == pytest.approx(sum(entry.logprob for entry, _ in rows), abs=1e-3)
        greedy = [
            logprob == max(top.values())
            for logprob, top in zip(found["token_logprobs"][part], found["top_logprobs"][part], strict=True)
        ]
        assert greedy == [entry.rank == 1 for entry, _ in rows]


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_counts_among_the_log_probabilities(another, stream):
    asked = {"model": MODEL, "prompt": [[5] * 100], "n": 3, "logprobs": 1, "echo": True, "max_tokens": 0}
    server = another(max_answer_logprobs=599)
    status, error = answered(server, posted(asked | {"stream": stream}))
    assert (status, error["param"]) == (400, "logprobs")
    assert "the answer could hold 600 log-probabilities" in error["message"]
    server = another(max_answer_logprobs=600)
    assert b"200 OK" in server.raw(posted(asked | {"stream": stream}))
    assert b"200 OK" in server.raw(posted({k: v for k, v in asked.items() if k != "logprobs"} | {"n": 4}))


@pytest.mark.parametrize("kind", ["byte-level", "byte fallback", "byte fallback, prefix"])
@pytest.mark.parametrize("given", [False, True])
def test_offsets_are_those_in_the_text(kind, given):
    """Whether the client gave the text, which lacks tokens that the tokenizer adds, or ids."""
    tokenizer, params = tokenizer_of(kind), SamplingParams()
    ids = ids_of(kind, "<s>", " true", "dog", b"\xc3", b"\xa9", " the")
    text = "dogé the"
    shown = " true" + text if given else None
    echo = echo_of(tokenizer, PromptRequest(0, shown, ids, params))
    assert echo.text == (shown or tokenizer.decode(ids))
    assert echo.text.endswith(text)
    assert echo.tokens[2:] == ["dog", "", "é", " the"]
    at = len(echo.text) - len(text)
    assert echo.offsets[2:] == [at, at + 3, at + 3, at + 4]
    assert echo.offsets[:2] == [0, 0 if given else echo.text.index(" true")]
    other = echo_of(tokenizer, PromptRequest(0, "normalised", ids, params))
    assert other.text == "normalised"
    assert all(0 <= offset <= len("normalised") for offset in other.offsets)
