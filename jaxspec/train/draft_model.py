"""Training a draft model, which reads tokens only, so that one pass predicts at all positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from checkpoints import orbax
from jaxspec.models.decoder import bind, whole
from jaxspec.models.model import Model
from jaxspec.train import build
from jaxspec.train.passes import PassOutputs, per_token_outputs
from jaxspec.train.train_options import TrainOptions

READS = False
TAKES = tuple(build.SHAPE)


def new(options: TrainOptions, target: Model, counts: np.ndarray, placement: Any) -> Model:
    config = build.draft_config(target.config, options)
    ids = build.vocabulary(counts, config)
    params = build.first_params(config, target, ids, placement, seed=options.seed, from_target=options.init_from_target)
    return Model(config, params)


def passes(configs, draft, target, batch, backend, k) -> PassOutputs:
    _, hidden = whole(configs[1], draft, batch["tokens"], backend)
    return per_token_outputs(1, hidden[:, :, None])


def heads(configs, draft, target, k):
    return [bind(configs[1], draft)]


def save(folder: Path, params: Any, config: Any, fingerprint: str) -> None:
    orbax.save(folder, params, config, fingerprint=fingerprint, replace=True)
