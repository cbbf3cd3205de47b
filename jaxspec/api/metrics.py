"""Metrics of an LLM for Prometheus. This module needs jaxspec's extra "metrics"."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxspec.api.async_llm import AsyncLLM
from jaxspec.api.llm import LLM
from jaxspec.common.package import remedy
from jaxspec.engine.request import Request

try:
    import prometheus_client as prometheus
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
except ImportError as error:
    raise ImportError(f"jaxspec.api.metrics needs prometheus-client: {remedy('metrics')}") from error

# Field of SpecDecodeMetrics -> help text of its Prometheus counter.
COUNTERS = {
    "num_drafts": "Rounds that proposed something.",
    "num_draft_tokens": "Draft tokens proposed.",
    "num_accepted_tokens": "Accepted draft tokens.",
    "num_emitted_tokens": "Output tokens.",
}
# Upper bounds of the histograms' buckets, in seconds: for a stage of a request, and for one output token.
STAGE = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
# Field of RequestTiming -> (name of the histogram, its help text, upper bounds of its buckets).
HISTOGRAMS = {
    "queue_seconds": ("queue_seconds", "From arrival until the request got a row.", STAGE),
    "prefill_seconds": ("prefill_seconds", "From getting a row until the prompt was in the caches.", STAGE),
    "decode_seconds": ("decode_seconds", "From the prompt in the caches until the end.", STAGE),
    "time_to_first_token": ("time_to_first_token_seconds", "From arrival until the first output token.", STAGE),
    "time_per_output_token": ("time_per_output_token_seconds", "For each output token after the first.", TOKEN),
}


class Metrics:
    """The metrics of an LLM for Prometheus.

    The gauges show the LLM's present state. The counters of tokens and programs cover all of its requests. The counter
    of requests and the histograms cover the requests that end after this object was made.

    The names of all metrics begin with jaxspec_. Each sample counts as a request: a prompt with n = 4 counts four
    times.

    Args:
      llm: an LLM or AsyncLLM.
      registry: Prometheus registry in which the metrics are registered; by default a new one, kept in the attribute
        `registry`. Two LLMs cannot share a registry, because their metrics have the same names.
    """

    def __init__(self, llm: LLM | AsyncLLM, registry: prometheus.CollectorRegistry | None = None) -> None:
        self.llm = llm.llm if isinstance(llm, AsyncLLM) else llm
        self.registry = registry or prometheus.CollectorRegistry()
        where: dict[str, Any] = {"namespace": "jaxspec", "registry": self.registry}
        self.requests = prometheus.Counter("requests", "Requests that ended, by reason.", ["finish_reason"], **where)
        self.histograms = {
            field: prometheus.Histogram(name, text, buckets=buckets, **where)
            for field, (name, text, buckets) in HISTOGRAMS.items()
        }
        self.registry.register(self)
        self.llm.observers.append(self.observe)

    def observe(self, request: Request) -> None:
        """Count a sample that ended, and the times of those stages whose end the sample reached."""
        self.requests.labels(request.finish_reason).inc()
        timing = request.times.timing(len(request.output))
        for field, histogram in self.histograms.items():
            seconds = getattr(timing, field)
            if seconds is not None:
                histogram.observe(seconds)

    def collect(self) -> Iterator[Any]:
        """Yield the current values of counters and gauges. The registry calls this method at every scrape."""
        metrics, scheduler = self.llm.metrics, self.llm.engine.scheduler
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"jaxspec_{name}", text, value=getattr(metrics, name))
        compiled = self.llm.timing.num_compiled
        yield CounterMetricFamily("jaxspec_num_compiled", "Programs that requests had to wait for.", value=compiled)
        by_position = CounterMetricFamily(
            "jaxspec_num_accepted_tokens_per_pos",
            "Accepted draft tokens, by position.",
            labels=["position"],
        )
        for position, count in enumerate(metrics.num_accepted_tokens_per_pos):
            by_position.add_metric([str(position)], count)
        yield by_position
        yield GaugeMetricFamily("jaxspec_running_requests", "Requests in the batch.", len(scheduler.running))
        yield GaugeMetricFamily("jaxspec_waiting_requests", "Requests in the queue.", len(scheduler.waiting))
        yield GaugeMetricFamily("jaxspec_free_pages", "Unused pages of the cache.", scheduler.allocator.num_free)


def serve(llm: LLM | AsyncLLM, port: int, address: str = "127.0.0.1") -> Any:
    """Serve the metrics of an LLM over HTTP in a thread, and return the server.

    The server's `server_port` is the port in use. Its methods shutdown() and server_close() end it.

    port: port to listen on; 0 takes a free one.
    address: address to listen on; "0.0.0.0" lets scrapers on other machines connect.
    """
    server, _ = prometheus.start_http_server(port, address, Metrics(llm).registry)
    return server
