"""The least that a pass must move or compute. Bytes: every weight once, every key and value of the context once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Params, parameters, read_by_pass, weight_bytes
from jaxspec.models.draft_spec import draft_spec
from jaxspec.models.paged import PagedModel


def seen(config: ModelConfig, context: int) -> list[int]:
    """Positions that each layer reads."""
    return [min(context, layer.window or context) for layer in config.layers]


def page_bytes(model: PagedModel, rows: int, context: int) -> float:
    """Keys and values that one pass reads."""
    of_cache = iter(model.layout.layers)
    each: list[Any] = []  # of every layer; one that shares another's reads that
    for layer in model.config.layers:
        each.append(next(of_cache) if layer.shares is None else each[layer.shares])
    seen_by = zip(each, seen(model.config, context), strict=True)
    return rows * sum(layer.position_bytes() * positions for layer, positions in seen_by)


def pass_bytes(model: PagedModel, params: Params, rows: int, context: int) -> float:
    return weight_bytes(model.config, params) + page_bytes(model, rows, context)


def pass_flop(model: PagedModel, params: Params, tokens: float) -> float:
    """Two a weight that the pass reads, and token; attention is left out."""
    return 2 * tokens * weight_count(model.config, params)


def drafting_flop(drafter: Any, target: Params, draft: Params, rows: int) -> float:
    """As `drafting_bytes`, without pages; a drafter that fills its places at once computes all of them in its pass."""
    model: PagedModel = drafter.model
    at_once = drafter.independent and model.config.cached_layers
    weights = drafting_weights(drafter, target, draft, weight_count)
    return 2 * rows * weights * (drafter.num_speculative_tokens if at_once else 1)


def drafting_bytes(drafter: Any, target: Params, draft: Params, rows: int, context: int) -> float:
    """Read by a drafter's passes of one round; the head of logits counts in each, be it the target's."""
    model: PagedModel = drafter.model
    pages = page_bytes(model, rows, context) if model.config.cached_layers else 0
    return drafting_weights(drafter, target, draft, weight_bytes) + drafter.passes * pages


def drafting_weights(drafter: Any, target: Params, draft: Params, measure: Callable[..., float]) -> float:
    """What a round's passes read, by `weight_bytes` or `weight_count`; what makes features is read once."""
    config = drafter.model.config
    each = measure(config, draft, without=draft_spec(config).features_from)
    once = measure(config, draft) - each
    borrowed = 0.0
    if draft_spec(config).borrows_head:
        heads = drafter.target.config
        borrowed = measure(heads, target) - measure(heads, target, logits=False)
    return drafter.passes * (each + borrowed) + once


def weight_count(config: ModelConfig, params: Params, **which: Any) -> float:
    """Weights that one pass reads, however many bytes they take."""
    return sum(w.size for w in read_by_pass(config, params, **which).values())


def prefill_flop(config: ModelConfig, params: Params, rows: int, context: int) -> float:
    """Two a weight and token; scores and mixing, two each a query, key and channel, half of the square being causal."""
    products = {name for name, p in parameters(config).items() if p.kind == "matrix" and not p.head}
    weights = sum(params[name].size for name in products)
    pairs = [context * n - n * n / 2 for n in seen(config, context)]
    attention = sum(4 * c.num_heads * c.head_dim * n for c, n in zip(config.layers, pairs, strict=True))
    return rows * (2 * weights * context + attention)
