"""Tiny random models and engines for tests."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax.numpy as jnp

from jaxspec.engine.engine import Engine
from jaxspec.loading.weights import resharded
from jaxspec.models import families
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import random_params
from jaxspec.models.layer_config import LayerConfig
from jaxspec.models.model import Model
from jaxspec.models.rope import Rope
from jaxspec.options.engine import EngineConfig
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.options.speculative import SpeculativeConfig
from jaxspec.parallel.placement import make_placement
from pallas_kernels.device import Device, here

BASE = ModelConfig(
    family="llama",
    vocab_size=64,
    num_layers=2,
    width=32,
    mlp_width=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_model_len=256,
    windows=(None, None),
)
# Layers as in Gemma 4: a window beside full attention with larger heads, and two layers that share these.
GEMMA4_LAYERS = tuple(
    LayerConfig(4, 2, size, width, 8, window, rope, 1.0, shares=shares, mlp="layer_embedding")
    for window, size, rope, width, shares in (
        (12, 16, Rope(1e4), 48, None),
        (None, 32, Rope(1e6, rotated=4), 48, None),
        (12, 16, Rope(1e4), 96, 0),
        (None, 32, Rope(1e6, rotated=4), 96, 1),
    )
)
# Beside a family's switches: what shows where they would be mistaken.
BESIDE: dict[str, dict] = {
    "mistral": {"windows": (12, 12), "tied": False},
    "qwen3": {"head_dim": 8},
    "granite": {"embed_scale": 3.0, "residual_scale": 0.3, "query_scale": 0.4, "logit_scale": 2.0},
    "phi3": {"rope": Rope(1e4, (1.0,) * 8, 6, 1.3, 40, (2.0,) * 8), "windows": (12, 12)},
    "smollm3": {"unrotated": (1,)},
    "olmo3": {"windows": (12, None), "rope": Rope(1e6, (4.0,) * 8, scale=1.2), "local_rope": Rope(1e4)},
    "ministral3": {"rope": Rope(1e4, (4.0,) * 8, context=8, query_growth=0.5), "tied": False},
    "gemma4": {
        "num_layers": 4,
        "windows": (12, None, 12, None),
        "query_scale": 1.0,
        "logit_soft_cap": 30.0,
        "layer_embed_width": 8,
        "per_layer": GEMMA4_LAYERS,
    },
    "muse_glimmer": {
        "windows": (12, None),
        "unrotated": (1,),
        "query_scale": 0.4,
        "post_norm_eps": 1e-2,
        "logit_scale": 0.5,
        "logit_soft_cap": 30.0,
        "tied": False,
    },
    "gemma3": {"windows": (12, None), "rope": Rope(1e6), "local_rope": Rope(1e4), "query_scale": 0.3},
}
FAMILIES = {
    "llama": BASE,
    "llama3": dataclasses.replace(BASE, rope=Rope(5e5, (1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0)), tied=False),
}
FAMILIES |= {
    name: dataclasses.replace(BASE, family=name, **family.switches(BASE.width) | BESIDE.get(name, {}))
    for name, family in families.FAMILIES.items()
    if family.reads_as not in families.FAMILIES  # else it is that one under another name
}


@functools.cache
def model(config: ModelConfig, seed: int = 0, tensor_parallel_size: int = 1, scale: float = 1.0) -> Model:
    """Random weights; scale multiplies the embedding table, which flattens (< 1) or sharpens the distributions."""
    params = random_params(config, jnp.float32, make_placement(tensor_parallel_size), seed)
    return Model(config, params | {"embed": params["embed"] * scale})


def small(config: ModelConfig = BASE) -> ModelConfig:
    """A one-layer draft for it."""
    return dataclasses.replace(config, num_layers=1, windows=config.windows[-1:])


def engine(
    target: Model,
    speculative: SpeculativeConfig | dict | None = None,
    draft: Model | None = None,
    *,
    tensor_parallel_size: int = 1,
    draft_tensor_parallel_size: int | None = None,
    device: Device | None = None,
    **options,
) -> Engine:
    placement = make_placement(tensor_parallel_size, draft_size=draft_tensor_parallel_size)
    if tensor_parallel_size > 1:
        target, draft = resharded(target, placement), draft and resharded(draft, placement.draft)
    if isinstance(speculative, dict):
        speculative = {"adaptive": False, **speculative}  # the number of drafts is the test's choice
    return Engine(
        target,
        EngineConfig(tensor_parallel_size=tensor_parallel_size, **options),
        placement=placement,
        speculative=SpeculativeConfig.of(speculative),
        draft=draft,
        device=device or here(),
    )


def run(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams], **kwargs):
    """Serves prompts to the end; the requests, with their outputs and metrics."""
    params = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    requests = [engine.add(p, s, **kwargs) for p, s in zip(prompts, params, strict=True)]
    while engine.busy:
        engine.step()
    assert engine.scheduler.allocator.num_free == engine.num_pages
    return requests


def outputs(engine: Engine, prompts, params, **kwargs) -> list[list[int]]:
    return [r.output for r in run(engine, prompts, params, **kwargs)]


def rounds_of_launches(engine: Engine, monkeypatch) -> list[int]:
    """What each launch from now on is asked for."""
    asked, launch = [], engine.launch
    monkeypatch.setattr(engine, "launch", lambda r, k, n, *rest: asked.append(n) or launch(r, k, n, *rest))
    return asked
