"""A trained head's folder: config.json and tensors by the names that others' engines read, too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from checkpoints import heads
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import parameters
from jaxspec.models.families import Place


def save(
    folder: Path,
    said: Mapping[str, Any],
    params: Mapping[str, jax.Array],
    config: ModelConfig,
    names: Mapping[str, Place],
    fingerprint: str,
    *,
    offsets: bool = True,
) -> None:
    """said: config.json; names: tensor -> where it goes; offsets: whether a reduced vocabulary is written as
    differences from the head's own ids; fingerprint: of the target's tokenizer."""
    tensors = heads.tensors(parameters(config), params, names)
    if offsets and "d2t" in tensors:
        tensors["d2t"] = tensors["d2t"].astype(np.int64) - np.arange(config.head_size)
    heads.save(folder, said, tensors, fingerprint)


def layers(config: ModelConfig) -> dict[str, Any]:
    """What config.json says of a head's layers, which are a Llama's or a Qwen3's."""
    return {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.head_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_model_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


def numbered(names: Mapping[str, Place], layers: int) -> dict[str, Place]:
    """Where tensors go, of so many layers."""
    return {name.format(i): (place.format(i), part) for name, (place, part) in names.items() for i in range(layers)}
