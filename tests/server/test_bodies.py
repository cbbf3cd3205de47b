"""Broken, wrong and hostile requests: each is answered in OpenAI's form, and nobody else notices."""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import random
import tracemalloc
import zlib

import openai
import pytest

from jaxspec import AsyncLLM
from jaxspec.server import body as bodies
from jaxspec.server.refusal import Refusal
from tests.api.async_llm.calls import OPTIONS
from tests.server.running import GREEDY, MODEL, Running, connected, posted, until_closed

ASKED = {"model": MODEL, "prompt": "x", "max_tokens": 2}
# Without the time, which would be part of some tests' names: each worker has to find the same ones.
zipped = functools.partial(gzip.compress, mtime=0)


def answered(server, sent: bytes, **options) -> tuple[int, dict]:
    """(status, the error) of what these bytes get."""
    head, _, body = server.raw(sent, **options).partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"]
    return int(head.split()[1]), error


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is not JSON"),
        (b"{", "the body is not JSON"),
        (b"\xff\xfe\xfa", "the body is not JSON"),
        (b'{"model": "tiny", "prompt": "x"} trailing', "the body is not JSON"),
        (b"[1]", "the body must be a JSON object"),
        (b"null", "the body must be a JSON object"),
        (b'{"temperature": NaN}', "the body holds NaN, which is not a JSON number"),
        (b'{"temperature": -Infinity}', "the body holds -Infinity"),
        (b'{"metadata": {"a": 1e999}}', "the body holds 1e999, which is too large for a number"),
        (b'{"model": "tiny", "prompt": "x", "temperature": 1e999}', "the body holds 1e999"),
        (b'{"seed": ' + b"9" * 10_000 + b"}", "the body is not JSON"),
        (b'{"n": 1, "n": 2}', "the body has 'n' twice in one object"),
        (b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "the body is nested too deeply"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "the body is nested too deeply"),
        (b'{"model": "tiny", "prompt": [' + b"[" * 500 + b"]" * 500 + b"]}", "token id"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', "is not valid Unicode"),
        (b'{"model": "tiny\\ud800", "prompt": "x"}', "is not served here"),
        (b'{"\\ud800": 1}', "unknown field"),
        (b'{"model": "tiny", "prompt": "x", "bad_words": ["\\ud800"]}', "is not valid Unicode"),
        (b'{"model": "tiny", "prompt": [1, true]}', "must be a whole number"),
        (b'{"model": "tiny", "prompt": ["x", [1, 999]]}', "token id 999 is outside the vocabulary"),
        (b'{"model": "tiny", "prompt": ["x", ""]}', None),  # <s> is put in front
        (b'{"model": "tiny", "prompt": [[]]}', "prompt is empty"),
    ],
)
def test_bodies_that_are_wrong(server, body, message):
    if message is None:
        assert b"200 OK" in server.raw(posted(body))
        return
    status, error = answered(server, posted(body))
    assert status == (404 if "served" in message else 400)
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"


def test_a_message_that_no_tokenizer_reads(server):
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}'
    status, error = answered(server, posted(body, "/v1/chat/completions"))
    assert (status, error["param"]) == (400, "messages")
    assert "is not valid Unicode" in error["message"]


def test_bodies_that_are_too_long(another):
    server = another(max_body_bytes=1000)
    long = json.dumps(ASKED | {"prompt": "x" * 2000}).encode()
    chunk = b"%x\r\n%s\r\n0\r\n\r\n" % (len(long), long)
    chunked = posted(long, Content_Length="", Transfer_Encoding="chunked").removesuffix(long) + chunk
    for sent in (posted(long), chunked, posted(long, Content_Length="1" + "0" * 15)):
        status, error = answered(server, sent)
        assert (status, error["message"]) == (
            413,
            "the body is longer than 1000 bytes: send less, or raise --max-body-bytes",
        )
    fits = json.dumps(ASKED).encode()
    chunk = b"%x\r\n%s\r\n0\r\n\r\n" % (len(fits), fits)
    sent = posted(fits, Content_Length="", Transfer_Encoding="chunked").removesuffix(fits) + chunk
    assert b"200 OK" in server.raw(sent)


@pytest.mark.parametrize("length", ["-1", "ten", "1e3", "5, 6"])
def test_lengths_that_are_none(server, length):
    assert b" 400 " in server.raw(posted(ASKED, Content_Length=length)).partition(b"\r\n")[0]


def test_a_body_that_never_comes(another):
    """Of a client that waits, and of one that has hung up."""
    server = another(request_timeout=0.3)
    status, error = answered(server, posted(b"{", Content_Length="100"))
    assert (status, error["message"]) == (408, "the body did not arrive within 0.3 seconds")
    server.raw(posted(b"{", Content_Length="100"), half=True)


@pytest.mark.parametrize(
    ("coding", "encode"),
    [
        ("gzip", gzip.compress),
        ("x-gzip", gzip.compress),
        ("GZip", gzip.compress),
        ("deflate", zlib.compress),
        ("identity", bytes),
    ],
)
def test_encoded_bodies(server, coding, encode):
    body = json.dumps(ASKED).encode()
    assert b"200 OK" in server.raw(posted(encode(body), Content_Encoding=coding))
    status, error = answered(server, posted(encode(b"{"), Content_Encoding=coding))
    assert (status, error["message"][:20]) == (400, "the body is not JSON")


ZIPPED = zipped(json.dumps(ASKED).encode())


@pytest.mark.parametrize(
    ("coding", "body", "status", "message"),
    [
        ("gzip", ASKED, 400, "the body is not gzip, which its content-encoding names"),
        ("deflate", ZIPPED, 400, "the body is not deflate, which its content-encoding names"),
        ("gzip", b"", 400, "the body ends before the end of its gzip data"),
        ("gzip", ZIPPED[:-3], 400, "the body ends before the end of its gzip data"),
        ("gzip", ZIPPED[:-8] + bytes(8), 400, "the body is not gzip, which its content-encoding names"),
        ("gzip", ZIPPED + b"x", 400, "the body goes on after the end of its gzip data"),
        ("gzip", ZIPPED * 2, 400, "the body goes on after the end of its gzip data"),
        ("", ZIPPED, 400, "the body is not JSON"),
        ("br", ZIPPED, 415, "content-encoding 'br' must be gzip, deflate or none"),
        ("gzip, gzip", zipped(ZIPPED), 415, "content-encoding 'gzip, gzip' must be gzip, deflate or none"),
        ("zip" * 100, ZIPPED, 415, "content-encoding 'zipzip"),
    ],
)
def test_encoded_bodies_that_are_wrong(server, coding, body, status, message):
    found, error = answered(server, posted(body, Content_Encoding=coding))
    assert found == status
    assert error["message"].startswith(message)
    if status == 415:
        assert b"accept-encoding: gzip, deflate" in server.raw(posted(body, Content_Encoding=coding)).lower()


def test_an_encoded_body_has_the_limit_of_a_plain_one(another):
    """It is not decoded any further."""
    server = another(max_body_bytes=1000)
    exact = json.dumps(ASKED).encode().ljust(1000)
    assert b"200 OK" in server.raw(posted(zipped(exact), Content_Encoding="gzip"))
    status, error = answered(server, posted(zipped(exact + b" "), Content_Encoding="gzip"))
    assert (status, error["message"][:34]) == (413, "the body is longer than 1000 bytes")
    bomb = zlib.compress(bytes(50_000_000))
    tracemalloc.start()
    with pytest.raises(Refusal, match="longer than 1000 bytes"):
        bodies.decoded(bomb, "deflate", 1000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 500_000


def test_only_json_is_taken(server):
    """A page of another site may send text without asking, and json not."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        status, error = answered(server, posted(ASKED, Content_Type=kind))
        assert status == 415
        assert "must be application/json" in error["message"]
    assert b"200 OK" in server.raw(posted(ASKED, Content_Type="Application/JSON; charset=utf-8"))


def test_paths_and_methods(server):
    status, error = answered(server, posted(ASKED, "/v1/embeddings"))
    assert (status, error["type"]) == (404, "invalid_request_error")
    assert answered(server, b"GET /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")[0] == 405
    assert answered(server, b"GET /v1/models/other HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")[0] == 404
    assert b" 400 " in server.raw(b"\x16\x03\x01 this is no HTTP\r\n\r\n").partition(b"\r\n")[0]


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_has_a_status(server, stream):
    client = server.client()
    with pytest.raises(openai.BadRequestError) as stop:
        client.completions.create(prompt="a" * 3000, stream=stream, **GREEDY)
    assert (stop.value.code, stop.value.param) == ("context_length_exceeded", "prompt")
    assert "this model's maximum context length is 512 tokens" in stop.value.message  # words that LiteLLM looks for
    with pytest.raises(openai.BadRequestError, match="stop token id 999 is outside"):
        client.completions.create(model=MODEL, prompt="x", stream=stream, extra_body={"stop_token_ids": [999]})
    talk = [{"role": "user", "content": "a" * 3000}]
    with pytest.raises(openai.BadRequestError) as stop:
        client.chat.completions.create(messages=talk, model=MODEL, stream=stream)
    assert (stop.value.code, stop.value.param) == ("context_length_exceeded", "messages")


def test_a_prompt_that_the_pool_cannot_hold_is_a_context_overflow_too(folder):
    llm = AsyncLLM(folder, **OPTIONS | {"num_pages": 3})
    server = Running(llm)
    for path, asked in (
        ("/v1/completions", {"prompt": "a" * 100}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 100}]}),
    ):
        status, error = answered(server, posted(asked | {"model": MODEL}, path))
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert "this model's maximum context length is 48 tokens" in error["message"]
    server.stop()
    llm.shutdown()


def test_a_template_without_an_end(server, monkeypatch):
    """Others are served meanwhile, and chats afterwards."""
    with monkeypatch.context() as patch:
        loops = "{% for i in range(how) %}" * 3 + "{% endfor %}" * 3
        patch.setattr(server.llm.llm.tokenizer, "chat_template", loops)
        asked = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        with connected(server.port) as chat:
            chat.sendall(posted(asked | {"chat_template_kwargs": {"how": 100_000}}, "/v1/chat/completions"))
            assert b"200 OK" in server.raw(posted(ASKED))
            head, _, body = until_closed(chat).partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert (int(head.split()[1]), error["param"]) == (400, "messages")
    assert "took more than 2 seconds of processor time" in error["message"]
    assert b"200 OK" in server.raw(posted(asked, "/v1/chat/completions"))


def test_keys(another):
    server = another(api_key="unlock")
    for key in ("Bearer wrong", "", "Bearer unloc", "Basic unlock", "Bearer \u00fcnlock"):
        status, error = answered(server, posted(ASKED, Authorization=key))
        assert (status, error["code"]) == (401, "invalid_api_key")
    with pytest.raises(openai.AuthenticationError):
        server.client(api_key="wrong").models.list()
    assert b"200 OK" in server.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert server.client(api_key="unlock").completions.create(prompt="x", **GREEDY).usage.completion_tokens == 24


def test_more_samples_than_fit(another):
    server = another(max_queue=2)
    status, error = answered(server, posted(ASKED | {"n": 7}))
    assert (status, error["message"]) == (400, "7 samples in one request: the server takes at most 6")
    status, error = answered(server, posted(ASKED | {"n": 4, "prompt": ["x", "y"]}))
    assert (status, error["message"]) == (400, "8 samples in one request: the server takes at most 6")


def test_many_broken_requests_on_one_connection(server):
    """What is refused does not end the connection, where its body was read."""
    body = json.dumps({"top_kk": 1}).encode()
    with connected(server.port) as connection:
        for _ in range(20):
            connection.sendall(posted(body, Connection="keep-alive"))
            found = b""
            while not found.endswith(b"}}"):
                found += connection.recv(1 << 16)
            assert found.startswith(b"HTTP/1.1 400")
        connection.sendall(posted(ASKED))
        assert b"200 OK" in until_closed(connection)


WHOLE = [
    ASKED | {"stream": True, "n": 2, "logprobs": 1, "stop": ["a"], "logit_bias": {"5": 1}},
    ASKED | {"top_k": 3, "seed": 1, "prompt": [5, 6], "stream_options": None},
]
INSERTED = [b"{", b"}", b"[", b'"', b"\r\n", b"null", b"1e9", b"-", b"\\ud800", b"\xff", b"\0"]


@pytest.mark.thorough
@pytest.mark.parametrize("part", ["body", "all"])
def test_whatever_the_bytes_are_the_server_does_not_fail(server, part):
    """Requests that are damaged at random, in their bodies or anywhere: no answer is 500, and none stays behind."""
    rng, found = random.Random(part), set()

    def damaged(sent: bytes) -> bytes:
        data = bytearray(sent)
        for _ in range(rng.choice([1, 1, 2, 5])):
            at = rng.randrange(len(data))
            data[at : at + rng.choice([0, 0, 1, 4])] = rng.choice([*INSERTED, rng.randbytes(3), b""])
        return bytes(data)

    for _ in range(150):
        body = json.dumps(rng.choice(WHOLE)).encode()
        sent = posted(damaged(body)) if part == "body" else damaged(posted(body))
        with contextlib.suppress(TimeoutError):  # where it announces more than it sends
            found.add(server.raw(sent, half=rng.random() < 0.5, seconds=4)[:13])
    assert found <= {b"", *(b"HTTP/1.1 %d " % status for status in (200, 400, 403, 404, 405, 413, 415))}
    assert found >= {b"HTTP/1.1 200 ", b"HTTP/1.1 400 "}
