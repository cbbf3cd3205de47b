"""The device programs without the engine's host side: launches, prefill, and the stages of a round one by one.

The only file of this package that knows how a launch is put together.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.bench.options import ROUNDS, launch_tokens
from jaxspec.bench.setup import Setup
from jaxspec.cache.pages import PagedKVCache
from jaxspec.decode.loop import begin, start_state
from jaxspec.decode.round import Scores, history_of, propose, score, verify
from jaxspec.decode.state import DecodeConfig, LaunchInput, LaunchResult
from jaxspec.drafters.base import Drafter, Proposal
from jaxspec.engine import batch
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request
from jaxspec.engine.runner import fetch
from jaxspec.engine.setup import drafter
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.options.speculative import SpeculativeConfig
from jaxspec.runtime.packing import pack
from jaxspec.runtime.programs import compiler_options
from jaxspec.verify import rules
from pallas_kernels.paged_attention import paged_attention

Call = Callable[[], Any]
NEVER = 2**30  # no token id, count or logit is as large


class Raw:
    """Rows that stand at one context, and programs over them. Every launch starts from there again, and
    overwrites what the one before it wrote. The donated caches are threaded through self.engine.runner.cache."""

    def __init__(self, setup: Setup, batch_size: int, context: int, speculative: SpeculativeConfig) -> None:
        most = speculative.num_speculative_tokens
        self.speculative, self.length = speculative, context + launch_tokens(most)
        self.engine: Engine = setup.engine(batch_size, self.length, speculative)
        self.batch_size, self.context = batch_size, context
        self.prompts = setup.prompts(batch_size, context)
        self.params = SamplingParams(temperature=setup.options.temperature, max_tokens=1, ignore_eos=True)
        self.row_pages = self.engine.scheduler.pages_for(self.length + most)
        # As the engine does: attention's cost depends on it.
        _, self.table_width = self.engine.catalogue.shape(1, self.row_pages)

    def requests(self, k: int, rates: Sequence[float] = ()) -> list[Request]:
        """rates: of synthetic acceptance; none is the real one."""
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
        return jax.device_put(tree, self.engine.runner.placement.sharding())

    def inputs(self, k: int, rates: Sequence[float] = ()) -> LaunchInput:
        """Of a launch of ROUNDS rounds."""
        requests, shape = self.requests(k, rates), (batch.power_of_two(self.batch_size), self.table_width)
        make = functools.partial(batch.launch_input, requests, k, batch.variant(requests), self.engine.layout, shape)
        return make(num_rounds=ROUNDS, rule_options=rates)

    def config(self, k: int, rates: Sequence[float] = ()) -> DecodeConfig:
        """The device program at K = k; 0 is plain decoding."""
        variant = batch.variant(self.requests(k, rates))
        return dataclasses.replace(self.engine.runner.decoding, drafter=self.drafter(k), variant=variant)

    def drafter(self, k: int) -> Drafter | None:
        """Of any K; the engine has its largest and the half of that."""
        if not k:
            return None
        return drafter(self.speculative, self.engine.runner.paged, k)

    def launch(self, k: int, rates: Sequence[float] = ()) -> Call:
        """One launch of ROUNDS rounds; its result, packed."""
        return self.launching(self.config(k, rates), k, self.inputs(k, rates))

    def launch_draft(self) -> Call:
        """The draft model alone, decoding plainly as if it were a target."""
        drafter: Any = self.engine.runner.decoding.drafter
        alone = dataclasses.replace(self.config(0), target=drafter.model)
        return self.launching(alone, 0, self.inputs(0), draft_alone=True)

    def launching(self, config: DecodeConfig, k: int, inputs: LaunchInput, *, draft_alone: bool = False) -> Call:
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
        """A launch that ended early, or drafted less than it should, would be timed as if it were fast."""
        emitted, proposed = result.emitted[: self.batch_size], result.proposed[: self.batch_size]
        if int(result.num_rounds) != ROUNDS or not (emitted > 0).all():
            raise RuntimeError(f"a launch did {int(result.num_rounds)} rounds of {ROUNDS}, or a row ended early")
        if k and "draft" in self.engine.runner.params and not (proposed == k).all():
            raise RuntimeError(f"rounds proposed {proposed.min()}..{proposed.max()} drafts instead of {k}")

    def prefill(self) -> Call:
        """The prompts, all but their last token, into the target's cache, in chunks."""
        engine, requests = self.engine, self.requests(0)
        for request in requests:
            request.target_len = 0
        config = dataclasses.replace(engine.runner.decoding, drafter=None)
        chunks = []
        while left := [r for r in requests if not r.prefilled]:
            rows = batch.pieces(left, [r.target_len for r in left], engine.prefilling.shape)
            chunks.append(batch.chunk_input(rows, engine.layout, engine.prefilling.shape, row_pages=self.table_width))
            for piece in rows:
                piece.request.target_len += piece.length

        def call() -> Any:
            for chunk in chunks:
                engine.runner.cache, _ = engine.runner.programs.run(
                    "prefill", config, engine.runner.params, engine.runner.cache, pack((chunk,))
                )
            return engine.runner.cache

        call()
        return call

    def stage(self, name: str, k: int) -> Call:
        """ROUNDS times one stage of a round, at the same place."""
        config, inputs = self.config(k), self.place(self.inputs(k))
        proposal = self.place(some_proposal(config, self.engine, inputs))
        shape = (*inputs.num_tokens.shape, k + 1, config.target.config.vocab_size)
        logits = self.place(jax.random.normal(jax.random.key(0), shape if name == "verify" else (0,)))
        parts, once = STAGES[name]
        program = functools.partial(repeat, config, once)
        return self.compiled(program, parts, self.engine.runner.params, inputs, proposal, logits)

    def attention(self, k: int) -> Call:
        """ROUNDS times the target's attention over the pages, layer by layer, K + 1 queries a row."""
        inputs, model = self.place(self.inputs(k)), self.engine.runner.decoding.target
        rows, layout = inputs.num_tokens.shape[0], model.layout
        layer = layout.layers[0]
        shape = (rows, k + 1, model.config.layers[0].num_heads, layer.head_dim)
        query = self.place(jax.random.normal(jax.random.key(0), shape).astype(layer.dtype))
        return self.compiled(functools.partial(repeat_attention, model), ("target",), inputs, query)

    def compiled(self, program: Callable, parts: tuple[str, ...], *arrays: Any) -> Call:
        """program(cache, number of rounds, *arrays) -> (cache, something small), the cache donated: the pages of the
        `parts` that it takes."""
        engine, rounds = self.engine, self.place(np.int32(ROUNDS))
        own = lambda cache: {name: getattr(cache, name) for name in parts}
        cache = lambda: PagedKVCache(**{"target": ()} | own(engine.runner.cache))
        started = time.perf_counter()
        options = compiler_options(rounds.sharding)
        jitted = jax.jit(program, donate_argnums=0, compiler_options=options)
        run = jitted.lower(cache(), rounds, *arrays).compile()
        engine.runner.programs.compile_seconds += time.perf_counter() - started

        def call() -> Any:
            new, done = run(cache(), rounds, *arrays)
            engine.runner.cache = dataclasses.replace(engine.runner.cache, **own(new))
            return done

        return call


def some_proposal(config: DecodeConfig, engine: Engine, inputs: LaunchInput) -> Proposal:
    """Drafts of the shapes that the drafter gives; q is flat."""

    def shapes(params: Any, cache: PagedKVCache, inputs: LaunchInput) -> Any:
        context = begin(config, params, inputs)
        return propose(context, cache, history_of(context, start_state(context)))[0]

    s = jax.eval_shape(shapes, engine.runner.params, engine.runner.cache, inputs)
    probs = None if s.probs is None else jnp.full(s.probs.shape, 1 / s.probs.shape[-1], s.probs.dtype)
    return Proposal(jnp.zeros_like(s.tokens), probs, jnp.full_like(s.num_proposed, config.num_speculative_tokens))


# Stage -> (the parts of the cache that it takes, and may write; (context, cache, history, proposal, logits) -> (what it
# gives, the cache)). verify is given logits, as where rows sample.
STAGES: dict[str, tuple[tuple[str, ...], Callable[..., tuple[Any, PagedKVCache]]]] = {
    "propose": (
        ("draft", "features"),
        lambda context, cache, history, proposal, logits: propose(context, cache, history),
    ),
    "score": (
        ("target", "features"),
        lambda context, cache, history, proposal, logits: score(context, cache, history, proposal),
    ),
    "verify": (
        (),
        lambda context, cache, history, proposal, logits: (
            verify(context, history, proposal, Scores(logits, jnp.isfinite(jnp.max(logits, axis=-1)))),
            cache,
        ),
    ),
}


def repeat(config: DecodeConfig, once: Callable, cache, num_rounds, params, inputs, proposal, logits):
    """Runs a stage num_rounds times. Each run depends on all that the one before it gave, through a number that is
    always 0; otherwise the compiler would run it once, or leave out what nobody reads."""
    context = begin(config, params, inputs)
    start = start_state(context)

    def body(_, carry):
        cache, zero = carry
        state = dataclasses.replace(start, num_tokens=start.num_tokens + zero)
        result, cache = once(context, cache, history_of(context, state), proposal, logits + zero)
        return cache, always_zero(result)

    return lax.fori_loop(0, num_rounds, body, (cache, jnp.int32(0)))


def repeat_attention(model, cache, num_rounds, inputs, query):
    """Attention of every layer in turn, each fed with the output of the one before; all have heads of one shape."""
    c, rows = model.config, query.shape[1]

    def body(_, carry):
        cache, zero = carry
        x, kv_len = query, inputs.num_tokens + rows - 1 + zero
        for memory, layer in zip(cache.target, c.cached_layers, strict=True):
            options = {"scale": layer.query_scale, "window": layer.window, "soft_cap": c.soft_cap}
            x = paged_attention(x, memory.pages, inputs.block_table, kv_len, **options, **model.backend.how())
        return cache, always_zero(x)

    return lax.fori_loop(0, num_rounds, body, (cache, jnp.int32(0)))


def always_zero(tree: Any) -> jax.Array:
    """0, which the compiler cannot know without computing all of the tree."""
    return sum((jnp.any(x > NEVER).astype(jnp.int32) for x in jax.tree.leaves(tree)), start=jnp.int32(0))
