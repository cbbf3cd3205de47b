"""The device programs without the engine's host side: whole launches, prefill, and the stages of a round.

A launch is one run of the decoding program, of many rounds. No other file of the bench builds a launch's inputs.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.bench.bench_options import ROUNDS, launch_tokens
from jaxspec.bench.models import Setup
from jaxspec.bench.stages import STAGES, repeat, repeat_attention, some_proposal
from jaxspec.cache.pages import PagedKVCache
from jaxspec.decode.state import DecodeConfig, LaunchInput, LaunchResult
from jaxspec.drafters.base import Drafter
from jaxspec.engine import batch
from jaxspec.engine.assembly import drafter
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request
from jaxspec.engine.runner import fetch
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.options.speculative import SpeculativeConfig
from jaxspec.runtime.packing import pack
from jaxspec.runtime.programs import compiler_options
from jaxspec.verify import rules

Call = Callable[[], Any]


class Raw:
    """Rows of one context length, and functions that run device programs over them.

    Every launch starts at the same context and overwrites what the launch before wrote. The programs take the caches
    from self.engine.runner.cache, donate them, and put the new caches there.
    """

    def __init__(self, setup: Setup, batch_size: int, context: int, speculative: SpeculativeConfig) -> None:
        most = speculative.num_speculative_tokens
        self.speculative = speculative
        self.length = context + launch_tokens(most)
        self.engine: Engine = setup.engine(batch_size, self.length, speculative)
        self.batch_size = batch_size
        self.context = context
        self.prompts = setup.prompts(batch_size, context)
        self.params = SamplingParams(temperature=setup.options.temperature, max_tokens=1, ignore_eos=True)
        self.row_pages = self.engine.scheduler.pages_for(self.length + most)
        # Attention costs more with a wider block table. So the table gets the width that the engine would choose.
        _, self.table_width = self.engine.catalogue.shape(1, self.row_pages)

    def requests(self, k: int, rates: Sequence[float] = ()) -> list[Request]:
        """Return the requests of a launch with K = k. rates: synthetic acceptance rates; empty for real acceptance."""
        return [
            Request(
                id=row,
                prompt=prompt,
                params=self.params,
                seed=row,
                rule=rules.of_request("synthetic" if rates else None, greedy=self.params.greedy, seeded=False),
                stop_ids=(),
                max_len=self.length,
                num_speculative_tokens=k,
                pages=list(range(row * self.row_pages, (row + 1) * self.row_pages)),
                target_len=self.context - 1,
                draft_len=self.context - 1,
            )
            for row, prompt in enumerate(self.prompts)
        ]

    def place(self, tree: Any) -> Any:
        """Copy all arrays of a tree to the devices, replicated."""
        return jax.device_put(tree, self.engine.runner.placement.sharding())

    def inputs(self, k: int, rates: Sequence[float] = ()) -> LaunchInput:
        """Return the input of a launch of ROUNDS rounds with K = k. rates: as in `requests`."""
        requests = self.requests(k, rates)
        self.engine.scheduler.cover([(request, self.length) for request in requests])
        return batch.launch_input(
            requests,
            k,
            batch.variant(requests),
            self.engine.layout,
            (batch.power_of_two(self.batch_size), self.table_width),
            num_rounds=ROUNDS,
            rule_options=rates,
        )

    def config(self, k: int, rates: Sequence[float] = ()) -> DecodeConfig:
        """Return the configuration of the device program with K = k. K = 0 is plain decoding."""
        variant = batch.variant(self.requests(k, rates))
        return dataclasses.replace(self.engine.runner.decoding, drafter=self.drafter(k), variant=variant)

    def drafter(self, k: int) -> Drafter | None:
        """Return a drafter for K = k. The engine itself has drafters only for its own K and for half of it."""
        if not k:
            return None
        return drafter(self.speculative, self.engine.runner.paged, k)

    def launch(self, k: int, rates: Sequence[float] = ()) -> Call:
        """Return a function that makes a launch (one run of a program, ROUNDS rounds) and returns its packed result."""
        return self.launching(self.config(k, rates), k, self.inputs(k, rates))

    def launch_draft(self) -> Call:
        """Return a function that makes a launch of plain decoding with the draft model in the target's place."""
        drafter: Any = self.engine.runner.decoding.drafter
        alone = dataclasses.replace(self.config(0), target=drafter.model)
        inputs = dataclasses.replace(self.inputs(0), window_table=None)
        return self.launching(alone, 0, inputs, draft_alone=True)

    def launching(self, config: DecodeConfig, k: int, inputs: LaunchInput, *, draft_alone: bool = False) -> Call:
        """Check a launch of `config`, and return a function that makes it. draft_alone: True for `launch_draft`."""
        engine = self.engine

        def call() -> Any:
            params, cache = engine.runner.params, engine.runner.cache
            if draft_alone:
                params, cache = {"target": params["draft"]}, PagedKVCache(cache.draft)
            new, result = engine.runner.programs.run("launch", config, params, cache, pack((inputs,)))
            engine.runner.cache = PagedKVCache(engine.runner.cache.target, new.target) if draft_alone else new
            return result

        self.check(fetch(call()), k)
        return call

    def check(self, result: LaunchResult, k: int) -> None:
        """Raise RuntimeError for a launch that ended early or drafted too few tokens: its time would be too short."""
        emitted = result.emitted[: self.batch_size]
        proposed = result.proposed[: self.batch_size]
        if int(result.num_rounds) != ROUNDS or not (emitted > 0).all():
            raise RuntimeError(f"a launch did {int(result.num_rounds)} rounds of {ROUNDS}, or a row ended early")
        if k and "draft" in self.engine.runner.params and not (proposed == k).all():
            raise RuntimeError(f"rounds proposed {proposed.min()}..{proposed.max()} drafts instead of {k}")

    def prefill(self) -> Call:
        """Return a function that prefills the target's cache, in chunks, with the prompts without their last tokens."""
        engine = self.engine
        requests = self.requests(0)
        for request in requests:
            request.target_len = 0
        engine.scheduler.reset(())
        engine.scheduler.running += requests  # so that `cover` lets them leave window pages
        config = dataclasses.replace(engine.runner.decoding, drafter=None)
        chunks = []
        while left := [r for r in requests if not r.prefilled]:
            pieces = batch.pieces(left, [r.target_len for r in left], engine.prefilling.shape)
            engine.scheduler.cover([(piece.request, piece.start + piece.length) for piece in pieces])
            chunks.append(batch.chunk_input(pieces, engine.layout, engine.prefilling.shape, row_pages=self.table_width))
            for piece in pieces:
                piece.request.target_len += piece.length
        engine.scheduler.cover([])
        engine.scheduler.running.clear()  # without their window pages, which launches read

        def call() -> Any:
            for chunk in chunks:
                engine.runner.cache, _ = engine.runner.programs.run(
                    "prefill", config, engine.runner.params, engine.runner.cache, pack((chunk,))
                )
            return engine.runner.cache

        call()
        return call

    def stage(self, name: str, k: int) -> Call:
        """Return a function that runs one stage of a round ROUNDS times, each time on the same tokens and positions."""
        config = self.config(k)
        inputs = self.place(self.inputs(k))
        proposal = self.place(some_proposal(config, self.engine, inputs))
        shape = (*inputs.num_tokens.shape, k + 1, config.target.config.vocab_size)
        logits = self.place(jax.random.normal(jax.random.key(0), shape if name == "verify" else (0,)))
        parts, once = STAGES[name]
        program = functools.partial(repeat, config, once)
        return self.compiled(program, parts, self.engine.runner.params, inputs, proposal, logits)

    def attention(self, k: int) -> Call:
        """Return a function that runs the attention of all target layers ROUNDS times, with k + 1 queries a row."""
        inputs = self.place(self.inputs(k))
        model = self.engine.runner.decoding.target
        rows = inputs.num_tokens.shape[0]
        layer: Any = model.layout.layers[0]
        shape = (rows, k + 1, model.config.layers[0].num_heads, layer.head_dim)
        query = self.place(jax.random.normal(jax.random.key(0), shape).astype(layer.dtype))
        return self.compiled(functools.partial(repeat_attention, model), ("target",), inputs, query)

    def compiled(self, program: Callable[..., Any], parts: tuple[str, ...], *arrays: Any) -> Call:
        """Compile a program and return a function that runs it.

        program: function of (cache, number of rounds, *arrays) that returns (cache, a small result).
        parts: the fields of PagedKVCache that the program takes. They are donated. arrays: further arguments.
        """
        engine = self.engine
        rounds = self.place(np.int32(ROUNDS))

        def own(cache: PagedKVCache) -> dict[str, Any]:
            return {name: getattr(cache, name) for name in parts}

        def taken() -> PagedKVCache:
            return PagedKVCache(**{"target": ()} | own(engine.runner.cache))

        started = time.perf_counter()
        options = compiler_options(rounds.sharding)
        jitted = jax.jit(program, donate_argnums=0, compiler_options=options)
        run = jitted.lower(taken(), rounds, *arrays).compile()
        engine.runner.programs.compile_seconds += time.perf_counter() - started

        def call() -> Any:
            new, result = run(taken(), rounds, *arrays)
            engine.runner.cache = dataclasses.replace(engine.runner.cache, **own(new))
            return result

        return call
