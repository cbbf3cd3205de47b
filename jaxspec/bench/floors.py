"""The least that a pass must move or compute. Bytes: every weight once, every key and value of the context once."""

from __future__ import annotations

from typing import Any

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
