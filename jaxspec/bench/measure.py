"""The stages of the bench: for each, its measured time and its floor (the least time that the device allows)."""

from __future__ import annotations

import functools
import itertools
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.bench import floors
from jaxspec.bench.bench_options import MODEL_STAGES, ROUNDS, BenchOptions
from jaxspec.bench.clock import Sample, measure
from jaxspec.bench.hardware import Hardware, hardware
from jaxspec.bench.load import load_rows
from jaxspec.bench.models import Setup, load
from jaxspec.bench.raw import Raw
from jaxspec.bench.turns import take_turns
from jaxspec.common.errors import UserError
from jaxspec.common.plots import check_plot
from jaxspec.common.progress import write_line
from jaxspec.engine.runner import fetch
from jaxspec.loading.weights import compute_dtype
from jaxspec.models.decoder import weight_bytes
from jaxspec.models.draft_spec import draft_spec
from jaxspec.parallel.placement import device_name
from pallas_kernels.device import here

Row = dict[str, Any]
# Ways of decoding that the stage `adaptive` compares: for each name the option `adaptive`, or None for no speculation.
WAYS = {"off": None, "always": False, "adaptive": True}


def bench(options: BenchOptions, *, as_json: bool = False, plot: Path | None = None) -> None:
    """Measure the stages, and print tables or one JSON document. Progress goes to standard error."""
    from jaxspec.bench.picture import draw
    from jaxspec.bench.report import show

    if plot is not None:
        check_plot(plot)
    document = run(options)
    if as_json:
        print(json.dumps(document))
    else:
        show(document)
    if plot is not None:
        draw(document, plot)
        write_line(f"plot written to {plot}")


def run(options: BenchOptions, limits: Hardware | None = None) -> dict[str, Any]:
    """Measure the stages and return the JSON document. limits: measured limits of the device; None to measure them."""
    dtype = compute_dtype(options.dtype, here())
    if limits is None:  # before weights are loaded, because measuring the limits needs large arrays too
        write_line("measuring copy bandwidth and matrix peak ...")
        limits = hardware(dtype)
    write_line(f"making {options.name} ({dtype.name}) ...")
    started = time.perf_counter()
    setup = load(options)
    jax.block_until_ready([m.params for m in (setup.target, setup.draft) if m])
    load_seconds = time.perf_counter() - started
    rows, left_out = list[Row](), list[Row]()
    for row in all_rows(setup, limits, left_out):
        rows.append(row)
        write_line(progress_line(row))
    return {
        "device": device_name(),
        "jax": jax.__version__,
        "preset": options.name,
        "dtype": dtype.name,
        "copy_bandwidth_gb_s": limits.copy_gb_s,
        "read_bandwidth_gb_s": limits.read_gb_s,
        "floor_bandwidth_gb_s": limits.floor_gb_s,
        "matrix_peak_tflops": limits.peak_tflops,
        "rows": rows,
        "left_out": left_out,
        "load_seconds": load_seconds,
        "compile_seconds": setup.programs.compile_seconds,
    }


def progress_line(row: Row) -> str:
    """Return a result row as a line of text for standard error."""
    where = f"batch {row['batch_size']}, context {row['context']}" + (f", K {row['k']}" if row["k"] else "")
    speed = f", {row['tokens_per_second']:.1f} tokens/s" if row["tokens_per_second"] else ""
    took = f"{row['ms']:.3f} ms, {row['ratio']:.2f} times its floor"
    return f"  {row['way'] or row['stage']} ({where}): {took}{speed}"


def all_rows(setup: Setup, limits: Hardware, left_out: list[Row]) -> Iterator[Row]:
    """Measure all stages at every batch size and context length, `load` at every batch size. Yield the result rows.

    A setting that is refused, as its KV cache does not fit into memory, is appended to `left_out`, and a line names it.
    Raises UserError if all are refused.
    """
    contexts = [*setup.options.contexts, *[0] * ("load" in setup.options.stages)]  # 0 stands for the stage `load`
    settings = list(itertools.product(setup.options.batch_sizes, contexts))
    for batch_size, context in settings:
        try:
            yield from Point(setup, limits, batch_size, context).rows()
        except UserError as error:
            left_out.append({"batch_size": batch_size, "context": context or "load", "reason": str(error)})
            write_line(f"  batch {batch_size}, context {context or 'load'}: left out, because {error}")
            if len(left_out) == len(settings):
                raise


class Point:
    """The measurements at one batch size and context length. Its methods yield or return rows of the JSON document."""

    def __init__(self, setup: Setup, limits: Hardware, batch_size: int, context: int) -> None:
        self.setup = setup
        self.limits = limits
        self.options = setup.options
        self.batch_size = batch_size
        self.context = context
        self.launches = self.options.launches

    def row(self, stage: str, sample: Sample, floor_ms: float, k: int | None = None, **more: Any) -> Row:
        """Return a row of the JSON document, with the time of a stage and its floor.

        k: number of draft tokens per round. more: further fields, or other values of these fields.
        """
        return {
            "preset": self.options.name,
            "stage": stage,
            "way": None,
            "batch_size": self.batch_size,
            "context": self.context,
            "k": k,
            "ms": sample.ms,
            "spread": [sample.low, sample.high],
            "floor_ms": floor_ms,
            "ratio": sample.ms / floor_ms,
            "tokens_per_second": None,
            "acceptance_length": None,
            "synthetic_acceptance_length": None,
            **more,
        }

    def rows(self) -> Iterator[Row]:
        """Measure the stages, and yield the result rows. A context of 0 stands for the stage `load`."""
        if self.context and set(MODEL_STAGES) & set(self.options.stages):
            yield from self.model_rows()
        yield from self.engine_rows() if self.context else self.load_rows()

    def model_rows(self) -> Iterator[Row]:
        """Time the stages that run device programs without the engine, those of a round for every K. Yield the rows."""
        speculation = self.options.speculation(max(self.options.ks), None, adaptive=False)
        raw = Raw(self.setup, self.batch_size, self.context, speculation)
        draft = self.setup.draft
        alone = draft is None or draft_spec(draft.config).method == "draft_model"
        if not alone and "draft" in self.options.stages:
            write_line("  draft: skipped, because a head does not decode by itself; the stage propose times its passes")
        wanted = set(self.options.stages) - (set() if alone else {"draft"})
        if "prefill" in wanted:  # prefill comes first, so that the other stages read the cache that it wrote
            yield self.prefill(raw)
        for stage in ("target", "draft"):
            if stage in wanted:
                sample = self.per_round(raw.launch(0) if stage == "target" else raw.launch_draft())
                speed = 1e3 * self.batch_size / sample.ms
                yield self.row(stage, sample, self.pass_ms(raw, stage), tokens_per_second=speed)
        if "attention" in wanted:
            yield self.row("attention", self.per_round(raw.attention(0)), self.pages_ms(raw))
        for k in self.options.ks:
            yield from self.k_rows(raw, k)

    def k_rows(self, raw: Raw, k: int) -> Iterator[Row]:
        """Time a round of K = k draft tokens, its stages, and attention of k + 1 queries. Yield their result rows."""
        drafting = self.drafting_ms(raw.drafter(k))
        logits = 4 * self.batch_size * (k + 1) * self.setup.target.config.vocab_size
        floor_ms = {
            # N-gram drafting has no weights to read. It reads the ids of the context.
            "propose": max(drafting, self.limits.bytes_ms(4 * self.batch_size * self.context)),
            "score": self.pass_ms(raw, "target", k + 1),
            "verify": self.limits.bytes_ms(logits),
        }
        acceptances = self.options.acceptances("round", k) if "round" in self.options.stages else ()
        for length, rates in acceptances:
            launch = raw.launch(k, rates)
            emitted = float(np.mean(fetch(launch()).emitted[: self.batch_size]))
            facts = {"acceptance_length": emitted, "synthetic_acceptance_length": length}
            yield self.row("round", self.per_round(launch), floor_ms["score"] + drafting, k, **facts)
        for stage in floor_ms:
            if stage in self.options.stages:
                sample = self.per_round(raw.stage(stage, k))
                more = {"ms_per_draft": sample.ms / k} if stage == "propose" else {}
                yield self.row(stage, sample, floor_ms[stage], k, **more)
        if "attention" in self.options.stages:
            yield self.row("attention", self.per_round(raw.attention(k)), self.pages_ms(raw), k)

    def engine_rows(self) -> Iterator[Row]:
        """Measure the stages that run through the engine, except `load`.

        Their times are in milliseconds per token of one row.
        """
        options = self.options
        if "plain" in options.stages:
            runner = self.take_turns({"plain": None})["plain"]
            yield self.decoding_row("plain", runner)
        for k in options.ks:
            if "speculative" in options.stages:
                for length, rates in options.acceptances("speculative", k):
                    ways = {"speculative": options.speculation(k, length, rates, adaptive=False)}
                    yield self.decoding_row("speculative", self.take_turns(ways)["speculative"], k, length)
            if "adaptive" in options.stages:
                for length, rates in options.acceptances("adaptive", k):
                    yield from self.never_slower(k, length, rates)

    def load_rows(self) -> Iterator[Row]:
        """Measure the stage `load` (serving many requests): with adaptive K, or plain decoding if there is no draft."""
        options = self.options
        serve = functools.partial(load_rows, self, self.setup, options.load, self.batch_size)
        if not options.draft_name:
            yield from serve(None)
            return
        for k in options.ks:
            for length, rates in options.acceptances("load", k):
                for row in serve(options.speculation(k, length, rates, adaptive=True)):
                    yield row | {"synthetic_acceptance_length": length}

    def never_slower(self, k: int, length: float | None, rates: tuple[float, ...]) -> Iterator[Row]:
        """Measure the stage `adaptive`: no speculation, always K draft tokens, and adaptive K, taking turns."""
        ways: dict[str, Any] = {}
        for way, adaptive in WAYS.items():
            if adaptive is None:
                ways[way] = None
            else:
                ways[way] = self.options.speculation(k, length, rates, adaptive=adaptive)
        runners = self.take_turns(ways)
        for way, runner in runners.items():
            speedup = runner.tokens_per_second / runners["off"].tokens_per_second
            yield self.decoding_row("adaptive", runner, k, length, way=way, speedup=speedup)

    def take_turns(self, ways: dict[str, Any]) -> dict[str, Any]:
        """Measure ways of decoding against each other. ways: speculative configs by name, None for plain decoding."""
        return take_turns(self.setup, ways, batch_size=self.batch_size, context=self.context, launches=self.launches)

    def decoding_row(
        self, stage: str, runner: Any, k: int | None = None, length: float | None = None, **more: Any
    ) -> Row:
        """Return the result row of one way of decoding. Its floor counts the passes that were really made.

        stage: name of the stage. runner: the `Runner` with the measurements. length: synthetic acceptance length, None
          for real acceptance.
        """
        decoding = runner.engine.runner.decoding
        target_passes, drafts = runner.passes
        floor = target_passes * self.floor_of_pass(decoding.target, "target", (k or 0) + 1)
        if self.setup.draft and runner.engine.speculative:
            drafter = decoding.drafter
            floor += drafts / drafter.num_speculative_tokens * self.drafting_ms(drafter)
        facts = {
            "tokens_per_second": runner.tokens_per_second,
            "acceptance_length": runner.counts.mean_acceptance_length,
            "synthetic_acceptance_length": length,
        }
        return self.row(stage, runner.per_token(self.batch_size), floor, k, **facts, **more)

    def per_round(self, call: Any) -> Sample:
        """Time a launch (one run of the device program, ROUNDS rounds) and return the milliseconds of one round."""
        return measure(call, self.launches) / ROUNDS

    def prefill(self, raw: Raw) -> Row:
        """Time the prefill of all prompts, and return the result row."""
        sample = measure(raw.prefill(), self.launches)
        config = self.setup.target.config
        params = self.setup.target.params
        count = self.context - 1  # the last token of a prompt is not prefilled; the first round reads it
        shape = raw.engine.prefilling.shape
        chunks = math.ceil(self.batch_size * count / (shape.rows * shape.width))
        moved = chunks * weight_bytes(config, params, logits=False)
        computed = self.limits.flop_ms(floors.prefill_flop(config, params, self.batch_size, count))
        speed = 1e3 * self.batch_size * count / sample.ms
        floor = max(computed, self.limits.bytes_ms(moved)) / raw.engine.runner.decoding.target.backend.degree
        return self.row("prefill", sample, floor, tokens_per_second=speed)

    def pass_ms(self, raw: Raw, name: str, tokens: int = 1) -> float:
        """Return the floor, in milliseconds, of one pass over `tokens` tokens a row; 0 for an n-gram draft.

        name: "target" or "draft", the model of the pass.
        """
        drafter: Any = raw.engine.runner.decoding.drafter
        if name == "draft" and self.setup.draft is None:
            return 0.0
        paged = raw.engine.runner.decoding.target if name == "target" else drafter.model
        return self.floor_of_pass(paged, name, tokens)

    def floor_of_pass(self, paged: Any, name: str, tokens: int) -> float:
        """Return the least milliseconds of a pass: the time to read or to compute a device's part, whichever is longer.

        paged: the model with its cache layout. name: "target" or "draft". tokens: tokens per row of the pass.
        """
        model: Any = self.setup.target if name == "target" else self.setup.draft
        moved = self.limits.bytes_ms(floors.pass_bytes(paged, model.params, self.batch_size, self.context))
        computed = self.limits.flop_ms(floors.pass_flop(paged, model.params, self.batch_size * tokens))
        num_devices: int = paged.backend.degree
        return max(moved, computed) / num_devices

    def drafting_ms(self, drafter: Any) -> float:
        """Return the floor, in milliseconds, of the drafter's passes in a round; 0 for a drafter without weights."""
        if self.setup.draft is None:
            return 0.0
        params = (self.setup.target.params, self.setup.draft.params)
        moved = self.limits.bytes_ms(floors.drafting_bytes(drafter, *params, self.batch_size, self.context))
        computed = self.limits.flop_ms(floors.drafting_flop(drafter, *params, self.batch_size))
        num_devices: int = drafter.backend.degree
        return max(moved, computed) / num_devices

    def pages_ms(self, raw: Raw) -> float:
        """Return the least milliseconds in which the target's keys and values can be read once."""
        target = raw.engine.runner.decoding.target
        return self.limits.bytes_ms(floors.page_bytes(target, self.batch_size, self.context)) / target.backend.degree
