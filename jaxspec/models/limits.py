"""Limits of the numbers in a decoder's configuration, in one table for all file formats, and checks of them."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

from jaxspec.common.errors import UserError, quoted

INT32 = 2**31 - 1

# (type, minimum, maximum) by field. The limits are generous. A number outside of them comes from a damaged file, and
# would fill the memory, keep the compiler busy for ever, or make every logit NaN.
LIMITS: dict[str, tuple[type, float, float]] = {
    "vocab_size": (int, 1, INT32),
    "num_layers": (int, 1, 1_000),  # the deepest known model has 126 layers; building 1,000 takes seconds
    "width": (int, 1, 2**20),
    "mlp_width": (int, 1, 2**24),
    "num_heads": (int, 1, 2**16),
    "num_kv_heads": (int, 1, 2**16),
    "head_dim": (int, 2, 2**16),
    "max_model_len": (int, 1, 2**30),  # positions are int32, and a launch may reserve positions beyond the last
    "window": (int, 1, INT32),
    "theta": (float, 1, 1e30),
    "factor": (float, 1e-3, 1e6),
    "norm_eps": (float, 0, 1),
    "post_norm_eps": (float, 0, 1),
    "embed_scale": (float, 1e-6, 1e6),
    "query_scale": (float, 0, 1e6),
    "rotary_share": (float, 0, 1),
    "query_growth": (float, 0, 1e3),
    "residual_scale": (float, 1e-3, 1e3),
    "logit_scale": (float, 1e-6, 1e6),
    "soft_cap": (float, 1e-3, 1e6),
    "logit_soft_cap": (float, 1e-3, 1e6),
    "token_id": (int, 0, INT32),  # an id beyond the vocabulary is harmless: it is never sampled
    "bos_id": (int, -1, INT32),  # -1 stands for no such id in some files
    "reduced_vocab_size": (int, 2, INT32),
    "rare_vocab_size": (int, 0, INT32),
    "rare_width": (int, 0, 2**20),
    "embed_width": (int, 1, 2**20),
    "layer_embed_width": (int, 0, 2**20),
    "shared_layers": (int, 0, 1_000),
    "mask_id": (int, 0, INT32),
}
# Fields of LIMITS that may be None.
OPTIONAL = (
    *("window", "soft_cap", "logit_soft_cap", "bos_id", "reduced_vocab_size", "embed_width", "mask_id"),
    "post_norm_eps",
)
# Fields of ModelConfig that are true or false.
SWITCHES = (
    *("tied", "qkv_bias", "qk_norm", "wide_qk_norm", "plain_qk_norm", "v_norm", "output_gate", "embed_norm"),
    *("pre_norm", "sandwich_norm", "norm_plus_one"),
)


def number(what: str, value: Any, name: str | None = None) -> Any:
    """Return the value if it is within the limits of the field `what` in LIMITS.

    name: name of the field in the user's file, if it differs from `what`.

    Raises: UserError that names the field, its value and the limits.
    """
    kind, least, most = LIMITS[what]
    wanted = numbers.Integral if kind is int else numbers.Real
    # The comparison is false for NaN, and exact for integers beyond the range of floats.
    if isinstance(value, wanted) and not isinstance(value, bool) and least <= value <= most:  # type: ignore[operator]
        return value
    limits = f"{least}..{most}" if kind is int else f"{least:g}..{most:g}"
    raise UserError(f"{name or what}={short(value)} must be a {'whole ' if kind is int else ''}number in {limits}")


def token_ids(value: Any, name: str) -> tuple[int, ...]:
    """Return an id, a list of ids or None as a tuple of distinct token ids. Raises: UserError for any other value.

    name: name of the field in the user's file.
    """
    if value is None:
        ids: Any = ()
    elif isinstance(value, list | tuple):
        ids = value
    else:
        ids = (value,)
    return tuple(dict.fromkeys(int(number("token_id", i, name)) for i in ids))


def short(value: Any) -> str:
    """Return the repr of a value, shortened for a message."""
    return quoted(value, 60)


def check_fields(config: Any, of: str = "") -> None:
    """Raise UserError for a field whose value is outside of LIMITS. of: text after the field's name in the message."""
    for name in LIMITS.keys() & vars(config).keys():
        value = getattr(config, name)
        if value is not None or name not in OPTIONAL:
            number(name, value, name + of)


def check_numbers(config: Any) -> None:
    """Raise UserError for a field of a ModelConfig that is outside of its limits or has a wrong type."""
    check_fields(config)
    for name in SWITCHES:
        value = getattr(config, name)
        if not isinstance(value, bool):
            raise UserError(f"{name}={short(value)} must be true or false")
    for window in config.windows:
        if window is not None:
            number("window", window)
    if config.activation not in ("silu", "gelu_tanh"):
        raise UserError(f"activation={short(config.activation)} must be silu or gelu_tanh")
    token_ids(config.eos_ids, "eos_ids")
    if config.rope is None:
        raise UserError("rope is missing: theta and factors are needed")
    for rope in (config.rope, config.local_rope):
        if rope is not None:
            check_rope(rope, config.head_dim)
    for i in config.unrotated:
        if type(i) is not int or i < 0:
            raise UserError(f"unrotated={short(config.unrotated)} must be indices of layers, from 0")


def check_rope(rope: Any, head_dim: int) -> None:
    """Raise UserError for a Rope that heads of this size cannot have."""
    number("theta", rope.theta, "rope's theta")
    most = head_dim // 2
    for factors in (rope.factors, rope.long_factors):
        for factor in factors:
            number("factor", factor, "a factor of rope")
        if len(factors) not in (0, most):
            raise UserError(f"{len(factors)} factors of rope for head_dim {head_dim}: {most} are needed")
    if rope.rotated is not None and not (type(rope.rotated) is int and 0 <= rope.rotated <= most):
        raise UserError(f"rope's rotated={short(rope.rotated)} must be a whole number in 0..{most} (head_dim / 2)")
    number("factor", rope.scale, "rope's scale")
    number("query_growth", rope.query_growth)
    if rope.context is not None:
        number("max_model_len", rope.context, "rope's context")


def check_layer(index: int, layer: Any, layers: Sequence[Any]) -> None:
    """Raise UserError for a LayerConfig that cannot be layer `index` of a decoder."""
    check_fields(layer, f" of layer {index}")
    if layer.num_heads % layer.num_kv_heads:
        raise UserError(f"{layer.num_heads} query heads do not divide among {layer.num_kv_heads} key-value heads")
    if layer.head_dim % 2:
        raise UserError(f"head_dim {layer.head_dim} is odd: rotary embedding needs pairs")
    check_rope(layer.rope, layer.head_dim)
    if layer.shares is not None:
        read = layers[layer.shares] if 0 <= layer.shares < index else None
        heads, size = layer.num_kv_heads, layer.head_dim
        if read is None or read.shares is not None or (read.num_kv_heads, read.head_dim) != (heads, size):
            raise UserError(
                f"layer {index} shares the keys and values of layer {layer.shares}: that must be an earlier layer with "
                f"keys and values of its own, {heads} heads of {size}"
            )
        if (layer.window is None) != (read.window is None) or (layer.window or 0) > (read.window or 0):
            raise UserError(
                f"layer {index} with window={layer.window} shares the keys and values of layer {layer.shares} with "
                f"window={read.window}: both must have a window, the latter's not the shorter one, or neither"
            )


def check_vocabulary(config: Any) -> None:
    """Raise UserError for impossible sizes of a draft's reduced vocabulary or of its rare ids.

    Raise it also for a tied output head in a draft with one of these, or with its target's embedding table.
    """
    if config.reduced_vocab_size is not None and not 2 <= config.reduced_vocab_size <= config.vocab_size:
        raise UserError(
            f"reduced_vocab_size={config.reduced_vocab_size} must lie in 2..{config.vocab_size} (vocab_size)"
        )
    if config.tied and (config.reduced_vocab_size or config.rare_vocab_size or config.embed_width):
        raise UserError(
            "tied=True is not possible for a draft with a reduced vocabulary or its target's embedding table: train a "
            "draft of an earlier version again"
        )
    has_rare = config.rare_vocab_size > 0
    if not 0 <= config.rare_vocab_size < config.head_size or has_rare != (config.rare_width > 0):
        raise UserError(
            f"rare_vocab_size={config.rare_vocab_size} must lie in 0..{config.head_size - 1}, and rare_width="
            f"{config.rare_width} must be above 0 exactly if rare_vocab_size is"
        )
