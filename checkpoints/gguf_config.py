"""The ModelConfig of a GGUF file, parsed from its metadata."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping
from typing import Any

from checkpoints.rope_scaling import spread, yarn
from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.models.config import ModelConfig
from jaxspec.models.families import ARCHITECTURES, FAMILIES, GGUF
from jaxspec.models.limits import number, short, token_ids
from jaxspec.models.rope import Rope

# GGUF keys that change what a model computes, without the architecture's prefix, and the only supported value of each.
GGUF_FIXED: dict[str, Any] = {
    "attention.causal": True,
    "attention.clamp_kqv": 0,
    "attention.scale": 0,
    "attention.temperature_scale": 0,
    "attention.temperature_length": 0,
    "attn_logit_softcapping": 0,
    "final_logit_softcapping": 0,
    "logit_scale": 0,
    "embedding_scale": 0,
    "residual_scale": 0,
    "expert_count": 0,
    "rope.scale_linear": 1,
    "rope.scaling.attn_factor": 1,
    "rope.scaling.yarn_ext_factor": 1,
}

# GGUF keys whose values are stop ids.
GGUF_ENDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))


def model_config(
    meta: Mapping[str, Any],
    *,
    vocab_size: int,
    tied: bool,
    rope_factors: Iterable[float] = (),
    long_factors: Iterable[float] = (),
) -> ModelConfig:
    """Return the ModelConfig that GGUF metadata (`general.architecture` and `<arch>.*` keys) describe.

    vocab_size: number of rows of tensor token_embd.weight, the embedding table.
    tied: whether the embedding table is also the output head, because the file has no tensor output.weight.
    rope_factors: values of tensor rope_freqs.weight or rope_factors_short.weight, which scale rotary frequencies; empty
      if the file has none.
    long_factors: values of tensor rope_factors_long.weight, which replace rope_factors for long texts; likewise.
    Raises: UnsupportedError for an unsupported architecture, or an unsupported option that changes what is computed;
      UserError for a key that is missing or a value that no model has.
    """
    architecture = meta.get("general.architecture")
    if architecture not in tuple(ARCHITECTURES):
        raise UnsupportedError(f"GGUF architecture {short(architecture)}: jaxspec reads {', '.join(ARCHITECTURES)}")
    family = ARCHITECTURES[architecture]
    files = GGUF[family]
    get = functools.partial(number_of, meta, family)
    check_fixed(meta, family)
    scaling = scaling_of(meta, family)
    if scaling not in ("none", "linear", "yarn") and not (scaling == "longrope" and family == "phi3"):
        raise UnsupportedError(f"rope scaling {short(scaling)} in GGUF: none, linear and yarn are supported")
    of_yarn = ("attention.temperature_scale", "rope.scaling.attn_factor")  # Phi-3's factor is that of its long texts
    for key in () if scaling == "yarn" or family == "phi3" else of_yarn:
        name = key_of(family, key)
        if meta.get(name, GGUF_FIXED[key]) not in (0, GGUF_FIXED[key]):
            raise UnsupportedError(f"{name}={short(meta[name])} is supported beside rope scaling 'yarn' only")
    layers = get("block_count", "num_layers")
    width = get("embedding_length", "width")
    heads = get("attention.head_count", "num_heads")
    head_dim = get("attention.key_length", "head_dim", width // heads)
    rotated = get("rope.dimension_count", "head_dim", head_dim)
    for key in ("rope.dimension_count", "attention.value_length"):
        if get(key, "head_dim", head_dim) != head_dim and not (FAMILIES[family].rotates_first and "rope" in key):
            part = "partial rotary embedding" if "rope" in key else "values of another size than keys"
            raise UnsupportedError(
                f"{key_of(family, key)}={meta[key_of(family, key)]} where heads have {head_dim}: {part} is not "
                "supported"
            )
    factors = tuple(float(f) for f in rope_factors)
    if scaling in ("linear", "yarn") and factors:
        raise UnsupportedError(f"rope scaling {scaling!r} beside rope_freqs.weight: only one of them is supported")
    if scaling == "linear":
        factors = (float(get("rope.scaling.factor", "factor")),) * (head_dim // 2)
    windows = sliding_windows(meta, family, layers) if files.period or files.optional_window else (None,) * layers
    theta = float(get("rope.freq_base", "theta", files.theta))
    wide = (width / heads) ** -0.5 if layers in files.wide_queries else 0.0
    rope = yarn(yarn_options(meta, family), theta, rotated, 0) if scaling == "yarn" else Rope(theta, factors)
    if long := tuple(float(f) for f in long_factors):
        context = get("rope.scaling.original_context_length", "max_model_len")
        scale = float(get("rope.scaling.attn_factor", "factor", 1.0))
        rope = dataclasses.replace(rope, scale=scale, context=context, long_factors=long)
    local = None
    if files.local_theta is not None and any(windows):
        local = Rope(float(get("rope.freq_base_swa", "theta", files.local_theta or theta)))
    switches = FAMILIES[family].switches(width)
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        num_layers=layers,
        width=width,
        mlp_width=get("feed_forward_length", "mlp_width"),
        num_heads=heads,
        num_kv_heads=get("attention.head_count_kv", "num_kv_heads", heads),
        head_dim=head_dim,
        max_model_len=get("context_length", "max_model_len"),
        windows=windows,
        unrotated=tuple(range(period - 1, layers, period)) if (period := files.unrotated_period) else (),
        rope=spread(rope, rotated, head_dim),
        local_rope=local,
        tied=tied,
        **switches | multipliers(meta, family, query_scale=wide, embed_scale=switches["embed_scale"]),
        bos_id=meta.get("tokenizer.ggml.bos_token_id"),
        eos_ids=tuple(dict.fromkeys(i for key in GGUF_ENDS for i in token_ids(meta.get(key), key))),
    )


def key_of(family: str, key: str) -> str:
    """Return a key of GGUF metadata with its prefix, the architecture of a family's files."""
    return f"{GGUF[family].architecture or family}.{key}"


def scaling_of(meta: Mapping[str, Any], family: str) -> Any:
    """Return the type of rope scaling. If it is missing, llama.cpp, too, assumes linear where there is a factor."""
    default = "linear" if key_of(family, "rope.scaling.factor") in meta else "none"
    return meta.get(key_of(family, "rope.scaling.type"), default)


def yarn_options(meta: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Return the options of `rope_scaling.yarn`, which GGUF metadata give under names of their own.

    Raises: UserError where one is missing; UnsupportedError for queries that grow from another position than the end of
      the original context.
    """
    get = functools.partial(number_of, meta, family)
    context = get("rope.scaling.original_context_length", "max_model_len")
    growth = get("attention.temperature_scale", "query_growth", 0.0)
    start = meta.get(key_of(family, "attention.temperature_length")) or context
    if growth and start != context:
        raise UnsupportedError(
            f"{key_of(family, 'attention.temperature_length')}={short(start)} is not supported: only {context}, the "
            "original context, is"
        )
    given = {
        key: meta.get(key_of(family, f"rope.scaling.yarn_{end}"))
        for key, end in (("attention_factor", "attn_factor"), ("beta_fast", "beta_fast"), ("beta_slow", "beta_slow"))
    }
    if given["attention_factor"] is None and "rope.scaling.attn_factor" in GGUF[family].takes:
        given["attention_factor"] = meta.get(key_of(family, "rope.scaling.attn_factor"))
    return given | {
        "factor": get("rope.scaling.factor", "factor"),
        "original_max_position_embeddings": context,
        "mscale": 1.0,
        "mscale_all_dim": meta.get(key_of(family, "rope.scaling.yarn_log_multiplier")),
        "llama_4_scaling_beta": growth,
    }


def check_fixed(meta: Mapping[str, Any], family: str) -> None:
    """Raise UnsupportedError for an option of GGUF_FIXED whose value is not supported in this family."""
    for key, only in GGUF_FIXED.items():
        if key not in GGUF[family].takes and (value := meta.get(key_of(family, key), only)) != only:
            raise UnsupportedError(f"{key_of(family, key)}={short(value)} is not supported: only {json.dumps(only)} is")


def multipliers(meta: Mapping[str, Any], family: str, **own: float) -> dict[str, float]:
    """Return the fields of ModelConfig that scale what the layers compute: norm_eps, query_scale and others.

    own: query_scale and embed_scale of a file that gives none.
    """
    get = functools.partial(number_of, meta, family)

    def scale(key: str, field: str, default: float = 1.0) -> float:
        """Return a number of GGUF_FIXED, or `default` if the file gives none or 0."""
        given = key in GGUF[family].takes and meta.get(key_of(family, key))
        return float(get(key, field)) if given else default

    residual = scale("residual_scale", "residual_scale")
    return {
        "norm_eps": get("attention.layer_norm_rms_epsilon", "norm_eps") / residual**2,
        "embed_scale": scale("embedding_scale", "embed_scale", own["embed_scale"]),
        "query_scale": scale("attention.scale", "query_scale", own["query_scale"]),
        "residual_scale": residual,
        "logit_scale": 1 / scale("logit_scale", "logit_scale"),
    }


def number_of(meta: Mapping[str, Any], family: str, key: str, what: str, default: Any = None) -> Any:
    """Return the number that GGUF metadata hold under a key.

    family: name of the model family, whose files have a prefix before the key.
    key: the key without this prefix.
    what: name of the entry of `jaxspec.models.limits.LIMITS` that bounds the number.
    default: number to use if the key is missing; None if the key is required.
    Raises: UserError where it is missing or out of bounds; UnsupportedError for a list.
    """
    name = key_of(family, key)
    value = meta.get(name, default)
    if value is None:
        raise UserError(f"GGUF metadata lacks {name}: is the file complete?")
    if isinstance(value, list):
        raise UnsupportedError(f"{name} has one value for each layer: only one value for all layers is supported")
    return number(what, value, name)


def sliding_windows(meta: Mapping[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    """Return the size of each layer's sliding attention window, None for full attention.

    The last of every `Gguf.period` layers has full attention, and the others have a window. The file may give another
    period, or for each layer a flag that is true for a window.
    """
    files = GGUF[family]
    if files.optional_window and not meta.get(key_of(family, "attention.sliding_window")):
        return (None,) * layers
    window = number_of(meta, family, "attention.sliding_window", "window")
    key = "attention.sliding_window_pattern"
    flags = meta.get(key_of(family, key))
    if not isinstance(flags, list):
        period = number_of(meta, family, key, "num_layers", files.period or layers + 1)
        flags = [bool((i + 1) % period) for i in range(layers)]
    if len(flags) != layers:
        raise UserError(f"{key_of(family, key)} has {len(flags)} values for {layers} layers: one for each is needed")
    return tuple(window if flag else None for flag in flags)
