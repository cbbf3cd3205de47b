"""What the event loop does in one turn: little, whatever is asked, so that nobody waits for another's request.

Counted are the calls that Python makes in the loop's thread from one wait for events to the next, and the longest text
that is made there. A busy machine changes neither."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gzip
import json
import sys
import threading
import tracemalloc
from collections.abc import Iterator

import pytest

from jaxspec.api import chat_process
from jaxspec.api.outputs import CompletionOutput, Logprob, RequestOutput
from jaxspec.engine.metrics import SpecDecodeMetrics
from jaxspec.server import answers, generation
from jaxspec.server import body as bodies
from jaxspec.server.answers import ChatAnswer, TextAnswer
from jaxspec.server.echo import Echo
from jaxspec.server.fields import request_fields
from tests.api.async_llm.calls import SOON
from tests.server.running import MODEL, posted
from tests.server.test_bodies import answered
from tests.support.sizes import cases

CALLS = 30_000  # of a turn
TEXT = 5_000  # characters
# They return what another thread made, or a piece of source code, which a first call may read.
HANDED_OVER = {chat_process.__file__, concurrent.futures._base.__file__, "<frozen codecs>"}
ASKED = {"model": MODEL, "max_tokens": 2, "temperature": 0}
IDS = list(range(5, 105))
MANY = {"prompt": [IDS[i:] + IDS[:i] for i in range(60)]}
TALK = {"messages": [{"role": "user", "content": "a"}]}
LONG = {"max_tokens": 400, "ignore_eos": True}
# What is large about a request -> the request, which is served or refused.
KINDS = {
    "prompt_logprobs": MANY | {"prompt_logprobs": 20},
    "prompt_logprobs of samples": {"prompt": IDS * 4, "n": 16, "prompt_logprobs": 20},
    "an echo": MANY | {"echo": True, "logprobs": 20},
    "streams of an echo": MANY | {"echo": True, "logprobs": 20, "stream": True},
    "an echo of ids": {"prompt": IDS * 4, "n": 64, "echo": True},
    "logprobs": {"prompt": IDS, "logprobs": 20, "n": 8} | LONG,
    "logprobs of a chat": TALK | {"logprobs": True, "top_logprobs": 20, "n": 4} | LONG,
    "prompt_logprobs of a chat": {"messages": [{"role": "user", "content": "a b " * 90}], "prompt_logprobs": 20},
    "texts": {"prompt": IDS, "n": 8} | LONG,
    "many prompts": {"prompt": ["x"] * 260},
    "streams": {"prompt": ["x"] * 20, "n": 10, "stream": True, "logprobs": 20, "max_tokens": 20, "ignore_eos": True},
    "a chat's streams": TALK | {"n": 200, "stream": True},
    "bad words": MANY | {"bad_words": [chr(97 + i % 26) + chr(97 + i // 26) for i in range(128)]},
    "biases": MANY | {"logit_bias": {str(i): 1 for i in range(200)}},
    "messages": {"messages": [{"role": "user", "content": "a"}] * 20_000},
    "a long prompt": {"prompt": "a " * 400_000},
    "ids": {"prompt": [5] * 200_000},
    "objects": {"prompt": [[]] * 200_000},
}
# Another kind has each of their large parts.
ALIKE = (
    "prompt_logprobs of samples",
    "streams of an echo",
    "an echo of ids",
    "logprobs of a chat",
    "texts",
    "a chat's streams",
)


class Turns:
    """Counts what a thread does, as its profiler."""

    def __init__(self) -> None:
        self.calls = self.most = self.longest = 0

    def __call__(self, frame, event, argument) -> None:
        if event == "c_call" and argument.__name__ in ("poll", "select", "control"):  # the loop waits for events
            self.calls = 0
        elif event in ("call", "c_call"):
            self.calls += 1
            self.most = max(self.most, self.calls)
        elif event == "return" and isinstance(argument, str) and frame.f_code.co_filename not in HANDED_OVER:
            self.longest = max(self.longest, len(argument))


@contextlib.contextmanager
def watched(server) -> Iterator[Turns]:
    def install(profiler: Turns | None) -> None:
        done = threading.Event()
        server.loop.call_soon_threadsafe(lambda: (sys.setprofile(profiler), done.set()))
        assert done.wait(SOON)

    turns = Turns()
    install(turns)
    try:
        yield turns
    finally:
        install(None)


@cases("kind", KINDS, quick=[kind for kind in KINDS if kind not in ALIKE])
def test_turns_are_short(server, kind):
    asked = KINDS[kind]
    path = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
    with watched(server) as turns:
        found = server.raw(posted(ASKED | asked, path))
    assert found.startswith((b"HTTP/1.1 200", b"HTTP/1.1 400"))
    assert turns.most < CALLS
    assert turns.longest < TEXT


def test_large_pieces_of_streams_are_written_elsewhere(server, monkeypatch):
    monkeypatch.setattr(generation, "LARGE_ANSWER", 10)
    written, threads = answers.written, []
    spy = lambda document: threads.append(threading.current_thread().name) or written(document)
    monkeypatch.setattr(answers, "written", spy)
    asked = ASKED | {"prompt": "x", "stream": True, "logprobs": 20, "max_tokens": 20, "ignore_eos": True}
    assert b"[DONE]" in server.raw(posted(asked))
    assert threads
    assert all(name.startswith("jaxspec-server") for name in threads)


@pytest.mark.parametrize("coding", ["", "gzip"])
def test_large_bodies_are_read_elsewhere(server, monkeypatch, coding):
    """So are short ones that were compressed: nobody knows how long they become."""
    parsed, threads = bodies.parsed, []
    spy = lambda body: threads.append(threading.current_thread().name) or parsed(body)
    monkeypatch.setattr(bodies, "parsed", spy)
    body = json.dumps(ASKED | {"prompt": "x"}).encode()
    body = gzip.compress(body) if coding else body + b" " * bodies.LARGE_BODY
    assert b"200 OK" in server.raw(posted(body, Content_Encoding=coding))
    assert threads[0].startswith("jaxspec-server")


ROWS = [{i: Logprob(-1.5, 1 + i - first, f"w{i}") for i in range(first, first + 21)} for first in range(2000)]


@pytest.mark.parametrize(
    ("answer", "logprobs", "prompt_logprobs", "echo"),
    [
        (TextAnswer, 20, None, False),
        (ChatAnswer, 20, None, False),
        (TextAnswer, None, 20, False),
        (TextAnswer, 20, None, True),
    ],
)
def test_writing_takes_little_more_memory_than_the_text(answer, logprobs, prompt_logprobs, echo):
    """Two copies of it: what it is written from is made piece by piece, and forgotten."""
    chat, ids = answer is ChatAnswer, list(range(len(ROWS)))
    body = {"model": MODEL, "prompt_logprobs": prompt_logprobs}
    body |= {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": "a", "logprobs": logprobs}
    body |= {"logprobs": True, "top_logprobs": logprobs} if chat else {}
    completion = CompletionOutput(0, "text", ids, "length", logprobs=ROWS if logprobs else None)
    output = RequestOutput("0", "a", ids, [completion], SpecDecodeMetrics())
    output.prompt_logprobs = [None, *ROWS[1:]] if prompt_logprobs or echo else None
    body |= {"echo": True} if echo else {}
    made = answer(MODEL, request_fields(body, chat=chat, model=MODEL, room=4096))
    made.echoes = {0: Echo("a", ids, ["a"] * len(ids), ids)} if echo else {}
    tracemalloc.start()
    try:
        text = made.whole([output])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(text) > 400_000
    assert peak < 3.2 * len(text)
    assert len(json.loads(text)["choices"]) == 1


@pytest.mark.parametrize(
    ("path", "asked", "count", "param"),
    [
        ("/v1/completions", {"prompt": [IDS] * 5, "prompt_logprobs": 1}, 5 * 100 * 2, "prompt_logprobs"),
        ("/v1/completions", {"prompt": IDS, "n": 4, "prompt_logprobs": 1, "logprobs": 1}, 816, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "x", "n": 2, "logprobs": 0, "max_tokens": 400}, 2 * 400, "logprobs"),
        ("/v1/completions", {"prompt": [IDS], "logprobs": 1, "max_tokens": 10**6}, (512 - 100) * 2, "logprobs"),
        ("/v1/completions", {"prompt": "x", "logprobs": 1, "max_tokens": 400, "stream": True}, 800, "logprobs"),
        ("/v1/chat/completions", TALK | {"logprobs": True, "max_tokens": 400, "n": 2}, 800, "logprobs"),
    ],
)
def test_log_probabilities_of_an_answer_have_a_limit(another, path, asked, count, param):
    """It is told before anything runs."""
    server = another(max_answer_logprobs=count - 1)
    before = server.llm.llm.engine.timing.prefill_seconds
    status, error = answered(server, posted(ASKED | asked, path))
    assert (status, error["param"]) == (400, param)
    assert f"the answer could hold {count} log-probabilities" in error["message"]
    assert f"at most {count - 1}; ask for fewer, or raise --max-answer-logprobs" in error["message"]
    assert server.llm.llm.engine.timing.prefill_seconds == before
    server = another(max_answer_logprobs=count)
    assert b"200 OK" in server.raw(posted(ASKED | asked, path))
