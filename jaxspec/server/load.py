"""Load test of a server that has OpenAI's API, measured at its clients.

Each client sends its next request when it has the answer to its last one.

TTFT, the time to the first token, is the time from a request to its first piece of text. TPOT, the time per output
token, is the time from the first piece of text to the last, divided by the number of tokens after the first. Failed
requests are counted, and not retried.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import random
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jaxspec.common.errors import UserError, quoted, shortened
from jaxspec.common.values import number, option, options, whole
from jaxspec.server.settings import LONGEST

if TYPE_CHECKING:
    from openai import AsyncOpenAI

WORDS = (
    "the",
    "a",
    "river",
    "hill",
    "fox",
    "dog",
    "sleeps",
    "runs",
    "over",
    "and",
    "then",
    "one",
    "two",
    "small",
    "old",
)
PERCENTILES = (50, 99)
MOST_CLIENTS = 1000  # largest number of concurrent clients: OpenAI's client library opens no more connections


@options
class LoadOptions:
    """The requests of a load test.

    Raises: UserError for a value out of its range.
    """

    model: str | None = option(
        "Name of the model at the server; by default the first that the server lists.",
        default=None,
    )
    api_key: str | None = option(
        "API key of the server; the variable OPENAI_API_KEY keeps it out of the list of processes.",
        default=None,
    )
    concurrency: tuple[int, ...] = option(
        "Number of clients at the same time; several numbers are measured one after the other.",
        default=(1, 100),
    )
    num_requests: int = option("Requests for each number of clients, and at least two for each client.", default=20)
    prompt_words: int = option("Words in each prompt; all prompts differ.", default=64)
    max_tokens: int = option("Tokens in each answer.", default=64)
    temperature: float = option("Sampling temperature; 0 is greedy.", default=0.0)
    timeout: float = option("Seconds that a client waits for the server.", default=600.0)

    def __post_init__(self) -> None:
        for name in ("num_requests", "prompt_words", "max_tokens"):
            whole(name, getattr(self, name), 1)
        for clients in self.concurrency:
            whole("concurrency", clients, 1, MOST_CLIENTS)
        if not 0.0 < number("timeout", self.timeout) <= LONGEST:
            raise UserError(f"timeout={self.timeout} must be more than 0 seconds and at most {LONGEST:g}")
        if not 0.0 <= number("temperature", self.temperature) <= 1e6:
            raise UserError(f"temperature={self.temperature} must lie in [0, 1e6]")
        if self.api_key and not self.api_key.isascii():
            raise UserError("api_key must be of ASCII characters: HTTP carries no others")


@dataclasses.dataclass
class Timing:
    """The times of one request, in seconds on the client's clock.

    started: start of the request.
    first, last: arrival of the first and of the last piece of text so far.
    num_tokens: tokens of the answer, as the server counts them.
    error: message of the error, if the request failed.
    """

    started: float
    first: float | None = None
    last: float = 0.0
    num_tokens: int = 0
    error: str | None = None


def measured(url: str, chosen: LoadOptions) -> dict[str, Any]:
    """Run the load test and return {"url", "model", "rows": [...]}, where each row has the results of one concurrency.

    url: address of the server's API.
    chosen: options of the test, among them the numbers of clients.

    Raises: UserError if the server cannot be used or all requests of a row fail.
    """
    return asyncio.run(measure(url, chosen))


async def measure(url: str, chosen: LoadOptions) -> dict[str, Any]:
    """Run the load test in an event loop, and return the same dict as `measured`."""
    import openai

    key = chosen.api_key or os.environ.get("OPENAI_API_KEY") or "none"
    try:
        found = openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=chosen.timeout)
    except Exception as error:  # the client raises many kinds of error for a wrong address
        raise UserError(f"{quoted(url, 200)} is not the address of a server: {error}") from None
    async with found as client:
        try:
            model = chosen.model or (await client.models.list()).data[0].id
        except Exception as error:  # there are many kinds of error, because any kind of server may answer
            raise UserError(f"{url} lists no model ({type(error).__name__}: {error}): is OpenAI's API there?") from None
        prompts = made_prompts(chosen.prompt_words)
        rows = []
        for clients in chosen.concurrency:
            # These requests are not measured. They open the connections, and make the server compile its programs.
            await run_clients(client, chosen, model, prompts, clients, clients)
            began = time.perf_counter()
            num_requests = max(chosen.num_requests, 2 * clients)
            timings = await run_clients(client, chosen, model, prompts, clients, num_requests)
            rows.append(row_of(clients, timings, time.perf_counter() - began))
    return {"url": url, "model": model, "rows": rows}


def made_prompts(num_words: int) -> Iterator[str]:
    """Yield random prompts of num_words words, without end. The first word is the prompt's index."""
    rng = random.Random(0)
    for i in itertools.count():
        yield " ".join([str(i), *rng.choices(WORDS, k=num_words - 1)])


async def run_clients(
    client: AsyncOpenAI, chosen: LoadOptions, model: str, prompts: Iterator[str], clients: int, num_requests: int
) -> list[Timing]:
    """Send num_requests requests from `clients` concurrent clients, and return the times of each request."""
    left = iter(range(num_requests))
    timings: list[Timing] = []

    async def one_client() -> None:
        for _ in left:
            timings.append(await one_request(client, chosen, model, next(prompts)))

    await asyncio.gather(*(one_client() for _ in range(clients)))
    return timings


async def one_request(client: AsyncOpenAI, chosen: LoadOptions, model: str, prompt: str) -> Timing:
    """Send a request, read its streamed answer to the end, and return the times."""
    import openai

    timing = Timing(time.perf_counter())
    try:
        stream = await client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=chosen.max_tokens,
            temperature=chosen.temperature,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},  # field of vLLM and jaxspec that makes all answers equally long
        )
        async for piece in stream:
            if piece.choices:
                timing.last = time.perf_counter()
                timing.first = timing.first or timing.last
            if piece.usage:
                timing.num_tokens = piece.usage.completion_tokens
    except openai.OpenAIError as error:
        timing.error = str(error)
    return timing


def row_of(clients: int, timings: list[Timing], seconds: float) -> dict[str, Any]:
    """Return the results for one number of clients. seconds: time from the first request's start to the last one's end.

    Raises: UserError if all requests failed.
    """
    done = [t for t in timings if t.error is None and t.first is not None]
    failed = [str(t.error or "an answer without text") for t in timings if t not in done]
    if not done:
        raise UserError(f"all {len(timings)} requests failed, the first: {shortened(failed[0], 200)}")
    per_token = [(t.last - t.first) / (t.num_tokens - 1) for t in done if t.first is not None and t.num_tokens > 1]
    return {
        "concurrency": clients,
        "requests": len(done),
        "failed": len(failed),
        "first_failure": failed[0] if failed else None,
        "seconds": seconds,
        "requests_per_second": len(done) / seconds,
        "tokens_per_second": sum(t.num_tokens for t in done) / seconds,
        "ttft_ms": percentiles([t.first - t.started for t in done if t.first is not None]),
        "tpot_ms": percentiles(per_token),
    }


def percentiles(seconds: list[float]) -> dict[str, float | None]:
    """Return percentiles of durations, in milliseconds by name ("p50", "p99"); each is None without durations.

    seconds: the durations.
    """
    import numpy as np

    return {f"p{p}": float(np.percentile(seconds, p)) * 1e3 if seconds else None for p in PERCENTILES}
