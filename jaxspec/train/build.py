"""Building a new draft for a target: its configuration, its vocabulary and its initial weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.common.errors import UserError
from jaxspec.common.values import flag_of
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import parameters, random_params
from jaxspec.models.model import Model
from jaxspec.train.train_options import TrainOptions

LAYERS = 2  # default number of a draft model's layers
MOST_IDS = 16384  # default size of a draft model's vocabulary
# Initial scale of the last norm if the draft's width differs from the target's. Projected embeddings are large, so a
# draft with a larger scale starts with confident wrong predictions. Loss on SmolLM2's text after 24 steps, with tied
# table and head: 4.3; with 0.25 or 1: 4.5; with the target's scale: 5.9.
FLAT = 0.5
# Defaults: the share of rare ids in a draft model's reduced vocabulary, and their head's width relative to the draft's.
RARE = {"ids": 1 / 2, "width": 1 / 4}
# Field of ModelConfig that each shape option sets.
SHAPE = {
    "layers": "num_layers",
    "width": "width",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "mlp_width": "mlp_width",
    "vocab_size": "head_size",
    "rare_ids": "rare_vocab_size",
    "rare_width": "rare_width",
}
OF_HEADS = ("markov_rank",)  # shape options that only heads have
OF_LAYERS = ("layers", "heads", "kv_heads", "mlp_width", "vocab_size", "rare_ids", "rare_width")  # for `layer_fields`


def draft_config(target: ModelConfig, options: TrainOptions) -> ModelConfig:
    """Return the configuration of a small decoder of the target's family, which uses the target's embedding table.

    Raises: UserError for heads that do not divide, or more layers or ids than the target has.
    """
    c, o = target, options
    layers = num_layers(target, options)
    # With two thirds of SmolLM2-135M's width, two layers and 16,384 ids cost a 14th of a pass through its 30 layers, on
    # two CPU cores (docs/notes/drafts.md).
    width = o.width or max(1, 2 * c.width // 3 // c.head_dim) * c.head_dim
    heads = o.heads or (c.num_heads if width == c.width else max(1, width // c.head_dim))
    kv_heads = o.kv_heads or math.gcd(heads, c.num_kv_heads)
    vocab_size = num_ids(c, o, MOST_IDS)
    rare = int(RARE["ids"] * vocab_size) if vocab_size < c.vocab_size else 0
    mlp_width = c.mlp_width if width == c.width else -(-c.mlp_width * width // c.width // 64) * 64
    return dataclasses.replace(
        c,
        num_layers=layers,
        windows=tuple(c.windows[i] for i in target_layers(c.num_layers, layers)),
        width=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        mlp_width=o.mlp_width or mlp_width,
        tied=False,
        embed_width=c.width,
        **vocabulary_fields(c, o, vocab_size, width, rare),
    )


def vocabulary_fields(
    target: ModelConfig, options: TrainOptions, vocab_size: int, width: int, usual: int
) -> dict[str, Any]:
    """Return the fields that describe the vocabulary of a draft.

    vocab_size: the draft's number of ids. width: the draft's width. usual: the default number of rare ids.

    Raises: UserError for more rare ids than there are ids, or for rare_width without rare ids.
    """
    o = options
    rare = usual if o.rare_ids is None else o.rare_ids
    if rare >= vocab_size:
        raise UserError(f"--rare-ids {rare} must be less than all {vocab_size} of the draft's ids")
    if o.rare_width and not rare:
        raise UserError(f"--rare-width {o.rare_width} is of rare ids, and there are none: give --rare-ids too")
    own = vocab_size < target.vocab_size or rare  # rare ids come last, so the draft renumbers its ids
    return {
        "reduced_vocab_size": vocab_size if own else None,
        "rare_vocab_size": rare,
        "rare_width": (o.rare_width or max(1, int(RARE["width"] * width))) if rare else 0,
    }


def num_layers(target: ModelConfig, options: TrainOptions, usual: int = LAYERS) -> int:
    """Return the draft's number of layers, by default `usual`. Raises: UserError for more than the target has."""
    layers = options.layers or usual
    if layers > target.num_layers:
        raise UserError(
            f"--layers {layers} exceeds the target's {target.num_layers}: a draft is smaller than its target"
        )
    return layers


def num_ids(target: ModelConfig, options: TrainOptions, most: int) -> int:
    """Return the size of the draft's vocabulary, by default at most `most`.

    Raises: UserError for more ids than the target has.
    """
    size = min(most, target.vocab_size) if options.vocab_size is None else options.vocab_size
    if size > target.vocab_size:
        raise UserError(f"--vocab-size {size} exceeds the target's {target.vocab_size}: lower it or leave it out")
    return size


def target_layers(of: int, count: int) -> list[int]:
    """Return which of `of` target layers initialise `count` draft layers: evenly spaced ones from first to last."""
    if count <= 1:
        return [0]
    return np.linspace(0, of - 1, count).round().astype(int).tolist()


def vocabulary(counts: np.ndarray, config: ModelConfig) -> dict[str, np.ndarray]:
    """Return d2t i32[_], the target's id of each draft id, and t2d i32[V], its inverse.

    The draft's ids are those with the largest counts i64[V]: first the frequent ones, then the rare ones, each in the
    target's order. t2d of an id that the draft lacks is the draft's number of ids. The result is empty for a draft with
    the target's own vocabulary.
    """
    size = config.head_size
    if config.reduced_vocab_size is None:
        return {}
    frequent, rare = np.split(np.argsort(-counts, kind="stable")[:size], [size - config.rare_vocab_size])
    d2t = np.concatenate([np.sort(frequent), np.sort(rare)]).astype(np.int32)
    t2d = np.full(len(counts), size, np.int32)
    t2d[d2t] = np.arange(size)
    return {"d2t": d2t, "t2d": t2d}


def first_params(
    config: ModelConfig, target: Model, ids: dict[str, np.ndarray], placement: Any, *, seed: int, from_target: bool
) -> dict[str, jax.Array]:
    """Return a draft model's initial parameters, float32 and placed, and the target's own embedding table.

    ids: the result of `vocabulary`.
    """
    known: dict[str, Any] = dict(ids)
    if from_target:
        same = config.width == target.config.width
        known["norm"] = target.params["norm"] if same else np.full(config.width, FLAT)
        known |= projected(config, target, ids) | layers_of(target, config)
    return initial_params(config, target, placement, seed, known)


def initial_params(
    config: ModelConfig, target: Model, placement: Any, seed: int, known: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Return initial parameters, float32 and placed: the known ones, the target's shared ones, the rest random."""
    from_target = {name: target.params[name] for name, p in parameters(config).items() if p.from_target}
    params = random_params(config, jnp.float32, placement, seed, known=from_target)
    for name, x in known.items():
        like = params[name]
        params[name] = jax.device_put(jnp.asarray(x, like.dtype), like.sharding)
    return params


def layers_of(target: Model, config: ModelConfig) -> dict[str, jax.Array]:
    """Return initial parameters of a draft's layers: those of evenly spaced target layers, where the shapes agree."""
    chosen = target_layers(target.config.num_layers, config.num_layers)
    found = {}
    for name, p in parameters(config).items():
        if name.startswith("layers."):
            _, i, rest = name.split(".", 2)
            theirs = target.params.get(f"layers.{chosen[int(i)]}.{rest}")
            if theirs is not None and theirs.shape == p.shape:
                found[name] = theirs
    return found


def head_of(
    target: Model, config: ModelConfig, ids: dict[str, np.ndarray], basis: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Return the target's output head, restricted to the draft's ids.

    basis: [E, _], the projection from the target's width to the draft's; None if the widths agree. The head of rare ids
    is approximated at rare_width, by the largest directions of its rows.
    """
    rows = rows_of_ids(target)
    own = rows[ids["d2t"]] if ids else rows
    own = own if basis is None else own @ basis
    frequent, rare = np.split(own, [len(own) - config.rare_vocab_size])
    found = {"head": frequent.T}
    if len(rare):
        found["rare_in"] = coordinates(rare, config.rare_width)
        found["rare_head"] = (rare @ found["rare_in"]).T
    return found


def layer_fields(target: ModelConfig, options: TrainOptions, layers: int, most_ids: int) -> dict[str, Any]:
    """Return the fields of a head's layers. They are as wide as the target's.

    Their family is Llama's, which is the one that readers of heads support.

    Raises: UserError for heads that do not divide, or more ids than the target has.
    """
    c, o = target, options
    size = num_ids(c, o, most_ids)
    heads = o.heads or c.num_heads
    return {
        "family": "llama",
        "vocab_size": c.vocab_size,
        "num_layers": layers,
        "width": c.width,
        "mlp_width": o.mlp_width or c.mlp_width,
        "num_heads": heads,
        "num_kv_heads": o.kv_heads or math.gcd(heads, c.num_kv_heads),
        "head_dim": c.head_dim,
        "max_model_len": c.max_model_len,
        "windows": (None,) * layers,
        "rope": dataclasses.replace(c.rope, factors=()),
        "norm_eps": c.norm_eps,
        "tied": False,
        "bos_id": c.bos_id,
        "eos_ids": c.eos_ids,
        **vocabulary_fields(c, o, size, c.width, 0),
    }


def check_taken(options: TrainOptions, taken: Collection[str]) -> None:
    """Raise UserError for a shape option that the method does not take. taken: the shape options that it takes."""
    for name in (*SHAPE, *OF_HEADS):
        if name not in taken and getattr(options, name) is not None:
            its = f"takes {', '.join(map(flag_of, taken))}" if taken else "has its target's shape"
            raise UserError(f"{flag_of(name)} is of another method, --method {options.method} {its}: leave it out")


def check_tapped(target: ModelConfig, method: str) -> tuple[int, ...]:
    """Return the target's layers whose inputs a head reads, as EAGLE-3 chose them.

    Raises: UserError for a target with fewer than five layers.
    """
    if target.num_layers < 5:
        raise UserError(
            f"--method {method} reads three of the target's layers, and it has {target.num_layers}: use another"
        )
    return 2, target.num_layers // 2, target.num_layers - 3


def projected(config: ModelConfig, target: Model, ids: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the projection from the target's embeddings to the draft's width, and the output head projected likewise.

    The projection keeps the largest directions of the embedding table.
    """
    table = np.asarray(target.params["embed"], np.float32)
    basis = coordinates(table, config.width)
    return {"embed_in": basis, **head_of(target, config, ids, basis)}


def rows_of_ids(target: Model) -> np.ndarray:
    """Return the rows [V, E] of the target's output head."""
    return np.asarray(target.params["embed"] if target.config.tied else target.params["head"].T, np.float32)


def coordinates(table: np.ndarray, width: int) -> np.ndarray:
    """Return the directions [E, width] in which the rows [..., E] of a table are largest: its right singular vectors.

    If width is E or more, return the identity, padded with zeros.
    """
    size = table.shape[1]
    if width >= size:
        return np.eye(size, width, dtype=np.float32)
    _, vectors = np.linalg.eigh(table.T @ table)  # in order of rising singular value
    return vectors[:, ::-1][:, :width]
