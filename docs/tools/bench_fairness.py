"""Measures the first token's delay of short requests, with and without long prompts beside them.

python docs/tools/bench_fairness.py: Qwen3-8B's shapes on a GPU, 16 short requests and one prompt of 8,000 tokens a
second for twelve seconds. The arguments are another preset, and the seconds. docs/benchmarks.md has the figures.
"""

from __future__ import annotations

import sys

import numpy as np

from jaxspec.bench import models
from jaxspec.bench.bench_options import BenchOptions
from jaxspec.bench.load import Planned, serve
from jaxspec.engine import warming
from jaxspec.engine.engine import Engine

ROWS, CONTEXT = 64, 8192
SHORT_A_SECOND, LONG = 16, 8000


def plan(seconds: int, seed: int, vocab_size: int, *, long: bool) -> list[Planned]:
    """Return requests that arrive within `seconds`: short ones, and one long prompt a second if `long` is true."""
    rng, words = np.random.default_rng(seed), np.random.default_rng(0)
    count = SHORT_A_SECOND * seconds
    arrivals = np.cumsum(rng.exponential(1 / SHORT_A_SECOND, count))
    sizes = zip(rng.integers(64, 257, count), rng.integers(32, 97, count), arrivals - arrivals[0], strict=True)

    def request(prompt: int, max_tokens: int, arrives: float) -> Planned:
        return Planned(words.integers(0, vocab_size, prompt).tolist(), max_tokens, arrives)

    rows = [request(int(prompt), int(tokens), float(at)) for prompt, tokens, at in sizes]
    rows += [request(LONG, 16, second + 0.5) for second in range(seconds if long else 0)]
    return sorted(rows, key=lambda row: row.arrives)


def delays(engine: Engine, planned: list[Planned]) -> list[float]:
    """Serve the requests to clients that stream. Return the milliseconds to the short ones' first tokens."""
    done, _ = serve(engine, planned, temperature=0.0, streaming=True)
    short = [r for r, row in zip(done, planned, strict=True) if len(row.prompt) < LONG]
    return [1e3 * (r.times.timing(len(r.output)).time_to_first_token or 0.0) for r in short]


def first_tokens(engine: Engine, planned: list[Planned]) -> str:
    """Serve the requests. Return their `delays` as text."""
    found = delays(engine, planned)
    return ", ".join(f"{q}th percentile {np.percentile(found, q):.1f} ms" for q in (50, 90, 99))


def main(preset: str = "qwen3-8b", seconds: str = "12") -> None:
    """Print the delays of two runs of each kind."""
    setup = models.load(BenchOptions(preset=preset, batch_sizes=(ROWS,), stages=("load",)))
    engine = setup.engine(ROWS, CONTEXT, None, enable_prefix_caching=False, warm_up=True)
    warming.warm_up(engine)
    vocab_size = engine.limits.vocab_size
    first_tokens(engine, plan(2, 9, vocab_size, long=True))  # measures each size of a pass once
    for seed in (1, 2):
        for long in (False, True):
            name = "beside long prompts" if long else "alone"
            print(f"{name}: {first_tokens(engine, plan(int(seconds), seed, vocab_size, long=long))}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
