"""A trained head's folder: config.json and tensors by the names that others' engines read, too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from checkpoints import heads
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import parameters
from jaxspec.models.families import Place


def save(
    folder: Path,
    said: Mapping[str, Any],
    params: Mapping[str, jax.Array],
    config: ModelConfig,
    names: Mapping[str, Place],
    fingerprint: str,
    *,
    offsets: bool = True,
) -> None:
    """said: config.json; names: tensor -> where it goes; offsets: whether a reduced vocabulary is written as
    differences from the head's own ids; fingerprint: of the target's tokenizer."""
    tensors = heads.tensors(parameters(config), params, names)
    if offsets and "d2t" in tensors:
        tensors["d2t"] = tensors["d2t"].astype(np.int64) - np.arange(config.head_size)
    heads.save(folder, said, tensors, fingerprint)


def layers(config: ModelConfig) -> dict[str, Any]:
    """What config.json says of a head's layers and of its ids."""
    return {**heads.layers(config), "draft_vocab_size": config.head_size, "rope_theta": config.rope.theta}


def numbered(names: Mapping[str, Place], layers: int) -> dict[str, Place]:
    """Where tensors go, of so many layers."""
    return {name.format(i): (place.format(i), part) for name, (place, part) in names.items() for i in range(layers)}
