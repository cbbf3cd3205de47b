"""What a Hugging Face config.json may say: kinds of models, numbers, options that change what is computed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.models.families import FAMILIES
from jaxspec.models.limits import number, short, token_ids
from jaxspec.models.rope import rope_parameters

# Hugging Face model_type -> family. Multimodal wrappers are refused by name instead of guessed at.
MODEL_TYPES = {family.model_type: name for name, family in FAMILIES.items()}
# Number -> what it is in LIMITS.
NUMBERS = {
    "vocab_size": "vocab_size",
    "num_hidden_layers": "num_layers",
    "hidden_size": "width",
    "intermediate_size": "mlp_width",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_model_len",
    "sliding_window": "window",
    "sliding_window_pattern": "num_layers",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "theta",
    "rope_local_base_freq": "theta",
    "final_logit_softcapping": "logit_soft_cap",
    "query_pre_attn_scalar": "width",
    "bos_token_id": "bos_id",
    "pard_token": "token_id",
}
# Option that changes what a model computes -> the only value of it that is supported (null is that too), but in the
# families that take any: see `Family.takes`.
FIXED: dict[str, Any] = {
    "attention_bias": False,
    "attn_logit_softcapping": None,  # Gemma 3's configurations have it, and nothing reads it
    "final_logit_softcapping": None,
    "query_pre_attn_scalar": None,
    "mlp_bias": False,
    "use_bidirectional_attention": False,
    "is_causal": True,
    "partial_rotary_factor": 1,
    "rotary_pct": 1,
    "attention_multiplier": 1,
    "embedding_multiplier": 1,
    "residual_multiplier": 1,
    "logits_scaling": 1,
    "logit_scale": 1,
}
NEEDED = (
    "vocab_size",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "max_position_embeddings",
)
READ = (
    *("model_type", "layer_types", "use_sliding_window", "max_window_layers", "rope_scaling", "rope_parameters"),
    *("original_max_position_embeddings", "hidden_act", "hidden_activation", "tie_word_embeddings", "eos_token_id"),
    *NUMBERS,
    *FIXED,
)


def check_supported(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Looks at a raw config.json before anything is computed from it. Returns the options that are read.

    Raises: UnsupportedError for an unknown architecture, a multimodal or M-RoPE checkpoint, quantised weights,
    a rotary embedding that no supported family has, or another option that changes what is computed and is not
    supported; UserError for a number that no model has.
    """
    kind = raw.get("model_type", "")
    if not isinstance(kind, str):
        raise UserError(f"model_type={short(kind)} must be a string")
    if any(key.endswith("_config") and "vision" in key for key in raw) or "vision" in kind:
        raise UnsupportedError(f"{kind!r} is a multimodal checkpoint: only text decoders are supported")
    if kind not in MODEL_TYPES:
        raise UnsupportedError(f"architecture {short(kind)}: jaxspec reads {', '.join(sorted(MODEL_TYPES))}")
    for key in ("quantization_config", "compression_config"):
        if raw.get(key):
            raise UnsupportedError(f"{key}: of quantised checkpoints only GGUF files are read")
    family = FAMILIES[MODEL_TYPES[kind]]
    for key, only in FIXED.items():
        if key not in family.takes and raw.get(key) not in (None, only):
            more = "" if only is None else f": only {json.dumps(only)} is"
            raise UnsupportedError(f"{key}={short(raw[key])} in a {kind!r} checkpoint is not supported{more}")
    for key, what in NUMBERS.items():
        if raw.get(key) is not None:
            number(what, raw[key], key)
    kinds = raw.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list | tuple) and all(isinstance(k, str) for k in kinds)):
        raise UserError(f"layer_types={short(kinds)} must be a list of strings, one a layer")
    token_ids(raw.get("eos_token_id"), "eos_token_id")
    rope_parameters(raw)
    known = {key: raw[key] for key in READ if key in raw}
    if known.get("num_key_value_heads", 0) is None:  # as many as query heads, which some families' readers refuse
        known["num_key_value_heads"] = known.get("num_attention_heads")
    return known


def windows(raw: Mapping[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer, from `layer_types` where the config has them."""
    window, kinds, which = raw.get("sliding_window"), raw.get("layer_types"), FAMILIES[family].windows
    if kinds is None:
        kinds = ["sliding_attention" if which == "all" and window else "full_attention"] * layers
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise UnsupportedError(
            f"layer types {short(sorted(unknown))}: full_attention and sliding_attention are supported"
        )
    sliding = "sliding_attention" in kinds
    if sliding and window is None:
        raise UserError("layer_types name sliding_attention, but sliding_window is missing")
    # transformers does not look at their layer_types: these say what is done, or the checkpoint is of another kind.
    if (which == "none" and sliding) or (which == "all" and window and "full_attention" in kinds):
        raise UnsupportedError(f"layer_types of a {family} checkpoint must be those of {family}: one kind in all")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
