"""EAGLE-3, and P-EAGLE, which drafts all tokens in one pass: equations of speculators' Eagle3DraftModel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.drafters.references import common
from tests.drafters.references.common import Features, Random, Shape, rms


def default_taps(num_layers: int) -> list[int]:
    return [2, num_layers // 2, num_layers - 3]


def write(
    folder: Path,
    *,
    seed: int,
    target: Shape,
    width: int | None = None,  # the draft's own, where it is not the target's: the file then has a table
    draft_vocab_size: int | None = 24,  # None: all ids, and the target's head
    layer_ids: Sequence[int] | None = None,  # None: the default ones, unsaid
    first_layer: str = "midlayer.",  # newer files: layers.0.
    norm_before_residual: bool = False,
    norm_output: bool = False,
    fc_norm: bool = False,
    norm_before_fc: bool = False,
    rope_theta: bool = True,  # False: unsaid, so 10000 whatever the target's is
    nested: bool = False,  # where the layer ids and norm_before_fc are said: under eagle_config
    speculators: bool = False,  # speculators' config.json, whose tensors are layers.0.
    mask_token_id: int | None = None,  # P-EAGLE
    layers: int = 1,
    embed: np.ndarray | None = None,  # a table of the target's shape
    qkv_bias: bool = False,
) -> None:
    own = replace(target, width=width or target.width)
    random, taps = Random(seed), layer_ids or default_taps(target.layers)
    block = random.layer(own, into=2 * own.width, qkv_bias=qkv_bias) | {"hidden_norm.weight": random.norm(own.width)}
    tensors = common.prefixed(block, "layers.0." if speculators else first_layer)
    for i in range(1, layers):
        tensors |= common.prefixed(random.layer(own, qkv_bias=qkv_bias), f"layers.{i}.")
    tensors |= {"fc.weight": random.matrix(own.width, len(taps) * target.width), "norm.weight": random.norm(own.width)}
    if draft_vocab_size is not None:
        tensors["lm_head.weight"] = random.matrix(draft_vocab_size, own.width)
        ids = np.sort(random.rng.choice(target.vocab_size, draft_vocab_size, replace=False))
        tensors["d2t"] = ids - np.arange(draft_vocab_size)
        tensors["t2d"] = np.isin(np.arange(target.vocab_size), ids)
    if own.width != target.width:
        tensors["embed_tokens.weight"] = random.norm(target.vocab_size, own.width, centre=0.0) * np.float32(3)
    if embed is not None:
        tensors["embed_tokens.weight"] = embed
    if norm_before_fc:
        tensors["input_norm.weight"] = random.norm(len(taps) * target.width)
    if fc_norm:
        tensors |= {f"fc_norm.{i}.weight": random.norm(target.width) for i in range(len(taps))}
    if mask_token_id is not None:
        tensors["mask_hidden"] = random.norm(1, 1, len(taps) * target.width, centre=0.5)

    layer_config = own.config(layers=layers) | ({"attention_bias": True} if qkv_bias else {})
    if not rope_theta:
        del layer_config["rope_theta"]
    switches = {"draft_vocab_size": draft_vocab_size, "fc_norm": fc_norm, "norm_output": norm_output}
    ids = {} if layer_ids is None else {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}
    where = ids | {"norm_before_fc": norm_before_fc}
    switches |= {"eagle_config": where | {"use_aux_hidden_state": True}} if nested else where
    if norm_before_residual:
        switches["norm_before_residual"] = True
    if own.width != target.width:
        switches["target_hidden_size"] = target.width
    if mask_token_id is not None:
        switches["mask_token_id" if speculators else "ptd_token_id"] = mask_token_id
    if speculators:
        algorithm = "eagle3" if mask_token_id is None else "peagle"
        config = (
            switches
            | {
                "speculators_model_type": algorithm,
                "architectures": ["Eagle3Speculator" if algorithm == "eagle3" else "PEagleSpeculator"],
                "transformer_layer_config": layer_config,
                "norm_before_residual": norm_before_residual,
            }
            | common.speculators_config(algorithm, 3)
        )
    else:
        config = layer_config | switches | {"architectures": ["LlamaForCausalLMEagle3"]}
    common.write_folder(folder, config, tensors)


class _Draft:
    """A folder's numbers, ready to compute."""

    def __init__(self, folder: Path, target: Features):
        said, self.w = common.read_folder(folder)
        self.config = said.get("transformer_layer_config", said)
        self.said = said | said.get("eagle_config", {})
        self.eps = self.config["rms_norm_eps"]
        self.block = common.under(self.w, "layers.0." if "layers.0.hidden_norm.weight" in self.w else "midlayer.")
        self.embed = self.w.get("embed_tokens.weight", target.embed)
        self.head = common.way_to_ids(self.w, target)
        self.own_ids = self.w["d2t"] + np.arange(len(self.w["d2t"])) if "d2t" in self.w else None
        ids = self.said.get("eagle_aux_hidden_state_layer_ids") or default_taps(max(target.taps))
        self.taps = np.concatenate([target.taps[i] for i in ids], -1)

    def fuse(self, taps):
        """[T, 3E] of the target -> [T, E]."""
        if self.said.get("norm_before_fc"):
            taps = rms(taps, self.w["input_norm.weight"], self.eps)
        if self.said.get("fc_norm"):
            parts = np.split(taps, sum(name.startswith("fc_norm.") for name in self.w), -1)
            taps = np.concatenate([rms(x, self.w[f"fc_norm.{i}.weight"], self.eps) for i, x in enumerate(parts)], -1)
        return taps @ self.w["fc.weight"].T

    def run(self, hidden, tokens):
        """Entries (hidden, token) -> the layer's output, before and behind the last norm."""
        normed = rms(hidden, self.block["hidden_norm.weight"], self.eps)
        reads = np.concatenate([rms(self.embed[tokens], self.block["input_layernorm.weight"], self.eps), normed], -1)
        residual = normed if self.said.get("norm_before_residual") else hidden
        out = common.layer(self.block, residual, self.config, reads=reads)
        for i in range(1, self.config["num_hidden_layers"]):
            out = common.layer(common.under(self.w, f"layers.{i}."), out, self.config)
        return out, rms(out, self.w["norm.weight"], self.eps)

    def step(self, hidden, tokens):
        out, normed = self.run(hidden, tokens)
        return normed[-1] @ self.head.T, (normed if self.said.get("norm_output") else out)[-1]


def proposals(folder: Path, target: Features, tokens: Sequence[int], k: int):
    draft = _Draft(folder, target)
    return common.chain(draft.step, draft.fuse(draft.taps), tokens, k, draft.own_ids)


def parallel_proposals(folder: Path, target: Features, tokens: Sequence[int], k: int):
    """P-EAGLE: behind the real entries come k - 1 entries (mask_hidden, mask), all in one causal pass."""
    draft = _Draft(folder, target)
    mask = draft.said.get("mask_token_id", draft.said.get("ptd_token_id"))
    masks = np.repeat(draft.w["mask_hidden"][0], k - 1, 0)
    row = [*tokens[1:], *[mask] * (k - 1)]
    logits = draft.run(draft.fuse(np.concatenate([draft.taps, masks])), row)[1][-k:] @ draft.head.T
    return np.array([common.greedy(x, draft.own_ids) for x in logits]), logits
