"""PARD: a language model of its own that reads nothing of the target and fills mask tokens in one causal pass.

Derived from vLLM's and PARD's descriptions; nothing was run. The layers are those held against upstream elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.drafters.references import common
from tests.drafters.references.common import Features, Random, Shape, rms


def write(folder: Path, *, seed: int, target: Shape, layers: int = 2, mask_token_id: int = 3) -> None:
    random = Random(seed)
    tensors = {"model.embed_tokens.weight": random.norm(target.vocab_size, target.width, centre=0.0) * np.float32(3)}
    for i in range(layers):
        tensors |= common.prefixed(random.layer(target), f"model.layers.{i}.")
    tensors["model.norm.weight"] = random.norm(target.width)
    tensors["lm_head.weight"] = random.matrix(target.vocab_size, target.width)
    config = target.config("llama", layers) | {"pard_token": mask_token_id, "architectures": ["LlamaForCausalLM"]}
    common.write_folder(folder, config, tensors)


def proposals(folder: Path, target: Features, tokens: Sequence[int], k: int):
    config, w = common.read_folder(folder)
    x = w["model.embed_tokens.weight"][[*tokens, *[config["pard_token"]] * (k - 1)]]
    for i in range(config["num_hidden_layers"]):
        x = common.layer(common.under(w, f"model.layers.{i}."), x, config)
    logits = rms(x[-k:], w["model.norm.weight"], config["rms_norm_eps"]) @ w["lm_head.weight"].T
    return np.argmax(logits, -1), logits
