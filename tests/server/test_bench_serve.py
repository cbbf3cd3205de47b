"""jaxspec bench-serve: what the clients of a server see."""

from __future__ import annotations

import json
import time

import pytest

from tests.support.commands import refused, run

SHORT = ("--num-requests", "4", "--max-tokens", "6", "--prompt-words", "4")


def test_a_row_for_each_concurrency(server, capsys, monkeypatch):
    """Against a server whose launches of one round take a known time."""
    engine = server.llm.llm.engine
    step = engine.step
    inside: list[int] = []  # at each step

    def slow(**more):
        inside.append(server.gate.inside)
        time.sleep(0.05)
        return step(**more)

    monkeypatch.setattr(engine, "step", slow)
    monkeypatch.setattr(engine.controller, "rounds_within", lambda *_: 1)
    out, _ = run(capsys, "bench-serve", server.url + "/v1", *SHORT, "--concurrency", "1,8", "--json")
    document = json.loads(out)
    assert (document["url"], document["model"]) == (server.url + "/v1", "tiny")
    assert [(row["concurrency"], row["requests"], row["failed"]) for row in document["rows"]] == [(1, 4, 0), (8, 16, 0)]
    one, eight = document["rows"]
    assert 50 <= one["ttft_ms"]["p50"] <= one["ttft_ms"]["p99"]
    assert 0 < one["tpot_ms"]["p50"] <= one["tpot_ms"]["p99"]
    assert inside[0] == 1
    assert 4 < max(inside) <= 8, "more than there are rows for"
    assert one["tokens_per_second"] == pytest.approx(4 * 6 / one["seconds"])
    # Four rows for eight clients: half of them wait for the others' six tokens.
    assert eight["ttft_ms"]["p99"] > 5 * 50


def test_what_is_refused_is_counted_and_told(another, capsys):
    server = another(max_queue=0)
    out, err = run(capsys, "bench-serve", server.url + "/v1", *SHORT, "--concurrency", "12")
    assert "TTFT p50" in out
    assert " requests failed: " in err
    assert "the server is busy" in err


def test_what_cannot_be_measured(server, capsys):
    line = refused(capsys, "bench-serve", "http://127.0.0.1:9/v1")
    assert "http://127.0.0.1:9/v1 lists no model (APIConnectionError: Connection error" in line
    line = refused(capsys, "bench-serve", server.url + "/v1", "--model", "other")
    assert "all 20 requests failed, the first: " in line
    assert "model 'other' is not served here" in line
    for url, words in (("http://[::1", "is not the address of a server"), (server.url, "lists no model")):
        assert words in refused(capsys, "bench-serve", url)
    for name, value in (("--temperature", "nan"), ("--timeout", "nan"), ("--api-key", "schlüssel")):
        assert name in refused(capsys, "bench-serve", "x", name, value)
    assert "give whole numbers of at least 1" in refused(capsys, "bench-serve", "x", "--concurrency", "0")
    assert "--concurrency 2000 is above 1000" in refused(capsys, "bench-serve", "x", "--concurrency", "2000")
