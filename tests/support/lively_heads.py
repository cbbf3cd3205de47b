"""A drafter of every kind beside a lively target. Heads have random weights and are hardly ever right."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxspec.bench.presets import HEADS, layers_like
from jaxspec.drafters import dspark, eagle3, gemma4_assistant, medusa, methods, mlp_speculator
from jaxspec.engine.engine import Engine
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import random_params
from jaxspec.models.draft_spec import draft_spec
from jaxspec.models.model import Model
from jaxspec.parallel.placement import make_placement
from tests.support import tiny_models
from tests.support.lively_models import OPTIONS, noisy, target

FEW, MASK = 48, 3  # ids of a reduced vocabulary; what stands in places to be filled


def fills(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, mask_id=MASK)


def reads(config: ModelConfig, *taps: int, **own: Any) -> ModelConfig:
    return dataclasses.replace(config, taps=taps, **own)  # type: ignore[call-arg]


def assistant(t: ModelConfig) -> ModelConfig:
    """One layer of queries over the target's last keys and values, and logits of half of the tokens."""
    own = dataclasses.replace(t.layers[-1], mixer="queries", num_kv_heads=t.num_heads, shares=None)
    shape = {"num_layers": 1, "windows": (None,), "per_layer": (own,), "tied": True, "target_width": t.width}
    shape |= {"layer_embed_width": 0}
    own_head = {"num_centroids": 4, "top_centroids": 2, "reads": (len(t.cached_layers) - 1,)}
    return gemma4_assistant.Config(**vars(t) | shape | own_head)


def dflash_head(t: ModelConfig) -> ModelConfig:
    """DFlash's head; for Muse Glimmer its assistant's, with windows and with the target's table and head alone."""
    beside = {"windows": (20, None, 20, 20, 20), "bare_target": True} if t.family == "muse_glimmer" else {}
    return reads(HEADS["dflash"](t), 1, 2, 2, **beside)


# Name -> (method, the head beside this target).
KINDS: dict[str, tuple[str, Callable[[ModelConfig], ModelConfig]]] = {
    "eagle": ("eagle", HEADS["eagle"]),
    "eagle3": ("eagle3", lambda t: reads(HEADS["eagle3"](t), 0, 2, 1, reduced_vocab_size=FEW)),
    "p-eagle": ("eagle3", lambda t: fills(eagle3.Config(**layers_like(t, 1), taps=(1, 2), target_width=t.width))),
    "mtp": ("mtp", HEADS["mtp"]),
    "medusa": ("medusa", lambda t: medusa.Config(**vars(t) | {"tied": False, "num_drafts": 4, "has_head": False})),
    "mlp_speculator": (
        "mlp_speculator",
        lambda t: mlp_speculator.Config(**vars(t) | {"tied": False, "target_width": t.width, "num_drafts": 4}),
    ),
    "gemma4_assistant": ("gemma4_assistant", lambda t: assistant(t)),
    "dflash": ("dflash", dflash_head),
    "dspark": ("dspark", lambda t: dspark.Config(**vars(reads(HEADS["dflash"](t), 1, 2, 2)), markov_rank=6)),
    "pard": ("draft_model", fills),
}
assert {method for method, _ in KINDS.values()} == set(methods.METHODS) - {"ngram", "suffix"}


@functools.cache
def head(kind: str, tensor_parallel_size: int = 1, family: str = "llama") -> Model:
    beside = target(family, tensor_parallel_size)
    config = KINDS[kind][1](beside.config)
    if draft_spec(config).method == "draft_model":
        return Model(config, noisy(beside).params)
    return Model(config, random_params(config, jnp.float32, make_placement(tensor_parallel_size), seed=1))


def engine(kind: str, k: int, family: str = "llama", *, spec: dict | None = None, **options) -> Engine:
    """kind: one of KINDS, or a method with its draft; see lively_models.new_engine for the rest."""
    method, degree = KINDS[kind][0], options.get("tensor_parallel_size", 1)
    chosen = {"method": method, "num_speculative_tokens": k} | ({} if method == "mtp" else {"model": kind})
    draft = head(kind, degree, family)
    return tiny_models.engine(target(family, degree), chosen | (spec or {}), draft, **OPTIONS | options)
