"""Many requests at once or as they arrive, through the engine: speed, waiting, and where the time went."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxspec.bench import floors
from jaxspec.bench.clock import summary
from jaxspec.bench.options import Load
from jaxspec.bench.setup import Setup
from jaxspec.common.errors import UserError
from jaxspec.common.progress import say
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.options.speculative import SpeculativeConfig


@dataclasses.dataclass(frozen=True)
class Wish:
    """A request to come: its prompt, how many tokens it wants, and when it arrives, in seconds from the start."""

    prompt: list[int]
    max_tokens: int
    arrives: float


def workload(setup: Setup, load: Load) -> list[Wish]:
    """The same for the same seed."""
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
    return [Wish(*row) for row in zip(prompts, wanted.tolist(), arrivals.tolist(), strict=True)]


def serve(engine: Engine, wishes: Sequence[Wish], *, temperature: float, streaming: bool) -> tuple[list[Request], Any]:
    """All of them from the first arrival to the last end -> (requests, {where the time went: seconds})."""
    timing, before = engine.timing, dataclasses.asdict(engine.timing)
    requests: list[Request] = []
    started, idle = time.perf_counter(), 0.0
    while len(requests) < len(wishes) or engine.busy:
        while len(requests) < len(wishes) and wishes[len(requests)].arrives <= time.perf_counter() - started:
            wish = wishes[len(requests)]
            params = SamplingParams(temperature=temperature, max_tokens=wish.max_tokens, ignore_eos=True)
            requests.append(engine.add(wish.prompt, params))
            requests[-1].times.arrived = started + wish.arrives
        if engine.busy:
            engine.step(streaming=streaming)
        else:
            wait = started + wishes[len(requests)].arrives - time.perf_counter()
            idle += max(wait, 0)
            time.sleep(max(wait, 0))
    whole = time.perf_counter() - started
    spent = {name: getattr(timing, f"{name}_seconds") - before[f"{name}_seconds"] for name in PARTS}
    if failed := [r.error for r in requests if r.finish_reason != "length"]:
        raise RuntimeError(f"{len(failed)} requests did not come to their end: {failed[0]}")
    return requests, spent | {"idle": idle, "host": whole - idle - sum(spent.values()), "whole": whole}


PARTS = ("prefill", "decode", "compile")


def told(values: Sequence[float | None]) -> dict[str, float | None]:
    """In milliseconds; None where there is nothing to tell, as of the time between tokens where each answer is one."""
    known = 1e3 * np.array([v for v in values if v is not None])
    if not known.size:
        return dict.fromkeys(("mean", "p50", "p99"))
    return {"mean": float(known.mean()), "p50": float(np.median(known)), "p99": float(np.percentile(known, 99))}


def load_rows(
    point: Any, setup: Setup, load: Load, rows: int, speculative: SpeculativeConfig | None
) -> Iterator[dict[str, Any]]:
    """A row a run. point: the bench's own, which knows floors and makes rows of them."""
    wishes = workload(setup, load)
    longest = max(len(w.prompt) + w.max_tokens for w in wishes)
    max_len = load.max_model_len or longest
    if max_len < longest:
        raise UserError(f"--max-model-len {max_len} is below the {longest} tokens of the longest request: raise it")
    engine = setup.engine(rows, max_len, speculative, enable_prefix_caching=False)
    floor = floor_ms(point, engine, wishes, rows)
    for run in range(1, load.runs + 1):
        say(f"  load, run {run} of {load.runs} ...")
        engine.reset_metrics()
        counts = engine.metrics
        put_back = engine.scheduler.num_preemptions
        requests, seconds = serve(engine, wishes, temperature=setup.options.temperature, streaming=bool(load.rate))
        timings = [r.times.timing(len(r.output)) for r in requests]
        tokens = sum(len(r.output) for r in requests)
        took = 1e3 * seconds["whole"]
        yield point.row(
            "load", summary([took]), floor, speculative and speculative.num_speculative_tokens, run=run,
            requests=len(wishes), rate=load.rate, prompt_tokens=sum(len(w.prompt) for w in wishes), tokens=tokens,
            tokens_per_second=tokens / seconds["whole"], acceptance_length=counts.mean_acceptance_length,
            time_to_first_token_ms=told([t.time_to_first_token for t in timings]),
            time_per_output_token_ms=told([t.time_per_output_token for t in timings]),
            seconds=seconds, preemptions=engine.scheduler.num_preemptions - put_back,
        )  # fmt: skip


def floor_ms(point: Any, engine: Engine, wishes: Sequence[Wish], rows: int) -> float:
    """Of plain decoding one part after the other: the prompts' arithmetic, and as few passes over all rows as there
    are tokens for, with as many keys as there are on the average."""
    config, params, model = point.setup.target.config, point.setup.target.params, engine.runner.decoding.target
    prefill = sum(floors.prefill_flop(config, params, 1, len(w.prompt)) for w in wishes)
    tokens = sum(w.max_tokens for w in wishes)
    keys = round(sum(w.max_tokens * (len(w.prompt) + w.max_tokens / 2) for w in wishes) / tokens)
    together = min(rows, len(wishes))
    a_pass = type(point)(point.setup, point.limits, together, keys).floor_of_pass(model, "target", 1)
    return point.limits.flop_ms(prefill) / model.backend.degree + tokens / together * a_pass
