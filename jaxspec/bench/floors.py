"""The least that a pass must move or compute. Bytes: every weight once, every key and value of the context once."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Params, parameters, weight_bytes
from jaxspec.models.paged import PagedModel


def seen(config: ModelConfig, context: int) -> list[int]:
    """Positions that each layer reads."""
    return [min(context, window or context) for window in config.windows]


def page_bytes(model: PagedModel, rows: int, context: int) -> float:
    """Keys and values that one pass reads."""
    layout = model.layout
    per_position = layout.page_bytes / layout.page_size / layout.num_layers
    return rows * per_position * sum(seen(model.config, context))


def pass_bytes(model: PagedModel, params: Params, rows: int, context: int) -> float:
    return weight_bytes(model.config, params) + page_bytes(model, rows, context)


def pass_flop(model: PagedModel, params: Params, tokens: float) -> float:
    """Two a weight that the pass reads, and token; attention is left out."""
    return 2 * tokens * weight_bytes(model.config, params) / jnp.dtype(model.layout.dtype).itemsize


def drafting_flop(drafter: Any, target: Params, draft: Params, rows: int) -> float:
    """As `drafting_bytes`, without pages; a drafter that fills its places at once computes all of them in its pass."""
    model: PagedModel = drafter.model
    at_once = drafter.independent and model.config.cached_layers
    weights = drafting_bytes(drafter, target, draft, 0, 0) / jnp.dtype(model.layout.dtype).itemsize
    return 2 * rows * weights * (drafter.num_speculative_tokens if at_once else 1)


def drafting_bytes(drafter: Any, target: Params, draft: Params, rows: int, context: int) -> float:
    """Read by a drafter's passes of one round; the head of logits counts in each, be it the target's."""
    model: PagedModel = drafter.model
    config, own = model.config, weight_bytes(model.config, draft)
    once = sum(draft[name].nbytes for name in config.features_from)
    pages = page_bytes(model, rows, context) if config.cached_layers else 0
    borrowed = 0
    if config.borrows_head:
        heads = drafter.target.config
        borrowed = weight_bytes(heads, target) - weight_bytes(heads, target, logits=False)
    return drafter.passes * (own - once + pages + borrowed) + once


def prefill_flop(config: ModelConfig, params: Params, rows: int, context: int) -> float:
    """Two a weight and token; scores and mixing, two each a query, key and channel, half of the square being causal."""
    products = {name for name, p in parameters(config).items() if p.kind == "matrix" and not p.head}
    weights = sum(params[name].size for name in products)
    pairs = sum(context * n - n * n / 2 for n in seen(config, context))
    return rows * (2 * weights * context + 4 * config.num_heads * config.head_dim * pairs)
