"""The ModelConfig of a Muse Glimmer in a GGUF file."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from checkpoints import hf_config
from checkpoints.gguf_config import GGUF_ENDS, check_fixed, key_of, number_of, scaling_of, sliding_windows
from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.models.config import ModelConfig
from jaxspec.models.families import GGUF
from jaxspec.models.limits import short, token_ids

FAMILY = "muse_glimmer"
POST_NORM_EPS = 1e-8  # the file does not say; llama.cpp, too, has this constant


def model_config(
    meta: Mapping[str, Any], *, tensors: Collection[str], vocab_size: int, factors: Callable[[str], Any]
) -> ModelConfig:
    """Return the ModelConfig that the metadata of a GGUF file with a Muse Glimmer describe.

    The metadata are put in the form of a config.json, which is checked and read as such.

    tensors: names of all tensors in the file.
    vocab_size: number of rows of tensor token_embd.weight.
    factors: function that returns the values of a tensor of one dimension, () if there is none.
    Raises as `gguf_config.model_config` and `hf_config.model_config` do.
    """
    check_fixed(meta, FAMILY)
    if (scaling := scaling_of(meta, FAMILY)) != "none":
        raise UnsupportedError(f"rope scaling {short(scaling)} in a Muse Glimmer's GGUF: only none is supported")
    get = functools.partial(number_of, meta, FAMILY)
    count = get("block_count", "num_layers")
    windows = sliding_windows(meta, FAMILY, count)
    head_dim = get("attention.key_length", "head_dim")
    for key in ("attention.value_length", "rope.dimension_count"):
        if get(key, "head_dim", head_dim) != head_dim:
            raise UnsupportedError(f"{key_of(FAMILY, key)}={meta[key_of(FAMILY, key)]}: only {head_dim} is supported")
    theta = get("rope.freq_base_swa", "theta", get("rope.freq_base", "theta", GGUF[FAMILY].theta))
    config = hf_config.model_config(
        {
            "model_type": "muse_glimmer_text",
            "vocab_size": vocab_size,
            "num_hidden_layers": count,
            "hidden_size": get("embedding_length", "width"),
            "intermediate_size": get("feed_forward_length", "mlp_width"),
            "num_attention_heads": get("attention.head_count", "num_heads"),
            "num_key_value_heads": get("attention.head_count_kv", "num_kv_heads"),
            "head_dim": head_dim,
            "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
            "sliding_window": get("attention.sliding_window", "window"),
            # Layers without a window have no rotary embedding.
            "layer_rope_theta": [theta if window else 0 for window in windows],
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "max_position_embeddings": get("context_length", "max_model_len"),
            "rms_norm_eps": get("attention.layer_norm_rms_epsilon", "norm_eps"),
            "post_norm_eps": POST_NORM_EPS,
            "final_logit_softcapping": meta.get(key_of(FAMILY, "final_logit_softcapping")) or None,
            "output_multiplier": get("logit_scale", "logit_scale"),
            "qk_scale_factor": qk_scale(factors, count, head_dim),
            "hidden_activation": "silu",
            "tie_word_embeddings": "output.weight" not in tensors,
            "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": list(dict.fromkeys(i for key in GGUF_ENDS for i in token_ids(meta.get(key), key))),
        }
    )
    return dataclasses.replace(config, norm_plus_one=False)  # the file stores 1 + w


def qk_scale(factors: Callable[[str], Any], count: int, head_dim: int) -> float:
    """Return the factor of queries, which files hold as scales of the norms of queries and keys.

    factors: as in `model_config`.
    count: number of layers.
    Raises: UserError for a norm that is missing or of another size; UnsupportedError if scales differ.
    """
    found: dict[str, float] = {}
    for part in "qk":
        for i in range(count):
            name = f"blk.{i}.attn_{part}_norm.weight"
            scales = np.asarray(factors(name), np.float32)
            if scales.shape != (head_dim,):
                raise UserError(f"tensor {name} has {scales.size} scales: {head_dim} are needed")
            if len(values := {found.get(part, float(scales[0])), *map(float, scales)}) > 1:
                raise UnsupportedError(f"tensor {name} has scales {short(sorted(values))}: all must be the same")
            found[part] = values.pop()
    return found["q"] * found["k"]
