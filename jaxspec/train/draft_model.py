"""Training a draft model: a small decoder that reads tokens only, so that one pass predicts at all positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from checkpoints import orbax
from jaxspec.models.backend import Backend
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Params, bind, whole
from jaxspec.models.model import Model
from jaxspec.train import build
from jaxspec.train.passes import Batch, OutputHead, PassOutputs, per_token_outputs
from jaxspec.train.train_options import TrainOptions

READS = False
TAKES = tuple(build.SHAPE)


def new(options: TrainOptions, target: Model, counts: np.ndarray, placement: Any) -> Model:
    """Return the initial draft model for a target."""
    config = build.draft_config(target.config, options)
    ids = build.vocabulary(counts, config)
    params = build.first_params(config, target, ids, placement, seed=options.seed, from_target=options.init_from_target)
    return Model(config, params)


def passes(
    configs: tuple[ModelConfig, ModelConfig], draft: Params, target: Params, batch: Batch, backend: Backend, k: int
) -> PassOutputs:
    """Run the draft model over the batch, in one pass."""
    _, hidden = whole(configs[1], draft, batch["tokens"], backend)
    return per_token_outputs(1, hidden[:, :, None])


def heads(configs: tuple[ModelConfig, ModelConfig], draft: Params, target: Params, k: int) -> list[OutputHead]:
    """Return the module that computes the logits of the one pass, in a list."""
    return [bind(configs[1], draft)]


def save(folder: Path, params: Any, config: Any, fingerprint: str) -> None:
    """Write the draft model to a folder, as orbax files."""
    orbax.save(folder, params, config, fingerprint=fingerprint, replace=True)
