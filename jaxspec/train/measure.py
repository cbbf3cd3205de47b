"""The acceptance length of a draft, measured by the engine on held-out prompts."""

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
    """measure(draft's params, those that differ from `draft`'s) -> counters of greedy answers to all prompts, and the
    seconds that compiling took, mostly of its first call."""
    longest = max(map(len, prompts)) + max_tokens
    page_size = facts(device.platform).page_size
    engine = Engine(
        target,
        EngineConfig(
            max_model_len=longest,
            max_num_seqs=len(prompts),
            page_size=page_size,
            num_pages=len(prompts) * -(-(longest + 2 * num_speculative_tokens) // page_size),
            enable_prefix_caching=False,  # pages of an earlier draft must not be found
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
        as_before = lambda old, new: jax.device_put(new.astype(old.dtype), old.sharding)
        changed = {name: as_before(draft.params[name], x) for name, x in params.items()}
        engine.runner.use("draft", {**draft.params, **changed})
        requests = [engine.add(prompt, greedy, stop_ids=stop_ids) for prompt in prompts]
        while engine.busy:
            engine.step()
        if failed := next((request.error for request in requests if request.finish_reason == "error"), None):
            raise RuntimeError(f"measuring the draft failed: {failed}")
        total = engine.no_counts()
        for request in requests:
            total += request.metrics
        return total, engine.timing.compile_seconds - before

    return measure
