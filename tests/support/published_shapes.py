"""Models in their published sizes, without weights: families that no preset of the benchmark has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from checkpoints.safetensors import parse
from jaxspec.drafters import methods
from jaxspec.drafters.head_checkpoint import HeadCheckpoint
from jaxspec.models.config import ModelConfig
from tests.checkpoints.test_full_size import KEYS, PUBLISHED
from tests.checkpoints.test_gemma4 import PUBLISHED as GEMMA4

# Four layers, the last with full attention, and clusters of tokens. The width of the MLPs is a guess.
E2B_ASSISTANT: dict[str, Any] = {
    "model_type": "gemma4_assistant",
    "backbone_hidden_size": 1536,
    "use_ordered_embeddings": True,
    "num_centroids": 2048,
    "centroid_intermediate_top_k": 32,
    "text_config": GEMMA4["E2B"]
    | {
        "hidden_size": 256,
        "intermediate_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    },
}
MUSE_ASSISTANT: dict[str, Any] = {
    "model_type": "muse_glimmer_assistant",
    "hidden_size": 6656,
    "intermediate_size": 19968,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "vocab_size": 202048,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "layer_types": ["sliding_attention"] * 5,
    "sliding_window": 2048,
    "block_size": 16,
    "mask_token_id": 201818,
    "target_layer_ids": [1, 13, 25, 37, 49],
}
# Tensors that are measured or looked for when the assistant is read.
MUSE_SHAPES = {"encoder.fc.weight": (6656, 5 * 6656), "layers.0.self_attn.q_norm.weight": (128,)}
# Assistant of a model -> its method, its config.json, and shapes of tensors.
ASSISTANTS: dict[str, tuple[str, dict[str, Any], Mapping[str, tuple[int, ...]]]] = {
    "gemma-4-e2b": ("gemma4_assistant", E2B_ASSISTANT, {}),
    "muse-glimmer-30b": ("dflash", MUSE_ASSISTANT, MUSE_SHAPES),
}


def published(name: str) -> ModelConfig:
    """name: that of PUBLISHED in `tests.checkpoints.test_full_size`, or a Gemma 4, "gemma-4-e2b"."""
    if name.startswith("gemma-4-"):
        return parse(GEMMA4[name.removeprefix("gemma-4-").upper()])
    kind, sizes, options = PUBLISHED[name]
    return parse({"model_type": kind} | dict(zip(KEYS, sizes, strict=True)) | options)


def assistant(name: str, target: ModelConfig) -> ModelConfig:
    """The published assistant of the model of this name, for the target, which may have fewer layers."""
    method, raw, shapes = ASSISTANTS[name]
    if taps := raw.get("target_layer_ids"):
        raw = raw | {"target_layer_ids": [min(i, target.num_layers - 1) for i in taps]}
    return methods.implementation(method).read(HeadCheckpoint("assistant", raw, shapes, target, name, parse)).config
