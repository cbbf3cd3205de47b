"""Training a head for multi-token prediction: a layer like the target's that reads the next token and a hidden state.

Source: DeepSeek-V3, https://arxiv.org/abs/2412.19437. In the paper each head makes one draft; here one head makes all
drafts of a round.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.common.shapes import Array, Float
from jaxspec.drafters.mtp import Config, formats, names
from jaxspec.models.backend import Backend
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Params, bind
from jaxspec.models.head import product
from jaxspec.models.model import Model
from jaxspec.train import build, chain, saved
from jaxspec.train.passes import Batch, OutputHead, PassOutputs
from jaxspec.train.train_options import TrainOptions
from pallas_kernels.plain import rms_norm

READS = True
TAKES = ()
FORMAT = "deepseek"


def new(options: TrainOptions, target: Model, counts: np.ndarray, placement: Any) -> Model:
    """Return the initial head, whose layer is by default a copy of the target's last one."""
    config = head_config(target.config)
    last = f"layers.{target.config.num_layers - 1}."
    known: dict[str, Any] = {}
    if options.init_from_target:
        theirs = {name.replace(last, "layers.0."): x for name, x in target.params.items() if name.startswith(last)}
        known = {**theirs, "norm": target.params["norm"]}
    return Model(config, build.initial_params(config, target, placement, options.seed, known))


def head_config(target: ModelConfig) -> Config:
    """Return the configuration of a new head with one layer."""
    fields = vars(target) | {
        "num_layers": 1,
        "windows": (None,),
        "tied": False,
        "qk_norm": target.qk_norm and not target.plain_qk_norm,
        "output_gate": False,
        "target_layers": target.num_layers,
        "last_norm": formats(target.num_layers)[FORMAT].last_norm,
    }
    return Config(**fields)


def passes(
    configs: tuple[ModelConfig, Config], draft: Params, target: Params, batch: Batch, backend: Backend, k: int
) -> PassOutputs:
    """Run the head over the batch, in k passes.

    The first pass reads the target's hidden states, each later pass the output of the pass before.
    """
    return chain.passes(enter, configs, draft, target, batch, backend, k, carries_normed=True)


def enter(
    head: Any, token: Float[Array, "B T E"], feature: Float[Array, "B T E"], backend: Backend
) -> tuple[Float[Array, "B T E"], Float[Array, "B T _"]]:
    """Return the residual stream and the attention input of the head's layer.

    token: embedding of each position's next token. feature: hidden state that the head reads at each position.
    """
    c = head.config
    normed_token = rms_norm(head.token_norm[...], token, c.norm_eps)
    hidden = rms_norm(head.hidden_norm[...], feature, c.norm_eps)
    x = product(jnp.concatenate([normed_token, hidden], axis=-1), head.fc[...], backend).astype(token.dtype)
    return x, rms_norm(head.layers[0].input_norm[...], x, c.norm_eps)


def heads(configs: tuple[ModelConfig, Config], draft: Params, target: Params, k: int) -> list[OutputHead]:
    """Return the target for each of the k passes. It computes the logits of all of them."""
    return [bind(configs[0], target)] * k


def save(folder: Path, params: Any, config: Any, fingerprint: str) -> None:
    """Write the head to a folder. Its tensors are named as in a checkpoint that holds target and head together."""
    config_json = saved.layers(config) | {
        "model_type": "mtp",
        "num_nextn_predict_layers": 1,
        "num_hidden_layers": config.target_layers,
    }
    tensor_names = names(formats(config.target_layers)[FORMAT], config.family)
    saved.save(folder, config_json, params, config, tensor_names, fingerprint)
