"""ModelConfig: the architecture of a decoder."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.models.families import FAMILIES
from jaxspec.models.layer_config import LayerConfig, mlp_block
from jaxspec.models.limits import check_layer, check_numbers, check_vocabulary, short
from jaxspec.models.rope import NO_ROPE, PLAIN_ROPE, Rope


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The architecture of a decoder. Frozen and hashable, because it is static in every compiled program.

    per_layer: configuration of each layer, if layers differ in more than `windows` and `local_rope` can say. If empty,
      the other fields describe all layers.
    """

    family: str
    vocab_size: int
    num_layers: int
    width: int  # E, the size of hidden states
    mlp_width: int  # F, the size of the MLP's inner layer
    num_heads: int  # H, the number of query heads
    num_kv_heads: int  # G, the number of key-value heads
    head_dim: int  # D, the size of a head
    max_model_len: int
    windows: tuple[int | None, ...]  # sliding window of each layer in tokens; None for no window
    rope: Rope = PLAIN_ROPE
    local_rope: Rope | None = None  # rotary embedding of layers with a window; None for `rope`
    unrotated: tuple[int, ...] = ()  # indices of layers without rotary embedding
    norm_eps: float = 1e-6  # epsilon of all norms; that of the checkpoint divided by residual_scale ** 2
    post_norm_eps: float | None = None  # epsilon of the further norms of sandwich_norm; None for norm_eps
    tied: bool = True  # whether the embedding table is also the output head
    qkv_bias: bool = False
    qk_norm: bool = False
    wide_qk_norm: bool = False  # whether qk_norm is over all heads together, with a scale of its own for each element
    plain_qk_norm: bool = False  # whether the norms of qk_norm have no scales
    output_gate: bool = False  # whether each output of attention is scaled by the sigmoid of a product with its input
    embed_norm: bool = False  # whether embeddings are normed, without a scale
    pre_norm: bool = True  # whether attention and MLP each begin with a norm; False needs sandwich_norm
    v_norm: bool = False  # whether the values of each head are normed, without a scale
    sandwich_norm: bool = False  # whether attention and MLP are each followed by a further norm, as in Gemma
    norm_plus_one: bool = False  # whether checkpoints store w for norms that multiply by 1 + w; 1 is added at load
    activation: str = "silu"  # activation function of the MLP: "silu" or "gelu_tanh"
    embed_scale: float = 1.0  # factor of the embeddings
    query_scale: float = 0.0  # factor of the attention scores; 0 stands for head_dim ** -0.5
    residual_scale: float = 1.0  # factor of what layers add to x; the decoder's x is x / residual_scale (see norm_eps)
    logit_scale: float = 1.0  # factor of the logits
    soft_cap: float | None = None  # bound c of attention scores x, which become c * tanh(x / c)
    logit_soft_cap: float | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    reduced_vocab_size: int | None = None  # number of ids of a draft's reduced vocabulary; None if it has all
    rare_vocab_size: int = 0  # number of the last ids, whose logits come from two matrices of rank rare_width
    rare_width: int = 0
    embed_width: int | None = None  # width of the target's embedding table, for a draft that reads it; else None
    layer_embed_width: int = 0  # width of the embeddings that each layer reads beside its input; 0 for none
    mask_id: int | None = None  # token id that a draft reads at positions that it predicts in parallel
    per_layer: tuple[LayerConfig, ...] = ()

    def __post_init__(self) -> None:
        if self.family not in tuple(FAMILIES):  # a tuple, because a value from a file may not be hashable
            raise UnsupportedError(f"architecture {short(self.family)}: jaxspec reads {', '.join(FAMILIES)}")
        check_numbers(self)
        if len(self.windows) != self.num_layers:
            raise UserError(f"{len(self.windows)} sliding windows for {self.num_layers} layers: one for each is needed")
        if len(self.per_layer) not in (0, self.num_layers):
            raise UserError(f"{len(self.per_layer)} layers are described, num_layers={self.num_layers}: all are needed")
        for i, layer in enumerate(self.layers):
            check_layer(i, layer, self.layers)
        check_vocabulary(self)
        if self.query_scale == 0.0:
            object.__setattr__(self, "query_scale", self.head_dim**-0.5)

    @property
    def layers(self) -> tuple[LayerConfig, ...]:
        """Configurations of all layers, in order."""
        return self.per_layer or layers_alike(self)

    def within(self, max_model_len: int) -> ModelConfig:
        """Return the configuration for texts of up to max_model_len positions, for which `Rope.within` decides."""
        ropes = {name: getattr(self, name) for name in ("rope", "local_rope")}
        chosen = {name: rope and rope.within(max_model_len) for name, rope in ropes.items()}
        return self if chosen == ropes else dataclasses.replace(self, **chosen)

    @property
    def cached_layers(self) -> tuple[LayerConfig, ...]:
        """Configurations of the layers with a KV cache. A layer that reads another layer's keys and values has none."""
        return tuple(layer for layer in self.layers if layer.shares is None)

    @property
    def head_size(self) -> int:
        """Number of token ids for which the output head computes logits."""
        return self.reduced_vocab_size or self.vocab_size

    def to_json(self) -> dict[str, Any]:
        """Return the configuration as a dict for JSON; `from_json` reads it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Return the configuration that `to_json` turned into this dict.

        Raises: UserError for an unknown or a missing field, or for a value out of its limits.
        """
        fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in raw.items()}
        for key in ("rope", "local_rope"):
            if key in raw:
                fields[key] = rope_from_json(raw[key])
        if fields.pop("kv_copies", 1) != 1:  # a field that earlier versions of jaxspec wrote
            raise UserError("kv_copies: a checkpoint must not hold copied key-value heads: convert the model again")
        if isinstance(raw.get("per_layer"), list | tuple):
            fields["per_layer"] = tuple(
                LayerConfig(**layer | {"rope": rope_from_json(layer.get("rope"))}) for layer in raw["per_layer"]
            )
        for key in ("windows", "unrotated", "eos_ids", "per_layer"):
            if not isinstance(fields.get(key, ()), tuple):
                raise UserError(f"{key}={short(raw[key])} must be a list")
        try:
            return cls(**fields)
        except TypeError as error:
            raise UserError(f"model configuration: {error}: was it written by another version?") from None


def rope_from_json(value: Any) -> Rope | None:
    """Return the rotary embedding that a JSON object describes; None for null. Raises: UserError for other JSON."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or not isinstance(value.get("factors"), list | tuple):
        raise UserError(f"rope={short(value)} must be an object of theta and factors")
    fields: dict[str, Any] = {key: tuple(x) if isinstance(x, list) else x for key, x in value.items()}
    try:
        return Rope(**{"theta": 0} | fields)
    except TypeError as error:
        raise UserError(f"rope: {error}: was it written by another version?") from None


@functools.cache
def layers_alike(config: ModelConfig) -> tuple[LayerConfig, ...]:
    """Return the layer configurations of a model with an empty per_layer.

    Its layers differ only in their sliding windows, in the rotary embedding that depends on the window, and in whether
    they have one.
    """
    c = config
    block = mlp_block(c.mlp_width, min(c.num_kv_heads, 8))
    full = c.rope.within(c.max_model_len)
    local = c.local_rope and c.local_rope.within(c.max_model_len)
    return tuple(
        LayerConfig(
            num_heads=c.num_heads,
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            mlp_width=c.mlp_width,
            mlp_block=block,
            window=window,
            rope=NO_ROPE if i in c.unrotated else full if local is None or not window else local,
            query_scale=c.query_scale or c.head_dim**-0.5,
        )
        for i, window in enumerate(c.windows)
    )
