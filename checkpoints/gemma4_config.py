"""The layers of a Gemma 4, from its config.json."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.models.layer_config import LayerConfig, mlp_block
from jaxspec.models.limits import number, short
from jaxspec.models.rope import Rope

KINDS = ("sliding_attention", "full_attention")


def check(raw: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for a Gemma 4 with experts or with attention in both directions."""
    if raw.get("enable_moe_block"):
        raise UnsupportedError("Gemma 4 with experts (enable_moe_block), such as 26B-A4B: E2B, E4B and 31B are read")
    seen = raw.get("use_bidirectional_attention")
    if seen not in (None, False, "vision"):  # "vision" is about images only
        raise UnsupportedError(f"use_bidirectional_attention={short(seen)}: only causal attention to text is supported")


def fields(raw: Mapping[str, Any], rope: Callable[[Mapping[str, Any], int], Rope]) -> dict[str, Any]:
    """Return the fields of ModelConfig that describe the layers and their embeddings.

    raw: configuration, with transformers' defaults filled in.
    rope: function from the options of a rotary embedding and a head size to the embedding.
    Raises: UserError for layers that share keys and values without an earlier layer of their kind; UnsupportedError for
      a table of embeddings per layer with another vocabulary.
    """
    count, kinds = raw["num_hidden_layers"], raw["layer_types"]
    first_shared = count - (raw.get("num_kv_shared_layers") or 0)
    ropes = raw.get("rope_parameters") or {}
    if missing := [kind for kind in KINDS if kind not in ropes]:
        raise UserError(f"rope_parameters lack {missing[0]}: {' and '.join(KINDS)} are needed")
    embed_width = raw.get("hidden_size_per_layer_input") or 0
    vocabulary = raw.get("vocab_size_per_layer_input")
    if embed_width and vocabulary != raw["vocab_size"]:
        raise UnsupportedError(f"vocab_size_per_layer_input={short(vocabulary)}: only vocab_size is supported")
    layers: list[LayerConfig] = []
    for i, kind in enumerate(kinds):
        heads, size = kv_heads(raw, i, kind)
        shares = None
        if i >= first_shared:
            shares = next((j for j in reversed(range(max(first_shared, 0))) if kinds[j] == kind), None)
            if shares is None:
                raise UserError(f"layer {i} shares keys and values, but no earlier layer has {kind} of its own")
        width = raw["intermediate_size"] * (2 if shares is not None and raw.get("use_double_wide_mlp") else 1)
        layers.append(
            LayerConfig(
                num_heads=raw["num_attention_heads"],
                num_kv_heads=heads,
                head_dim=size,
                mlp_width=width,
                mlp_block=mlp_block(width, min(heads, 8)),
                window=raw["sliding_window"] if kind == "sliding_attention" else None,
                rope=rope(ropes[kind], size),
                query_scale=1.0,
                shares=shares,
                value_is_key=shares is None and kind == "full_attention" and bool(raw.get("attention_k_eq_v")),
                mlp="layer_embedding",
            )
        )
    local = rope(ropes["sliding_attention"], raw["head_dim"])
    return {
        "per_layer": tuple(layers),
        "rope": local,
        "local_rope": None,
        "query_scale": 1.0,
        "layer_embed_width": embed_width,
    }


def kv_heads(raw: Mapping[str, Any], index: int, kind: str) -> tuple[int, int]:
    """Return the number of key-value heads and the head size of a layer.

    Newer configurations list the layers that differ from the rest; older ones have keys for all layers with full
    attention.
    """
    own: Any = {}
    listed = raw.get("per_layer_config")
    if listed is not None:
        if not isinstance(listed, Mapping) or not all(re.fullmatch(r"\d+", str(key)) for key in listed):
            raise UserError(f"per_layer_config={short(listed)} must be an object whose keys are numbers of layers")
        own = next((x for key, x in listed.items() if int(key) == index), own)  # keys may be padded: "04"
        if not isinstance(own, Mapping) or own.keys() - {"head_dim", "num_key_value_heads"}:
            raise UserError(
                f"per_layer_config={short(own)} of layer {index} must be an object of head_dim and num_key_value_heads"
            )
    elif kind == "full_attention":
        own = {"head_dim": raw.get("global_head_dim") or 512}
        if raw.get("attention_k_eq_v") and raw.get("num_global_key_value_heads") is not None:
            own["num_key_value_heads"] = raw["num_global_key_value_heads"]
    heads = number("num_kv_heads", own.get("num_key_value_heads", raw["num_key_value_heads"]), "num_key_value_heads")
    return heads, number("head_dim", own.get("head_dim", raw["head_dim"]))
