"""Load on a server of OpenAI's API, and what its clients see of it: each of so many asks again when it has its answer.

TTFT, the time to the first token, is from the request to the first piece of text; TPOT, the time per output token, from
there to the end, for each further token. Nothing is retried: what is refused is counted."""

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
from jaxspec.common.values import number, options, whole
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
MOST_CLIENTS = 1000  # connections that OpenAI's client opens


@options
class LoadOptions:
    """What a server is asked.

    Args:
      model: The model's name there; the first that the server lists.
      api_key: The server's; OPENAI_API_KEY in the environment keeps it from view.
      concurrency: Clients at once; several figures are measured in turn.
      num_requests: Requests of a figure; at least twice as many as clients.
      prompt_words: Words of a prompt, no two of which are alike.
      max_tokens: Tokens of an answer.
      temperature: 0 is greedy.
      timeout: Seconds that a client waits.

    Raises: UserError for a value out of its range.
    """

    model: str | None = None
    api_key: str | None = None
    concurrency: tuple[int, ...] = (1, 100)
    num_requests: int = 20
    prompt_words: int = 64
    max_tokens: int = 64
    temperature: float = 0.0
    timeout: float = 600.0

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
class Seen:
    """One request as its client saw it, in seconds; error: what it got instead."""

    started: float
    first: float | None = None
    last: float = 0.0
    num_tokens: int = 0
    error: str | None = None


def measured(url: str, chosen: LoadOptions) -> dict[str, Any]:
    """{"url", "model", "rows": [...]}: a row for each concurrency. Raises UserError where no request succeeds."""
    return asyncio.run(measure(url, chosen))


async def measure(url: str, chosen: LoadOptions) -> dict[str, Any]:
    import openai

    key = chosen.api_key or os.environ.get("OPENAI_API_KEY") or "none"
    try:
        found = openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=chosen.timeout)
    except Exception as error:  # the client says in many ways that this is no address
        raise UserError(f"{quoted(url, 200)} is no address of a server: {error}") from None
    async with found as client:
        try:
            model = chosen.model or (await client.models.list()).data[0].id
        except Exception as error:  # whatever answered may be no such server
            raise UserError(f"{url} lists no model ({type(error).__name__}: {error}): is OpenAI's API there?") from None
        prompts, rows = made_prompts(chosen.prompt_words), []
        for clients in chosen.concurrency:
            await asked(client, chosen, model, prompts, clients, clients)  # unmeasured: connections, compiled programs
            began = time.perf_counter()
            seen = await asked(client, chosen, model, prompts, clients, max(chosen.num_requests, 2 * clients))
            rows.append(row_of(clients, seen, time.perf_counter() - began))
    return {"url": url, "model": model, "rows": rows}


def made_prompts(num_words: int) -> Iterator[str]:
    rng = random.Random(0)
    for i in itertools.count():
        yield " ".join([str(i), *rng.choices(WORDS, k=num_words - 1)])


async def asked(
    client: AsyncOpenAI, chosen: LoadOptions, model: str, prompts: Iterator[str], clients: int, num_requests: int
) -> list[Seen]:
    """So many clients share the requests."""
    left, seen = iter(range(num_requests)), []

    async def one_client() -> None:
        for _ in left:
            seen.append(await one_request(client, chosen, model, next(prompts)))

    await asyncio.gather(*(one_client() for _ in range(clients)))
    return seen


async def one_request(client: AsyncOpenAI, chosen: LoadOptions, model: str, prompt: str) -> Seen:
    import openai

    seen = Seen(time.perf_counter())
    try:
        stream = await client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=chosen.max_tokens,
            temperature=chosen.temperature,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},  # of vLLM and jaxspec: answers of equal length
        )
        async for piece in stream:
            if piece.choices:
                seen.last = time.perf_counter()
                seen.first = seen.first or seen.last
            if piece.usage:
                seen.num_tokens = piece.usage.completion_tokens
    except openai.OpenAIError as error:
        seen.error = str(error)
    return seen


def row_of(clients: int, seen: list[Seen], seconds: float) -> dict[str, Any]:
    done = [s for s in seen if s.error is None and s.first is not None]
    failed = [str(s.error or "an answer without text") for s in seen if s not in done]
    if not done:
        raise UserError(f"all {len(seen)} requests failed, the first: {shortened(failed[0], 200)}")
    rest = [(s.last - s.first) / (s.num_tokens - 1) for s in done if s.first is not None and s.num_tokens > 1]
    return {
        "concurrency": clients,
        "requests": len(done),
        "failed": len(failed),
        "first_failure": failed[0] if failed else None,
        "seconds": seconds,
        "requests_per_second": len(done) / seconds,
        "tokens_per_second": sum(s.num_tokens for s in done) / seconds,
        "ttft_ms": percentiles([s.first - s.started for s in done if s.first is not None]),
        "tpot_ms": percentiles(rest),
    }


def percentiles(seconds: list[float]) -> dict[str, float | None]:
    """In milliseconds; None where there is nothing to tell."""
    import numpy as np

    return {f"p{p}": float(np.percentile(seconds, p)) * 1e3 if seconds else None for p in PERCENTILES}
