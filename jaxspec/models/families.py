"""The model families: how each differs in its configurations, its tensor names and its GGUF files.

All of this is data. A new dense family that needs no new switch of the decoder is one entry of FAMILIES.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

# The place of a checkpoint's tensor: (name of the parameter that it fills, name of the part of it or "" for the whole).
Place = tuple[str, str]

# Places of a layer's tensors in its parameters, by the tensors' names in Hugging Face's files.
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
    "self_attn.gate_proj.weight": ("output_gate", ""),
    "self_attn.o_proj.weight": ("out", ""),
    "post_attention_layernorm.weight": ("mlp_norm", ""),
    "mlp.gate_proj.weight": ("gate_up", "gate"),
    "mlp.up_proj.weight": ("gate_up", "up"),
    "mlp.down_proj.weight": ("down", ""),
}


# Names of a layer's norms in families with four norms. In others post_attention_layernorm is the norm before the MLP.
FOUR_NORMS: dict[str, Place] = {
    "model.layers.{}.post_attention_layernorm.weight": ("layers.{}.post_attention_norm", ""),
    "model.layers.{}.pre_feedforward_layernorm.weight": ("layers.{}.mlp_norm", ""),
    "model.layers.{}.post_feedforward_layernorm.weight": ("layers.{}.post_mlp_norm", ""),
}


def layer_names(prefix: str, place: str = "layers.{}.") -> dict[str, Place]:
    """Return the table LAYER with `prefix` before its tensor names and `place` before its parameter names."""
    return {prefix + name: (place + parameter, part) for name, (parameter, part) in LAYER.items()}


@dataclasses.dataclass(frozen=True)
class Gguf:
    """Properties of a family's GGUF files.

    architecture: value of the metadata key general.architecture. Other keys begin with this value, as
      "llama.block_count". If it is empty, the family's name is used.
    interleaved: whether the rows of q and k are ordered for a rotary embedding that rotates neighbouring rows.
    period: P: all layers except every P-th have the file's sliding window, unless the file itself gives a period or
      lists the layers. 0: no layer has a window, even if the file gives one.
    theta: base of the rotary embedding, if the file gives none.
    local_theta: base of the rotary embedding in layers with a window, if the file gives none; 0 for the base of the
      other layers. None if these layers have no rotary embedding of their own.
    wide_queries: numbers of layers by which to recognise those models that scale queries by (width / heads) ** -0.5.
    gemma_tokens: whether the tokenizer is of Gemma's kind: SentencePiece tokens rank by id and not by score, runs of
      spaces are stored as they are, and no space is put before a text.
    optional_window: whether files may give no sliding window, or 0. All layers have the window if `period` is 0.
    unrotated_period: P: every P-th layer has no rotary embedding. 0: all layers have it.
    takes: keys that this family's files use and others refuse (`checkpoints.gguf_config.GGUF_FIXED`).
    names: places that a tensor fills, by tensor name, where they differ from `checkpoints.names.GGUF`.
    ignored: shell patterns of tensors that are not parameters.
    """

    architecture: str = ""
    interleaved: bool = False
    period: int = 0
    theta: float = 1e4
    local_theta: float | None = None
    wide_queries: tuple[int, ...] = ()
    gemma_tokens: bool = False
    optional_window: bool = False
    unrotated_period: int = 0
    takes: tuple[str, ...] = ()
    names: Mapping[str, Place] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ()


# Fields of Family that are fields of ModelConfig, too.
SWITCHES = (
    *("qkv_bias", "qk_norm", "wide_qk_norm", "plain_qk_norm", "v_norm", "output_gate", "embed_norm", "pre_norm"),
    *("sandwich_norm", "activation"),
)


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family: properties that all its models share.

    model_type: name of the family in a Hugging Face config.json.
    qkv_bias, qk_norm, wide_qk_norm, plain_qk_norm, v_norm, output_gate, embed_norm, pre_norm, sandwich_norm: switches
      of ModelConfig, the same in all models of the family.
    norm_plus_one: switch of ModelConfig for models from safetensors; GGUF files store 1 + w.
    whole_last_norm: whether the last norm is stored as it is, although norm_plus_one is set.
    activation: activation function of the MLP for files that do not name it; a config.json names it.
    scaled_embedding: whether embeddings are multiplied by sqrt(width).
    windows: layers that have the sliding window of config.json: "named" by its layer_types, "all" or "none".
    activation_key: key of the activation function in config.json.
    takes: options of config.json that this family supports and others refuse (`checkpoints.hf_config.FIXED`).
    names: (parameter, part) that a tensor fills, by tensor name, where they differ from `checkpoints.names.HF`.
    reads_as: model_type whose defaults complete a config.json, if the transformers library does not know the family.
    rotates_first: whether a partial rotary embedding rotates the first elements of a head, the halves of these against
      each other (`checkpoints.edits.rotary_order`).
    multimodal: model_type of multimodal checkpoints, of which only the text decoder is read; None for none.
    ends: control tokens that end a text, even if the checkpoint does not name them.
    gguf: properties of the family's GGUF files; None if it has none, or if they name another architecture.
    """

    model_type: str
    qkv_bias: bool = False
    qk_norm: bool = False
    wide_qk_norm: bool = False
    pre_norm: bool = True
    plain_qk_norm: bool = False
    v_norm: bool = False
    output_gate: bool = False
    embed_norm: bool = False
    sandwich_norm: bool = False
    norm_plus_one: bool = False
    whole_last_norm: bool = False
    activation: str = "silu"
    scaled_embedding: bool = False
    windows: Literal["named", "all", "none"] = "named"
    activation_key: str = "hidden_act"
    takes: tuple[str, ...] = ()
    names: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    reads_as: str | None = None
    rotates_first: bool = False
    multimodal: str | None = None
    ends: tuple[str, ...] = ()
    gguf: Gguf | None = Gguf()

    def switches(self, width: int) -> dict[str, Any]:
        """Return the fields of ModelConfig that the family and the model's width determine."""
        fixed = {name: getattr(self, name) for name in SWITCHES}
        return fixed | {"embed_scale": math.sqrt(width) if self.scaled_embedding else 1.0}


# Norms of a layer in OLMo 2 and 3, which follow attention and MLP.
POST_NORMS: dict[str, Place] = {
    "model.layers.{}.post_attention_layernorm.weight": ("layers.{}.post_attention_norm", ""),
    "model.layers.{}.post_feedforward_layernorm.weight": ("layers.{}.post_mlp_norm", ""),
}
OLMO: dict[str, Any] = {
    **dict.fromkeys(("qk_norm", "wide_qk_norm", "sandwich_norm"), True),
    "pre_norm": False,
    "names": POST_NORMS,
}
ALWAYS = ("attention_bias",)  # options of config.json that are ignored, because the family always has these biases

FAMILIES = {
    "llama": Family("llama", windows="none", gguf=Gguf(interleaved=True)),
    # Mistral's GGUF files name the architecture llama and do not show whether a window is used, so llama reads them.
    # A multimodal checkpoint's text decoder is a Mistral unless it names another family, as that of Ministral 3 does.
    "mistral": Family("mistral", windows="all", multimodal="mistral3", gguf=None),
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
        names=FOUR_NORMS,
        # Gemma 3 27B, which has 62 layers, scales its queries in another way than the family's other models.
        gguf=Gguf(period=6, theta=1e6, local_theta=1e4, wide_queries=(62,), gemma_tokens=True),
    ),
    "granite": Family(
        "granite",
        windows="none",
        takes=("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"),
        gguf=Gguf(interleaved=True, takes=("embedding_scale", "attention.scale", "residual_scale", "logit_scale")),
    ),
    "phi3": Family(
        "phi3",
        windows="all",
        takes=("partial_rotary_factor",),
        names={
            "model.layers.{}.self_attn.qkv_proj.weight": ("layers.{}.qkv", "q+k+v"),
            "model.layers.{}.mlp.gate_up_proj.weight": ("layers.{}.gate_up", "gate+up"),
        },
        rotates_first=True,
        gguf=Gguf(
            optional_window=True,
            takes=("rope.scaling.attn_factor",),
            names={
                "blk.{}.attn_qkv.weight": ("layers.{}.qkv", "q+k+v"),
                "blk.{}.ffn_up.weight": ("layers.{}.gate_up", "gate+up"),
            },
        ),
    ),
    "smollm3": Family("smollm3", takes=("no_rope_layers",), gguf=Gguf(interleaved=True, unrotated_period=4)),
    "olmo2": Family(
        "olmo2",
        windows="none",
        **OLMO,
        # Layers with a window are those of OLMo 3, whose rotary embedding is not scaled. Its files may name the factor
        # of YaRN's attention by a key that does not say YaRN.
        gguf=Gguf(period=4, optional_window=True, local_theta=0.0, takes=("rope.scaling.attn_factor",)),
    ),
    # OLMo 3's GGUF files name the architecture olmo2, so olmo2 reads them.
    "olmo3": Family(
        "olmo3",
        **OLMO,
        gguf=None,
    ),
    "ministral3": Family(
        "ministral3",
        windows="all",
        takes=("llama_4_scaling_beta",),
        gguf=Gguf(
            architecture="mistral3",
            interleaved=True,
            takes=("attention.temperature_scale", "attention.temperature_length"),
        ),
    ),
    "gemma4": Family(
        "gemma4_text",
        qk_norm=True,
        v_norm=True,
        sandwich_norm=True,
        activation="gelu_tanh",
        scaled_embedding=True,
        activation_key="hidden_activation",
        takes=("final_logit_softcapping", "use_bidirectional_attention"),
        names={
            **FOUR_NORMS,
            "model.embed_tokens_per_layer.weight": ("layer_embed", ""),
            "model.per_layer_model_projection.weight": ("layer_embed_in", ""),
            "model.per_layer_projection_norm.weight": ("layer_embed_norm", ""),
            "model.layers.{}.per_layer_input_gate.weight": ("layers.{}.embed_gate", ""),
            "model.layers.{}.per_layer_projection.weight": ("layers.{}.embed_out", ""),
            "model.layers.{}.post_per_layer_input_norm.weight": ("layers.{}.embed_norm", ""),
            "model.layers.{}.layer_scalar": ("layers.{}.layer_scale", ""),
        },
        multimodal="gemma4",
        ends=("<|tool_response>",),  # the model writes it after its calls; GGUF files do not name it
        gguf=Gguf(
            takes=("final_logit_softcapping",),
            names={
                "per_layer_token_embd.weight": ("layer_embed", ""),
                "per_layer_model_proj.weight": ("layer_embed_in", ""),
                "per_layer_proj_norm.weight": ("layer_embed_norm", ""),
                "blk.{}.inp_gate.weight": ("layers.{}.embed_gate", ""),
                "blk.{}.proj.weight": ("layers.{}.embed_out", ""),
                "blk.{}.post_norm.weight": ("layers.{}.embed_norm", ""),
                "blk.{}.layer_output_scale.weight": ("layers.{}.layer_scale", ""),
            },
        ),
    ),
    "muse_glimmer": Family(
        "muse_glimmer_text",
        qk_norm=True,
        plain_qk_norm=True,
        output_gate=True,
        embed_norm=True,
        sandwich_norm=True,
        norm_plus_one=True,
        whole_last_norm=True,
        activation_key="hidden_activation",
        takes=("final_logit_softcapping", "qk_scale_factor", "output_multiplier", "post_norm_eps", "layer_rope_theta"),
        names=FOUR_NORMS,
        multimodal="muse_glimmer",
        gguf=Gguf(
            architecture="muse-glimmer",
            interleaved=True,
            period=4,
            takes=("final_logit_softcapping", "logit_scale"),
            names={"blk.{}.attn_gate.weight": ("layers.{}.output_gate", "")},
            ignored=("blk.*.attn_q_norm.weight", "blk.*.attn_k_norm.weight"),  # read as query_scale
        ),
    ),
}
GGUF = {name: family.gguf for name, family in FAMILIES.items() if family.gguf}
# The family of each value of general.architecture in GGUF files.
ARCHITECTURES = {files.architecture or name: name for name, files in GGUF.items()}
