"""ModelConfig: what a decoder is, read from a Hugging Face config or from GGUF metadata."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
# Hugging Face model_type -> family. Multimodal wrappers are refused by name instead of guessed at.
MODEL_TYPES = {"llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary embedding: frequencies theta^(-2i/D), each divided by factors[i] (all 1 where factors is empty)."""

    theta: float = 10000.0
    factors: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One decoder's shape and switches. Frozen and hashable: it is static in every compiled program."""

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
    rope: Rope = Rope()
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
    # Of a draft. It proposes only so many ids, see Vocabulary in decoder.py; the last rare_vocab_size of these, which
    # are rare, by way of rare_width channels. It reads ids in its target's table, which is embed_width wide.
    reduced_vocab_size: int | None = None
    rare_vocab_size: int = 0
    rare_width: int = 0
    embed_width: int | None = None

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise NotImplementedError(f"architecture {self.family!r}: jaxspec reads {', '.join(FAMILIES)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads do not divide among {self.num_kv_heads} key-value heads")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: rotary embedding needs pairs")
        if len(self.windows) != self.num_layers:
            raise ValueError(f"{len(self.windows)} sliding windows for {self.num_layers} layers: one a layer is needed")
        if self.reduced_vocab_size is not None and not 2 <= self.reduced_vocab_size <= self.vocab_size:
            raise ValueError(
                f"reduced_vocab_size={self.reduced_vocab_size} must lie in 2..{self.vocab_size}, vocab_size"
            )
        if self.tied and (self.reduced_vocab_size or self.rare_vocab_size or self.embed_width):
            raise ValueError(
                "tied=True, but a draft with fewer ids, or its target's table, has a head of its own: one of an "
                "earlier version has to be trained again"
            )
        if not 0 <= self.rare_vocab_size < self.head_size or (self.rare_vocab_size > 0) != (self.rare_width > 0):
            raise ValueError(
                f"rare_vocab_size={self.rare_vocab_size} must lie in 0..{self.head_size - 1}, and rare_width="
                f"{self.rare_width} be above 0 where it is"
            )
        if self.query_scale == 0.0:
            object.__setattr__(self, "query_scale", self.head_dim**-0.5)

    @property
    def heads_per_group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def head_size(self) -> int:
        """R, how many ids have logits."""
        return self.reduced_vocab_size or self.vocab_size

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def merged(self) -> dict[str, dict[str, int]]:
        """Merged product -> part -> columns of that part in each group of columns.

        Columns are grouped, not laid side by side, so that any tensor parallelism that divides the number of groups
        cuts each shard's own columns of every part: qkv by key-value head, gate_up by blocks. A block is as wide as a
        TPU's lanes, 128, or as narrow as it takes to give each of up to eight shards as many.
        """
        qkv = {"q": self.heads_per_group * self.head_dim, "k": self.head_dim, "v": self.head_dim}
        shards = min(self.num_kv_heads, 8)
        widths = [2**i for i in range(7, -1, -1) if self.mlp_width % (2**i * shards) == 0]
        block = widths[0] if widths else math.gcd(self.mlp_width, 128)
        return {"qkv": qkv, "qkv_bias": qkv, "gate_up": {"gate": block, "up": block}}

    @staticmethod
    def check_supported(raw: Mapping[str, Any]) -> None:
        """Looks at a raw config.json only.

        Raises: NotImplementedError for an unknown architecture, a multimodal or M-RoPE checkpoint, quantised weights,
        or a bias that the family does not have by itself.
        """
        kind = raw.get("model_type", "")
        if any(key.endswith("_config") and "vision" in key for key in raw) or "vision" in kind:
            raise NotImplementedError(f"{kind!r} is a multimodal checkpoint: only text decoders are supported")
        if kind not in MODEL_TYPES:
            raise NotImplementedError(f"architecture {kind!r}: jaxspec reads {', '.join(sorted(MODEL_TYPES))}")
        for key in ("rope_scaling", "rope_parameters"):
            if (raw.get(key) or {}).get("mrope_section"):
                raise NotImplementedError("M-RoPE (mrope_section) is of multimodal checkpoints: only text is supported")
        if raw.get("quantization_config"):
            raise NotImplementedError("quantization_config: of quantised checkpoints only GGUF files are read")
        for flag in ("attention_bias", "mlp_bias", "use_bidirectional_attention"):
            if raw.get(flag):
                raise NotImplementedError(f"{flag}=true in a {kind!r} checkpoint is not supported")

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """From a Hugging Face config as a dict (`transformers.AutoConfig...to_dict()`, which fills the defaults).

        Raises: NotImplementedError as `check_supported` does, and for a rotary embedding or an activation that no
        supported family has.
        """
        cls.check_supported(raw)
        family = MODEL_TYPES[raw["model_type"]]
        layers, heads = raw["num_hidden_layers"], raw["num_attention_heads"]
        head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
        ropes = rope_tables(raw, head_dim)
        gemma = family == "gemma3"
        activation = raw.get("hidden_activation" if gemma else "hidden_act", "silu")
        if activation not in ("silu", "gelu_pytorch_tanh"):
            raise NotImplementedError(f"activation {activation!r}: silu and gelu_pytorch_tanh are supported")
        eos = raw.get("eos_token_id")
        return cls(
            family=family,
            vocab_size=raw["vocab_size"],
            num_layers=layers,
            width=raw["hidden_size"],
            mlp_width=raw["intermediate_size"],
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            max_model_len=raw["max_position_embeddings"],
            windows=hf_windows(raw, family),
            rope=ropes[0],
            local_rope=ropes[1],
            norm_eps=raw.get("rms_norm_eps", 1e-6),
            tied=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2",
            qk_norm=family in ("qwen3", "gemma3"),
            sandwich_norm=gemma,
            norm_plus_one=gemma,
            activation="gelu_tanh" if activation == "gelu_pytorch_tanh" else "silu",
            embed_scale=math.sqrt(raw["hidden_size"]) if gemma else 1.0,
            query_scale=raw["query_pre_attn_scalar"] ** -0.5 if gemma else 0.0,
            soft_cap=raw.get("attn_logit_softcapping"),
            logit_soft_cap=raw.get("final_logit_softcapping"),
            bos_id=raw.get("bos_token_id"),
            eos_ids=() if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (eos,),
        )

    @classmethod
    def from_gguf(cls, meta: Mapping[str, Any], *, vocab_size: int, tied: bool, rope_factors=()) -> ModelConfig:
        """From GGUF metadata (`general.architecture` and `<arch>.*` keys).

        vocab_size: rows of token_embd; tied: no output.weight in the file; rope_factors: rope_freqs.weight if present.
        """
        family = meta.get("general.architecture")
        if family not in ("llama", "qwen2", "qwen3", "gemma3"):
            raise NotImplementedError(f"GGUF architecture {family!r}: jaxspec reads llama, qwen2, qwen3, gemma3")

        def get(key: str, default: Any = None) -> Any:
            value = meta.get(f"{family}.{key}", default)
            if value is None:
                raise ValueError(f"GGUF metadata lacks {family}.{key}: is the file complete?")
            return value

        scaling = get("rope.scaling.type", "none")
        if scaling not in ("none", "linear"):
            raise NotImplementedError(f"rope scaling {scaling!r} in GGUF: none and linear are supported")
        layers, heads, width = get("block_count"), get("attention.head_count"), get("embedding_length")
        head_dim = get("attention.key_length", width // heads)
        factors = tuple(float(f) for f in rope_factors)
        if scaling == "linear":
            factors = (float(get("rope.scaling.factor")),) * (head_dim // 2)
        gemma = family == "gemma3"
        window, pattern = 0, 1
        if gemma:  # every sixth layer is global, unless the file gives the period, or a flag a layer
            window, pattern = get("attention.sliding_window"), get("attention.sliding_window_pattern", 6)
        local = pattern if isinstance(pattern, list) else [bool((i + 1) % pattern) for i in range(layers)]
        eos = [meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
        return cls(
            family=family,
            vocab_size=vocab_size,
            num_layers=layers,
            width=width,
            mlp_width=get("feed_forward_length"),
            num_heads=heads,
            num_kv_heads=get("attention.head_count_kv", heads),
            head_dim=head_dim,
            max_model_len=get("context_length"),
            # Files of the other families name no window that is in use.
            windows=tuple(window if sliding else None for sliding in local),
            rope=Rope(float(get("rope.freq_base", 1e6 if gemma else 1e4)), factors),
            local_rope=Rope(float(get("rope.freq_base_swa", 1e4))) if gemma else None,
            norm_eps=get("attention.layer_norm_rms_epsilon"),
            tied=tied,
            qkv_bias=family == "qwen2",
            qk_norm=family in ("qwen3", "gemma3"),
            sandwich_norm=gemma,
            activation="gelu_tanh" if gemma else "silu",
            embed_scale=math.sqrt(width) if gemma else 1.0,
            # The 27B model scales queries by width / heads, all others by head_dim.
            query_scale=(width / heads) ** -0.5 if gemma and layers == 62 else 0.0,
            bos_id=meta.get("tokenizer.ggml.bos_token_id"),
            eos_ids=tuple(dict.fromkeys(int(i) for i in eos if i is not None)),
        )

    def to_json(self) -> dict[str, Any]:
        """A dict that JSON can hold; `from_json` reads it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Raises: ValueError for a field that this version does not know, or lacks."""
        rope = lambda r: None if r is None else Rope(r["theta"], tuple(r["factors"]))
        fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in raw.items()}
        fields |= {key: rope(raw[key]) for key in ("rope", "local_rope") if key in raw}
        try:
            return cls(**fields)
        except TypeError as error:
            raise ValueError(f"model configuration: {error}: was it written by another version?") from None


def hf_windows(raw: Mapping[str, Any], family: str) -> tuple[int | None, ...]:
    """The sliding window of each layer, from `layer_types` where the config has them."""
    layers, window = raw["num_hidden_layers"], raw.get("sliding_window")
    if family == "mistral":
        return (window,) * layers
    kinds = raw.get("layer_types") or ["full_attention"] * layers
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise NotImplementedError(f"layer types {sorted(unknown)}: full_attention and sliding_attention are supported")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def rope_tables(raw: Mapping[str, Any], head_dim: int) -> tuple[Rope, Rope | None]:
    """(global, local) rotary tables; local is None where all layers share one."""
    parameters = raw.get("rope_parameters") or {
        "rope_theta": raw.get("rope_theta", 10000.0),
        **(raw.get("rope_scaling") or {}),
    }
    if "full_attention" in parameters:
        tables = [parameters["full_attention"], parameters["sliding_attention"]]
        return rope_table(tables[0], head_dim), rope_table(tables[1], head_dim)
    return rope_table(parameters, head_dim), None


def rope_table(parameters: Mapping[str, Any], head_dim: int) -> Rope:
    """One Hugging Face rope dict as a Rope."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    theta = float(parameters["rope_theta"])
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise NotImplementedError("partial rotary embedding is not supported")
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, (float(parameters["factor"]),) * (head_dim // 2))
    if kind == "llama3":
        return Rope(theta, llama3_factors(parameters, theta, head_dim))
    raise NotImplementedError(f"rope type {kind!r}: default, linear and llama3 are supported")


def llama3_factors(parameters: Mapping[str, Any], theta: float, head_dim: int) -> tuple[float, ...]:
    """Llama 3.1's scaling: long waves are stretched by `factor`, short ones kept, those between interpolated."""
    factor, low, high = (float(parameters[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    context = float(parameters["original_max_position_embeddings"])
    factors = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
        smooth = min(1.0, max(0.0, (context / wavelength - low) / (high - low)))
        factors.append(1.0 / ((1 - smooth) / factor + smooth))
    return tuple(factors)
