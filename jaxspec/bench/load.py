"""The stage `load` of the bench, which sends many requests: throughput, latency and where the time goes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxspec.bench import floors
from jaxspec.bench.clock import summary
from jaxspec.bench.load_options import Load
from jaxspec.bench.models import Setup
from jaxspec.common.errors import UserError
from jaxspec.common.progress import write_line
from jaxspec.engine.catalogue import FEWEST_ROWS, row_counts
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.options.speculative import SpeculativeConfig


@dataclasses.dataclass(frozen=True)
class Planned:
    """A request that the workload is to send.

    prompt: token ids.
    max_tokens: length of the answer, in tokens.
    arrives: time of arrival, in seconds from the start.
    """

    prompt: list[int]
    max_tokens: int
    arrives: float


def workload(setup: Setup, load: Load) -> list[Planned]:
    """Return the requests of the workload in the order of arrival. The same seed gives the same requests."""
    rng = np.random.default_rng(load.seed)
    lengths = rng.integers(load.prompt_tokens[0], load.prompt_tokens[-1] + 1, load.requests)
    wanted = rng.integers(load.output_tokens[0], load.output_tokens[-1] + 1, load.requests)
    gaps = rng.exponential(1 / load.rate, load.requests) if load.rate else np.zeros(load.requests)
    if load.texts:
        ids = [setup.tokenizer.encode(text) for text in load.texts]
        prompts = [ids[i % len(ids)] for i in range(load.requests)]
    else:
        vocab = min(m.config.vocab_size for m in (setup.target, setup.draft) if m)
        prompts = [rng.integers(0, vocab, length).tolist() for length in lengths]
    arrivals = np.cumsum(gaps) - gaps[0]
    return [Planned(*row) for row in zip(prompts, wanted.tolist(), arrivals.tolist(), strict=True)]


def serve(
    engine: Engine, planned: Sequence[Planned], *, temperature: float, streaming: bool
) -> tuple[list[Request], dict[str, float]]:
    """Serve the planned requests, from the first arrival to the last end.

    streaming: whether clients read along, so that the engine's steps must be short.

    Returns: the finished requests, and the seconds spent on each part of the work.
    """
    timing = engine.timing
    before = dataclasses.asdict(timing)
    requests: list[Request] = []
    idle = 0.0
    started = time.perf_counter()
    while len(requests) < len(planned) or engine.busy:
        while len(requests) < len(planned) and planned[len(requests)].arrives <= time.perf_counter() - started:
            arriving = planned[len(requests)]
            params = SamplingParams(temperature=temperature, max_tokens=arriving.max_tokens, ignore_eos=True)
            request = engine.add(arriving.prompt, params)
            request.times.arrived = started + arriving.arrives
            requests.append(request)
        if engine.busy:
            engine.step(streaming=streaming)
        else:
            wait = started + planned[len(requests)].arrives - time.perf_counter()
            idle += max(wait, 0)
            time.sleep(max(wait, 0))
    whole = time.perf_counter() - started
    spent = {name: getattr(timing, f"{name}_seconds") - before[f"{name}_seconds"] for name in PARTS}
    if failed := [r.error for r in requests if r.finish_reason != "length"]:
        raise RuntimeError(f"{len(failed)} requests failed, the first: {failed[0]}")
    return requests, spent | {"idle": idle, "host": whole - idle - sum(spent.values()), "whole": whole}


PARTS = ("prefill", "decode", "compile")  # parts of the work that the engine itself times


def latency(values: Sequence[float | None]) -> dict[str, float | None]:
    """Return mean, median and 99th percentile in milliseconds of values in seconds. None is ignored.

    All three are None if no value is known: answers of one token have no time between tokens.
    """
    known = 1e3 * np.array([v for v in values if v is not None])
    if not known.size:
        return dict.fromkeys(("mean", "p50", "p99"))
    return {"mean": float(known.mean()), "p50": float(np.median(known)), "p99": float(np.percentile(known, 99))}


def load_rows(
    point: Any, setup: Setup, load: Load, rows: int, speculative: SpeculativeConfig | None
) -> Iterator[dict[str, Any]]:
    """Serve the workload `load.runs` times, and yield a result row for each run.

    point: the `Point` of the bench, which computes the least possible times and makes result rows.
    rows: largest number of requests that run together.
    speculative: config of the drafts, None for plain decoding.
    """
    planned = workload(setup, load)
    longest = max(len(p.prompt) + p.max_tokens for p in planned)
    max_len = load.max_model_len or longest
    if max_len < longest:
        raise UserError(f"--max-model-len {max_len} is below the {longest} tokens of the longest request: raise it")
    engine = setup.engine(rows, max_len, speculative, enable_prefix_caching=False)
    floor = floor_ms(point, engine, planned, rows)
    for few in (count for count in row_counts(rows) if FEWEST_ROWS <= count < rows):
        # The last rows of a load run on programs of fewer rows, which an engine that warms up has from the start.
        write_line(f"  load, programs of {few} rows ...")
        longest_first = sorted(planned, key=lambda p: -len(p.prompt) - p.max_tokens)
        together = [dataclasses.replace(p, arrives=0.0) for p in longest_first[:few]]
        serve(engine, together, temperature=setup.options.temperature, streaming=bool(load.rate))
    for run in range(1, load.runs + 1):
        write_line(f"  load, run {run} of {load.runs} ...")
        engine.reset_metrics()
        counts = engine.metrics
        preemptions = engine.scheduler.num_preemptions
        requests, seconds = serve(engine, planned, temperature=setup.options.temperature, streaming=bool(load.rate))
        timings = [r.times.timing(len(r.output)) for r in requests]
        tokens = sum(len(r.output) for r in requests)
        took = 1e3 * seconds["whole"]
        yield point.row(
            "load", summary([took]), floor, speculative and speculative.num_speculative_tokens, run=run,
            requests=len(planned), rate=load.rate, prompt_tokens=sum(len(p.prompt) for p in planned), tokens=tokens,
            tokens_per_second=tokens / seconds["whole"], acceptance_length=counts.mean_acceptance_length,
            time_to_first_token_ms=latency([t.time_to_first_token for t in timings]),
            time_per_output_token_ms=latency([t.time_per_output_token for t in timings]),
            seconds=seconds, preemptions=engine.scheduler.num_preemptions - preemptions,
        )  # fmt: skip


def floor_ms(point: Any, engine: Engine, planned: Sequence[Planned], rows: int) -> float:
    """Return the least milliseconds in which plain decoding could serve the workload, prefill and decoding in turn.

    Prefill takes the time of its arithmetic. Decoding takes the fewest possible passes, each over all rows at their
    average context length.

    point: the `Point` of the bench. rows: largest number of requests that run together.
    """
    config = point.setup.target.config
    params = point.setup.target.params
    model = engine.runner.decoding.target
    prefill = sum(floors.prefill_flop(config, params, 1, len(p.prompt)) for p in planned)
    tokens = sum(p.max_tokens for p in planned)
    keys = round(sum(p.max_tokens * (len(p.prompt) + p.max_tokens / 2) for p in planned) / tokens)
    together = min(rows, len(planned))
    a_pass: float = type(point)(point.setup, point.limits, together, keys).floor_of_pass(model, "target", 1)
    prefill_ms: float = point.limits.flop_ms(prefill) / model.backend.degree
    return prefill_ms + tokens / together * a_pass
