"""Models and drafts, loaded from folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp

import checkpoints
from jaxspec.loading import drafts, weights
from jaxspec.loading.resolved import ResolvedModel, resolved, resolved_draft
from jaxspec.models.model import Model
from jaxspec.parallel.placement import Placement, make_placement


def resolve(folder: str | Path) -> ResolvedModel:
    return resolved(checkpoints.resolve(str(folder)))


def load(
    folder: str | Path,
    dtype: Any = "float32",
    placement: Placement | None = None,
    *,
    quantization: str | None = None,
) -> Model:
    found = resolve(folder)
    return weights.load(found, jnp.dtype(dtype), placement or make_placement(), quantization=quantization)


def load_draft(
    folder: str | Path,
    target: str | Path,
    method: str | None = None,
    *,
    model: Model | None = None,
    dtype: Any = "float32",
    placement: Placement | None = None,
) -> Model:
    """Load the draft of a folder beside its target. model: the target's, where it is loaded."""
    placement = placement or make_placement()
    model = model or load(target, dtype, placement)
    found = resolved_draft(checkpoints.resolve(str(folder)), resolve(target), method)
    return drafts.load_draft(found, jnp.dtype(dtype), placement, model)
