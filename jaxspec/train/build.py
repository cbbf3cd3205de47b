"""A new draft for a target: its configuration, its vocabulary and the weights it begins with."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.engine.setup import Model
from jaxspec.errors import UserError
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import parameters, random_params
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


def draft_config(target: ModelConfig, options: TrainOptions) -> ModelConfig:
    """A small decoder of the target's family, which reads ids in the target's own table.

    Raises: UserError for heads that do not divide, or more layers or ids than the target has.
    """
    c, o, layers = target, options, options.layers or LAYERS
    if layers > c.num_layers:
        raise UserError(f"--layers {layers} exceeds the target's {c.num_layers}: a draft is smaller than its target")
    # With 16,384 ids two thirds of SmolLM2-135M's width make two layers that cost a 14th of a pass of its 30 on two CPU
    # cores (docs/notes/drafts.md).
    width = o.width or max(1, 2 * c.width // 3 // c.head_dim) * c.head_dim
    heads = o.heads or (c.num_heads if width == c.width else max(1, width // c.head_dim))
    kv_heads = o.kv_heads or math.gcd(heads, c.num_kv_heads)
    vocab_size = num_ids(c, o, MOST_IDS)
    fewer = vocab_size < c.vocab_size
    rare = (int(RARE["ids"] * vocab_size) if fewer else 0) if o.rare_ids is None else o.rare_ids
    if rare >= vocab_size:
        raise UserError(f"--rare-ids {rare} must be less than all {vocab_size} of the draft's ids")
    if o.rare_width and not rare:
        raise UserError(f"--rare-width {o.rare_width} is of rare ids, and there are none: give --rare-ids too")
    return dataclasses.replace(
        c,
        num_layers=layers,
        windows=tuple(c.windows[i] for i in target_layers(c.num_layers, layers)),
        width=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        mlp_width=o.mlp_width or (c.mlp_width if width == c.width else -(-c.mlp_width * width // c.width // 64) * 64),
        tied=False,
        reduced_vocab_size=vocab_size if fewer or rare else None,  # rare ids stand last, so that all have new places
        rare_vocab_size=rare,
        rare_width=(o.rare_width or max(1, int(RARE["width"] * width))) if rare else 0,
        embed_width=c.width,
    )


def num_ids(target: ModelConfig, options: TrainOptions, most: int) -> int:
    """How many ids the draft proposes; most: unless told otherwise. Raises UserError for more than the target has."""
    size = min(most, target.vocab_size) if options.vocab_size is None else options.vocab_size
    if size > target.vocab_size:
        raise UserError(f"--vocab-size {size} exceeds the target's {target.vocab_size}: lower it or leave it out")
    return size


def check_begun(config: ModelConfig, target: ModelConfig, options: TrainOptions) -> None:
    """A draft that is trained further keeps its shape and its ids. Raises UserError for another target, and for an
    option that asks for another shape."""
    begun = f"--init-from {options.init_from}"
    if config.vocab_size != target.vocab_size:
        raise UserError(f"{begun} is a draft for {config.vocab_size} ids, the target has {target.vocab_size}")
    for option, name in SHAPE.items():
        has, wanted = getattr(config, name), getattr(options, option)
        if wanted not in (None, has):
            flag = "--" + option.replace("_", "-")
            raise UserError(f"{begun} has {has} where {flag} {wanted} asks for another shape: leave {flag} out")


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
    borrowed = {name: target.params[name] for name, p in parameters(config).items() if p.borrowed}
    params = random_params(config, jnp.float32, placement, seed, known=borrowed)
    place = lambda name, x: jax.device_put(jnp.asarray(x, params[name].dtype), params[name].sharding)
    params |= {name: place(name, x) for name, x in ids.items()}
    if not from_target:
        return params
    params |= {name: place(name, x) for name, x in projected(config, target, ids).items()}
    if config.width == target.config.width:
        params["norm"] = place("norm", target.params["norm"])
    else:
        params["norm"] = place("norm", np.full(config.width, FLAT))
    for i, source in enumerate(target_layers(target.config.num_layers, config.num_layers)):
        start = f"layers.{i}."
        for name in [name for name in params if name.startswith(start)]:
            theirs = target.params[f"layers.{source}.{name.removeprefix(start)}"]
            if theirs.shape == params[name].shape:
                params[name] = place(name, theirs)
    return params


def projected(config: ModelConfig, target: Model, ids: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What leads into the draft's layers and out of them: the target's table and head, in the coordinates that keep
    most of the table; of the rare ids' rows of the head, in those that keep most of these."""
    table = np.asarray(target.params["embed"], np.float32)
    rows = rows_of_ids(target)
    found = {"embed_in": coordinates(table, config.width)}
    own = (rows[ids["d2t"]] if ids else rows) @ found["embed_in"]
    frequent, rare = np.split(own, [len(own) - config.rare_vocab_size])
    found["head"] = frequent.T
    if len(rare):
        found["rare_in"] = coordinates(rare, config.rare_width)
        found["rare_head"] = (rare @ found["rare_in"]).T
    return found


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
