"""Rotary embeddings whose frequencies are changed for long texts: YaRN, LongRoPE and Llama 3.1's; partial rotation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxspec.common.errors import UserError
from jaxspec.models.limits import number, short
from jaxspec.models.rope import Rope


def rotated_part(parameters: Mapping[str, Any], head_dim: int) -> int:
    """Return the number of the first elements of a head that are rotated, from the option partial_rotary_factor."""
    share = parameters.get("partial_rotary_factor")
    if share is None:
        return head_dim
    size = int(head_dim * number("rotary_share", share, "partial_rotary_factor"))
    if size < 2 or size % 2:
        raise UserError(
            f"partial_rotary_factor={short(share)} rotates {size} of {head_dim} elements of a head: an even number is "
            "needed"
        )
    return size


def spread(rope: Rope, rotated: int, head_dim: int) -> Rope:
    """Return a rotary embedding of `rotated` elements as one of heads of size head_dim, whose other elements stay.

    Its frequencies are the same: theta^(-2i/rotated) is theta'^(-2i/head_dim) for a larger theta'.
    """
    if rotated == head_dim:
        return rope
    if 8 * rotated < head_dim:
        raise UserError(f"{rotated} of {head_dim} elements of a head are rotated: an eighth or more is needed")
    ones = (1.0,) * ((head_dim - rotated) // 2)
    return Rope(
        rope.theta ** (head_dim / rotated),
        rope.factors and rope.factors + ones,
        rotated // 2,
        rope.scale,
        rope.context,
        rope.long_factors and rope.long_factors + ones,
        rope.query_growth,
    )


def yarn(parameters: Mapping[str, Any], theta: float, size: int, max_model_len: int) -> Rope:
    """Return the rotary embedding of YaRN (https://arxiv.org/abs/2309.00071) for `size` rotated elements of a head.

    parameters: options of the rotary embedding in config.json.
    max_model_len: largest number of positions, which gives the option `factor` if it is missing.
    """
    context = original_context(parameters)
    factor = stretch(parameters, max_model_len / context)
    if theta <= 1:
        raise UserError(f"rope_theta={theta:g} must be above 1 for YaRN")

    def correction(rotations: float) -> float:
        """Return the index of the frequency that makes this many rotations within the original context."""
        return size * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    fast = float(number("factor", parameters.get("beta_fast") or 32, "rope's beta_fast"))
    slow = float(number("factor", parameters.get("beta_slow") or 1, "rope's beta_slow"))
    low, high = correction(fast), correction(slow)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    high += 0.001 if low == high else 0.0
    ramp = [min(1.0, max(0.0, (i - low) / (high - low))) for i in range(size // 2)]
    factors = tuple(1.0 / (share / factor + 1.0 - share) for share in ramp)
    scale, all_dims = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if parameters.get("attention_factor") is not None:
        magnitude = number("factor", parameters["attention_factor"], "rope's attention_factor")
    elif scale and all_dims:
        over, under = (number("factor", x, "rope's mscale or mscale_all_dim") for x in (scale, all_dims))
        magnitude = yarn_scale(factor, over) / yarn_scale(factor, under)
    else:
        magnitude = yarn_scale(factor)
    growth = number("query_growth", parameters.get("llama_4_scaling_beta") or 0.0, "llama_4_scaling_beta")
    growing = {"context": context, "query_growth": growth} if growth else {}
    return Rope(theta, factors, scale=float(magnitude), **growing)


def yarn_scale(factor: float, scale: float = 1.0) -> float:
    """Return YaRN's factor of queries and keys for texts that are `factor` times as long as the original context."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def longrope(parameters: Mapping[str, Any], theta: float, size: int, max_model_len: int) -> Rope:
    """Return the rotary embedding of LongRoPE (https://arxiv.org/abs/2402.13753). Arguments are as in `yarn`.

    It has two lists of factors: one for models that are used within their original context, and one for longer texts.
    """
    context = original_context(parameters)
    lists = {}
    for key in ("short_factor", "long_factor"):
        given = parameters.get(key)
        if not isinstance(given, list | tuple) or len(given) != size // 2:
            raise UserError(f"rope's {key}={short(given)} must be a list of {size // 2} numbers")
        lists[key] = tuple(float(number("factor", x, f"rope's {key}")) for x in given)
    if parameters.get("attention_factor") is not None:
        scale = float(number("factor", parameters["attention_factor"], "rope's attention_factor"))
    else:
        factor = stretch(parameters, max_model_len / context)
        scale = math.sqrt(1 + math.log(factor) / math.log(context)) if factor > 1 else 1.0
    return Rope(theta, lists["short_factor"], scale=scale, context=context, long_factors=lists["long_factor"])


def llama3_factors(parameters: Mapping[str, Any], theta: float, head_dim: int) -> tuple[float, ...]:
    """Return Llama 3.1's scaling factor for each frequency of a rotary embedding, by which the frequency is divided.

    Long wavelengths are stretched by the option `factor`, and short wavelengths stay. For wavelengths in between, the
    inverse factor is interpolated.
    """
    factor, low, high = (
        float(number("factor", parameters.get(key), f"rope's {key}"))
        for key in ("factor", "low_freq_factor", "high_freq_factor")
    )
    if not low < high:
        raise UserError(f"rope's low_freq_factor={low} must be below high_freq_factor={high}")
    key = "original_max_position_embeddings"
    context = float(number("max_model_len", parameters.get(key), f"rope's {key}"))
    factors = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
        smooth = min(1.0, max(0.0, (context / wavelength - low) / (high - low)))
        factors.append(1.0 / ((1 - smooth) / factor + smooth))
    return tuple(factors)


def original_context(parameters: Mapping[str, Any]) -> int:
    """Return the number of positions that a model was first trained on. Raises: UserError where it is missing."""
    key = "original_max_position_embeddings"
    context: int = number("max_model_len", parameters.get(key), f"rope's {key}")
    if context < 2:
        raise UserError(f"rope's {key}={context} must be 2 or more")
    return context


def stretch(parameters: Mapping[str, Any], default: float) -> float:
    """Return how many times as long as the original context texts may be."""
    given = parameters.get("factor")
    return default if given is None else float(number("factor", given, "rope's factor"))


KINDS = {"yarn": yarn, "longrope": longrope}
