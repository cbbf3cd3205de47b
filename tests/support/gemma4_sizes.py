"""Gemma 4 E2B and its assistant in their published sizes, without weights."""

from __future__ import annotations

from checkpoints.safetensors import parse
from jaxspec.drafters import methods
from jaxspec.drafters.head_checkpoint import HeadCheckpoint
from jaxspec.models.config import ModelConfig
from tests.checkpoints.test_gemma4 import PUBLISHED

# Four layers, the last with full attention, and clusters of tokens. The width of the MLPs is a guess.
ASSISTANT = {
    "model_type": "gemma4_assistant",
    "backbone_hidden_size": 1536,
    "use_ordered_embeddings": True,
    "num_centroids": 2048,
    "centroid_intermediate_top_k": 32,
    "text_config": PUBLISHED["E2B"]
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


def assistant(target: ModelConfig) -> ModelConfig:
    found = HeadCheckpoint("assistant", ASSISTANT, {}, target, "E2B", parse)
    return methods.implementation("gemma4_assistant").read(found).config


def e2b() -> ModelConfig:
    return parse(PUBLISHED["E2B"])
