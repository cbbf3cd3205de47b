"""A line for each request, where the server's owner asks for it."""

from __future__ import annotations

import re
import threading

import pytest

from jaxspec.server import request_log
from tests.api.async_llm.calls import SOON
from tests.server.running import MODEL, connected, posted, wait


def logged(another, monkeypatch, sent: bytes) -> str:
    """The line of the request log for a request."""
    lines: list[str] = []
    monkeypatch.setattr(request_log, "write_line", lines.append)
    another(enable_log_requests=True).raw(sent)
    wait(lambda: lines)
    (line,) = lines
    return line


@pytest.mark.parametrize("stream", [False, True])
def test_the_request_log(another, monkeypatch, stream):
    """One line: how it ended, counts, sampling options, seconds; no text, not even a stop string."""
    asked = {"model": MODEL, "prompt": ["dog", [5, 6]], "n": 2, "max_tokens": 3, "ignore_eos": True, "seed": 7}
    line = logged(another, monkeypatch, posted(asked | {"stop": ["secret", "no"], "stream": stream}))
    options = r"n=2 max_tokens=3 seed=7 stop=\[2\] ignore_eos=True"
    counts = rf"ended=length:4 id=cmpl-\w+ stream={stream} prompt_tokens=\d+ output_tokens=12 "
    seconds = r" first_seconds=\d+\.\d{3}" * stream + r" seconds=\d+\.\d{3}"
    pattern = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d POST '/v1/completions' status=200 " + counts + options + seconds
    assert re.fullmatch(pattern, line), line


@pytest.mark.parametrize(
    ("body", "path", "words"),
    [
        (b"{", "/v1/completions", "POST '/v1/completions' status=400 ended=refused seconds="),
        ({"model": "secret"}, "/v1/completions", "status=404 ended=model_not_found seconds="),
        ({"model": MODEL, "prompt": "secret" * 999}, "/v1/completions", "ended=context_length_exceeded id=cmpl-"),
        ({}, "/v1/a%0Ab", "POST '/v1/a\\nb' status=404 ended=refused seconds="),
    ],
)
def test_the_request_log_has_what_is_refused(another, monkeypatch, body, path, words):
    line = logged(another, monkeypatch, posted(body, path))
    assert words in line
    assert not re.search("secret|\n", line)


def test_the_request_log_has_who_leaves(another, llm, monkeypatch):
    """The engine rests until the server has noticed."""
    lines: list[str] = []
    monkeypatch.setattr(request_log, "write_line", lines.append)
    step, leaving, noticed = llm.llm.engine.step, threading.Event(), threading.Event()
    monkeypatch.setattr(
        llm.llm.engine, "step", lambda **more: (leaving.is_set() and noticed.wait(SOON), step(**more))[1]
    )
    with connected(another(enable_log_requests=True).port) as client:
        client.sendall(posted({"model": MODEL, "prompt": "dog", "stream": True, "max_tokens": 400, "ignore_eos": True}))
        assert client.recv(1)
        leaving.set()
    wait(lambda: lines)
    noticed.set()
    assert "status=200 ended=client_left id=cmpl-" in lines[0]
