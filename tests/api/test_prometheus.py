"""Metrics for Prometheus: what a scrape shows is what the LLM did."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import urllib.request

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from jaxspec import LLM, AsyncLLM, SamplingParams
from jaxspec.api.metrics import Metrics, serve
from jaxspec.common.package import remedy
from tests.support.model_folders import write_model
from tests.support.root import ROOT

OPTIONS = {"max_num_seqs": 2, "num_pages": 64, "rounds_per_launch": 4}
PROMPTS = ["The quick brown fox", "dog dog dog", "one, two,"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "target"))


@pytest.fixture
def llm(folder):
    """The target drafts for itself."""
    return LLM(folder, speculative_config={"model": folder, "num_speculative_tokens": 2}, **OPTIONS)


def parsed(text: str) -> dict:
    """Sample name, and its label where there is one -> value."""
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return {(s.name, *s.labels.values()): s.value for s in samples if not s.name.endswith("_created")}


def scrape(metrics: Metrics) -> dict:
    return parsed(generate_latest(metrics.registry).decode())


@pytest.mark.thorough
def test_counters_are_the_llms_own(llm):
    metrics = Metrics(llm)
    llm.generate(PROMPTS, GREEDY)
    shown, counted = scrape(metrics), llm.metrics
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens"):
        assert shown[f"jaxspec_{name}_total",] == getattr(counted, name) > 0
    per_position = [shown["jaxspec_num_accepted_tokens_per_pos_total", str(i)] for i in range(2)]
    assert per_position == counted.num_accepted_tokens_per_pos


def test_requests_by_reason_and_their_times(llm):
    """A prompt of three samples is three requests; one that was dropped before its first token has no such time."""
    metrics = Metrics(llm)
    outputs = llm.generate(PROMPTS, GREEDY)
    llm.generate(PROMPTS[0], SamplingParams(n=3, max_tokens=1, ignore_eos=True))
    pieces = llm.stream(PROMPTS, GREEDY)
    next(pieces)
    pieces.close()
    shown = scrape(metrics)
    reasons = {key[1]: value for key, value in shown.items() if key[0] == "jaxspec_requests_total"}
    assert reasons == {"length": 6, "abort": 3}
    assert shown["jaxspec_queue_seconds_count",] == 8, "the third prompt of the stream got no row"
    assert shown["jaxspec_time_to_first_token_seconds_count",] == 8
    assert shown["jaxspec_time_per_output_token_seconds_count",] == 3 + 2 - (shown["jaxspec_decode_seconds_count",] < 8)
    own = sum(o.timing.time_to_first_token for o in outputs)
    assert own < shown["jaxspec_time_to_first_token_seconds_sum",]
    assert shown["jaxspec_decode_seconds_bucket", "+Inf"] == shown["jaxspec_decode_seconds_count",]


def test_gauges_show_the_moment(llm):
    metrics = Metrics(llm)
    gauges = ("jaxspec_running_requests", "jaxspec_waiting_requests", "jaxspec_free_pages")
    now = lambda: tuple(scrape(metrics)[name,] for name in gauges)
    assert now() == (0, 0, 64)
    pieces = llm.stream(PROMPTS, GREEDY)
    next(pieces)
    running, waiting, free = now()
    assert (running, waiting) == (2, 1)
    assert free == llm.engine.scheduler.allocator.num_free < 64
    pieces.close()
    assert now()[:2] == (0, 0)


def test_served_over_http_of_an_async_llm(folder):
    async def main():
        async with AsyncLLM(folder, **OPTIONS) as llm:
            server = serve(llm, 0)
            try:
                await asyncio.gather(*(llm.generate(p, GREEDY) for p in PROMPTS))
                address = f"http://127.0.0.1:{server.server_port}/metrics"
                return await asyncio.to_thread(lambda: urllib.request.urlopen(address, timeout=300).read().decode())
            finally:
                server.shutdown()
                server.server_close()

    shown = parsed(asyncio.run(main()))
    assert shown["jaxspec_requests_total", "length"] == 3
    assert shown["jaxspec_num_emitted_tokens_total",] == 36


def test_a_missing_package_is_one_line_that_names_the_extra():
    code = "import sys; sys.modules['prometheus_client'] = None; import jaxspec.api.metrics"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 1
    last = ran.stderr.strip().splitlines()[-1]
    assert last == f"ImportError: jaxspec.api.metrics needs prometheus-client: {remedy('metrics')}"
