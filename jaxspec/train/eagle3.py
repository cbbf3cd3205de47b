"""Training EAGLE-3's head: one or more layers that read the next token and three of the target's hidden states.

Source: Li et al., https://arxiv.org/abs/2503.01840.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.common.shapes import Array, Float
from jaxspec.drafters.eagle3 import Config, places
from jaxspec.models.backend import Backend
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Params, bind
from jaxspec.models.model import Model
from jaxspec.train import build, chain, saved
from jaxspec.train.passes import Batch, OutputHead, PassOutputs
from jaxspec.train.train_options import TrainOptions
from pallas_kernels.plain import rms_norm

READS = True
TAKES = build.OF_LAYERS
MOST_IDS = 32_000  # largest size of the head's vocabulary, unless options.vocab_size sets the size


def new(options: TrainOptions, target: Model, counts: np.ndarray, placement: Any) -> Model:
    """Return the initial EAGLE-3 head for a target. Its vocabulary holds the most frequent ids of the training data."""
    config = head_config(target.config, options)
    known: dict[str, Any] = build.vocabulary(counts, config)
    if options.init_from_target:
        known |= {**build.head_of(target, config, known), "norm": target.params["norm"]}
    return Model(config, build.initial_params(config, target, placement, options.seed, known))


def head_config(target: ModelConfig, options: TrainOptions) -> Config:
    """Return the configuration of a new EAGLE-3 head."""
    layers = build.num_layers(target, options, 1)
    fields = build.layer_fields(target, options, layers, MOST_IDS)
    return Config(**fields, taps=build.check_tapped(target, options.method), target_width=target.width)


def passes(
    configs: tuple[ModelConfig, Config], draft: Params, target: Params, batch: Batch, backend: Backend, k: int
) -> PassOutputs:
    """Run the head over the batch, in k passes.

    The first pass reads the target's hidden states, each later pass the output of the pass before.
    """
    return chain.passes(enter, configs, draft, target, batch, backend, k, carries_normed=False)


def enter(
    head: Any, token: Float[Array, "B T E"], feature: Float[Array, "B T E"], backend: Backend
) -> tuple[Float[Array, "B T E"], Float[Array, "B T _"]]:
    """Return the residual stream and the attention input of the head's first layer.

    token: embedding of each position's next token. feature: hidden state that the head reads at each position.
    """
    c = head.config
    token = rms_norm(head.token_norm[...], token, c.norm_eps)
    hidden = rms_norm(head.hidden_norm[...], feature, c.norm_eps)
    return feature, jnp.concatenate([token, hidden], axis=-1)


def heads(configs: tuple[ModelConfig, Config], draft: Params, target: Params, k: int) -> list[OutputHead]:
    """Return the head for each of the k passes. It computes the logits of all of them."""
    return [bind(configs[1], draft)] * k


def save(folder: Path, params: Any, config: Any, fingerprint: str) -> None:
    """Write the head to a folder, under the names that EAGLE-3's published heads have."""
    config_json = {
        **saved.layers(config),
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_aux_hidden_state_layer_ids": list(config.taps),
    }
    if config.num_layers == 1:
        names = places("midlayer.")  # the names in SafeAILab's files
    else:
        names = saved.numbered(places("layers.0."), config.num_layers)  # the names in the speculators library's files
    saved.save(folder, config_json, params, config, names, fingerprint)
