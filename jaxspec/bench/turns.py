"""Tokens per second through the engine, of several ways of decoding the same prompts. They take turns at every step."""

from __future__ import annotations

import dataclasses
import time

from jaxspec.bench.bench_options import FIRST_ROUNDS, engine_tokens
from jaxspec.bench.clock import Sample, summary
from jaxspec.bench.models import Setup
from jaxspec.engine.engine import Engine
from jaxspec.engine.metrics import SpecDecodeMetrics
from jaxspec.engine.request import Request
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.options.speculative import SpeculativeConfig


@dataclasses.dataclass
class Runner:
    """The measurements of one way of decoding (plain, or with one speculative config).

    tokens, seconds: totals of the timed steps.
    ms: milliseconds per token of one row, for each timed step.
    counts: metrics of the requests, which also cover the untimed start of each turn (see `heat`).
    """

    engine: Engine
    tokens: int = 0
    seconds: float = 0.0
    ms: list[float] = dataclasses.field(default_factory=list)
    counts: SpecDecodeMetrics = dataclasses.field(default_factory=SpecDecodeMetrics)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def passes(self) -> tuple[float, float]:
        """Number of target passes, and number of draft tokens, per emitted token of a row."""
        c = self.counts
        # A round emits its accepted draft tokens and one more token.
        rounds = c.num_emitted_tokens - c.num_accepted_tokens
        return rounds / c.num_emitted_tokens, c.num_draft_tokens / c.num_emitted_tokens

    def per_token(self, batch_size: int) -> Sample:
        """Return milliseconds per token of one row: total time over total tokens, with the quartiles of the steps."""
        return dataclasses.replace(summary(self.ms), ms=1e3 * batch_size / self.tokens_per_second)


def take_turns(
    setup: Setup,
    ways: dict[str, SpeculativeConfig | None],
    *,
    batch_size: int,
    context: int,
    launches: int,
) -> dict[str, Runner]:
    """Decode batch_size prompts of `context` tokens in every way, and return each way's measurements by its name.

    Each way takes `launches` timed engine steps. The ways take turns, so that a disturbance of the machine hits all of
    them. Prefill and compiling are not timed. A first turn of each way warms up, and its measurements are discarded.

    ways: speculative configs by name, None for plain decoding.
    """
    max_tokens = engine_tokens(max(setup.options.ks))  # the same number for all ways, so that all have the same shapes
    max_len = context + max_tokens
    engines = {name: setup.engine(batch_size, max_len, s) for name, s in ways.items()}
    runners = {name: Runner(engine) for name, engine in engines.items()}
    prompts = setup.prompts(batch_size, context)
    params = SamplingParams(temperature=setup.options.temperature, max_tokens=max_tokens, ignore_eos=True)
    heat(list(runners.values()), prompts, params)
    for name, engine in engines.items():
        runners[name] = Runner(engine)
    for _ in range(launches):
        heat(list(runners.values()), prompts, params)
    return runners


def heat(runners: list[Runner], prompts: list[list[int]], params: SamplingParams) -> None:
    """Run one turn: every way starts all prompts, untimed (admission, prefill, short launches), and is then timed.

    Each way takes one timed step of its engine. The requests are aborted at the end of the turn.

    A launch is one run of the device program, of many rounds.
    """
    started: list[list[Request]] = []
    for runner in runners:
        started.append([runner.engine.add(prompt, params) for prompt in prompts])
        while any(not request.output for request in started[-1]):
            runner.engine.step(FIRST_ROUNDS)
    for runner, requests in zip(runners, started, strict=True):
        timed_step(runner, requests)
    for runner, requests in zip(runners, started, strict=True):
        for request in requests:
            if request.finish_reason is not None:
                raise RuntimeError(f"a row ended while it was timed ({request.finish_reason})")
            runner.counts += request.metrics
            runner.engine.abort(request)


def timed_step(runner: Runner, requests: list[Request]) -> None:
    """Take one step of the engine. Add its tokens, and its time without compiling, to the runner's measurements."""
    programs = runner.engine.runner.programs
    tokens_before = sum(len(request.output) for request in requests)
    compiled_before = programs.compile_seconds
    started = time.perf_counter()
    runner.engine.step()
    seconds = time.perf_counter() - started - (programs.compile_seconds - compiled_before)
    gained = sum(len(request.output) for request in requests) - tokens_before
    if not gained:
        why = next((request.error for request in requests if request.error), "it cannot be timed")
        raise RuntimeError(f"a step gave no token: {why}")
    runner.tokens += gained
    runner.seconds += seconds
    runner.ms.append(1e3 * seconds * len(requests) / gained)
