"""Measuring a draft's acceptance length with the engine on held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxspec.engine.engine import Engine
from jaxspec.engine.metrics import SpecDecodeMetrics
from jaxspec.hardware.platforms import facts
from jaxspec.models.decoder import Params
from jaxspec.models.model import Model
from jaxspec.options.engine import EngineConfig
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.options.speculative import SpeculativeConfig
from pallas_kernels.device import Device


def make_measure(
    target: Model,
    draft: Model,
    prompts: Sequence[Sequence[int]],
    *,
    num_speculative_tokens: int,
    max_tokens: int,
    stop_ids: Sequence[int],
    placement: Any,
    device: Device,
) -> Callable[[Params], tuple[SpecDecodeMetrics, float]]:
    """Return a function measure(params), which answers all prompts greedily with the draft of these parameters.

    Its argument holds the draft's parameters that have changed since `draft`. It returns the counters, summed over
    all answers, and the seconds that compiling took, mostly in the first call. It raises RuntimeError if a request
    fails.
    """
    longest = max(map(len, prompts)) + max_tokens
    page_size = facts(device.platform).page_size
    engine = Engine(
        target,
        EngineConfig(
            max_model_len=longest,
            max_num_seqs=len(prompts),
            page_size=page_size,
            num_pages=len(prompts) * -(-(longest + 2 * num_speculative_tokens) // page_size),
            enable_prefix_caching=False,  # pages that an earlier draft wrote must not be reused
        ),
        placement=placement,
        speculative=SpeculativeConfig(
            model="the draft in training", num_speculative_tokens=num_speculative_tokens, adaptive=False
        ),
        draft=draft,
        device=device,
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens)

    def measure(params: Params) -> tuple[SpecDecodeMetrics, float]:
        before = engine.timing.compile_seconds
        changed = {}
        for name, x in params.items():
            old = draft.params[name]
            changed[name] = jax.device_put(x.astype(old.dtype), old.sharding)
        engine.runner.use("draft", {**draft.params, **changed})
        requests = [engine.add(prompt, greedy, stop_ids=stop_ids) for prompt in prompts]
        while engine.busy:
            engine.step()
        for request in requests:
            if request.finish_reason == "error":
                raise RuntimeError(f"measuring the draft failed: {request.error}")
        total = engine.limits.no_counts()
        for request in requests:
            total += request.metrics
        return total, engine.timing.compile_seconds - before

    return measure
