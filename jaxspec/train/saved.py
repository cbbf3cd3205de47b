"""Writing the folder of a trained head: config.json, and tensors with the names that other engines read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from checkpoints import head_folders
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import parameters
from jaxspec.models.families import Place


def save(
    folder: Path,
    config_json: Mapping[str, Any],
    params: Mapping[str, jax.Array],
    config: ModelConfig,
    names: Mapping[str, Place],
    fingerprint: str,
    *,
    offsets: bool = True,
) -> None:
    """Write a head's folder: its config.json and its tensors.

    config_json: contents of config.json.
    params, config: the head's parameters and configuration.
    names: for each tensor's name, the parameter and the part of it that the tensor holds.
    fingerprint: fingerprint of the target's tokenizer.
    offsets: whether d2t, the target's id of each draft id, is written as target id minus draft id; else as target ids.
    """
    tensors = head_folders.tensors(parameters(config), params, names)
    if offsets and "d2t" in tensors:
        tensors["d2t"] = tensors["d2t"].astype(np.int64) - np.arange(config.head_size)
    head_folders.save(folder, config_json, tensors, fingerprint)


def layers(config: ModelConfig) -> dict[str, Any]:
    """Return the entries of config.json that describe a head's layers and its vocabulary."""
    return {**head_folders.layers(config), "draft_vocab_size": config.head_size, "rope_theta": config.rope.theta}


def numbered(names: Mapping[str, Place], layers: int) -> dict[str, Place]:
    """Return an entry of each name for each layer, with the layer's index in place of `{}` in tensor and parameter."""
    return {name.format(i): (place.format(i), part) for name, (place, part) in names.items() for i in range(layers)}
