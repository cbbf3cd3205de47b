"""The ModelConfig of a Gemma 4 in a GGUF file, whose layers differ."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from checkpoints import hf_config
from checkpoints.gguf_config import GGUF_ENDS, check_fixed, number_of, sliding_windows
from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.models.config import ModelConfig
from jaxspec.models.limits import number, short, token_ids

FAMILY = "gemma4"  # value of general.architecture
UNUSED = 1e30  # factor of the rotary frequencies that are not used


def model_config(
    meta: Mapping[str, Any], *, tensors: Collection[str], vocab_size: int, rope_factors: Iterable[float]
) -> ModelConfig:
    """Return the ModelConfig that the metadata of a GGUF file with a Gemma 4 describe.

    The metadata are put in the form of a config.json, which is checked and read as such.

    tensors: names of all tensors in the file.
    vocab_size: number of rows of tensor token_embd.weight.
    rope_factors: values of tensor rope_freqs.weight, for layers with full attention.
    Raises as `gguf_config.model_config` and `hf_config.model_config` do.
    """
    check_fixed(meta, FAMILY)
    get = functools.partial(number_of, meta, FAMILY)
    each = functools.partial(numbers_of, meta)
    count = get("block_count", "num_layers")
    kinds = ["sliding_attention" if window else "full_attention" for window in sliding_windows(meta, FAMILY, count)]
    shared = get("attention.shared_kv_layers", "shared_layers", 0)
    sizes = {
        "full_attention": get("attention.key_length", "head_dim"),
        "sliding_attention": get("attention.key_length_swa", "head_dim"),
    }
    for kind, end in (("full_attention", ""), ("sliding_attention", "_swa")):
        for key in (f"attention.value_length{end}", f"rope.dimension_count{end}"):
            if get(key, "head_dim", sizes[kind]) != sizes[kind]:
                raise UnsupportedError(f"{FAMILY}.{key}={meta[f'{FAMILY}.{key}']}: only {sizes[kind]} is supported")
    widths = each("feed_forward_length", "mlp_width", count)
    wide = widths[-1] == 2 * widths[0] and shared > 0
    if widths != [widths[0] * (2 if wide and i >= count - shared else 1) for i in range(count)]:
        raise UnsupportedError(
            f"{FAMILY}.feed_forward_length={short(widths)}: one size, and its double in layers that share keys and "
            "values, are supported"
        )
    kv_heads = each("attention.head_count_kv", "num_kv_heads", count)
    own_full = [i for i in range(count - shared) if kinds[i] == "full_attention"]
    return hf_config.model_config(
        {
            "model_type": "gemma4_text",
            "vocab_size": vocab_size,
            "vocab_size_per_layer_input": vocab_size,
            "num_hidden_layers": count,
            "hidden_size": get("embedding_length", "width"),
            "hidden_size_per_layer_input": get("embedding_length_per_layer_input", "layer_embed_width", 0),
            "intermediate_size": widths[0],
            "use_double_wide_mlp": wide,
            "hidden_activation": "gelu_pytorch_tanh",
            "num_attention_heads": get("attention.head_count", "num_heads"),
            "num_key_value_heads": next(
                (heads for heads, kind in zip(kv_heads, kinds, strict=True) if kind == "sliding_attention"), kv_heads[0]
            ),
            "head_dim": sizes["sliding_attention"],
            "per_layer_config": {
                str(i): {"num_key_value_heads": heads, "head_dim": sizes[kind]}
                for i, (heads, kind) in enumerate(zip(kv_heads, kinds, strict=True))
            },
            # The file has no tensor of values for layers whose values are their keys.
            "attention_k_eq_v": any(f"blk.{i}.attn_v.weight" not in tensors for i in own_full),
            "num_kv_shared_layers": shared,
            "layer_types": kinds,
            "sliding_window": get("attention.sliding_window", "window"),
            "max_position_embeddings": get("context_length", "max_model_len"),
            "rms_norm_eps": get("attention.layer_norm_rms_epsilon", "norm_eps"),
            "final_logit_softcapping": meta.get(f"{FAMILY}.final_logit_softcapping") or None,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": get("rope.freq_base", "theta"),
                    "partial_rotary_factor": rotary_share(rope_factors, sizes["full_attention"]),
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": get("rope.freq_base_swa", "theta", 1e4)},
            },
            "tie_word_embeddings": "output.weight" not in tensors,
            "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": list(dict.fromkeys(i for key in GGUF_ENDS for i in token_ids(meta.get(key), key))),
        }
    )


def numbers_of(meta: Mapping[str, Any], key: str, what: str, count: int) -> list[int]:
    """Return a number of GGUF metadata for each layer. The file has one for all layers, or a list.

    key, what: as in `gguf_config.number_of`.
    count: number of layers.
    Raises: UserError where the key is missing, or a number is out of bounds.
    """
    value = meta.get(f"{FAMILY}.{key}")
    if not isinstance(value, list):
        return [number_of(meta, FAMILY, key, what)] * count
    if len(value) != count:
        raise UserError(f"{FAMILY}.{key} has {len(value)} values for {count} layers: one for each is needed")
    return [number(what, x, f"{FAMILY}.{key}") for x in value]


def rotary_share(factors: Iterable[float], head_dim: int) -> float:
    """Return the share of the rotary frequencies that are used: their factors are 1, those of the others UNUSED.

    Raises: UserError for another number of factors; UnsupportedError for other factors.
    """
    found = [float(f) for f in factors]
    if len(found) != head_dim // 2:
        raise UserError(f"tensor rope_freqs.weight has {len(found)} factors: {head_dim // 2} are needed")
    used = found.count(1.0)
    if found[:used] != [1.0] * used or any(f < UNUSED * 0.99 for f in found[used:]):
        raise UnsupportedError(f"rope_freqs.weight={short(found)}: only factors of 1, then of {UNUSED}, are supported")
    return used / len(found)
