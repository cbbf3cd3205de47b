"""Building a new draft for a target: its configuration, its vocabulary and its initial weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.common.values import flag_of
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import parameters, random_params
from jaxspec.models.model import Model
from jaxspec.models.rope import Rope
from jaxspec.train.train_options import TrainOptions
from pallas_kernels.weights import dense

LAYERS = 2  # default number of a draft model's layers
MOST_IDS = 16384  # largest size of a draft model's vocabulary, unless options.vocab_size sets the size
# Initial weights of the last norm if the draft's width differs from the target's. Projected embeddings are large, so a
# draft with larger weights starts with confident wrong predictions. Loss on SmolLM2's text after 24 steps, with the
# output head tied to the embedding table: 4.3 with weights of 0.5, 4.5 with 0.25 or 1, 5.9 with the target's weights.
FLAT = 0.5
# Defaults for a draft model's reduced vocabulary. ids: share of its ids that are rare. width: width of the separate
# output head for rare ids, relative to the draft's width.
RARE = {"ids": 1 / 2, "width": 1 / 4}
# Shape options (fields of TrainOptions that set the draft's shape), each with the field of ModelConfig that it sets.
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
OF_HEADS = ("markov_rank",)  # shape options that only heads (drafts that read the target's hidden states) have
# Shape options of the methods that build their layers with `layer_fields`.
OF_LAYERS = ("layers", "heads", "kv_heads", "mlp_width", "vocab_size", "rare_ids", "rare_width")


def draft_config(target: ModelConfig, options: TrainOptions) -> ModelConfig:
    """Return the configuration of a draft model: a small decoder of the target's family.

    It reads tokens through the target's embedding table.

    Raises: UserError if the query heads are not a multiple of the key-value heads, for more layers or ids than the
      target has, and as `vocabulary_fields` does; UnsupportedError for a target whose layers differ in their shapes.
    """
    c, o = target, options
    if c.per_layer:
        raise UnsupportedError(
            f"--method draft_model copies the shape of the target's layers, and those of a {c.family} differ: train a "
            "head, such as --method eagle3"
        )
    layers = num_layers(target, options)
    # A draft model of two layers, 16,384 ids and two thirds of SmolLM2-135M's width costs a 14th of a pass through
    # SmolLM2's 30 layers, on two CPU cores (docs/notes/drafts.md).
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
        unrotated=tuple(i for i, own in enumerate(target_layers(c.num_layers, layers)) if own in c.unrotated),
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
    """Return the fields of ModelConfig that describe a draft's vocabulary.

    Rare ids are the least frequent ones of the draft's ids. They have an output head of their own, of width rare_width.

    vocab_size: the draft's number of ids. width: the draft's width. usual: the default number of rare ids.

    Raises: UserError if the rare ids are not fewer than all ids, or for rare_width without rare ids.
    """
    o = options
    rare = usual if o.rare_ids is None else o.rare_ids
    if rare >= vocab_size:
        raise UserError(f"--rare-ids {rare} must be less than the draft's {vocab_size} ids: lower it")
    if o.rare_width and not rare:
        raise UserError(f"--rare-width {o.rare_width} needs rare ids, and there are none: give --rare-ids too")
    # A draft with rare ids has its own numbering even if it has all ids: its rare ids come last.
    own = vocab_size < target.vocab_size or rare
    return {
        "reduced_vocab_size": vocab_size if own else None,
        "rare_vocab_size": rare,
        "rare_width": (o.rare_width or max(1, int(RARE["width"] * width))) if rare else 0,
    }


def num_layers(target: ModelConfig, options: TrainOptions, usual: int = LAYERS) -> int:
    """Return the draft's number of layers: options.layers, else `usual`. Raises: UserError if the target has fewer."""
    layers = options.layers or usual
    if layers > target.num_layers:
        raise UserError(f"--layers {layers} exceeds the target's {target.num_layers}: lower it, or leave it out")
    return layers


def num_ids(target: ModelConfig, options: TrainOptions, most: int) -> int:
    """Return the size of the draft's vocabulary: options.vocab_size, or else the target's size, but at most `most`.

    Raises: UserError if the target has fewer ids.
    """
    size = min(most, target.vocab_size) if options.vocab_size is None else options.vocab_size
    if size > target.vocab_size:
        raise UserError(f"--vocab-size {size} exceeds the target's {target.vocab_size}: lower it or leave it out")
    return size


def target_layers(of: int, count: int) -> list[int]:
    """Return the indices of the target layers that initialise `count` draft layers, evenly spaced from first to last.

    A single draft layer gets the first one.

    of: the target's number of layers.
    """
    if count <= 1:
        return [0]
    return [int(i) for i in np.linspace(0, of - 1, count).round()]


def vocabulary(counts: np.ndarray, config: ModelConfig) -> dict[str, np.ndarray]:
    """Return the maps between the draft's ids and the target's; empty for a draft with the target's own vocabulary.

    d2t i32[_] holds the target's id of each draft id. t2d i32[V] is its inverse. For an id that the draft lacks, t2d
    holds the draft's number of ids.

    counts i64[V]: occurrences of each target id in the training data. The draft gets the ids with the largest counts:
      first the frequent ones, then the rare ones, each group in the target's order.
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
    """Return a draft model's initial parameters, in float32 and on the devices, with the target's own embedding table.

    ids: the result of `vocabulary`. from_target: whether to start from the target's weights; else from random ones.
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
    """Return a draft's initial parameters, in float32 and on the devices.

    known: initial values, by the parameter's name. Every other parameter is the target's own if the draft shares it,
      else random.
    """
    from_target = {name: target.params[name] for name, p in parameters(config).items() if p.from_target}
    params = random_params(config, jnp.float32, placement, seed, known=from_target)
    for name, x in known.items():
        like = params[name]
        params[name] = jax.device_put(jnp.asarray(x, like.dtype), like.sharding)
    return params


def layers_of(target: Model, config: ModelConfig) -> dict[str, jax.Array]:
    """Return the weights of the target with which a draft's layers start.

    They come from evenly spaced target layers. A weight is included if its shape is the same in both models.
    """
    chosen = target_layers(target.config.num_layers, config.num_layers)
    found = {}
    for name, p in parameters(config).items():
        if name.startswith("layers."):
            _, i, rest = name.split(".", 2)
            theirs = target.params.get(f"layers.{chosen[int(i)]}.{rest}")
            if theirs is not None and theirs.shape == p.shape:
                found[name] = dense(theirs)
    return found


def head_of(
    target: Model, config: ModelConfig, ids: dict[str, np.ndarray], basis: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Return a draft's initial output head: the columns of the target's head for the draft's ids.

    basis: [E, _], the projection from the target's width to the draft's; None if the widths agree. The head of the rare
      ids has only rare_width channels, so it keeps the directions in which its rows are largest.
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
    """Return the configuration fields for the layers of a head (a draft that reads the target's hidden states).

    The layers are as wide as the target's. Their family is Llama's, the one that other programs support in heads.

    layers: number of layers. most_ids: largest size of the vocabulary, unless options.vocab_size sets the size.

    Raises: UserError if the query heads are not a multiple of the key-value heads, for more ids than the target has,
      and as `vocabulary_fields` does.
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
        "rope": Rope(c.rope.theta),
        "norm_eps": c.norm_eps,
        "tied": False,
        "bos_id": c.bos_id,
        "eos_ids": c.eos_ids,
        **vocabulary_fields(c, o, size, c.width, 0),
    }


def check_taken(options: TrainOptions, taken: Collection[str]) -> None:
    """Raise UserError if a shape option is given that the method does not take.

    taken: names of the shape options that the method takes.
    """
    for name in (*SHAPE, *OF_HEADS):
        if name not in taken and getattr(options, name) is not None:
            known = f"only {', '.join(map(flag_of, taken))}" if taken else "because its draft has the target's shape"
            raise UserError(f"--method {options.method} does not take {flag_of(name)}, {known}: leave it out")


def check_tapped(target: ModelConfig, method: str) -> tuple[int, ...]:
    """Return the indices of the three target layers whose inputs a head reads, chosen as in EAGLE-3.

    Raises: UserError for a target with fewer than five layers.
    """
    if target.num_layers < 5:
        raise UserError(
            f"--method {method} needs a target of 5 layers or more, not {target.num_layers}: use another method"
        )
    return 2, target.num_layers // 2, target.num_layers - 3


def projected(config: ModelConfig, target: Model, ids: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return initial parameters of a draft model: a projection of the target's embeddings, and an output head.

    The projection embed_in [E, width] leads from the target's width to the draft's. It keeps the largest directions of
    the embedding table. The output head is the target's, projected likewise.
    """
    table = np.asarray(target.params["embed"], np.float32)
    basis = coordinates(table, config.width)
    return {"embed_in": basis, **head_of(target, config, ids, basis)}


def rows_of_ids(target: Model) -> np.ndarray:
    """Return the target's output head in float32, as a row [E] for each of its V ids."""
    return np.asarray(target.params["embed"] if target.config.tied else target.params["head"].T, np.float32)


def coordinates(table: np.ndarray, width: int) -> np.ndarray:
    """Return the directions [E, width] in which the rows [..., E] of a table are largest: its right singular vectors.

    If width is E or more, return the identity, padded with zeros.
    """
    size = table.shape[1]
    if width >= size:
        return np.eye(size, width, dtype=np.float32)
    _, vectors = np.linalg.eigh(table.T @ table)  # the eigenvectors, in order of rising singular value of the table
    return vectors[:, ::-1][:, :width]
