"""vLLM's /tokenize and /detokenize: ids are those that requests for text are given, within the same limits."""

from __future__ import annotations

import contextlib
import json
import threading

import pytest

from jaxspec.server import tokenization
from jaxspec.server.offload import PROMPTS
from tests.server.running import MODEL, posted
from tests.server.test_bodies import answered
from tests.server.test_request_log import logged
from tests.server.test_turns import CALLS, TEXT, watched

TALK = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One"}]


def asked(server, path: str, **body):
    head, _, answer = server.raw(posted(body, path)).partition(b"\r\n\r\n")
    assert b"200 OK" in head, answer
    return json.loads(answer)


def test_texts_are_tokenised(server, expected):
    tokenizer, text = server.llm.llm.tokenizer, "The quick bröwn\u2028 fox<bot>"
    ids = tokenizer.encode(text)
    assert asked(server, "/tokenize", prompt=text) == {
        "count": len(ids),
        "max_model_len": server.client().models.retrieve(MODEL).max_model_len,
        "tokens": ids,
        "token_strs": None,
    }
    plain = asked(server, "/tokenize", model=MODEL, prompt=text, add_special_tokens=False, return_token_strs=True)
    assert plain["tokens"] == ids[1:]
    assert plain["token_strs"] == tokenizer.convert_ids_to_tokens(ids[1:])
    assert asked(server, "/detokenize", tokens=ids) == {"prompt": "<s>" + text}
    assert asked(server, "/detokenize", model=MODEL, tokens=[]) == {"prompt": ""}
    assert asked(server, "/tokenize", prompt="", add_special_tokens=False)["tokens"] == []


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"chat_template_kwargs": {"how": "fox "}},
    ],
)
def test_chats_are_tokenised_as_they_are_answered(server, expected, options):
    found = asked(server, "/tokenize", messages=TALK, **options)
    assert found["tokens"] == expected.render_chat(TALK, **options)["prompt_token_ids"]
    answer = server.client().chat.completions.create(
        model=MODEL, messages=TALK, max_completion_tokens=1, extra_body=options
    )
    assert answer.usage.prompt_tokens == found["count"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "message"),
    [
        ("/tokenize", {}, 400, "prompt", "prompt is missing"),
        ("/tokenize", {"prompt": ["x"]}, 400, "prompt", "prompt=['x'] must be a string"),
        ("/tokenize", {"prompt": [5, 6]}, 400, "prompt", "must be a string"),
        ("/tokenize", {"prompt": 3}, 400, "prompt", "must be a string"),
        ("/tokenize", {"prompt": "\ud800"}, 400, "prompt", "is not valid Unicode"),
        ("/tokenize", {"prompt": "x", "messages": TALK}, 400, "prompt", "unknown field 'prompt'"),
        ("/tokenize", {"prompt": "x", "temperature": 1}, 400, "temperature", "unknown field 'temperature'"),
        ("/tokenize", {"prompt": "x", "add_special_token": True}, 400, "add_special_token", "did you mean"),
        ("/tokenize", {"prompt": "x", "return_token_strs": 1}, 400, "return_token_strs", "must be True or False"),
        ("/tokenize", {"prompt": "x", "model": "gpt-5"}, 404, "model", "is not served here"),
        ("/tokenize", {"messages": []}, 400, "messages", "not empty"),
        ("/tokenize", {"messages": [{"role": "user", "content": "\ud800"}]}, 400, "messages", "Unicode"),
        (
            "/tokenize",
            {"messages": TALK, "chat_template_kwargs": {"x": 1}},
            *(400, "chat_template_kwargs", "'x' is not a variable"),
        ),
        ("/detokenize", {}, 400, "tokens", "tokens is missing"),
        ("/detokenize", {"tokens": "x"}, 400, "tokens", "must be a list of token ids"),
        ("/detokenize", {"tokens": [1, True]}, 400, "tokens", "must be a whole number"),
        ("/detokenize", {"tokens": [1, -1]}, 400, "tokens", "token id -1 is outside the vocabulary"),
        ("/detokenize", {"tokens": [10**9]}, 400, "tokens", "token id 1000000000 is outside the vocabulary"),
        ("/detokenize", {"tokens": [10**30]}, 400, "tokens", "is above 2147483647"),
        ("/detokenize", {"tokens": [1], "prompt": "x"}, 400, "prompt", "unknown field 'prompt'"),
        ("/detokenize", {"tokens": [1], "model": ["a"]}, 404, "model", "is not served here"),
    ],
)
def test_what_is_wrong_is_told_by_field(server, path, body, status, param, message):
    found, error = answered(server, posted(body, path))
    assert (found, error["param"]) == (status, param)
    assert message in error["message"]
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a " * 400_000, "return_token_strs": True}),
        ("/tokenize", {"messages": [{"role": "user", "content": "a " * 200}] * 1000}),
        ("/detokenize", {"tokens": [5] * 200_000}),
    ],
    ids=["text", "chat", "ids"],
)
def test_long_ones_are_worked_on_elsewhere(server, path, body):
    with watched(server) as turns:
        assert server.raw(posted(body, path)).startswith(b"HTTP/1.1 200")
    assert turns.most < CALLS
    assert turns.longest < TEXT


@contextlib.contextmanager
def long_prompts_wait():
    """The thread for long prompts has other work."""
    done = threading.Event()
    waiting = PROMPTS.submit(done.wait)
    try:
        yield
    finally:
        done.set()
        waiting.result()


def test_the_routes_are_guarded_and_limited(another, monkeypatch):
    guarded = another(api_key="secret")
    small = another(max_body_bytes=100)
    sent = {"/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": [5]}}
    for path, body in sent.items():
        assert answered(guarded, posted(body, path))[0] == 401
        assert b"200 OK" in guarded.raw(posted(body, path, Authorization="Bearer secret"))
        assert answered(small, posted(body | {"model": "x" * 100}, path))[0] == 413
        assert answered(small, posted(body, path, Host="evil.example"))[0] == 403
        small.gate.inside = small.gate.most
        try:
            status, error = answered(small, posted(body, path))
        finally:
            small.gate.inside = 0
        assert (status, error["type"]) == (429, "rate_limit_error")
    quick = another(request_timeout=0.01)
    monkeypatch.setattr(tokenization, "SHORT", 0)
    with long_prompts_wait():
        status, error = answered(quick, posted(sent["/detokenize"], "/detokenize"))
    assert (status, error["code"]) == (504, "request_timeout")


def test_the_request_log_has_them(another, monkeypatch):
    line = logged(another, monkeypatch, posted({"prompt": "secret"}, "/tokenize"))
    assert "POST '/tokenize' status=200 ended=done seconds=" in line
    assert "secret" not in line
