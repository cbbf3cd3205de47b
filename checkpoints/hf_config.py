"""Parsing and checking of Hugging Face's config.json: model type, sizes and unsupported options."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

from checkpoints import gemma4_config, muse_glimmer_config, published, rope_scaling
from checkpoints.rope_scaling import llama3_factors, rotated_part, spread
from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.models.config import ModelConfig
from jaxspec.models.families import FAMILIES, Family
from jaxspec.models.limits import number, short, token_ids
from jaxspec.models.rope import Rope

# The model family for each Hugging Face model_type.
MODEL_TYPES = {family.model_type: name for name, family in FAMILIES.items()}
# The model_type of the text decoder for each multimodal model_type whose text decoder is read.
TEXT_PARTS = {family.multimodal: family.model_type for family in FAMILIES.values() if family.multimodal}
# Keys that a multimodal config.json may have beside its text_config, and that are about the text decoder.
BESIDE_TEXT = ("bos_token_id", "eos_token_id", "quantization_config", "compression_config", "tie_word_embeddings")
# For a family with options of its own: the module that checks its configurations and describes the layers.
LAYERS: dict[str, Any] = {"gemma4": gemma4_config, "muse_glimmer": muse_glimmer_config}
# For each key of config.json whose value is a number, the entry of `jaxspec.models.limits.LIMITS` that bounds it.
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
    "no_rope_layer_interval": "num_layers",
    "embedding_multiplier": "embed_scale",
    "attention_multiplier": "query_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "global_head_dim": "head_dim",
    "num_global_key_value_heads": "num_kv_heads",
    "num_kv_shared_layers": "shared_layers",
    "hidden_size_per_layer_input": "layer_embed_width",
    "qk_scale_factor": "factor",
    "output_multiplier": "logit_scale",
    "post_norm_eps": "norm_eps",
}
# Options of config.json that change what a model computes, and the only supported value of each; null is supported too.
# A model family also takes other values of the options in its `Family.takes`.
FIXED: dict[str, Any] = {
    "attention_bias": False,
    "attn_logit_softcapping": None,  # a key that Gemma 3's configurations have, but Gemma 3 does not use
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
    "clip_qkv": None,
    "no_rope_layers": None,
    "qk_scale_factor": 1,
    "output_multiplier": 1,
    "post_norm_eps": None,
    "layer_rope_theta": None,
}
# Keys that a config.json must have.
NEEDED = (
    "vocab_size",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "max_position_embeddings",
)
# Keys of config.json that are read; all others are ignored.
READ = (
    *("model_type", "layer_types", "use_sliding_window", "max_window_layers", "rope_scaling", "rope_parameters"),
    *("original_max_position_embeddings", "hidden_act", "hidden_activation", "tie_word_embeddings", "eos_token_id"),
    *("per_layer_config", "vocab_size_per_layer_input", "attention_k_eq_v", "enable_moe_block", "use_double_wide_mlp"),
    *NUMBERS,
    *FIXED,
)
ROPES = ("default", "linear", "llama3", "proportional", *rope_scaling.KINDS)  # kinds of rotary embedding that are read
# For each activation's name in config.json, jaxspec's name.
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig that a Hugging Face configuration describes.

    raw: the configuration as a dict with defaults filled in, such as `transformers.AutoConfig...to_dict()`.
    Raises: UnsupportedError as `check_supported` does, and for an activation or a kind of layer that no
      supported model family has; UserError for a value that no model has.
    """
    check_supported(raw)
    name = MODEL_TYPES[raw["model_type"]]
    family = FAMILIES[name]
    for key in NEEDED:
        number(NUMBERS[key], raw.get(key), key)
    layers, heads = raw["num_hidden_layers"], raw["num_attention_heads"]
    kv_heads = raw.get("num_key_value_heads")
    head_dim = raw["hidden_size"] // heads if raw.get("head_dim") is None else raw["head_dim"]
    number("head_dim", head_dim)
    ropes = rope_tables(raw, head_dim)
    activation = raw.get(family.activation_key, "silu")
    if activation not in tuple(ACTIVATIONS):  # a tuple, because config.json's value may be unhashable
        raise UnsupportedError(f"activation {short(activation)}: silu and gelu_pytorch_tanh are supported")
    tied = raw.get("tie_word_embeddings")
    switches = family.switches(raw["hidden_size"])
    switches["activation"] = ACTIVATIONS[activation]
    switches |= multipliers(raw, family, switches["embed_scale"])
    config = ModelConfig(
        family=name,
        vocab_size=raw["vocab_size"],
        num_layers=layers,
        width=raw["hidden_size"],
        mlp_width=raw["intermediate_size"],
        num_heads=heads,
        num_kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim,
        max_model_len=raw["max_position_embeddings"],
        windows=windows(raw, name, layers),
        unrotated=unrotated(raw, layers),
        rope=ropes[0],
        local_rope=ropes[1],
        tied=False if tied is None else tied,
        **switches,
        norm_plus_one=family.norm_plus_one,
        logit_soft_cap=raw.get("final_logit_softcapping"),
        bos_id=raw.get("bos_token_id"),
        eos_ids=token_ids(raw.get("eos_token_id"), "eos_token_id"),
        mask_id=raw.get("pard_token"),
    )
    if name not in LAYERS:
        return config
    table = functools.partial(rope_table, max_model_len=raw["max_position_embeddings"])
    return dataclasses.replace(config, **LAYERS[name].fields(raw, table))


def text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the text decoder, if `raw` is of a multimodal model that TEXT_PARTS lists, else raw.

    Raises: UserError if it is missing.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        return raw
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise UserError(f"text_config={short(text)} in a {kind!r} checkpoint must be an object")
    beside = {key: raw[key] for key in BESIDE_TEXT if key in raw}
    return {"model_type": TEXT_PARTS[kind], **text, **beside}


def multipliers(raw: Mapping[str, Any], family: Family, embed_scale: float) -> dict[str, float]:
    """Return the fields of ModelConfig that scale what the layers compute: norm_eps, query_scale and others.

    embed_scale: factor of the embeddings that the family has without the options of the configuration.
    """

    def factor(key: str) -> float:
        return float(raw[key]) if key in family.takes and raw.get(key) is not None else 1.0

    query_scale = 0.0
    if "query_pre_attn_scalar" in family.takes:
        query_scale = number("width", raw.get("query_pre_attn_scalar"), "query_pre_attn_scalar") ** -0.5
    elif "attention_multiplier" in family.takes:
        query_scale = factor("attention_multiplier")
    residual = factor("residual_multiplier")
    return {
        "norm_eps": number("norm_eps", raw.get("rms_norm_eps", 1e-6), "rms_norm_eps") / residual**2,
        "embed_scale": embed_scale * factor("embedding_multiplier"),
        "query_scale": query_scale,
        "residual_scale": residual,
        "logit_scale": 1 / factor("logits_scaling"),
    }


def check_supported(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Check the content of a config.json before anything is computed from it. Return its entries that jaxspec reads.

    Raises: UnsupportedError for an unknown architecture, a multimodal or M-RoPE checkpoint, quantised weights that are
      not read (`published.parse`), a rotary embedding that no supported model family has, or another unsupported option
      that changes what is computed; UserError for a number that no model has.
    """
    kind = raw.get("model_type", "")
    if not isinstance(kind, str):
        raise UserError(f"model_type={short(kind)} must be a string")
    if any(key.endswith("_config") and "vision" in key for key in raw) or "vision" in kind:
        raise UnsupportedError(f"{kind!r} is a multimodal checkpoint: only text decoders are supported")
    if kind not in MODEL_TYPES:
        raise UnsupportedError(f"architecture {short(kind)}: jaxspec reads {', '.join(sorted(MODEL_TYPES))}")
    published.parse(raw)
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
        raise UserError(f"layer_types={short(kinds)} must be a list of strings, one for each layer")
    token_ids(raw.get("eos_token_id"), "eos_token_id")
    rope_parameters(raw)
    if MODEL_TYPES[kind] in LAYERS:
        LAYERS[MODEL_TYPES[kind]].check(raw)
    known = {key: raw[key] for key in READ if key in raw}
    # A null num_key_value_heads means as many as query heads. Transformers refuses null for some model families.
    if known.get("num_key_value_heads", 0) is None:
        known["num_key_value_heads"] = known.get("num_attention_heads")
    return known


def takes(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the options that the model family of a configuration supports and others refuse (`Family.takes`)."""
    return FAMILIES[MODEL_TYPES[raw["model_type"]]].takes if raw.get("model_type") in MODEL_TYPES else ()


def windows(raw: Mapping[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    """Return the size of each layer's sliding attention window, None for full attention.

    The key layer_types of the configuration decides, if it is there; else the model family does.

    raw: the configuration.
    layers: number of layers.
    Raises: UnsupportedError for a kind of layer that is not supported in this family; UserError where the window's size
      is missing.
    """
    window, kinds = raw.get("sliding_window"), raw.get("layer_types")
    which = FAMILIES[family].windows
    if kinds is None:
        kinds = ["sliding_attention" if which == "all" and window else "full_attention"] * layers
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise UnsupportedError(
            f"layer types {short(sorted(unknown))}: full_attention and sliding_attention are supported"
        )
    sliding = "sliding_attention" in kinds
    if sliding and window is None:
        raise UserError("layer_types name sliding_attention, but sliding_window is missing")
    # For a model family whose `Family.windows` is "none" or "all", transformers ignores layer_types. If layer_types
    # contradict what transformers does, the checkpoint is of another kind.
    if (which == "none" and sliding) or (which == "all" and window and "full_attention" in kinds):
        needed = "full_attention" if which == "none" else "sliding_attention"
        raise UnsupportedError(
            f"layer_types={short(sorted(set(kinds)))} in a {family} checkpoint: only {needed} is supported"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def unrotated(raw: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return the indices of layers without rotary embedding. The option no_rope_layers holds 1 for layers with it."""
    flags = raw.get("no_rope_layers")
    if flags is None:
        return ()
    if not isinstance(flags, list | tuple) or len(flags) < layers or any(flag not in (0, 1) for flag in flags):
        raise UserError(f"no_rope_layers={short(flags)} must be a list of 0 or 1 for each of {layers} layers")
    return tuple(i for i in range(layers) if not flags[i])


def rope_parameters(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options of the rotary embedding, from the key rope_parameters or from the older keys.

    The older keys are rope_theta and rope_scaling.

    raw: the configuration.
    Raises: UserError where the options are not a JSON object; UnsupportedError for a kind of rotary embedding that is
      not supported.
    """
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(raw.get(key) or {}, Mapping):
            raise UserError(f"{key}={short(raw[key])} must be an object")
        if (raw.get(key) or {}).get("mrope_section"):
            raise UnsupportedError(
                "M-RoPE (mrope_section) belongs to multimodal checkpoints: only text decoders are supported"
            )
    theta = raw.get("rope_theta")
    parameters = raw.get("rope_parameters") or {
        "rope_theta": 10000.0 if theta is None else theta,
        **(raw.get("rope_scaling") or {}),
    }
    context = raw.get("original_max_position_embeddings")
    # Transformers, too, prefers this context length to the one among the options of the rotary embedding.
    if context is not None and parameters.get("rope_type", parameters.get("type")) == "llama3":
        parameters = {**parameters, "original_max_position_embeddings": context}
    by_kind = [parameters[kind] for kind in ("full_attention", "sliding_attention") if kind in parameters]
    for table in by_kind or [parameters]:
        if not isinstance(table, Mapping):
            raise UserError(f"rope_parameters hold {short(table)} where an object is needed")
        kind = rope_kind(table)
        if kind not in ROPES:
            raise UnsupportedError(f"rope type {short(kind)}: {', '.join(ROPES)} are supported")
        if table.get("llama_4_scaling_beta") and "llama_4_scaling_beta" not in takes(raw):
            raise UnsupportedError(
                f"llama_4_scaling_beta={short(table['llama_4_scaling_beta'])} is not supported in a "
                f"{raw.get('model_type')!r} checkpoint: only ministral3 has it"
            )
        rotates_all = table.get("partial_rotary_factor") in (None, 1)
        if kind != "proportional" and not rotates_all and "partial_rotary_factor" not in takes(raw):
            raise UnsupportedError(
                f"partial rotary embedding (partial_rotary_factor={short(table['partial_rotary_factor'])}) is not "
                "supported: only 1"
            )
    return parameters


def rope_tables(raw: Mapping[str, Any], head_dim: int) -> tuple[Rope, Rope | None]:
    """Return two rotary embeddings: for layers with full attention, and for layers with a sliding window.

    The second is None if all layers use the first.
    """
    parameters = rope_parameters(raw)
    longest = raw["max_position_embeddings"]
    if "full_attention" not in parameters and "sliding_attention" not in parameters:
        return rope_table(parameters, head_dim, longest), None
    kinds = ("full_attention", "sliding_attention")
    for kind in kinds:
        if kind not in parameters:
            raise UserError(f"rope_parameters lack {kind}: full_attention and sliding_attention are needed")
    full, sliding = (rope_table(parameters[kind], head_dim, longest) for kind in kinds)
    return full, sliding


def rope_kind(parameters: Mapping[str, Any]) -> Any:
    """Return the kind of a rotary embedding: a name of ROPES, or a name that is not supported."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    # The oldest Phi-3 files call LongRoPE "su" or "yarn".
    return "longrope" if kind == "su" or (kind == "yarn" and "short_factor" in parameters) else kind


def rope_table(parameters: Mapping[str, Any], head_dim: int, max_model_len: int) -> Rope:
    """Return the rotary embedding that these options (of `rope_parameters`) describe.

    max_model_len: largest number of positions of the model.
    """
    kind = rope_kind(parameters)
    theta = float(number("theta", parameters.get("rope_theta"), "rope_theta"))
    if kind == "proportional":  # a share of the frequencies rotates, and these do not depend on the share
        share = number("rotary_share", parameters.get("partial_rotary_factor", 1.0), "partial_rotary_factor")
        factor = float(number("factor", parameters.get("factor", 1.0), "rope's factor"))
        return Rope(theta, () if factor == 1 else (factor,) * (head_dim // 2), int(share * head_dim // 2))
    size = rotated_part(parameters, head_dim)
    if kind in rope_scaling.KINDS:
        rope = rope_scaling.KINDS[kind](parameters, theta, size, max_model_len)
    elif kind == "linear":
        rope = Rope(theta, (float(number("factor", parameters.get("factor"), "rope's factor")),) * (size // 2))
    else:
        rope = Rope(theta, llama3_factors(parameters, theta, size) if kind == "llama3" else ())
    return spread(rope, size, head_dim)
