"""How a server ends, and how it is started: what runs is finished, what comes is refused, within bounded time."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import weakref

import openai
import pytest

import jaxspec.server
from jaxspec import AsyncLLM, cli
from jaxspec.common.errors import UserError
from jaxspec.common.package import remedy
from jaxspec.server import run
from jaxspec.server.settings import ServerConfig
from tests.api.async_llm.calls import OPTIONS, PROMPTS, SOON
from tests.server.running import GREEDY, LONG, MODEL, Running, connected, posted, until_closed, wait
from tests.support.commands import refused
from tests.support.root import ROOT

SMALL = [word for name, n in OPTIONS.items() for word in (f"--{name.replace('_', '-')}", str(n))]
SMALL.append("--no-warm-up")


def drain(server: Running, seconds: float):
    return asyncio.run_coroutine_threadsafe(server.gate.drain(seconds), server.loop)


def test_a_server_that_has_ended_leaves_its_model_to_be_forgotten(folder):
    """Weights and pages of another may take its place in a process that goes on."""
    server = Running(AsyncLLM(folder, **OPTIONS))
    assert server.client().completions.create(prompt=PROMPTS[0], **GREEDY).choices[0].text
    with urllib.request.urlopen(server.url + "/metrics") as told:
        assert b"jaxspec_num_emitted_tokens_total 24" in told.read()
    server.stop()
    server.llm.shutdown()
    engine = weakref.ref(server.llm.llm.engine)
    del server
    gc.collect()
    assert engine() is None


def test_a_drain_finishes_what_runs_and_refuses_what_comes(another):
    server = another()
    client, slow = server.client(), {"prompt": PROMPTS[0], "stream": True} | LONG
    stream = iter(client.completions.create(**slow))
    text = next(stream).choices[0].text
    ending = drain(server, SOON)
    wait(lambda: server.gate.draining)
    with pytest.raises(openai.InternalServerError, match="the server is shutting down") as stop:
        client.completions.create(prompt=PROMPTS[1], **GREEDY)
    assert (stop.value.status_code, stop.value.code) == (503, "shutting_down")
    assert int(stop.value.response.headers["retry-after"]) >= 1
    with pytest.raises(urllib.error.HTTPError, match="503") as told:
        urllib.request.urlopen(server.url + "/health")
    told.value.close()
    assert not ending.done(), "the stream is still being read"
    chunks = list(stream)
    text += "".join(chunk.choices[0].text for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"
    ending.result(SOON)
    assert server.gate.num_cut == 0
    assert text


def test_a_drain_cuts_off_what_does_not_end(another, monkeypatch):
    """A stream with a last word, a whole answer with a status."""
    server = another()
    step = server.llm.llm.engine.step
    monkeypatch.setattr(server.llm.llm.engine, "step", lambda **more: time.sleep(0.1) or step(**more))
    found = {}

    def ask(stream):
        try:
            answer = server.client().completions.create(prompt=PROMPTS[0], stream=stream, **LONG)
            found[stream] = list(answer)
        except openai.APIError as error:
            found[stream] = error

    threads = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
    for thread in threads:
        thread.start()
    wait(lambda: server.gate.inside == 2)
    drain(server, 0.3).result(SOON)
    for thread in threads:
        thread.join(SOON)
    assert server.gate.num_cut == 2
    for error in found.values():
        assert "the server shut down before the request was done" in error.message
    assert found[False].status_code == 503


def test_a_drain_ends_bodies_that_are_on_their_way(another, caplog):
    """At once, and without a traceback: none of them would be served any more."""
    server = another()
    with contextlib.ExitStack() as stack:
        halves = [stack.enter_context(connected(server.port)) for _ in range(5)]
        for half in halves:
            half.sendall(posted(b"{", Content_Length="100"))
        wait(lambda: len(server.server.server_state.tasks) == 5)
        drain(server, SOON).result(SOON)
        for half in halves:
            answer = until_closed(half)
            assert b" 503 " in answer.partition(b"\r\n")[0]
            assert b"shutting_down" in answer
        server.stop()
    assert not caplog.records


def test_an_engine_that_failed_is_told_of(folder):
    """By /health too, for whoever restarts servers."""
    llm = AsyncLLM(folder, **OPTIONS)
    server = Running(llm)

    def failing():
        raise MemoryError("no room")

    llm._thread.post(failing)
    wait(lambda: llm._thread.ended)
    with pytest.raises(openai.InternalServerError, match="the engine has ended") as stop:
        server.client().completions.create(prompt="x", **GREEDY)
    assert (stop.value.status_code, stop.value.code) == (503, "engine_ended")
    with pytest.raises(urllib.error.HTTPError, match="503") as told:
        urllib.request.urlopen(server.url + "/health")
    told.value.close()
    server.stop()


# The command


@pytest.mark.parametrize("number", [signal.SIGTERM])
def test_the_command_serves_until_it_is_told_to_end(folder, capsys, monkeypatch, number):
    """One stream is under way: it is read to its end."""
    monkeypatch.setenv("JAXSPEC_API_KEY", "unlock")
    found, port = {}, free_port()

    def use():
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="unlock", max_retries=20) as client:
            found["models"] = [model.id for model in client.models.list()]
            chunks = iter(client.completions.create(prompt=PROMPTS[0], stream=True, **LONG))
            found["chunks"] = [next(chunks)]
            os.kill(os.getpid(), number)
            found["chunks"] += chunks

    using = threading.Thread(target=use)
    using.start()
    words = ["serve", folder, "--port", str(port), "--served-model-name", MODEL, *SMALL]
    with pytest.raises(SystemExit) as stop:
        cli.main([*words, "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'])
    using.join(SOON)
    assert stop.value.code == 0
    assert found["models"] == [MODEL]
    assert found["chunks"][-1].choices[0].finish_reason == "length"
    out, err = capsys.readouterr()
    assert f"serving {folder} at http://127.0.0.1:{port}/v1" in err
    assert "SIGTERM: the server has ended, requests cut off after 30 seconds: 0" in err
    assert (out, "Traceback" in err) == ("", False)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.thorough
def test_a_process_that_is_told_to_end_does_so_in_time(folder):
    """SIGINT, with a request that would take longer: the line says how many were cut off."""
    words = ["serve", folder, "--port", "0", "--served-model-name", MODEL, "--drain-timeout", "0.2", *SMALL]
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxspec.cli", *words], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    try:
        lines = iter(process.stderr)
        url = next(m[1] for line in lines if (m := re.search(r"at (http://\S+)", line)))
        with openai.OpenAI(base_url=url, api_key="any", max_retries=0) as client:
            many = GREEDY | {"n": 200, "max_tokens": 400, "stream": True}
            stream = iter(client.completions.create(prompt=PROMPTS[0], **many))
            next(stream)
            process.send_signal(signal.SIGINT)
            with pytest.raises(openai.APIError, match="the server shut down before the request was done"):
                list(stream)
        assert process.wait(SOON) == 130
        assert "SIGINT: the server has ended, requests cut off after 0.2 seconds: 1" in "".join(lines)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.thorough
def test_a_server_that_still_compiles_answers_and_ends_at_once(folder, tmp_path):
    """It does not wait for programs that nobody wants any more."""
    words = ["serve", folder, "--port", "0", "--served-model-name", MODEL, *SMALL[:-1]]
    environment = os.environ | {"JAXSPEC_CACHE": str(tmp_path), "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "xla")}
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxspec.cli", *words], cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        lines = iter(process.stderr)
        url = next(m[1] for line in lines if (m := re.search(r"at (http://\S+)", line)))
        with openai.OpenAI(base_url=url, api_key="any", max_retries=0) as client:
            assert client.completions.create(prompt=PROMPTS[0], **GREEDY).choices[0].text
        process.send_signal(signal.SIGTERM)
        said = "".join(lines)
        assert process.wait(SOON) == 0
        assert "compiled" not in said, "all of it was compiled already"
        assert "Traceback" not in said
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "70000"], "--port 70000 is above 65535"),
        (["--request-timeout", "0"], "--request-timeout 0.0 must be more than 0 seconds"),
        (["--max-queue", "-1"], "--max-queue -1 is below 0"),
        (["--max-connections", "0"], "--max-connections 0 is below 1"),
        (["--max-answer-logprobs", "-1"], "--max-answer-logprobs -1 is below 0"),
        (
            ["--allowed-host", "a.example", "--allowed-host", "b.example:80"],
            "--allowed-host 'b.example:80' must be a name",
        ),
        (["--allowed-origin", "b.example"], "--allowed-origin 'b.example' must be a scheme and a host"),
        (["--api-key", ""], "--api-key is empty: leave it out, or give one"),
        (["--api-key", "schlüssel"], "--api-key must be of printable ASCII characters"),
        (["--host", "256.1.1.1"], "cannot listen on 256.1.1.1 port 8000"),
        (["--speculative-config", "{"], "'--speculative-config': '{' is not JSON"),
        (["--speculative-config", "[]"], "'--speculative-config': '[]': it must be an object"),
        (["--speculative-config", '{"methd": "ngram"}'], "unknown option 'methd' of SpeculativeConfig"),
        (["--speculative-config", "{}", "--draft", "x"], "leave --draft out"),
        (["--dtype", "float8"], "--dtype 'float8'"),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_loaded(capsys, words, message):
    assert message in refused(capsys, "serve", "no-such-model", *words)


def test_a_port_that_is_taken(another, capsys):
    server = another()
    line = refused(capsys, "serve", "no-such-model", "--port", str(server.port))
    assert f"cannot listen on 127.0.0.1 port {server.port}: Address already in use; --host and --port choose" in line
    with pytest.raises(UserError, match="Address already in use"):
        run.bound(ServerConfig(port=server.port))


def test_what_is_not_installed_is_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.delattr(jaxspec.server, "run")
    for name in [name for name in sys.modules if name.startswith("jaxspec.server.")]:
        monkeypatch.delitem(sys.modules, name)
    line = refused(capsys, "serve", "no-such-model")
    assert f"this command needs fastapi: {remedy('serve')}" in line
