"""Metrics of an LLM for Prometheus. Needs jaxspec's extra "metrics"."""

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

# By field of SpecDecodeMetrics.
COUNTERS = {
    "num_drafts": "Rounds that proposed something.",
    "num_draft_tokens": "Draft tokens proposed.",
    "num_accepted_tokens": "Draft tokens kept in the output.",
    "num_emitted_tokens": "Output tokens.",
}
# By field of RequestTiming: the metric's name, its help text, the buckets' upper bounds in seconds.
STAGE = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
HISTOGRAMS = {
    "queue_seconds": ("queue_seconds", "From arrival until a row was given.", STAGE),
    "prefill_seconds": ("prefill_seconds", "From then until the prompt was in the caches.", STAGE),
    "decode_seconds": ("decode_seconds", "From then until the end.", STAGE),
    "time_to_first_token": ("time_to_first_token_seconds", "From arrival until the first output token.", STAGE),
    "time_per_output_token": ("time_per_output_token_seconds", "For each token after the first.", TOKEN),
}


class Metrics:
    """Counters and gauges of an LLM, read when they are asked for, and histograms of the requests that end from now on.

    All names begin with jaxspec_. A request here is one sample: a prompt with n = 4 counts four times.

    Args:
      llm: an LLM or AsyncLLM.
      registry: the registry to register in; by default a new one, in `registry`. Two LLMs cannot share a registry:
        their metrics have the same names.
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
        """Count a sample that ended. A stage that it did not reach is not counted."""
        self.requests.labels(request.finish_reason).inc()
        timing = request.times.timing(len(request.output))
        for field, histogram in self.histograms.items():
            seconds = getattr(timing, field)
            if seconds is not None:
                histogram.observe(seconds)

    def collect(self) -> Iterator[Any]:
        """Yield the counters and gauges. The registry calls this at every scrape."""
        metrics, scheduler = self.llm.metrics, self.llm.engine.scheduler
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"jaxspec_{name}", text, value=getattr(metrics, name))
        compiled = self.llm.timing.num_compiled
        yield CounterMetricFamily("jaxspec_num_compiled", "Programs that requests had to wait for.", value=compiled)
        by_position = CounterMetricFamily(
            "jaxspec_num_accepted_tokens_per_pos", "Draft tokens kept, by position in the round.", labels=["position"]
        )
        for position, count in enumerate(metrics.num_accepted_tokens_per_pos):
            by_position.add_metric([str(position)], count)
        yield by_position
        yield GaugeMetricFamily("jaxspec_running_requests", "Requests in the batch.", len(scheduler.running))
        yield GaugeMetricFamily("jaxspec_waiting_requests", "Requests in the queue.", len(scheduler.waiting))
        yield GaugeMetricFamily("jaxspec_free_pages", "Pages of the cache in no use.", scheduler.allocator.num_free)


def serve(llm: LLM | AsyncLLM, port: int, address: str = "127.0.0.1") -> Any:
    """Serve the metrics over HTTP in a thread. address: "0.0.0.0" for scrapers on other machines.

    Return the server. Its `server_port` is the port it got (for port 0 a free one); shutdown() and server_close() end
    it.
    """
    server, _ = prometheus.start_http_server(port, address, Metrics(llm).registry)
    return server
