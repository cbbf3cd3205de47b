"""Muse Glimmer's assistant: a DFlash head in a checkpoint layout of its own.

The head reads the target's embeddings without their norm, and makes logits by the target's output head without the
target's factor and bound. The window of its layers reaches to both sides.
Source: the model muse_glimmer_assistant of transformers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.drafters.head_checkpoint import HeadCheckpoint
from jaxspec.models.families import Place
from jaxspec.models.limits import short

MODEL_TYPE = "muse_glimmer_assistant"
# Tensor names of the two parameters that compute features, in DFlash's order.
FEATURES: dict[str, Place] = {"encoder.fc.weight": ("fc", ""), "encoder.output_norm_enc.weight": ("hidden_norm", "")}
THETA = 5e5  # base of the rotary embedding, if config.json has none
WINDOW = ("layer_types", "sliding_window", "use_sliding_window")  # keys that `windows` reads


def plain(found: HeadCheckpoint) -> HeadCheckpoint:
    """Return the checkpoint with a config.json that describes the same layers without windows."""
    raw = {key: value for key, value in found.raw.items() if key not in WINDOW}
    rope = {} if raw.get("rope_parameters") else {"rope_theta": THETA}
    return dataclasses.replace(found, raw=rope | raw)


def windows(found: HeadCheckpoint) -> tuple[int | None, ...]:
    """Return each layer's window: the number of positions from the furthest one that it sees up to its own.

    transformers gives the distance to the furthest position, on both sides.

    Raises: UserError for layer_types that do not describe each layer; UnsupportedError for a kind of layer that no
      assistant has, or a window shorter than a block, within which all tokens see each other.
    """
    found.refuse(use_sliding_window=True)
    count: int = found.whole("num_hidden_layers", kind="num_layers")
    kinds: Any = found.raw.get("layer_types") or ["sliding_attention"] * count
    if not isinstance(kinds, list | tuple) or len(kinds) != count:
        raise UserError(f"{found.name}: layer_types={short(kinds)} must be a list of {count} kinds, one for each layer")
    if others := [kind for kind in kinds if kind not in ("sliding_attention", "full_attention")]:
        raise UnsupportedError(
            f"{found.name}: layer type {short(others[0])}: sliding_attention and full_attention are supported"
        )
    if "sliding_attention" not in kinds:
        return (None,) * count
    distance, block = (found.whole(key, kind="window") for key in ("sliding_window", "block_size"))
    if distance < block - 1:
        raise UnsupportedError(
            f"{found.name}: sliding_window={distance} is shorter than a block of {block} tokens: at least {block - 1} "
            "is supported"
        )
    return tuple(distance + 1 if kind == "sliding_attention" else None for kind in kinds)
