"""DSpark: DFlash's block, and a head that adds what the token before says of the next. Equations of DeepSpec and of
speculators' DSparkDraftModel."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from tests.drafters.references import common, dflash
from tests.drafters.references.common import Features, Random, Shape


def write(
    folder: Path,
    *,
    seed: int,
    target: Shape,
    rank: int | None = 6,  # None: no such head, as DeepSpec writes what it calls DFlash
    kind: str = "vanilla",
    table: bool = True,  # of its own; else, in jaxspec's files alone, a product makes the channels of the target's
    speculators: bool = False,  # else DeepSpec's form
    from_pending: bool = True,  # whether the pending token's place makes a draft, which only speculators' files say
    embed: np.ndarray | None = None,  # DeepSpec's form has copies of the target's table and head
    head_of_logits: np.ndarray | None = None,
    **options,
) -> None:
    dflash.write(folder, seed=seed, target=target, speculators=speculators, **options)
    random, config = Random(seed + 1), json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    if rank:
        ids = len(tensors["d2t"]) if speculators else target.vocab_size
        head = {"markov_w1.weight": 2 * random.matrix(target.vocab_size, rank) * np.float32(rank**0.5)}
        if not table:
            head = {"embed_in.weight": random.matrix(rank, target.width)}
        head["markov_w2.weight"] = random.matrix(ids, rank)
        name, read, given = {"vanilla": ("", 0, 0), "gated": ("gate_proj", 1, 1), "rnn": ("joint_proj", 2, 3)}[kind]
        if name:
            head[f"{name}.weight"] = random.matrix(given * rank, read * rank + target.width)
            head[f"{name}.bias"] = random.bias(given * rank)
        tensors |= common.prefixed(head, "markov_head.")
        tensors["confidence_head.proj.weight"] = random.matrix(1, target.width + rank)
        tensors["confidence_head.proj.bias"] = random.bias(1)
    config |= {"markov_rank": rank or 0, "enable_confidence_head": bool(rank), "confidence_head_with_markov": True}
    config |= {"markov_head_type": kind} if rank else {}
    if speculators:
        config |= {"speculators_model_type": "dspark", "architectures": ["DSparkSpeculator"]}
        config["sample_from_anchor"] = from_pending
    else:
        config |= config.pop("dflash_config") | {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512}
        copies = {"embed_tokens.weight": embed, "lm_head.weight": head_of_logits}
        tensors |= {name: x for name, x in copies.items() if x is not None}
    common.write_folder(folder, config, tensors)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def proposals(folder: Path, target: Features, tokens: Sequence[int], k: int, *, longest: int | None = None):
    """The first k of the block; longest: of the context."""
    from_pending = json.loads((folder / "config.json").read_text()).get("sample_from_anchor", True)
    hidden, w, said, own_ids = dflash.block(folder, target, tokens, longest and longest - len(tokens) + 1)
    hidden = hidden[: k + (not from_pending)]
    head = common.way_to_ids(w, target)
    m, kind = common.under(w, "markov_head."), said.get("markov_head_type")
    token, state, drafts, logits = tokens[-1], np.zeros(said["markov_rank"]), [], []
    for place, h in enumerate(hidden):
        logits.append(head @ h)
        if m:
            own = m.get("embed_in.weight")  # of jaxspec's files alone
            x = m["markov_w1.weight"][token] if own is None else own @ target.embed[token]
            if kind == "gated":
                x = x * sigmoid(m["gate_proj.weight"] @ np.concatenate([h, x]) + m["gate_proj.bias"])
            elif kind == "rnn":
                inner = m["joint_proj.weight"] @ np.concatenate([state, x, h]) + m["joint_proj.bias"]
                gate, new, out = np.split(inner, 3)
                state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(new)
                x = np.tanh(out)
            logits[-1] = logits[-1] + m["markov_w2.weight"] @ x
        if place or from_pending:  # else the place of the pending token has a part in the state alone
            token = common.greedy(logits[-1], own_ids)
            drafts.append(token)
    return np.array(drafts), np.array(logits[-k:])
