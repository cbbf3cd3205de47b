"""The options of Muse Glimmer's config.json that no other family has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.models.limits import short
from jaxspec.models.rope import Rope


def check(raw: Mapping[str, Any]) -> None:
    """Raise UserError for a layer_rope_theta that is no list of numbers, one for each layer."""
    thetas, count = raw.get("layer_rope_theta"), raw.get("num_hidden_layers")
    if thetas is None:
        return
    numbers = isinstance(thetas, list | tuple) and all(type(theta) in (int, float) for theta in thetas)
    if not numbers or len(thetas) != count:
        raise UserError(f"layer_rope_theta={short(thetas)} must be a list of numbers, one for each of {count} layers")


def fields(raw: Mapping[str, Any], rope: Callable[[Mapping[str, Any], int], Rope]) -> dict[str, Any]:
    """Return the fields of ModelConfig that these options set.

    raw: configuration, with transformers' defaults filled in.
    rope: function from the options of a rotary embedding and a head size to the embedding.
    Raises: UnsupportedError for a layer with a rotary base of its own. A layer with a base of 0 has no rotary
      embedding; transformers rotates all other layers by the base in rope_parameters.
    """
    thetas = raw["layer_rope_theta"]
    rotary = rope(raw["rope_parameters"], raw["head_dim"])
    if others := sorted(set(thetas) - {0, rotary.theta}):
        raise UnsupportedError(f"layer_rope_theta has {short(others[0])}: only 0 and {rotary.theta:g} are supported")
    return {
        "unrotated": tuple(i for i, theta in enumerate(thetas) if not theta),
        "query_scale": float(raw["qk_scale_factor"]) * raw["head_dim"] ** -0.5,
        "logit_scale": float(raw["output_multiplier"]),
        "post_norm_eps": float(raw["post_norm_eps"]),
    }
