"""The least that a pass must move or compute. Bytes: every weight once, every key and value of the context once."""

from __future__ import annotations

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


def prefill_flop(config: ModelConfig, params: Params, rows: int, context: int) -> float:
    """Two a weight and token; scores and mixing, two each a query, key and channel, half of the square being causal."""
    products = {name for name, p in parameters(config).items() if p.kind == "matrix" and not p.head}
    weights = sum(params[name].size for name in products)
    pairs = sum(context * n - n * n / 2 for n in seen(config, context))
    return rows * (2 * weights * context + 4 * config.num_heads * config.head_dim * pairs)
