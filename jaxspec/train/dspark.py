"""Training DSpark: a head that drafts a block at once, as DFlash does. Each position also reads the previous token.

In training, the previous token is the one in the data.

Source: DeepSeek-AI, https://github.com/deepseek-ai/DeepSpec. Unlike theirs, this head embeds that token by the target's
table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.drafters.dflash import NAMES
from jaxspec.drafters.dspark import Config, names
from jaxspec.models.backend import Backend
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Params, bind
from jaxspec.models.model import Model
from jaxspec.train import dflash
from jaxspec.train.passes import Batch, OutputHead, PassOutputs
from jaxspec.train.train_options import TrainOptions

READS = True
TAKES = (*dflash.TAKES, "markov_rank")
RANK = 64  # default of the option markov_rank: number of channels from the previous token to the logits


def new(options: TrainOptions, target: Model, counts: np.ndarray, placement: Any) -> Model:
    """Return the initial DSpark head for a target."""
    config = Config(**dflash.fields(target.config, options, counts) | {
        "block_size": options.num_speculative_tokens,
        "from_pending": True,
        "markov_rank": options.markov_rank or RANK,
        "markov_kind": "rnn",
        "markov_table": False,
    })  # fmt: skip
    return dflash.new_head(config, options, target, counts, placement)


def passes(
    configs: tuple[ModelConfig, Config], draft: Params, target: Params, batch: Batch, backend: Backend, k: int
) -> PassOutputs:
    """Run the same pass as DFlash.

    Append to each hidden state the channels [r] that the Markov head computes for it from the previous token.
    """
    outputs = dflash.passes(configs, draft, target, batch, backend, k)
    head: Any = bind(configs[1], draft)
    decoder = bind(configs[0], target)

    def by_block(x: jax.Array) -> jax.Array:
        """Return x [B, blocks * k, ...] in the shape [B, blocks, k, ...]."""
        return x.reshape(len(x), -1, k, *x.shape[2:])

    hidden = by_block(outputs.hidden[:, :, 0])
    before = by_block(jnp.take_along_axis(batch["tokens"], outputs.predicts - 1, axis=1, mode="clip"))
    state = jnp.zeros((*hidden.shape[:2], configs[1].markov_rank), hidden.dtype)
    channels = []
    for i in range(k):
        x, state = head.markov(state, before[:, :, i], hidden[:, :, i], decoder, backend)
        channels.append(x)
    both = jnp.concatenate([hidden, jnp.stack(channels, axis=2)], axis=-1)
    return outputs._replace(hidden=both.reshape(len(both), -1, 1, both.shape[-1]))


class MarkovHead(NamedTuple):
    """An output head whose logits are the sum of two parts: from a hidden state, and from the channels appended to it.

    head: module of the first part. markov: module of the second part.
    """

    head: Any
    markov: Any

    def logits(self, x: jax.Array, backend: Backend) -> jax.Array:
        width = self.markov.config.width
        logits: jax.Array = self.head.logits(x[..., :width], backend) + self.markov.logits(x[..., width:], backend)
        return logits


def heads(configs: tuple[ModelConfig, Config], draft: Params, target: Params, k: int) -> list[OutputHead]:
    """Return the module that computes the logits of the one pass over a block, in a list."""
    (head,) = dflash.heads(configs, draft, target, k)
    return [MarkovHead(head, bind(configs[1], draft).markov)]


def save(folder: Path, params: Any, config: Any, fingerprint: str) -> None:
    """Write the head to a folder, under the names that DSpark's published heads have."""
    own = {
        "architectures": ["Qwen3DSparkModel"],
        "mask_token_id": config.mask_id,
        "target_layer_ids": [i - 1 for i in config.taps],
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_kind,
    }
    dflash.write(folder, own, params, config, NAMES | names(config), fingerprint)
