"""ModelConfig: what a decoder is, read from a Hugging Face config or from GGUF metadata."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.models import hf
from jaxspec.models.families import FAMILIES, GGUF
from jaxspec.models.layer_config import LayerConfig, mlp_block
from jaxspec.models.limits import check_layer, check_numbers, check_vocabulary, number, short, token_ids
from jaxspec.models.rope import PLAIN_ROPE, Rope, rope_tables

# GGUF key, after the architecture's name, that changes what a model computes -> the only value that is supported.
GGUF_FIXED: dict[str, Any] = {
    "attention.causal": True,
    "attention.clamp_kqv": 0,
    "attention.scale": 0,
    "attn_logit_softcapping": 0,
    "final_logit_softcapping": 0,
    "logit_scale": 0,
    "embedding_scale": 0,
    "residual_scale": 0,
    "expert_count": 0,
    "rope.scale_linear": 1,
    "rope.scaling.attn_factor": 1,
}

GGUF_ENDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # a config.json's -> ours


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The architecture of a decoder. Frozen and hashable: it is static in every compiled program.

    per_layer: the layers, where they differ in more than windows; empty where all are as the fields say.
    """

    family: str
    vocab_size: int
    num_layers: int
    width: int  # E
    mlp_width: int  # F
    num_heads: int  # H
    num_kv_heads: int  # G
    head_dim: int  # D
    max_model_len: int
    windows: tuple[int | None, ...]  # one a layer: sliding window in tokens, None sees everything
    rope: Rope = PLAIN_ROPE
    local_rope: Rope | None = None  # rotary base of the sliding layers, where it differs
    norm_eps: float = 1e-6
    tied: bool = True  # the head is the embedding table
    qkv_bias: bool = False
    qk_norm: bool = False
    sandwich_norm: bool = False  # Gemma: a norm after attention and after the MLP too
    norm_plus_one: bool = False  # files store w, the norm multiplies by 1 + w (added once, at load)
    activation: str = "silu"  # or "gelu_tanh"
    embed_scale: float = 1.0
    query_scale: float = 0.0  # multiplies the scores; 0 means head_dim ** -0.5
    soft_cap: float | None = None  # of attention scores
    logit_soft_cap: float | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    # The head has logits for so many ids only (`Vocabulary` in head.py); those of the last rare_vocab_size of them, the
    # rare ones, go through rare_width channels.
    reduced_vocab_size: int | None = None
    rare_vocab_size: int = 0
    rare_width: int = 0
    embed_width: int | None = None  # of the table, which is then another model's
    mask_id: int | None = None  # the id that stands in places to be filled all at once
    per_layer: tuple[LayerConfig, ...] = ()

    def __post_init__(self) -> None:
        if self.family not in tuple(FAMILIES):  # what a file says need not be hashable
            raise UnsupportedError(f"architecture {short(self.family)}: jaxspec reads {', '.join(FAMILIES)}")
        check_numbers(self)
        if len(self.windows) != self.num_layers:
            raise UserError(f"{len(self.windows)} sliding windows for {self.num_layers} layers: one a layer is needed")
        if len(self.per_layer) not in (0, self.num_layers):
            raise UserError(f"{len(self.per_layer)} layers are described, num_layers={self.num_layers}: all are needed")
        for i, layer in enumerate(self.layers):
            check_layer(i, layer, self.layers)
        check_vocabulary(self)
        if self.query_scale == 0.0:
            object.__setattr__(self, "query_scale", self.head_dim**-0.5)

    @property
    def layers(self) -> tuple[LayerConfig, ...]:
        """What each layer is."""
        return self.per_layer or layers_alike(self)

    @property
    def cached_layers(self) -> tuple[LayerConfig, ...]:
        """The layers that remember something of a row: those that do not share another's keys and values."""
        return tuple(layer for layer in self.layers if layer.shares is None)

    @property
    def head_size(self) -> int:
        """How many ids have logits."""
        return self.reduced_vocab_size or self.vocab_size

    @staticmethod
    def check_supported(raw: Mapping[str, Any]) -> dict[str, Any]:
        """Looks at a raw config.json only, and returns what is read of it; see `hf.check_supported`."""
        return hf.check_supported(raw)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """From a Hugging Face config as a dict (`transformers.AutoConfig...to_dict()`, which fills the defaults).

        Raises: UnsupportedError as `check_supported` does, and for an activation or a kind of layer that no
        supported family has; UserError for a value that no model has.
        """
        cls.check_supported(raw)
        name = hf.MODEL_TYPES[raw["model_type"]]
        family = FAMILIES[name]
        for key in hf.NEEDED:
            number(hf.NUMBERS[key], raw.get(key), key)
        layers, heads, kv_heads = raw["num_hidden_layers"], raw["num_attention_heads"], raw.get("num_key_value_heads")
        head_dim = raw["hidden_size"] // heads if raw.get("head_dim") is None else raw["head_dim"]
        number("head_dim", head_dim)
        ropes = rope_tables(raw, head_dim)
        activation, scaled = raw.get(family.activation_key, "silu"), "query_pre_attn_scalar" in family.takes
        if activation not in tuple(ACTIVATIONS):  # what a file says need not be hashable
            raise UnsupportedError(f"activation {short(activation)}: silu and gelu_pytorch_tanh are supported")
        if scaled:
            number("width", raw.get("query_pre_attn_scalar"), "query_pre_attn_scalar")
        tied = raw.get("tie_word_embeddings")
        switches = family.switches(raw["hidden_size"])
        switches["activation"] = ACTIVATIONS[activation]
        return cls(
            family=name,
            vocab_size=raw["vocab_size"],
            num_layers=layers,
            width=raw["hidden_size"],
            mlp_width=raw["intermediate_size"],
            num_heads=heads,
            num_kv_heads=heads if kv_heads is None else kv_heads,
            head_dim=head_dim,
            max_model_len=raw["max_position_embeddings"],
            windows=hf.windows(raw, name, layers),
            rope=ropes[0],
            local_rope=ropes[1],
            norm_eps=raw.get("rms_norm_eps", 1e-6),
            tied=False if tied is None else tied,
            **switches,
            norm_plus_one=family.norm_plus_one,
            query_scale=raw["query_pre_attn_scalar"] ** -0.5 if scaled else 0.0,
            logit_soft_cap=raw.get("final_logit_softcapping"),
            bos_id=raw.get("bos_token_id"),
            eos_ids=token_ids(raw.get("eos_token_id"), "eos_token_id"),
            mask_id=raw.get("pard_token"),
        )

    @classmethod
    def from_gguf(cls, meta: Mapping[str, Any], *, vocab_size: int, tied: bool, rope_factors=()) -> ModelConfig:
        """From GGUF metadata (`general.architecture` and `<arch>.*` keys).

        vocab_size: rows of token_embd; tied: no output.weight in the file; rope_factors: rope_freqs.weight if present.
        """
        family = meta.get("general.architecture")
        if family not in tuple(GGUF):
            raise UnsupportedError(f"GGUF architecture {short(family)}: jaxspec reads {', '.join(GGUF)}")
        files = GGUF[family]

        def get(key: str, what: str, default: Any = None) -> Any:
            value = meta.get(f"{family}.{key}", default)
            if value is None:
                raise UserError(f"GGUF metadata lacks {family}.{key}: is the file complete?")
            if isinstance(value, list):
                raise UnsupportedError(f"{family}.{key} has a value for each layer: one for all is supported")
            return number(what, value, f"{family}.{key}")

        for key, only in GGUF_FIXED.items():
            if (value := meta.get(f"{family}.{key}", only)) != only:
                raise UnsupportedError(f"{family}.{key}={short(value)} is not supported: only {json.dumps(only)} is")
        stretched = f"{family}.rope.scaling.factor" in meta
        scaling = meta.get(f"{family}.rope.scaling.type", "linear" if stretched else "none")  # as llama.cpp has it
        if scaling not in ("none", "linear"):
            raise UnsupportedError(f"rope scaling {short(scaling)} in GGUF: none and linear are supported")
        layers, width = get("block_count", "num_layers"), get("embedding_length", "width")
        heads = get("attention.head_count", "num_heads")
        head_dim = get("attention.key_length", "head_dim", width // heads)
        for key in ("rope.dimension_count", "attention.value_length"):
            if get(key, "head_dim", head_dim) != head_dim:
                part = "partial rotary embedding" if "rope" in key else "values of another size than keys"
                raise UnsupportedError(
                    f"{family}.{key}={meta[f'{family}.{key}']} where heads have {head_dim}: {part} is not supported"
                )
        factors = tuple(float(f) for f in rope_factors)
        if scaling == "linear":
            if factors:
                raise UnsupportedError("rope scaling 'linear' beside rope_freqs.weight: one of them is supported")
            factors = (float(get("rope.scaling.factor", "factor")),) * (head_dim // 2)
        window, local = 0, [False] * layers
        if files.period:  # the file may give another one, or a flag a layer
            window = get("attention.sliding_window", "window")
            if isinstance(flags := meta.get(f"{family}.attention.sliding_window_pattern"), list):
                local = flags
            else:
                period = get("attention.sliding_window_pattern", "num_layers", files.period)
                local = [bool((i + 1) % period) for i in range(layers)]
        theta, local_theta = files.theta, files.local_theta
        return cls(
            family=family,
            vocab_size=vocab_size,
            num_layers=layers,
            width=width,
            mlp_width=get("feed_forward_length", "mlp_width"),
            num_heads=heads,
            num_kv_heads=get("attention.head_count_kv", "num_kv_heads", heads),
            head_dim=head_dim,
            max_model_len=get("context_length", "max_model_len"),
            windows=tuple(window if sliding else None for sliding in local),
            rope=Rope(float(get("rope.freq_base", "theta", theta)), factors),
            local_rope=Rope(float(get("rope.freq_base_swa", "theta", local_theta))) if local_theta else None,
            norm_eps=get("attention.layer_norm_rms_epsilon", "norm_eps"),
            tied=tied,
            **FAMILIES[family].switches(width),
            query_scale=(width / heads) ** -0.5 if layers in files.wide_queries else 0.0,
            bos_id=meta.get("tokenizer.ggml.bos_token_id"),
            eos_ids=tuple(dict.fromkeys(i for key in GGUF_ENDS for i in token_ids(meta.get(key), key))),
        )

    def to_json(self) -> dict[str, Any]:
        """A dict that JSON can hold; `from_json` reads it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Raises: UserError for a field that this version does not know, or lacks, or for a value that cannot be."""

        def rope(value: Any) -> Rope | None:
            if value is None:
                return None
            if not isinstance(value, Mapping) or not isinstance(value.get("factors"), list | tuple):
                raise UserError(f"rope={short(value)} must be an object of theta and factors")
            return Rope(value.get("theta", 0), tuple(value["factors"]))

        fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in raw.items()}
        fields |= {key: rope(raw[key]) for key in ("rope", "local_rope") if key in raw}
        if fields.pop("kv_copies", 1) != 1:  # a field of earlier versions
            raise UserError("kv_copies: a model whose key-value heads are copied is no checkpoint: convert it again")
        if "per_layer" in raw:
            fields["per_layer"] = tuple(
                LayerConfig(**layer | {"rope": rope(layer.get("rope"))}) for layer in raw["per_layer"]
            )
        for key in ("windows", "eos_ids", "per_layer"):
            if not isinstance(fields.get(key, ()), tuple):
                raise UserError(f"{key}={short(raw[key])} must be a list")
        try:
            return cls(**fields)
        except TypeError as error:
            raise UserError(f"model configuration: {error}: was it written by another version?") from None


@functools.cache
def layers_alike(config: ModelConfig) -> tuple[LayerConfig, ...]:
    """Return the layers of a model whose layers differ in windows only."""
    c, block = config, mlp_block(config.mlp_width, min(config.num_kv_heads, 8))
    return tuple(
        LayerConfig(
            num_heads=c.num_heads,
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            mlp_width=c.mlp_width,
            mlp_block=block,
            window=window,
            rope=c.local_rope if window and c.local_rope else c.rope,
            query_scale=c.query_scale or c.head_dim**-0.5,
        )
        for window in c.windows
    )
