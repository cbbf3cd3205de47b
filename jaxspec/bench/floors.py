"""Floors, the least work that a forward pass needs: bytes to read, and floating-point operations.

A pass reads every weight once; the few rows that it reads of an embedding table are not counted. It also reads once
every key and value that its layers attend to. A row's context is the number of its tokens in the caches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Params, parameters, read_by_pass, weight_bytes
from jaxspec.models.draft_spec import draft_spec
from jaxspec.models.paged import PagedModel


def seen(config: ModelConfig, context: int) -> list[int]:
    """Return, for each layer, the number of positions that one token attends to."""
    return [min(context, layer.window or context) for layer in config.layers]


def page_bytes(model: PagedModel, rows: int, context: int) -> float:
    """Return the bytes of keys and values that one pass reads for `rows` rows of `context` tokens."""
    own = iter(model.layout.layers)
    caches: list[Any] = []  # cache that each layer reads: its own or that of an earlier layer
    for layer in model.config.layers:
        caches.append(next(own) if layer.shares is None else caches[layer.shares])
    positions = seen(model.config, context)
    per_row: float = sum(cache.page_bytes(1) * n for cache, n in zip(caches, positions, strict=True))
    return rows * per_row


def pass_bytes(model: PagedModel, params: Params, rows: int, context: int) -> float:
    """Return the bytes of weights, keys and values that one pass reads for `rows` rows of `context` tokens."""
    return weight_bytes(model.config, params) + page_bytes(model, rows, context)


def pass_flop(model: PagedModel, params: Params, tokens: float) -> float:
    """Return the floating-point operations of a pass without attention: two per weight and token."""
    return 2 * tokens * weight_count(model.config, params)


def drafting_flop(drafter: Any, target: Params, draft: Params, rows: int) -> float:
    """Return the floating-point operations of the drafter's passes in one round, without attention.

    A drafter with attention that proposes all K tokens in one pass computes K tokens a row in it. Any other drafter
    computes one token a row in each pass.

    target, draft: parameters of both models. rows: number of rows in the batch.
    """
    model: PagedModel = drafter.model
    at_once = drafter.independent and model.config.cached_layers
    weights = drafting_weights(drafter, target, draft, weight_count)
    return 2 * rows * weights * (drafter.num_speculative_tokens if at_once else 1)


def drafting_bytes(drafter: Any, target: Params, draft: Params, rows: int, context: int) -> float:
    """Return the bytes that the drafter's passes in one round read.

    Every pass reads the output head, even if that is the target's.

    target, draft: parameters of both models.
    """
    model: PagedModel = drafter.model
    pages = page_bytes(model, rows, context) if model.config.cached_layers else 0
    passes: int = drafter.passes
    return drafting_weights(drafter, target, draft, weight_bytes) + passes * pages


def drafting_weights(drafter: Any, target: Params, draft: Params, measure: Callable[..., float]) -> float:
    """Return the size of the weights that the drafter's passes in one round read.

    The weights that compute the head's features (its form of the target's hidden states) are read once a round, the
    other weights in each pass.

    target, draft: parameters of both models.
    measure: function that returns the size in its unit, `weight_bytes` or `weight_count`.
    """
    config = drafter.model.config
    per_pass = measure(config, draft, without=draft_spec(config).features_from)
    per_round = measure(config, draft) - per_pass
    from_target = 0.0
    if draft_spec(config).uses_target_head:
        lending = drafter.target.config
        from_target = measure(lending, target) - measure(lending, target, logits=False)
    passes: int = drafter.passes
    return passes * (per_pass + from_target) + per_round


def weight_count(config: ModelConfig, params: Params, **which: Any) -> float:
    """Return the number of weights that one pass reads."""
    count: float = sum(w.size for w in read_by_pass(config, params, **which).values())
    return count


def prefill_flop(config: ModelConfig, params: Params, rows: int, context: int) -> float:
    """Return the floating-point operations of prefilling `rows` prompts of `context` tokens.

    Matrix products need two per weight and token. Attention needs four per query, key and channel: two for the scores,
    two for the weighted sum of values. Without a window, the causal mask halves the number of pairs of query and key.
    The output head is not computed.
    """
    products = {name for name, p in parameters(config).items() if p.kind == "matrix" and not p.head}
    weights: int = sum(params[name].size for name in products)
    pairs = [context * n - n * n / 2 for n in seen(config, context)]
    attention = sum(4 * c.num_heads * c.head_dim * n for c, n in zip(config.layers, pairs, strict=True))
    return rows * (2 * weights * context + attention)
