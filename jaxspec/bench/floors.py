"""Floors: the fewest bytes and floating-point operations that a pass needs.

A pass reads every weight once and every key and value of the context once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Params, parameters, read_by_pass, weight_bytes
from jaxspec.models.draft_spec import draft_spec
from jaxspec.models.paged import PagedModel


def seen(config: ModelConfig, context: int) -> list[int]:
    """Return the number of positions that each layer attends to."""
    return [min(context, layer.window or context) for layer in config.layers]


def page_bytes(model: PagedModel, rows: int, context: int) -> float:
    """Return the bytes of keys and values that one pass reads."""
    own = iter(model.layout.layers)
    caches: list[Any] = []  # the cache that each layer reads, its own or an earlier layer's
    for layer in model.config.layers:
        caches.append(next(own) if layer.shares is None else caches[layer.shares])
    positions = seen(model.config, context)
    return rows * sum(cache.position_bytes() * n for cache, n in zip(caches, positions, strict=True))


def pass_bytes(model: PagedModel, params: Params, rows: int, context: int) -> float:
    """Return the bytes of weights, keys and values that one pass reads."""
    return weight_bytes(model.config, params) + page_bytes(model, rows, context)


def pass_flop(model: PagedModel, params: Params, tokens: float) -> float:
    """Return the operations of a pass without attention: two per weight and token."""
    return 2 * tokens * weight_count(model.config, params)


def drafting_flop(drafter: Any, target: Params, draft: Params, rows: int) -> float:
    """Return the operations of a drafter's passes of one round, without attention.

    A drafter with attention that proposes all K tokens in one pass computes K tokens a row in it. Any other drafter
    computes one token a row in each pass.
    """
    model: PagedModel = drafter.model
    at_once = drafter.independent and model.config.cached_layers
    weights = drafting_weights(drafter, target, draft, weight_count)
    return 2 * rows * weights * (drafter.num_speculative_tokens if at_once else 1)


def drafting_bytes(drafter: Any, target: Params, draft: Params, rows: int, context: int) -> float:
    """Return the bytes that a drafter's passes of one round read.

    Every pass reads the output head, also where the head is the target's.
    """
    model: PagedModel = drafter.model
    pages = page_bytes(model, rows, context) if model.config.cached_layers else 0
    return drafting_weights(drafter, target, draft, weight_bytes) + drafter.passes * pages


def drafting_weights(drafter: Any, target: Params, draft: Params, measure: Callable[..., float]) -> float:
    """Return the size of the weights that the drafter's passes of one round read.

    measure: `weight_bytes` or `weight_count`. The weights that compute the features are read once a round, the others
    in each pass.
    """
    config = drafter.model.config
    per_pass = measure(config, draft, without=draft_spec(config).features_from)
    per_round = measure(config, draft) - per_pass
    from_target = 0.0
    if draft_spec(config).uses_target_head:
        lending = drafter.target.config
        from_target = measure(lending, target) - measure(lending, target, logits=False)
    return drafter.passes * (per_pass + from_target) + per_round


def weight_count(config: ModelConfig, params: Params, **which: Any) -> float:
    """Return the number of weights that one pass reads."""
    return sum(w.size for w in read_by_pass(config, params, **which).values())


def prefill_flop(config: ModelConfig, params: Params, rows: int, context: int) -> float:
    """Return the operations of prefilling `rows` prompts.

    Matrix products need two per weight and token. Attention needs four per query, key and channel: two for the scores,
    two for the weighted sum of values. The causal mask halves the number of pairs of query and key.
    """
    products = {name for name, p in parameters(config).items() if p.kind == "matrix" and not p.head}
    weights = sum(params[name].size for name in products)
    pairs = [context * n - n * n / 2 for n in seen(config, context)]
    attention = sum(4 * c.num_heads * c.head_dim * n for c, n in zip(config.layers, pairs, strict=True))
    return rows * (2 * weights * context + attention)
