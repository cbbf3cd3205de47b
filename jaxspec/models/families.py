"""The families of models: what sets each apart, in its configurations, its tensors' names and its GGUF files.

Plain data: a dense family whose switches exist is an entry of FAMILIES, and nothing else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

Place = tuple[str, str]  # parameter pattern; which part of it, "" for all

# Of a layer: what Hugging Face's files call a tensor -> where it goes.
LAYER: dict[str, Place] = {
    "input_layernorm.weight": ("input_norm", ""),
    "self_attn.q_proj.weight": ("qkv", "q"),
    "self_attn.k_proj.weight": ("qkv", "k"),
    "self_attn.v_proj.weight": ("qkv", "v"),
    "self_attn.q_proj.bias": ("qkv_bias", "q"),
    "self_attn.k_proj.bias": ("qkv_bias", "k"),
    "self_attn.v_proj.bias": ("qkv_bias", "v"),
    "self_attn.q_norm.weight": ("q_norm", ""),
    "self_attn.k_norm.weight": ("k_norm", ""),
    "self_attn.o_proj.weight": ("out", ""),
    "post_attention_layernorm.weight": ("mlp_norm", ""),
    "mlp.gate_proj.weight": ("gate_up", "gate"),
    "mlp.up_proj.weight": ("gate_up", "up"),
    "mlp.down_proj.weight": ("down", ""),
}


def layer_names(prefix: str, place: str = "layers.{}.") -> dict[str, Place]:
    """LAYER for files that put `prefix` before the names, and modules that put `place`."""
    return {prefix + name: (place + parameter, part) for name, (parameter, part) in LAYER.items()}


@dataclasses.dataclass(frozen=True)
class Gguf:
    """Of GGUF files whose general.architecture is the family's name."""

    interleaved: bool = False  # rows of q and k stand as for the rotary embedding that rotates neighbours
    # Of every `period` layers all but the last have the file's window, unless it says which; 0: none, whatever it says.
    period: int = 0
    theta: float = 1e4  # rotary base, where the file gives none
    local_theta: float | None = None  # the same of the layers with a window, where these have one of their own
    wide_queries: tuple[int, ...] = ()  # of so many layers are models whose queries are scaled by width / heads
    # SentencePiece tokens rank by id, not by score; runs of spaces are stored as such; none goes before a text.
    gemma_tokens: bool = False


@dataclasses.dataclass(frozen=True)
class Family:
    model_type: str  # in a Hugging Face config.json
    # Switches of ModelConfig, alike in all of its models.
    qkv_bias: bool = False
    qk_norm: bool = False
    sandwich_norm: bool = False
    norm_plus_one: bool = False  # in safetensors; GGUF files hold 1 + w
    activation: str = "silu"  # a config.json names it itself
    scaled_embedding: bool = False  # by sqrt(width)
    # Which layers have a config.json's sliding window: those that layer_types name, all of them, or none.
    windows: Literal["named", "all", "none"] = "named"
    activation_key: str = "hidden_act"
    takes: tuple[str, ...] = ()  # options of config.json that are refused in other families: see `hf.FIXED`
    names: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)  # where not `checkpoints.names.HF`
    reads_as: str | None = None  # the model_type whose defaults its config.json has, where transformers lacks its own
    gguf: Gguf | None = Gguf()  # None: no such files, or they say another architecture

    def switches(self, width: int) -> dict[str, Any]:
        """The fields of ModelConfig that hang on nothing else."""
        alike = {name: getattr(self, name) for name in ("qkv_bias", "qk_norm", "sandwich_norm", "activation")}
        return alike | {"embed_scale": math.sqrt(width) if self.scaled_embedding else 1.0}


ALWAYS = ("attention_bias",)  # these biases are there, whatever is said of them

FAMILIES = {
    "llama": Family("llama", windows="none", gguf=Gguf(interleaved=True)),
    "mistral": Family("mistral", windows="all", gguf=None),  # its GGUF files say llama, and do not tell a window in use
    "qwen2": Family("qwen2", qkv_bias=True, takes=ALWAYS),
    "qwen3": Family("qwen3", qk_norm=True),
    "mimo": Family("mimo", qkv_bias=True, takes=ALWAYS, reads_as="qwen2", gguf=None),
    "gemma3": Family(
        "gemma3_text",
        qk_norm=True,
        sandwich_norm=True,
        norm_plus_one=True,
        activation="gelu_tanh",
        scaled_embedding=True,
        activation_key="hidden_activation",
        takes=("final_logit_softcapping", "query_pre_attn_scalar"),
        names={  # an old name has a new meaning
            "model.layers.{}.post_attention_layernorm.weight": ("layers.{}.post_attention_norm", ""),
            "model.layers.{}.pre_feedforward_layernorm.weight": ("layers.{}.mlp_norm", ""),
            "model.layers.{}.post_feedforward_layernorm.weight": ("layers.{}.post_mlp_norm", ""),
        },
        gguf=Gguf(period=6, theta=1e6, local_theta=1e4, wide_queries=(62,), gemma_tokens=True),  # the 27B has 62 layers
    ),
}
GGUF = {name: family.gguf for name, family in FAMILIES.items() if family.gguf}
