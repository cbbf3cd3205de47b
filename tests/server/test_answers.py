"""What the real client of OpenAI gets is what the library says."""

from __future__ import annotations

import json
import urllib.request

import openai
import pytest

from jaxspec import SamplingParams
from tests.api.async_llm.calls import PROMPTS
from tests.server.running import GREEDY, MODEL, posted

PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count the words."}]
SEEDED = {"seed": 3, "max_tokens": 12, "extra_body": {"ignore_eos": True}}


def joined(chunks, index=0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(c.delta.content or "" if hasattr(c, "delta") else c.text for c in choices)


def test_texts_are_completed(server, expected):
    wanted = expected.generate(PROMPTS[:3], PARAMS)
    answer = server.client().completions.create(prompt=PROMPTS[:3], **GREEDY)
    assert [choice.text for choice in answer.choices] == [output.outputs[0].text for output in wanted]
    assert [(choice.index, choice.finish_reason) for choice in answer.choices] == [(i, "length") for i in range(3)]
    assert answer.usage.prompt_tokens == sum(len(output.prompt_token_ids) for output in wanted)
    assert (answer.usage.completion_tokens, answer.model, answer.object) == (72, MODEL, "text_completion")
    by_ids = server.client().completions.create(prompt=[w.prompt_token_ids for w in wanted[:2]], **GREEDY)
    assert [choice.text for choice in by_ids.choices] == [choice.text for choice in answer.choices[:2]]


def test_texts_are_streamed(server):
    client, asked = server.client(), {"prompt": PROMPTS[:2], "n": 2, "model": MODEL, "logprobs": 2, **SEEDED}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert [joined(chunks, i) for i in range(4)] == [choice.text for choice in whole.choices]
    assert len({chunk.id for chunk in chunks}) == 1
    *pieces, last = chunks
    assert (last.usage, last.choices) == (whole.usage, [])
    assert all(piece.usage is None for piece in pieces)
    for index, choice in enumerate(whole.choices):
        parts = [c for piece in pieces for c in piece.choices if c.index == index]
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            there = [x for part in parts if part.logprobs for x in getattr(part.logprobs, name)]
            about = [x if isinstance(x, str) else pytest.approx(x) for x in getattr(choice.logprobs, name)]
            assert there == about, name


def test_chats_are_answered(server, expected):
    (wanted,) = expected.chat(TALK, PARAMS)
    client = server.client()
    answer = client.chat.completions.create(messages=TALK, **GREEDY)
    assert answer.choices[0].message.content == wanted.outputs[0].text
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == len(wanted.prompt_token_ids)
    chunks = list(client.chat.completions.create(messages=TALK, stream=True, n=2, **GREEDY))
    assert [joined(chunks, i) for i in range(2)] == [wanted.outputs[0].text] * 2
    assert [chunk.choices[0].delta.role for chunk in chunks[:3]] == ["assistant", "assistant", None]
    parts = [{"type": "text", "text": text} for text in ("Count", "the words.")]
    again = [TALK[0] | {"role": "developer", "type": "text"}, {"role": "user", "content": parts}]
    joined_ones = [TALK[0], {"role": "user", "content": "Count\nthe words."}]
    (other,) = expected.chat(joined_ones, PARAMS)
    assert client.chat.completions.create(messages=again, **GREEDY).choices[0].message.content == other.outputs[0].text
    # An answer as the client has it goes back in the next turn, with all its empty fields.
    talk = [*TALK, answer.choices[0].message.model_dump(), {"role": "user", "content": "Again."}]
    assert client.chat.completions.create(messages=talk, **GREEDY).choices[0].finish_reason == "length"


def test_a_chat_without_a_length_takes_the_room_there_is(server):
    answer = server.client().chat.completions.create(messages=TALK, model=MODEL, extra_body={"ignore_eos": True})
    assert answer.usage.total_tokens == server.client().models.retrieve(MODEL).max_model_len == 512


def test_log_probabilities_are_the_librarys(server, expected):
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=3, prompt_logprobs=1)
    (wanted,) = expected.generate(PROMPTS[0], params)
    extra = {"ignore_eos": True, "prompt_logprobs": 1}
    asked = {"model": MODEL, "temperature": 0, "max_tokens": 24, "extra_body": extra}
    text = server.client().completions.create(prompt=PROMPTS[0], logprobs=3, **asked).choices[0]
    rows = wanted.outputs[0].logprobs
    chosen = [row[i] for i, row in zip(wanted.outputs[0].token_ids, rows, strict=True)]
    assert text.logprobs.token_logprobs == pytest.approx([entry.logprob for entry in chosen], abs=1e-4)
    assert text.logprobs.tokens == [entry.decoded_token for entry in chosen]
    assert text.prompt_logprobs[0] is None
    for there, row in zip(text.prompt_logprobs[1:], wanted.prompt_logprobs[1:], strict=True):
        assert {int(i): e["rank"] for i, e in there.items()} == {i: entry.rank for i, entry in row.items()}
    (talked,) = expected.chat(TALK, params)
    for top in (0, 3):
        chat = server.client().chat.completions.create(messages=TALK, logprobs=True, top_logprobs=top, **asked)
        assert len(chat.prompt_logprobs) == len(talked.prompt_token_ids)  # of all choices, as vLLM has it
        assert not hasattr(chat.choices[0], "prompt_logprobs")
        content = chat.choices[0].logprobs.content
        assert [len(entry.top_logprobs) for entry in content] == [top] * 24
        for entry, row in zip(content, talked.outputs[0].logprobs, strict=True):
            best = sorted(row.values(), key=lambda e: e.rank)[:top]
            assert [t.logprob for t in entry.top_logprobs] == pytest.approx([e.logprob for e in best], abs=1e-4)
        assert content[0].bytes in (None, list(content[0].token.encode()))


def test_tokens_are_counted_in_every_event(server):
    """As guidellm asks for it."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    for chat in (False, True):
        create = server.client().chat.completions.create if chat else server.client().completions.create
        asked = {"messages": TALK} if chat else {"prompt": PROMPTS[0]}
        chunks = list(create(**asked, **GREEDY, stream=True, stream_options=options))
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[0] < counts[-1] == 24
        assert len({chunk.usage.prompt_tokens for chunk in chunks}) == 1


def test_what_a_template_is_told(server, expected):
    told = {"how": "fox "}
    (wanted,) = expected.chat(TALK, PARAMS, chat_template_kwargs=told)
    (plain,) = expected.chat(TALK, PARAMS)
    assert wanted.prompt.startswith("<s>fox ")
    assert wanted.outputs[0].text != plain.outputs[0].text
    create = server.client().chat.completions.create
    extra = {"extra_body": {"ignore_eos": True, "chat_template_kwargs": told}}
    answer = create(messages=TALK, **GREEDY | extra)
    assert answer.choices[0].message.content == wanted.outputs[0].text
    for wrong, words in (({"tokenize": True}, "'tokenize' is"), ({"thinking": 1}, "'thinking' is"), (3, "=3 must")):
        with pytest.raises(openai.BadRequestError, match=words) as refused:
            create(messages=TALK, **GREEDY | {"extra_body": {"chat_template_kwargs": wrong}})
        assert refused.value.param == "chat_template_kwargs"


@pytest.mark.parametrize("given", [{"continue_final_message": True}, {"add_generation_prompt": False}])
def test_a_chats_last_message_is_continued(server, expected, given):
    """The output is what follows, of the role that the last message has; so in vLLM."""
    (wanted,) = expected.chat(TALK, PARAMS, **given)
    assert not wanted.prompt.endswith("<bot>")
    asked = {"messages": TALK} | GREEDY | {"extra_body": {"ignore_eos": True, **given}}
    create = server.client().chat.completions.create
    message = create(**asked).choices[0].message
    assert (message.content, message.role) == (wanted.outputs[0].text, "user")
    chunks = list(create(**asked, stream=True))
    assert (joined(chunks), chunks[0].choices[0].delta.role) == (wanted.outputs[0].text, "user")


def test_the_models_own_end_is_no_stop_reason(server):
    """As in vLLM: null, but for ids that were asked for."""
    for asked, reason in (({}, None), ({"stop_token_ids": [2]}, 2)):
        extra = {"extra_body": {"logit_bias": {"2": 100}, **asked}}
        choice = server.client().completions.create(prompt="x", **GREEDY | extra).choices[0]
        assert (choice.finish_reason, choice.stop_reason) == ("stop", reason)


@pytest.mark.parametrize("stream", [False, True])
def test_what_ends_a_text_is_told(server, expected, stream):
    whole = expected.generate(PROMPTS[0], PARAMS)[0].outputs[0].text
    stop = whole[5:8]
    answer = server.client().completions.create(prompt=PROMPTS[0], stop=[stop, "never"], stream=stream, **GREEDY)
    chunks = list(answer) if stream else [answer]
    assert joined(chunks) == whole.split(stop)[0]
    last = chunks[-1].choices[0]
    assert (last.finish_reason, last.stop_reason) == ("stop", stop)


def test_sampling_fields_reach_the_engine(server, expected):
    """Of OpenAI and of vLLM, by a text that each of them changes."""
    fields = {"logit_bias": {"70": 5.0}, "presence_penalty": 1.5, "frequency_penalty": 0.5, "top_p": 0.9, "n": 2}
    extra = {"top_k": 30, "min_p": 0.01, "repetition_penalty": 1.3, "min_tokens": 4, "bad_words": ["dog"]}
    extra |= {"stop_token_ids": [71], "skip_special_tokens": False, "num_speculative_tokens": 0}
    (wanted,) = expected.generate(PROMPTS[1], SamplingParams(seed=5, max_tokens=16, **fields, **extra))
    answer = server.client().completions.create(
        model=MODEL, prompt=PROMPTS[1], seed=5, max_tokens=16, extra_body=extra, **fields
    )
    assert [choice.text for choice in answer.choices] == [output.text for output in wanted.outputs]


def test_models_health_and_metrics(server):
    client = server.client()
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "jaxspec"
    with urllib.request.urlopen(server.url + "/health") as answer:
        assert (answer.status, json.loads(answer.read())) == (200, {"status": "ok"})
    with urllib.request.urlopen(server.url + "/metrics") as answer:
        text = answer.read().decode()
        assert "text/plain" in answer.headers["content-type"]
    assert "jaxspec_requests_total" in text
    assert f"jaxspec_free_pages {float(server.llm.llm.engine.num_pages)}" in text


def test_heads_are_those_of_the_answers(server):
    """HEAD is GET without the body, as probes ask."""
    for path in ("/health", "/v1/models", "/v1/models/", f"/v1/models/{MODEL}", "/metrics"):
        ask = lambda method, path=path: server.raw(
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
        ).partition(b"\r\n\r\n")
        (head, _, nothing), (wanted, _, body) = ask("HEAD"), ask("GET")
        lines = lambda head: [line for line in head.splitlines() if not line.startswith((b"date", b"content-length"))]
        assert lines(head) == lines(wanted), path
        assert head.startswith(b"HTTP/1.1 200")
        assert (nothing, bool(body)) == (b"", True)


def test_models_with_a_slash(server):
    asked = [urllib.request.urlopen(f"{server.url}/v1/models{end}") for end in ("", "/")]
    plain, slash = [json.loads(answer.read()) for answer in asked]
    assert plain == slash
    assert plain["data"][0]["id"] == MODEL


def test_what_goes_over_the_wire(server):
    """Events, as other clients than OpenAI's read them."""
    asked = {"model": MODEL, "messages": TALK, "max_tokens": 3, "stream": True}
    head, _, body = server.raw(posted(asked, "/v1/chat/completions")).decode().partition("\r\n\r\n")
    assert "200 OK" in head
    assert "content-type: text/event-stream" in head
    events = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert all(json.loads(event)["object"] == "chat.completion.chunk" for event in events[:-1])
    assert json.loads(events[0])["choices"][0]["finish_reason"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_unicodes_line_ends_are_escaped(server, stream):
    """Clients split events where Python's str.splitlines does. Each of the character's bytes is a token here."""
    ids = server.llm.llm.tokenizer.encode("\u2028", add_special_tokens=False)
    asked = {"model": MODEL, "prompt": "x", "max_tokens": 400, "allowed_token_ids": ids, "temperature": 1e6, "seed": 1}
    body = server.raw(posted(asked | {"stream": stream})).partition(b"\r\n\r\n")[2].decode()
    lines = [text for line in body.splitlines() if (text := line.removeprefix("data: ")).startswith("{")]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    assert "\u2028" in "".join(choice["text"] for choice in choices)


def test_unicodes_line_ends_are_escaped_in_errors(server):
    body = server.raw(posted({"\u2028\u2029\u0085": 1})).partition(b"\r\n\r\n")[2].decode()
    (line,) = body.splitlines()
    assert json.loads(line)["error"]["param"] == "\u2028\u2029\u0085"
