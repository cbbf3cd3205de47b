"""Rotary embedding's frequencies, and how Hugging Face configs spell them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.models.limits import number, short


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary embedding: frequencies theta^(-2i/D), each divided by factors[i] (all 1 where factors is empty)."""

    theta: float = 10000.0
    factors: tuple[float, ...] = ()


PLAIN_ROPE = Rope()


def rope_parameters(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config says of its rotary embedding, in whichever of the two spellings. Raises: UserError where that is
    no object; UnsupportedError for a kind of embedding that is not supported."""
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(raw.get(key) or {}, Mapping):
            raise UserError(f"{key}={short(raw[key])} must be an object")
        if (raw.get(key) or {}).get("mrope_section"):
            raise UnsupportedError("M-RoPE (mrope_section) is of multimodal checkpoints: only text is supported")
    theta = raw.get("rope_theta")
    parameters = raw.get("rope_parameters") or {
        "rope_theta": 10000.0 if theta is None else theta,
        **(raw.get("rope_scaling") or {}),
    }
    context = raw.get("original_max_position_embeddings")
    if context is not None and parameters.get("rope_type", parameters.get("type")) == "llama3":
        parameters = {**parameters, "original_max_position_embeddings": context}  # it comes first in transformers
    by_kind = [parameters[kind] for kind in ("full_attention", "sliding_attention") if kind in parameters]
    for table in by_kind or [parameters]:
        if not isinstance(table, Mapping):
            raise UserError(f"rope_parameters hold {short(table)} where an object is needed")
        kind = table.get("rope_type", table.get("type", "default"))
        if kind not in ("default", "linear", "llama3"):
            raise UnsupportedError(f"rope type {short(kind)}: default, linear and llama3 are supported")
        if table.get("partial_rotary_factor") not in (None, 1):
            raise UnsupportedError(
                f"partial rotary embedding (partial_rotary_factor={short(table['partial_rotary_factor'])}) is not "
                "supported: only 1"
            )
    return parameters


def rope_tables(raw: Mapping[str, Any], head_dim: int) -> tuple[Rope, Rope | None]:
    """(global, local) rotary tables; local is None where all layers share one."""
    parameters = rope_parameters(raw)
    if "full_attention" not in parameters and "sliding_attention" not in parameters:
        return rope_table(parameters, head_dim), None
    for kind in ("full_attention", "sliding_attention"):
        if kind not in parameters:
            raise UserError(f"rope_parameters lack {kind}")
    return rope_table(parameters["full_attention"], head_dim), rope_table(parameters["sliding_attention"], head_dim)


def rope_table(parameters: Mapping[str, Any], head_dim: int) -> Rope:
    """One Hugging Face rope dict as a Rope."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    theta = float(number("theta", parameters.get("rope_theta"), "rope_theta"))
    if kind == "linear":
        return Rope(theta, (float(number("factor", parameters.get("factor"), "rope's factor")),) * (head_dim // 2))
    return Rope(theta, llama3_factors(parameters, theta, head_dim) if kind == "llama3" else ())


def llama3_factors(parameters: Mapping[str, Any], theta: float, head_dim: int) -> tuple[float, ...]:
    """Llama 3.1's scaling: long waves are stretched by `factor`, short ones kept, those between interpolated."""
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
