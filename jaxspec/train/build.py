"""A new draft for a target: its configuration, its vocabulary and the weights it begins with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.common.errors import UserError
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import parameters, random_params
from jaxspec.models.model import Model
from jaxspec.train.options import TrainOptions

LAYERS, MOST_IDS = 2, 16384  # unless told otherwise
# The last norm's scale where the target's does not fit. Projected embeddings are large, and with a larger one a draft
# begins sure of wrong ids. Loss on SmolLM2's text after 24 steps, table and head still tied: 4.3; 4.5 with 0.25 or 1;
# 5.9 with the target's.
FLAT = 0.5
RARE = {"ids": 1 / 2, "width": 1 / 4}  # of the draft's ids and of its width, where its ids are fewer than the target's
# Option -> what it sets.
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
OF_HEADS = ("markov_rank",)  # options of shape that no model has
OF_LAYERS = ("layers", "heads", "kv_heads", "mlp_width", "vocab_size", "rare_ids", "rare_width")  # of `layer_fields`


def draft_config(target: ModelConfig, options: TrainOptions) -> ModelConfig:
    """A small decoder of the target's family, which reads ids in the target's own table.

    Raises: UserError for heads that do not divide, or more layers or ids than the target has.
    """
    c, o, layers = target, options, num_layers(target, options)
    # With 16,384 ids two thirds of SmolLM2-135M's width make two layers that cost a 14th of a pass of its 30 on two CPU
    # cores (docs/notes/drafts.md).
    width = o.width or max(1, 2 * c.width // 3 // c.head_dim) * c.head_dim
    heads = o.heads or (c.num_heads if width == c.width else max(1, width // c.head_dim))
    kv_heads = o.kv_heads or math.gcd(heads, c.num_kv_heads)
    vocab_size = num_ids(c, o, MOST_IDS)
    rare = int(RARE["ids"] * vocab_size) if vocab_size < c.vocab_size else 0
    return dataclasses.replace(
        c,
        num_layers=layers,
        windows=tuple(c.windows[i] for i in target_layers(c.num_layers, layers)),
        width=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        mlp_width=o.mlp_width or (c.mlp_width if width == c.width else -(-c.mlp_width * width // c.width // 64) * 64),
        tied=False,
        embed_width=c.width,
        **vocabulary_fields(c, o, vocab_size, width, rare),
    )


def vocabulary_fields(
    target: ModelConfig, options: TrainOptions, vocab_size: int, width: int, usual: int
) -> dict[str, Any]:
    """Of a draft of this width with so many ids; usual: how many of them are rare, unless told otherwise. Raises
    UserError for more than there are."""
    o = options
    rare = usual if o.rare_ids is None else o.rare_ids
    if rare >= vocab_size:
        raise UserError(f"--rare-ids {rare} must be less than all {vocab_size} of the draft's ids")
    if o.rare_width and not rare:
        raise UserError(f"--rare-width {o.rare_width} is of rare ids, and there are none: give --rare-ids too")
    own = vocab_size < target.vocab_size or rare  # rare ids stand last, so that all have new places
    return {
        "reduced_vocab_size": vocab_size if own else None,
        "rare_vocab_size": rare,
        "rare_width": (o.rare_width or max(1, int(RARE["width"] * width))) if rare else 0,
    }


def num_layers(target: ModelConfig, options: TrainOptions, usual: int = LAYERS) -> int:
    """Of the draft. Raises UserError for more than the target has."""
    layers = options.layers or usual
    if layers > target.num_layers:
        raise UserError(
            f"--layers {layers} exceeds the target's {target.num_layers}: a draft is smaller than its target"
        )
    return layers


def num_ids(target: ModelConfig, options: TrainOptions, most: int) -> int:
    """How many ids the draft proposes; most: unless told otherwise. Raises UserError for more than the target has."""
    size = min(most, target.vocab_size) if options.vocab_size is None else options.vocab_size
    if size > target.vocab_size:
        raise UserError(f"--vocab-size {size} exceeds the target's {target.vocab_size}: lower it or leave it out")
    return size


def target_layers(of: int, count: int) -> list[int]:
    """The target's layers that a draft of `count` begins with: the first, the last and evenly spaced ones between."""
    return np.linspace(0, of - 1, count).round().astype(int).tolist() if count > 1 else [0]


def vocabulary(counts: np.ndarray, config: ModelConfig) -> dict[str, np.ndarray]:
    """d2t i32[_] and t2d i32[V] of the ids with the largest counts i64[V]: the frequent ones in their order, then the
    rare ones. Empty for a draft that has all ids as its target has them."""
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
    """The draft's float32 parameters on placement, and the target's table as it is; ids: of `vocabulary`."""
    known: dict[str, Any] = dict(ids)
    if from_target:
        same = config.width == target.config.width
        known["norm"] = target.params["norm"] if same else np.full(config.width, FLAT)
        known |= projected(config, target, ids) | layers_of(target, config)
    return begun(config, target, placement, seed, known)


def begun(
    config: ModelConfig, target: Model, placement: Any, seed: int, known: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Random float32 parameters on placement, but for those that are known or borrowed."""
    borrowed = {name: target.params[name] for name, p in parameters(config).items() if p.borrowed}
    params = random_params(config, jnp.float32, placement, seed, known=borrowed)
    place = lambda like, x: jax.device_put(jnp.asarray(x, like.dtype), like.sharding)
    return params | {name: place(params[name], x) for name, x in known.items()}


def layers_of(target: Model, config: ModelConfig) -> dict[str, jax.Array]:
    """What the layers of a draft begin with: the target's own, evenly spaced ones, where the shapes agree."""
    chosen, found = target_layers(target.config.num_layers, config.num_layers), {}
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
    """The target's way from hidden states to the draft's ids, in the coordinates `basis` [E, _] where there are any; of
    the rare ids' rows, in those that keep most of these."""
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
    """The fields of a head's layers: as wide as the target, and as the readers of heads know them, which is Llama's
    kind. Raises UserError for heads that do not divide and for more ids than the target has."""
    c, o = target, options
    size, heads = num_ids(c, o, most_ids), o.heads or c.num_heads
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
    """Raises UserError for an option of shape that the method has no use for; taken: the others."""
    for name in (*SHAPE, *OF_HEADS):
        if name not in taken and getattr(options, name) is not None:
            flag = lambda name: "--" + name.replace("_", "-")
            its = f"takes {', '.join(map(flag, taken))}" if taken else "has its target's shape"
            raise UserError(f"{flag(name)} is of another method, --method {options.method} {its}: leave it out")


def check_tapped(target: ModelConfig, method: str) -> tuple[int, ...]:
    """The layers of a target whose input a head reads, as EAGLE-3 chose them. Raises UserError for too few."""
    if target.num_layers < 5:
        raise UserError(
            f"--method {method} reads three of the target's layers, and it has {target.num_layers}: use another"
        )
    return 2, target.num_layers // 2, target.num_layers - 3


def projected(config: ModelConfig, target: Model, ids: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What leads into the draft's layers and out of them: the target's table and head, in the coordinates that keep
    most of the table."""
    table = np.asarray(target.params["embed"], np.float32)
    basis = coordinates(table, config.width)
    return {"embed_in": basis, **head_of(target, config, ids, basis)}


def rows_of_ids(target: Model) -> np.ndarray:
    """[V, E]: what the target's hidden states are multiplied with for each id's logit."""
    return np.asarray(target.params["embed"] if target.config.tied else target.params["head"].T, np.float32)


def coordinates(table: np.ndarray, width: int) -> np.ndarray:
    """[E, width]: the directions in which the rows [..., E] are largest (right singular vectors); all E, and zeros,
    where width has room for them."""
    size = table.shape[1]
    if width >= size:
        return np.eye(size, width, dtype=np.float32)
    _, vectors = np.linalg.eigh(table.T @ table)  # of the Gram matrix, by rising singular value
    return vectors[:, ::-1][:, :width]
