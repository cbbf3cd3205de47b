"""Training Medusa: one head per draft token. The heads read the target's last hidden state, independently.

Source: Cai et al., https://arxiv.org/abs/2401.10774.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.drafters.medusa import VLLM, Config, places
from jaxspec.models.backend import Backend
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Params, bind, parameters
from jaxspec.models.model import Model
from jaxspec.train import build, saved
from jaxspec.train.passes import Batch, OutputHead, PassOutputs, per_token_outputs, read
from jaxspec.train.train_options import TrainOptions

READS = True
TAKES = ("layers", "vocab_size")


def new(options: TrainOptions, target: Model, counts: np.ndarray, placement: Any) -> Model:
    """Return new heads. With --vocab-size each head has an output matrix of its own; else all use the target's.

    The heads' blocks start at zero and pass the hidden state through unchanged. So each head starts by repeating the
    target's prediction of the next token, unless its output matrix is random.
    """
    config = head_config(target.config, options)
    known: dict[str, Any] = build.vocabulary(counts, config)
    ends = build.head_of(target, config, known) if config.has_head and options.init_from_target else {}
    for name, p in parameters(config).items():
        kind = name.split(".")[2] if name.startswith("heads.") else name
        if kind in ("blocks", "biases"):
            known[name] = np.zeros(p.shape, np.float32)
        elif kind in ends:
            known[name] = ends[kind]
    return Model(config, build.initial_params(config, target, placement, options.seed, known))


def head_config(target: ModelConfig, options: TrainOptions) -> Config:
    """Return the configuration of new Medusa heads."""
    own = options.vocab_size is not None
    size = build.num_ids(target, options, target.vocab_size)
    return Config(**vars(target) | {
        "tied": False,
        "reduced_vocab_size": size if size < target.vocab_size else None,
        "num_drafts": options.num_speculative_tokens,
        "depth": options.layers or 1,
        "has_head": own,
    })  # fmt: skip


def passes(
    configs: tuple[ModelConfig, Config], draft: Params, target: Params, batch: Batch, backend: Backend, k: int
) -> PassOutputs:
    """Run the k heads over the target's hidden states of the batch."""
    own: Any = bind(configs[1], draft)
    _, hidden, _ = read(configs[0], target, batch, backend, ())
    dtype = own.heads[0].blocks[0][...].dtype
    # The outputs of head i are shifted by i positions. So at each position all heads predict the token that is two
    # positions later.
    outputs = [jnp.roll(own.one(i)(hidden.astype(dtype), backend), i, axis=1) for i in range(k)]
    return per_token_outputs(2, jnp.stack(outputs, axis=2), hidden)


def heads(configs: tuple[ModelConfig, Config], draft: Params, target: Params, k: int) -> list[OutputHead]:
    """Return for each head the module that computes its logits."""
    own: Any = bind(configs[1], draft)
    return [own.one(i) if configs[1].has_head else bind(configs[0], target) for i in range(k)]


def save(folder: Path, params: Any, config: Any, fingerprint: str) -> None:
    """Write the heads to a folder, under the names that Medusa's published heads have."""
    config_json = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": config.num_drafts,
        "num_hidden_layers": config.depth,
        "hidden_size": config.width,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.head_size,
        "medusa_fc_bias": True,
        "original_lm_head": not config.has_head,
    }
    names = places(VLLM, config.num_drafts, config.depth)
    saved.save(folder, config_json, params, config, names, fingerprint, offsets=False)
