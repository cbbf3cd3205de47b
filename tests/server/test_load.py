"""Hundreds of clients at once, clients that go away at any moment, clients that do not read: nothing is lost, nothing
stays behind."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import random
import socket
import threading
import time

import openai
import pytest

from jaxspec import SamplingParams
from jaxspec.server import prepared
from tests.api.async_llm.calls import PROMPTS, SOON
from tests.server.running import GREEDY, LONG, MODEL, connected, posted, until_closed, wait
from tests.support.sizes import cases

SHORT = {"temperature": 0, "max_tokens": 6, "extra_body": {"ignore_eos": True}, "model": MODEL}


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, SOON))


@pytest.fixture(scope="module")
def texts(expected):
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    return [output.outputs[0].text for output in expected.generate(PROMPTS, params)]


async def streamed(client, prompt: str) -> str:
    stream = await client.completions.create(prompt=prompt, stream=True, **SHORT)
    return "".join([chunk.choices[0].text async for chunk in stream])


async def whole(client, prompt: str) -> str:
    return (await client.completions.create(prompt=prompt, **SHORT)).choices[0].text


def test_two_hundred_at_once_get_what_each_would_get_alone(server, texts):
    async def main():
        async with server.async_client() as client:
            calls = [(streamed if i % 2 else whole)(client, PROMPTS[i % 5]) for i in range(200)]
            return await asyncio.gather(*calls)

    assert run(main()) == [texts[i % 5] for i in range(200)]


def test_who_does_not_fit_is_told_when_to_come_again(another, texts):
    """And, coming again as it is told, is served: nothing is lost."""
    server = another(max_queue=2)

    async def main():
        async with server.async_client() as client:
            calls = [client.completions.create(prompt=PROMPTS[0], **LONG) for _ in range(20)]
            first = await asyncio.gather(*calls, return_exceptions=True)
        async with server.async_client(max_retries=30) as patient:
            return first, await asyncio.gather(*(whole(patient, PROMPTS[i % 5]) for i in range(12)))

    first, later = run(main())
    busy = [error for error in first if isinstance(error, openai.RateLimitError)]
    assert len(busy) == 20 - 6, "four rows and two places to wait"
    assert all(1 <= int(error.response.headers["retry-after"]) <= 60 for error in busy)
    assert busy[0].code == "server_busy"
    assert later == [texts[i % 5] for i in range(12)]


# Who goes away


ENDLESS = {"model": MODEL, "prompt": PROMPTS[0], "temperature": 0, "max_tokens": 480, "ignore_eos": True}
RESET = b"\1\0\0\0\0\0\0\0"  # of SO_LINGER: the connection ends as that of a machine that is switched off


@contextlib.contextmanager
def leaving(server, asked: dict):
    """Asks, and hangs up at the end of the block without a word."""
    with connected(server.port) as connection:
        connection.sendall(posted(asked))
        yield connection
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["queue", "prefill", "decoding"])
def test_who_goes_away_ends_its_request(server, monkeypatch, phase, stream):
    """In the queue, while its prompt is read, while it is decoded: long before it would have ended."""
    engine, asked = server.llm.llm.engine, ENDLESS | {"stream": stream}
    before, scheduler = server.llm.metrics.num_emitted_tokens, engine.scheduler
    step, prefill, left = engine.step, engine.prefill, threading.Event()

    def slow(**more):
        """Once the client leaves, the engine waits until the server has seen that."""
        time.sleep(0.1)
        wait(lambda: not left.is_set() or not server.gate.inside)
        return step(**more)

    monkeypatch.setattr(engine, "step", slow)
    with contextlib.ExitStack() as stack:
        if phase == "queue":
            stack.enter_context(leaving(server, ENDLESS | {"n": 4}))
            wait(lambda: len(scheduler.running) == 4)
            with leaving(server, asked):
                wait(lambda: len(scheduler.waiting) == 1)
            wait(lambda: not scheduler.waiting)
            assert len(scheduler.running) == 4
            left.set()
        elif phase == "prefill":
            monkeypatch.setattr(engine, "prefill", lambda *asked: left.wait(SOON) and prefill(*asked))
            with leaving(server, asked | {"prompt": list(range(5, 300))}):
                wait(lambda: scheduler.running)
                assert not scheduler.running[0].prefilled
                left.set()
        else:
            with leaving(server, asked) as connection:
                wait(lambda: scheduler.running and scheduler.running[0].output)
                assert not stream or connection.recv(100).startswith(b"HTTP/1.1 200")
                left.set()
    server.assert_idle()
    assert server.llm.metrics.num_emitted_tokens - before < (4 if phase == "queue" else 1) * 480 // 2


@cases("rounds", [1, 5], quick=[1])
def test_clients_that_come_and_go_hurt_nobody(server, texts, rounds):
    """Two hundred of them, who leave at random moments, with fifty who stay."""
    rng = random.Random(rounds)

    async def leaves(client, i):
        async def read():
            asked = {"prompt": PROMPTS[i % 5], "n": 1 + i % 2, "stream": bool(i % 3), **LONG}
            answer = await client.completions.create(**asked)
            if i % 3:
                async for _ in answer:
                    pass

        try:
            await asyncio.wait_for(read(), rng.expovariate(1 / 0.2))
        except TimeoutError:
            return

    async def main():
        async with server.async_client() as client:
            staying = [asyncio.create_task((streamed if i % 2 else whole)(client, PROMPTS[i % 5])) for i in range(50)]
            going = [asyncio.create_task(leaves(client, i)) for i in range(200)]
            return await asyncio.gather(*staying), await asyncio.gather(*going, return_exceptions=True)

    for _ in range(rounds):
        stayed, left = run(main())
        assert stayed == [texts[i % 5] for i in range(50)]
        assert {type(x) for x in left} <= {type(None), openai.RateLimitError}
        server.assert_idle()


# Who does not read


SLOW = {"SO_RCVBUF": 4096}


def narrow(server):
    """Its connections hold little that is not read yet."""
    server.listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return server


def test_who_does_not_read_holds_nobody_up(another, texts):
    """Nor loses a word: all of it is there when it reads."""
    server = narrow(another())
    asked = ENDLESS | {"n": 4, "stream": True, "logprobs": 20, "max_tokens": 60, "prompt": [PROMPTS[0]] * 2}
    with connected(server.port, **SLOW) as connection:
        connection.sendall(posted(asked))
        wait(lambda: server.gate.inside)
        assert server.client().completions.create(prompt=PROMPTS[0], **SHORT).choices[0].text == texts[0]
        wait(lambda: not server.llm.llm.engine.busy)
        wait(lambda: server.gate.inside <= 8)  # the other one is just leaving
        assert server.gate.inside == 8, "there is much left to be said"
        _, _, body = until_closed(connection).partition(b"\r\n\r\n")
    events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: {")]
    assert body.rstrip().removesuffix(b"0").rstrip().endswith(b"data: [DONE]")
    assert sum(len(c["logprobs"]["tokens"]) for e in events for c in e["choices"]) == 8 * 60


def test_who_never_reads_is_let_go(another):
    server = narrow(another(request_timeout=1.5))
    asked = ENDLESS | {"n": 4, "stream": True, "logprobs": 20, "max_tokens": 200}
    with connected(server.port, **SLOW) as connection:
        connection.sendall(posted(asked))
        wait(lambda: server.gate.inside)
        wait(lambda: not server.gate.inside)
        server.assert_idle()


# Who takes too long


@pytest.mark.parametrize("stream", [False, True])
def test_what_takes_too_long_is_ended(another, monkeypatch, stream):
    server = another(request_timeout=0.5)
    step = server.llm.llm.engine.step
    monkeypatch.setattr(server.llm.llm.engine, "step", lambda **more: time.sleep(0.1) or step(**more))
    client = server.client(max_retries=2)
    with pytest.raises(openai.APIError) as stop:
        list(client.completions.create(prompt=PROMPTS[0], stream=stream, **LONG))
    assert "not done within 0.5 seconds: ask for less, or raise --request-timeout" in stop.value.message
    if not stream:
        assert stop.value.status_code == 504
    assert stop.value.code == "request_timeout"


def test_a_request_that_fails_says_so(server, monkeypatch):
    """Whole or streamed, and nobody else's."""
    from jaxspec.api.detokenizer import Detokenizer

    read = Detokenizer.finish

    def failing(self, output, **more):
        if self.stop:
            raise LookupError("no such word")
        return read(self, output, **more)

    monkeypatch.setattr(Detokenizer, "finish", failing)
    client, asked = server.client(), SHORT | {"prompt": PROMPTS[0], "stop": "never"}
    with pytest.raises(openai.InternalServerError, match="the request failed: LookupError: no such word"):
        client.completions.create(**asked)
    with pytest.raises(openai.APIError, match="the request failed: LookupError: no such word"):
        list(client.completions.create(stream=True, **asked))
    assert client.completions.create(prompt=PROMPTS[0], **GREEDY).choices[0].finish_reason == "length"


def test_long_prompts_hold_up_only_each_other(server, monkeypatch):
    """A megabyte of text takes a second to be read."""
    encode, read = prepared.encode, threading.Event()
    monkeypatch.setattr(prepared, "encode", lambda t, p: (len(p) < 1000 or read.wait(SOON)) and encode(t, p))
    client, long = server.client(), {"model": MODEL, "prompt": "a" * 20_000}
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        refused = [pool.submit(client.completions.create, **long) for _ in range(3)]
        assert client.completions.create(prompt=PROMPTS[0], **SHORT).choices[0].finish_reason == "length"
        assert not any(call.done() for call in refused)
        with leaving(server, long):
            wait(lambda: server.gate.inside == 4)
        wait(lambda: server.gate.inside == 3)  # who has gone away is not waited for
        read.set()
        for call in refused:
            with pytest.raises(openai.BadRequestError, match="the prompt has 20001 tokens"):
                call.result(SOON)
