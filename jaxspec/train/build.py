"""A new draft for a target: its configuration, its vocabulary and the weights it begins with."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.engine.setup import Model
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import random_params
from jaxspec.train.options import TrainOptions

LAYERS, MOST_IDS = 2, 16384  # unless told otherwise
# The last norm's scale where the target's does not fit. Projected embeddings are large, and with a larger one a draft
# begins sure of wrong ids. Loss on SmolLM2's text after 24 steps: 4.3; 4.5 with 0.25 or 1; 5.9 with the target's.
FLAT = 0.5
VOCABULARY = ("d2t", "t2d")  # parameters that are not trained
# Option -> what it sets.
SHAPE = {
    "layers": "num_layers",
    "width": "width",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "mlp_width": "mlp_width",
    "vocab_size": "table_size",
}


def draft_config(target: ModelConfig, options: TrainOptions) -> ModelConfig:
    """A small decoder of the target's family, with tied embeddings.

    Raises: ValueError for heads that do not divide, or more layers or ids than the target has.
    """
    c, o, layers = target, options, options.layers or LAYERS
    if layers > c.num_layers:
        raise ValueError(f"--layers {layers} exceeds the target's {c.num_layers}: a draft is smaller than its target")
    # With 16,384 ids two thirds of SmolLM2-135M's width make two layers that cost a 14th of a pass of its 30 on two CPU
    # cores (bench/NOTES.md).
    width = o.width or max(1, 2 * c.width // 3 // c.head_dim) * c.head_dim
    heads = o.heads or (c.num_heads if width == c.width else max(1, width // c.head_dim))
    kv_heads = o.kv_heads or math.gcd(heads, c.num_kv_heads)
    vocab_size = min(MOST_IDS, c.vocab_size) if o.vocab_size is None else o.vocab_size
    if vocab_size > c.vocab_size:
        raise ValueError(f"--vocab-size {vocab_size} exceeds the target's {c.vocab_size}: lower it or leave it out")
    return dataclasses.replace(
        c,
        num_layers=layers,
        windows=tuple(c.windows[i] for i in target_layers(c.num_layers, layers)),
        width=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        mlp_width=o.mlp_width or (c.mlp_width if width == c.width else -(-c.mlp_width * width // c.width // 64) * 64),
        tied=True,
        embed_scale=c.embed_scale if c.embed_scale == 1.0 else math.sqrt(width),
        reduced_vocab_size=None if vocab_size == c.vocab_size else vocab_size,
    )


def check_begun(config: ModelConfig, target: ModelConfig, options: TrainOptions) -> None:
    """A draft that is trained further keeps its shape and its ids. Raises ValueError for another target, and for an
    option that asks for another shape."""
    begun = f"--init-from {options.init_from}"
    if config.vocab_size != target.vocab_size:
        raise ValueError(f"{begun} is a draft for {config.vocab_size} ids, the target has {target.vocab_size}")
    for option, name in SHAPE.items():
        has, wanted = getattr(config, name), getattr(options, option)
        if wanted not in (None, has):
            flag = "--" + option.replace("_", "-")
            raise ValueError(f"{begun} has {has} where {flag} {wanted} asks for another shape: leave {flag} out")


def target_layers(of: int, count: int) -> list[int]:
    """The target's layers that a draft of `count` begins with: the first, the last and evenly spaced ones between."""
    return np.linspace(0, of - 1, count).round().astype(int).tolist() if count > 1 else [0]


def vocabulary(counts: np.ndarray, size: int) -> dict[str, np.ndarray]:
    """d2t i32[size] and t2d i32[V] of the size - 1 ids with the largest counts i64[V], in the order of the ids."""
    most = np.sort(np.argsort(-counts, kind="stable")[: size - 1])
    d2t = np.append(most, len(counts)).astype(np.int32)
    t2d = np.full(len(counts), size - 1, np.int32)
    t2d[most] = np.arange(size - 1)
    return {"d2t": d2t, "t2d": t2d}


def first_params(
    config: ModelConfig, target: Model, ids: dict[str, np.ndarray], mesh: Any, *, seed: int, from_target: bool
) -> dict[str, jax.Array]:
    """The draft's float32 parameters on mesh; ids: of `vocabulary`, empty where the draft has the target's."""
    params = random_params(config, jnp.float32, mesh, seed)
    place = lambda name, x: jax.device_put(jnp.asarray(x, params[name].dtype), params[name].sharding)
    params |= {name: place(name, x) for name, x in ids.items()}
    if not from_target:
        return params
    params["embed"] = place("embed", projected(np.asarray(target.params["embed"], np.float32), ids, config.width))
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


def projected(table: np.ndarray, ids: dict[str, np.ndarray], width: int) -> np.ndarray:
    """The target's embedding table [V, E] for the draft's ids and width: the coordinates along the `width` directions
    that keep most of it (the right singular vectors). The row for all other ids is their mean."""
    if ids:
        own = ids["d2t"][:-1]
        lacking = np.delete(table, own, axis=0)
        table = np.concatenate([table[own], (lacking if len(lacking) else table).mean(axis=0, keepdims=True)])
    if width >= table.shape[1]:
        return np.pad(table, ((0, 0), (0, width - table.shape[1])))
    _, vectors = np.linalg.eigh(table.T @ table)  # of the Gram matrix, by rising singular value
    return table @ vectors[:, ::-1][:, :width]
