"""Training DFlash, a head that drafts a whole block of tokens in one pass.

Each training row holds many blocks, at random positions.

Source: Chen et al., https://arxiv.org/abs/2602.06036.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.common.shapes import Array, Float, Int
from jaxspec.drafters.dflash import NAMES, Config
from jaxspec.models.backend import Backend
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Params, bind
from jaxspec.models.mixers.attention import rotary_tables
from jaxspec.models.model import Model
from jaxspec.models.rows import Rows, whole_rows
from jaxspec.train import build, saved
from jaxspec.train.passes import Batch, OutputHead, PassOutputs, draft_shares, projected, read
from jaxspec.train.train_options import TrainOptions
from pallas_kernels.plain import rms_norm

READS = True
TAKES = build.OF_LAYERS
OVERLAP = 2  # average number of blocks that cover a position; all share one target pass, which is most of a step's cost


def new(options: TrainOptions, target: Model, counts: np.ndarray, placement: Any) -> Model:
    """Return the initial DFlash head for a target."""
    return new_head(Config(**fields(target.config, options, counts)), options, target, counts, placement)


def new_head(config: Config, options: TrainOptions, target: Model, counts: np.ndarray, placement: Any) -> Model:
    """Return a new head of this configuration.

    A head with fewer ids than the target, or with rare ids, has an output matrix of its own; else the target's is used.

    counts i64[V]: occurrences of each id in the training data.
    """
    known: dict[str, Any] = build.vocabulary(counts, config)
    if options.init_from_target:
        own_head = build.head_of(target, config, known) if config.has_head else {}
        known |= {"norm": target.params["norm"], **own_head, **build.layers_of(target, config)}
    return Model(config, build.initial_params(config, target, placement, options.seed, known))


def fields(target: ModelConfig, options: TrainOptions, counts: np.ndarray) -> dict[str, Any]:
    """Return the configuration fields of a new head. Its mask token is the id that is rarest in the training data."""
    found = build.layer_fields(target, options, build.num_layers(target, options), target.vocab_size)
    return found | {
        "qk_norm": True,  # the authors' heads have query and key norms, too
        "taps": build.check_tapped(target, options.method),
        "target_width": target.width,
        "block_size": options.num_speculative_tokens + 1,
        "has_head": found["reduced_vocab_size"] is not None,
        "mask_id": int(np.argmin(counts)),
    }


def passes(
    configs: tuple[ModelConfig, Config], draft: Params, target: Params, batch: Batch, backend: Backend, k: int
) -> PassOutputs:
    """Run the head over blocks at random positions of the batch's rows."""
    config, tokens = configs[1], batch["tokens"]
    skipped = 0 if config.from_pending else 1  # number of positions at the start of a block that make no draft
    size = k + skipped
    assert config.mask_id is not None  # `fields` sets it
    head: Any = bind(config, draft)
    decoder, hidden, tapped = read(configs[0], target, batch, backend, config.spec.taps)
    dtype = head.fc[...].dtype
    past = head.features(None, [x.astype(dtype) for x in tapped], backend)
    # First positions of the blocks. In decoding, the pending token (accepted, not yet in the caches) is there.
    anchors = first_places(batch["draw"], tokens.shape[1], size)
    block = anchors[:, :, None] + jnp.arange(size)
    pending = jnp.take_along_axis(tokens, anchors, axis=1)[:, :, None]
    shown = jnp.where(jnp.arange(size) == 0, pending, config.mask_id).reshape(tokens.shape[0], -1)
    x = lax.stop_gradient(decoder.embedded(shown, backend)).astype(dtype)
    x = through_layers(head, x, past, block, backend).reshape(*block.shape, -1)[:, :, skipped:]
    predicts = anchors[:, :, None] + 1 + jnp.arange(k)
    count = anchors.shape[1]
    shares = np.tile(draft_shares(k), count).astype(np.float32)
    first = np.tile(np.arange(k) == 0, count)

    def entries(y: jax.Array) -> jax.Array:
        """Return y [B, blocks, k, ...] in the shape [B, blocks * k, ...]."""
        return y.reshape(len(tokens), -1, *y.shape[3:])

    return PassOutputs(entries(x)[:, :, None], entries(predicts), shares[:, None], first[:, None], hidden)


def first_places(draw: jax.Array, length: int, size: int) -> jax.Array:
    """Return the first position of each block, i32[B,_]: a random one in each of a row's equal stretches.

    draw: u32[B], a random number for each row. length: tokens of a row. size: positions of a block.
    """
    stretch = max(1, size // OVERLAP)
    count = max(1, length // stretch)
    drawn = jax.vmap(lambda number: jax.random.randint(jax.random.key(number), (count,), 0, stretch))(draw)
    return jnp.minimum(jnp.arange(count, dtype=jnp.int32) * stretch + drawn, length - 1)


def through_layers(
    head: Any, x: Float[Array, "B _ E"], past: Float[Array, "B _ E"], block: Int[Array, "B _ T"], backend: Backend
) -> Float[Array, "B _ E"]:
    """Return the hidden states [B,A*T,E] of blocks of positions after the head's last norm.

    x: embeddings of A blocks of T positions, [B,A*T,E]. block: the blocks' positions in their row, [B,A,T]. past: what
    the head reads of the target's hidden states at all S tokens of a row, [B,S,E].

    A block attends to itself and to the past before its first position.
    """
    c, dtype = head.config, x.dtype
    own = Rows(block.reshape(len(x), -1))
    before = whole_rows(*past.shape[:2])
    known = before.positions[:, None] < block[:, :, :1]  # bool[B,A,S]: positions of the past that a block sees
    at_block, at_past = (rotary_tables(c.layers, rows, backend)[c.layers[0].rope, c.head_dim] for rows in (own, before))

    def by_block(y: jax.Array) -> jax.Array:
        """Return y as [B,A,T,G,heads of a group,D] if it is a query, or as [B,A,T,G,1,D] if it is a key or value."""
        return y.reshape(*block.shape, c.num_kv_heads, -1, c.head_dim)

    for layer in head.layers:
        query, key, value = projected(layer, rms_norm(layer.input_norm[...], x, c.norm_eps), at_block)
        _, old_key, old_value = projected(layer, past, at_past)
        query, key, value = by_block(query), by_block(key)[:, :, :, :, 0], by_block(value)[:, :, :, :, 0]
        of_past = jnp.einsum("batgnd,bsgd->bagnts", query, old_key, preferred_element_type=jnp.float32) * c.query_scale
        of_past = jnp.where(known[:, :, None, None, None], of_past, -jnp.inf)
        of_own = jnp.einsum("batgnd,basgd->bagnts", query, key, preferred_element_type=jnp.float32) * c.query_scale
        weights = jax.nn.softmax(jnp.concatenate([of_past, of_own], axis=-1), axis=-1).astype(dtype)
        mixed = jnp.einsum("bagnts,bsgd->batgnd", weights[..., : past.shape[1]], old_value)
        mixed += jnp.einsum("bagnts,basgd->batgnd", weights[..., past.shape[1] :], value)
        x, _ = layer.feed_forward(x, mixed.reshape(*x.shape[:2], -1), backend)
    return rms_norm(head.norm[...], x, c.norm_eps)


def heads(configs: tuple[ModelConfig, Config], draft: Params, target: Params, k: int) -> list[OutputHead]:
    """Return the module that computes the logits of the one pass over a block, in a list."""
    return [bind(configs[1], draft) if configs[1].has_head else bind(configs[0], target)]


def save(folder: Path, params: Any, config: Any, fingerprint: str) -> None:
    """Write the head to a folder, under the names that DFlash's published heads have."""
    dflash = {"mask_token_id": config.mask_id, "target_layer_ids": [i - 1 for i in config.taps]}
    own = {"architectures": ["DFlashDraftModel"], "dflash_config": dflash}
    write(folder, own, params, config, NAMES, fingerprint)


def write(folder: Path, own: dict[str, Any], params: Any, config: Any, names: Any, fingerprint: str) -> None:
    """Write the folder of a head that drafts blocks.

    own: the method's entries of config.json. names: for each tensor's name, the parameter that the tensor holds.
    """
    config_json = {**saved.layers(config), "block_size": config.block_size, **own}
    saved.save(folder, config_json, params, config, saved.numbered(names, config.num_layers), fingerprint)
