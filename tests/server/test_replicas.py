"""Replicas on Ray Serve: two on one machine, of which one is killed under load."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from jaxspec import SamplingParams
from tests.api.async_llm.calls import PROMPTS, SOON
from tests.server.running import MODEL, wait
from tests.server.test_ends import free_port
from tests.support.root import ROOT

PARAMS = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
ASKED = {"model": MODEL, "temperature": 0, "max_tokens": 300, "extra_body": {"ignore_eos": True}}
CALLS = 24
READY = "ready"


def replica_pids() -> list[int]:
    """Of the replicas that this process's own one started, which Ray names."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                named = (folder / "cmdline").read_bytes().startswith(b"ray::ServeReplica")
                if named and os.getpid() in ancestors(int(folder.name)):
                    found.append(int(folder.name))
            except OSError:  # it has ended
                continue
    return found


def ancestors(pid: int) -> list[int]:
    found = []
    while pid > 1:
        status = Path(f"/proc/{pid}/status").read_text()
        pid = int(status.partition("PPid:")[2].split()[0])
        found.append(pid)
    return found


@pytest.fixture
def url(folder):
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed")
    port, environment = (
        free_port(),
        os.environ
        | {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "jaxspec.server.ray_proxy.middlewares",
        },
    )
    command = [sys.executable, "-m", "tests.server.replicating", folder, str(port)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, start_new_session=True, cwd=ROOT, **pipes) as process:
        try:
            assert any(line.strip() == READY for line in process.stdout), "it did not start"
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.stdin.close()
            try:
                process.wait(SOON)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.thorough
def test_a_replica_that_dies_takes_only_its_own_requests_along(url, expected):
    """Streams of the other one go on to their ends, and new requests are served."""
    wanted = [output.outputs[0].text for output in expected.generate(PROMPTS, PARAMS)]
    wait(lambda: len(replica_pids()) == 2)
    told = asyncio.Event()

    async def read(client, i):
        """Every third one as a whole."""
        text = ""
        if i % 3 == 0:
            return (await client.completions.create(prompt=PROMPTS[i % 5], **ASKED)).choices[0].text
        async for chunk in await client.completions.create(prompt=PROMPTS[i % 5], stream=True, **ASKED):
            text += chunk.choices[0].text
            told.set()
        return text

    async def main():
        async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
            warm = await asyncio.gather(*(read(client, i) for i in range(CALLS)))
            assert warm == [wanted[i % 5] for i in range(CALLS)]
            told.clear()
            named = {"Host": "api.example"}  # Ray listens: a replica does not know by which names
            assert (await client.models.list(extra_headers=named)).data[0].id == MODEL
            calls = [asyncio.create_task(read(client, i)) for i in range(CALLS)]
            await told.wait()
            os.kill(replica_pids()[0], signal.SIGKILL)
            under_load = await asyncio.gather(*calls, return_exceptions=True)
            return under_load, await asyncio.gather(*(read(client, i) for i in range(CALLS)))

    under_load, after = asyncio.run(asyncio.wait_for(main(), 600))
    ended = [i for i, text in enumerate(under_load) if text == wanted[i % 5]]
    cut = [error for error in under_load if isinstance(error, Exception)]
    assert ended, "the other replica's"
    assert cut, "the killed one's, or nothing was shown"
    assert len(ended) + len(cut) == CALLS, "no text ends early as if it were whole"
    for error in cut:
        assert isinstance(error, openai.APIError)
        assert error.code == "replica_ended"
        assert "the replica ended before it had answered this request" in error.message
    assert after == [wanted[i % 5] for i in range(CALLS)]
    wait(lambda: len(replica_pids()) == 2)
