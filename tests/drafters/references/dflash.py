"""DFlash, a block of drafts in one pass that is not causal: equations of z-lab's dflash."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.drafters.references import common
from tests.drafters.references.common import Features, Random, Shape, rms


def write(
    folder: Path,
    *,
    seed: int,
    target: Shape,
    layers: int = 2,
    layer_ids: Sequence[int] = (1, 4, 5),  # whose *outputs* are read: id i is the input of layer i + 1
    block_size: int = 5,
    mask_token_id: int = 3,
    speculators: bool = False,  # speculators' config.json, whose ids are inputs, and a reduced vocabulary
    draft_vocab_size: int = 24,  # of speculators' files
    qkv_bias: bool = False,
) -> None:
    random, tensors = Random(seed), {}
    for i in range(layers):
        tensors |= common.prefixed(random.layer(target, qk_norm=True, qkv_bias=qkv_bias), f"layers.{i}.")
    tensors["fc.weight"] = random.matrix(target.width, len(layer_ids) * target.width)
    tensors |= {name: random.norm(target.width) for name in ("hidden_norm.weight", "norm.weight")}
    if speculators:
        tensors["lm_head.weight"] = random.matrix(draft_vocab_size, target.width)
        ids = np.sort(random.rng.choice(target.vocab_size, draft_vocab_size, replace=False))
        tensors |= {"d2t": ids - np.arange(len(ids)), "t2d": np.isin(np.arange(target.vocab_size), ids)}
        config = {"speculators_model_type": "dflash", "architectures": ["DFlashSpeculator"], "block_size": block_size}
        config |= {"draft_vocab_size": draft_vocab_size, "aux_hidden_state_layer_ids": list(layer_ids)}
        config |= {"mask_token_id": mask_token_id, "sample_from_anchor": False}
        config |= common.speculators_config("dflash", block_size - 1)
        config["transformer_layer_config"] = target.config("qwen3", layers)
        common.write_folder(folder, config, tensors)
        return
    config = target.config("qwen3", layers) | {"block_size": block_size, "num_target_layers": target.layers}
    config |= {"attention_bias": True} if qkv_bias else {}
    config |= {"dflash_config": {"mask_token_id": mask_token_id, "target_layer_ids": list(layer_ids)}}
    common.write_folder(folder, config | {"architectures": ["DFlashDraftModel"]}, tensors)


def block(folder: Path, target: Features, tokens: Sequence[int], places: int | None = None):
    """What leaves the last norm at the places of a block, and the folder's parts: at the pending token, and at masks
    behind it. Their number is that of training, as in dflash_generate, unless the context ends: then `places`. Keys:
    context p at position p, then these at n - 1...; each query sees them all."""
    said, w = common.read_folder(folder)
    config = said.get("transformer_layer_config", said)
    eps, flash = config["rms_norm_eps"], said.get("dflash_config", said)
    read = flash.get("aux_hidden_state_layer_ids") or [i + 1 for i in flash["target_layer_ids"]]
    taps = np.concatenate([target.taps[i] for i in read], -1)
    context = rms(taps @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    size = min(said["block_size"], places or said["block_size"])
    table = w.get("embed_tokens.weight", target.embed)
    x = table[[tokens[-1], *[flash["mask_token_id"]] * (size - 1)]].astype(np.float64)
    positions = np.arange(len(context) + len(x))
    for i in range(config["num_hidden_layers"]):
        layer = common.under(w, f"layers.{i}.")
        y = rms(x, layer["input_layernorm.weight"], eps)
        both = np.concatenate([context, y])
        q = common.project(layer, "q", y, positions[len(context) :], config, eps)
        keys, values = (common.project(layer, name, both, positions, config, eps) for name in "kv")
        x = common.feed_forward(layer, x + common.attend(layer, q, keys, values, True), eps)
    own_ids = w["d2t"] + np.arange(len(w["d2t"])) if "d2t" in w else None
    return rms(x, w["norm.weight"], eps), w, said, own_ids


def proposals(folder: Path, target: Features, tokens: Sequence[int], k: int, *, longest: int | None = None):
    """The first k after the pending token's place; longest: of the context."""
    hidden, w, said, own_ids = block(folder, target, tokens, longest and longest - len(tokens) + 1)
    first = 0 if said.get("sample_from_anchor") else 1
    logits = hidden[first : first + k] @ common.way_to_ids(w, target).T
    return np.array([common.greedy(x, own_ids) for x in logits]), logits
