"""Edits of a file's tensors while they are read: norms of Gemma's kind, and heads that are rotated in part."""

from __future__ import annotations

import numpy as np

from checkpoints.assemble import Edit
from jaxspec.models.config import ModelConfig
from jaxspec.models.families import FAMILIES
from jaxspec.models.parameters import Parameter


def rotary_order(config: ModelConfig) -> np.ndarray | None:
    """Return the order in which the decoder has the elements of a query or key head of the file. None for the same.

    The decoder rotates the two halves of a head against each other. If only the first elements of a head are rotated,
    the file rotates the halves of these. The others become the end of either half.
    """
    half = config.rope.rotated
    if not FAMILIES[config.family].rotates_first or half is None:
        return None
    rotated, rest = np.split(np.arange(config.head_dim), [2 * half])
    return np.concatenate([rotated[:half], rest[: len(rest) // 2], rotated[half:], rest[len(rest) // 2 :]])


def edit(norm_plus_one: bool, order: np.ndarray | None = None) -> Edit:
    """Return the function `edit` that `assemble` applies to each tensor of a Hugging Face folder.

    norm_plus_one: whether the file stores w for norms that multiply by 1 + w.
    order: order of the elements of each query and key head, as `rotary_order` returns it.
    """

    def undo(parameter: Parameter, part: str, x: np.ndarray) -> np.ndarray:
        if norm_plus_one and parameter.kind == "norm" and not parameter.whole:
            return x.astype(np.float32) + 1  # as float32: bfloat16 has too few bits near 1 for Gemma's small w
        if order is not None and part in ("q", "k"):
            return x.reshape(-1, len(order), *x.shape[1:])[:, order].reshape(x.shape)
        return x

    return undo
