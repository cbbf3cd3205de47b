"""Predicts how an engine serves requests on a GPU, without the GPU: on a clock that the costs of programs advance.

python -m docs.tools.virtual_clock: the first tokens of short requests beside long prompts, and tokens a second of 256
requests over 64 rows, as in docs/benchmarks.md. The engine schedules and packs as always. Its device programs do not
run: a pass over prompts and a launch take what they take for Qwen3-8B in bfloat16 on one H200, without drafts.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import jax.numpy as jnp
import numpy as np

from docs.tools.bench_fairness import CONTEXT, ROWS, first_tokens, plan
from jaxspec.bench.bench_options import BenchOptions
from jaxspec.bench.load import serve, workload
from jaxspec.bench.load_options import Load
from jaxspec.bench.models import Setup
from jaxspec.decode.state import FINISH_REASONS, LaunchInput, LaunchResult
from jaxspec.engine.engine import Engine
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import random_params
from jaxspec.models.model import Model
from jaxspec.options.engine import MAX_ROUNDS
from jaxspec.parallel.placement import make_placement
from jaxspec.runtime.plans import Plan
from jaxspec.runtime.programs import Programs
from pallas_kernels.device import Device

# Seconds on one H200. The host takes some of them, and the device waits meanwhile.
STARTING, PACKING, TAKING_IN = 0.8e-3, 1e-3, 1.5e-3  # of the host: a program, a launch's arrays, a launch's results
LAUNCH, ROUND, ROW = 1.5e-3, 4.2e-3, 31e-6  # of the device: a launch, a round, and each row of a round
PASS, TOKEN, KEY = 1.5e-3, 20.5e-6, 2.35e-9  # of the device: a pass, each token of it, and each key that a token reads
LENGTH = next(number for number, reason in FINISH_REASONS.items() if reason == "length")

MODEL = ModelConfig(
    family="llama",
    vocab_size=64,
    num_layers=1,
    width=32,
    mlp_width=32,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    max_model_len=CONTEXT,
    windows=(None,),
)


@dataclasses.dataclass
class VirtualDevice:
    """A device that runs an engine's plans by advancing a clock.

    now: time of the host, in seconds. busy: time at which the device will have run all plans.
    """

    now: float = 0.0
    busy: float = 0.0

    def serve(self, engine: Engine) -> None:
        """Take the place of the engine's device and of the process's clock."""
        engine.runner.start, engine.runner.wait, engine.runner.fetch = self.start, self.wait, self.fetch  # type: ignore[method-assign, assignment]
        time.perf_counter, time.sleep = lambda: self.now, self.sleep  # type: ignore[assignment]

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 0.0)

    def start(self, plan: Plan) -> Any:
        """Start a plan. Return when it ends, and its result. The call of a launch returns when its loop has ended."""
        self.now += STARTING
        inputs: Any = plan.arrays[0]  # type: ignore[index]
        if plan.program == "launch":
            self.now += PACKING
            seconds, result = launch(inputs)
            self.now = self.busy = max(self.busy, self.now) + seconds
            return self.busy, result
        self.busy = max(self.busy, self.now) + PASS
        if plan.program == "prefill":
            self.busy += TOKEN * inputs.tokens.size + KEY * float(np.dot(inputs.length.astype(float), inputs.start))
        return self.busy, None

    def wait(self, started: Any) -> None:
        self.now = max(self.now, started[0])

    def fetch(self, started: Any) -> Any:
        self.now += TAKING_IN
        return started[1]


def launch(inputs: LaunchInput) -> tuple[float, LaunchResult]:
    """Return the seconds and the result of a launch in which each row gains a token a round until its last one."""
    rows = len(inputs.live)
    left = np.where(inputs.live, np.asarray(inputs.limits.max_len) - inputs.num_tokens, 0)
    gained, finish = np.zeros(rows, int), np.zeros(rows, int)
    decoding = [int(row) for row in inputs.active if left[row]]
    waiting = [row for row in range(rows) if left[row] and row not in decoding]
    seconds, ends, rounds = LAUNCH, 0, 0
    while decoding and rounds < int(inputs.control.num_rounds) and ends < int(inputs.control.max_ends):
        rounds += 1
        seconds += ROUND + ROW * len(decoding)
        gained[decoding] += 1
        ended = [row for row in decoding if gained[row] == left[row]]
        finish[ended] = LENGTH
        ends += len(ended)
        decoding = [row for row in decoding if row not in ended]
        decoding += [waiting.pop(0) for _ in ended[: len(waiting)]]
    nothing: Any = np.zeros((rows, MAX_ROUNDS), int)
    counts = (nothing, nothing, nothing, nothing, np.int32(rounds))
    return seconds, LaunchResult(nothing, gained, finish, np.zeros(rows, int), *counts)  # type: ignore[arg-type]


def new_setup() -> Setup:
    """Return a bench's setup with a tiny model and a GPU that is not there."""
    placement = make_placement()
    target = Model(MODEL, random_params(MODEL, jnp.float32, placement))
    gpu, programs = Device("gpu", (9, 0)), Programs(placement)
    options = BenchOptions(preset="qwen3-8b", stages=("load",))  # whose costs the constants above are
    return Setup(options, gpu, jnp.float32, placement, target, None, None, programs)


def new_engine(max_gap_ms: float | None, setup: Setup | None = None) -> Engine:
    """Return an engine of ROWS rows on a clock of its own. max_gap_ms: the option; None for its default."""
    options = {"enable_prefix_caching": False, "warm_up": True, "max_gap_ms": max_gap_ms}
    engine = (setup or new_setup()).engine(ROWS, CONTEXT, None, **options)
    VirtualDevice().serve(engine)
    return engine


def throughput(max_gap_ms: float | None, *, streaming: bool) -> float:
    """Return the tokens a second of the load stage's requests, which arrive at once."""
    setup = new_setup()
    planned = workload(setup, Load())
    _, spent = serve(new_engine(max_gap_ms, setup), planned, temperature=0.0, streaming=streaming)
    return sum(row.max_tokens for row in planned) / spent["whole"]


def main() -> None:
    """Print the predictions for the default of max_gap_ms and for no limit."""
    for name, long, gap in (("alone", False, None), ("beside long ones", True, None), ("- no limit", True, math.inf)):
        print(f"short requests {name}: {first_tokens(new_engine(gap), plan(12, 1, MODEL.vocab_size, long=long))}")
    print(f"256 requests over {ROWS} rows: {throughput(None, streaming=False):.0f} tokens/s")
    print(f"- clients stream: {throughput(None, streaming=True):.0f} tokens/s")
    print(f"- no limit: {throughput(math.inf, streaming=True):.0f} tokens/s")


if __name__ == "__main__":
    main()
