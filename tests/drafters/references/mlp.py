"""The MLP speculator: derived from vLLM's model of that name and fms-extras, neither of which could be run here."""

from __future__ import annotations

import math
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
    n_predict: int = 3,
    inner: int = 24,
    tied: bool | None = False,  # None: unsaid, which means false
    scaled: bool | None = False,  # None: unsaid, which means false
    inner_said: bool = True,  # False: inner_dim 0, which means emb_dim
) -> None:
    random, inner = Random(seed), inner if inner_said else target.width
    shared: dict[str, np.ndarray] = {}
    tensors = {}
    for i in range(n_predict):
        parts = {
            "emb": random.norm(target.vocab_size, inner, centre=0.0) * np.float32(6),
            "head": random.matrix(target.vocab_size, inner),
            "proj": random.matrix(inner, target.width if i == 0 else inner),
            "ln": random.norm(inner),
            "bias": random.bias(inner),
        }
        if tied:  # one of each, listed under every index; the first projection, of another shape, is its own
            parts = {name: x if (name, i) == ("proj", 0) else shared.setdefault(name, x) for name, x in parts.items()}
        tensors |= {f"speculator.{name}.{i}.weight": parts[name] for name in ("emb", "head", "proj", "ln")}
        tensors[f"speculator.ln.{i}.bias"] = parts["bias"]
    config = {"model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"]}
    config |= {"emb_dim": target.width, "inner_dim": inner if inner_said else 0, "n_predict": n_predict}
    config |= {"vocab_size": target.vocab_size, "top_k_tokens_per_head": [4, 3, 2][:n_predict], "n_candidates": 5}
    config |= {} if tied is None else {"tie_weights": tied}
    config |= {} if scaled is None else {"scale_input": scaled}
    common.write_folder(folder, config, {name: x.copy() for name, x in tensors.items()})


def proposals(folder: Path, target: Features, tokens: Sequence[int], k: int):
    config, w = common.read_folder(folder)
    w = common.under(w, "speculator.")
    n = config["n_predict"]
    alpha = 0.5 ** (0.5 / n)
    beta = math.sqrt((1 - alpha**2) * (config["inner_dim"] or config["emb_dim"]) / 2)
    state, token, drafts, logits = target.hidden[-1], tokens[-1], [], []
    if config.get("scale_input"):
        state = rms(state, 1.0, 1e-6) / math.sqrt(2)
    for i in range(min(k, n)):
        x = w[f"proj.{i}.weight"] @ state + beta / alpha * w[f"emb.{i}.weight"][token]
        x = rms(x, w[f"ln.{i}.weight"], 1e-6) + w[f"ln.{i}.bias"]
        state = x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
        logits.append(w[f"head.{i}.weight"] @ state)
        token = common.greedy(logits[-1])
        drafts.append(token)
    return np.array(drafts), np.array(logits)
