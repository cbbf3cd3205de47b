"""Medusa's heads: derived by reading medusa-llm 0.1 (ResBlock: x + SiLU(W x + b); then a matrix of its own)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.drafters.references import common
from tests.drafters.references.common import Features, Random, Shape, silu


def write(
    folder: Path,
    *,
    seed: int,
    target: Shape,
    heads: int = 3,
    layers: int = 1,
    said_heads: int | None = 2,  # often wrong in published files: count the tensors
    own_head: bool = True,  # False: legacy files, which end in the target's head
    vllm: bool = False,  # vLLM's names, without biases unless `medusa_fc_bias`
    bias: bool = True,
) -> None:
    random, width = Random(seed), target.width
    tensors = {}
    for i in range(heads):
        for j in range(layers):
            name = f"blocks.{i}.layers.{j}" if vllm else f"{i}.{j}.linear"
            tensors[f"{name}.weight"] = random.matrix(width, width)
            if bias:
                tensors[f"{name}.bias"] = random.bias(width)
        if own_head:
            name = f"lm_heads.{i}.weight" if vllm else f"{i}.{layers}.weight"
            tensors[name] = random.matrix(target.vocab_size, width)
    if vllm:
        config = {"model_type": "medusa", "num_heads": heads, "num_hidden_layers": layers, "hidden_size": width}
        config |= {"vocab_size": target.vocab_size, "truncated_vocab_size": target.vocab_size}
        config |= {"medusa_fc_bias": bias, "original_lm_head": not own_head, "architectures": ["MedusaModel"]}
    else:
        config = {"medusa_num_heads": said_heads or heads, "medusa_num_layers": layers}
        config |= {"base_model_name_or_path": "target"}
    common.write_folder(folder, config, tensors, "model.safetensors" if vllm else "medusa_lm_head.safetensors")


def proposals(folder: Path, target: Features, tokens: Sequence[int], k: int):
    """Head i guesses the token i + 1 behind the pending one, all from the last hidden state."""
    config, w = common.read_folder(folder)
    layers = config.get("medusa_num_layers", config.get("num_hidden_layers"))
    vllm = config.get("model_type") == "medusa"
    count = 1 + max(int(found[0]) for name in w if (found := re.search(r"\d+", name)))
    logits = []
    for i in range(min(k, count)):
        x = target.hidden[-1]
        for j in range(layers):
            name = f"blocks.{i}.layers.{j}" if vllm else f"{i}.{j}.linear"
            x = x + silu(w[f"{name}.weight"] @ x + w.get(f"{name}.bias", 0.0))
        logits.append(w.get(f"lm_heads.{i}.weight" if vllm else f"{i}.{layers}.weight", target.head) @ x)
    return np.argmax(logits, -1), np.array(logits)
