"""What the references share: a target's shapes and features, a folder's files, a Llama or Qwen3 layer, the chain.

Everything is float64 and computed anew: no cache, nothing of jaxspec. x[T, E] are the entries of one row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

Tensors = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Shape:
    """A target, as far as a drafter's file depends on it; head_dim stands apart from width / heads where it may."""

    vocab_size: int = 48
    width: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    mlp: int = 40
    layers: int = 8
    rope_theta: float = 10000.0
    eps: float = 1e-2  # large enough to count

    def config(self, model_type: str = "llama", layers: int = 1) -> dict:
        return {
            "model_type": model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.width,
            "intermediate_size": self.mlp,
            "num_hidden_layers": layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": 2048,  # beside a target with far more: it limits nothing
            "rms_norm_eps": self.eps,
            "rope_theta": self.rope_theta,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        }


@dataclass(frozen=True)
class Features:
    """What the target lends: its table and head [V, E], and of positions 0..n-2 the last norm's output and taps."""

    embed: np.ndarray
    head: np.ndarray
    hidden: np.ndarray
    taps: Mapping[int, np.ndarray]  # layer -> its input; the number of layers -> what enters the last norm


def random_features(shape: Shape, num_tokens: int, seed: int) -> tuple[list[int], Features]:
    """A row of tokens, the last pending, and features of the others."""
    rng = np.random.default_rng(seed)
    draw = lambda *size: rng.standard_normal(size).astype(np.float32)
    tokens = rng.integers(0, shape.vocab_size, num_tokens).tolist()
    taps = {i: 2 * draw(num_tokens - 1, shape.width) for i in range(shape.layers + 1)}
    table, head = draw(shape.vocab_size, shape.width), draw(shape.vocab_size, shape.width)
    return tokens, Features(table, head, draw(num_tokens - 1, shape.width), taps)


class Random:
    """Weights that make mistakes show: logits of size one or more, norms away from 1, biases away from 0."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)

    def matrix(self, out: int, into: int) -> np.ndarray:
        return (self.rng.standard_normal((out, into)) * 1.5 * into**-0.5).astype(np.float32)

    def norm(self, *size: int, centre: float = 1.0) -> np.ndarray:
        return (centre + 0.3 * self.rng.standard_normal(size)).astype(np.float32)

    def bias(self, size: int) -> np.ndarray:
        return self.norm(size, centre=0.0)

    def layer(self, shape: Shape, *, into: int | None = None, qk_norm=False, qkv_bias=False, centre=1.0) -> dict:
        """A layer's tensors by their short names; `into` is what attention reads where that is not the width."""
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        sizes = {"q": queries, "k": keys, "v": keys}
        tensors = {f"self_attn.{x}_proj.weight": self.matrix(n, into or shape.width) for x, n in sizes.items()}
        if qkv_bias:
            tensors |= {f"self_attn.{x}_proj.bias": self.bias(n) for x, n in sizes.items()}
        if qk_norm:
            tensors |= {f"self_attn.{x}_norm.weight": self.norm(shape.head_dim, centre=centre) for x in "qk"}
        return tensors | {
            "self_attn.o_proj.weight": self.matrix(shape.width, queries),
            "mlp.gate_proj.weight": self.matrix(shape.mlp, shape.width),
            "mlp.up_proj.weight": self.matrix(shape.mlp, shape.width),
            "mlp.down_proj.weight": self.matrix(shape.width, shape.mlp),
            "input_layernorm.weight": self.norm(shape.width, centre=centre),
            "post_attention_layernorm.weight": self.norm(shape.width, centre=centre),
        }


def write_folder(folder: Path, config: dict, tensors: Tensors, name: str = "model.safetensors") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    save_file(dict(tensors), folder / name)


def speculators_config(algorithm: str, num_tokens: int) -> dict:
    """What speculators says of a drafter beside its shapes."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_tokens}
    nested = {
        "algorithm": algorithm,
        "proposal_methods": [proposal | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": "target", "architectures": ["LlamaForCausalLM"]},
    }
    return {"speculators_config": nested}


def read_folder(folder: Path) -> tuple[dict, dict[str, np.ndarray]]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (file,) = folder.glob("*.safetensors")
    floats = lambda x: x.astype(np.float64) if x.dtype.kind == "f" else x
    return config, {name: floats(x) for name, x in load_file(file).items()}


def under(tensors: Tensors, prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


def prefixed(tensors: Tensors, prefix: str) -> dict[str, np.ndarray]:
    return {prefix + name: x for name, x in tensors.items()}


def rms(x, weight, eps: float):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def silu(x):
    return x / (1 + np.exp(-x))


def rope(x, positions, theta: float):
    """x[T, heads, D]: the first half of a head against the second."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * theta ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)


def project(w: Tensors, name: str, x, positions, config: dict, eps: float):
    """Queries, keys or values [T, heads, D] of x, with the bias and the norm that the file has."""
    out = x @ w[f"self_attn.{name}_proj.weight"].T + w.get(f"self_attn.{name}_proj.bias", 0.0)
    out = out.reshape(len(x), -1, config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    if f"self_attn.{name}_norm.weight" in w:
        out = rms(out, w[f"self_attn.{name}_norm.weight"], eps)
    return out if name == "v" else rope(out, positions, config.get("rope_theta", 10000.0))


def attend(w: Tensors, q, k, v, mask):
    """q[T, H, D] over k, v[S, G, D] where mask[T, S]."""
    k, v = (np.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("thd,shd->hts", q, k) * q.shape[-1] ** -0.5
    scores = np.exp(np.where(mask, scores, -np.inf) - np.where(mask, scores, -np.inf).max(-1, keepdims=True))
    out = np.einsum("hts,shd->thd", scores / scores.sum(-1, keepdims=True), v)
    return out.reshape(len(q), -1) @ w["self_attn.o_proj.weight"].T


def feed_forward(w: Tensors, x, eps: float):
    y = rms(x, w["post_attention_layernorm.weight"], eps)
    gated = silu(y @ w["mlp.gate_proj.weight"].T) * (y @ w["mlp.up_proj.weight"].T)
    return x + gated @ w["mlp.down_proj.weight"].T


def layer(w: Tensors, x, config: dict, *, reads=None):
    """A causal layer over entries 0..T-1; `reads`: what attention sees of them, unless x behind the first norm."""
    eps, positions = config["rms_norm_eps"], np.arange(len(x))
    y = rms(x, w["input_layernorm.weight"], eps) if reads is None else reads
    q, k, v = (project(w, name, y, positions, config, eps) for name in "qkv")
    return feed_forward(w, x + attend(w, q, k, v, np.tri(len(x), dtype=bool)), eps)


def another(shape: Shape, seed: int = 5) -> np.ndarray:
    """A table or head of the target's shape that is not the target's."""
    return Random(seed).matrix(shape.vocab_size, shape.width) * np.float32(2)


def way_to_ids(w: Tensors, target: Features):
    """[V, E]: the head of a folder's own, with the narrower way to its rare ids, which jaxspec's files alone have, or
    else the target's."""
    if "lm_head.weight" not in w:
        return target.head
    rare = [w["rare_head.weight"] @ w["rare_in.weight"]] if "rare_head.weight" in w else []
    return np.concatenate([w["lm_head.weight"], *rare])


def greedy(logits, own_ids=None) -> int:
    best = int(np.argmax(logits))
    return best if own_ids is None else int(own_ids[best])


def chain(step: Callable, hidden, tokens: Sequence[int], k: int, own_ids=None):
    """k drafts by entries (h_p, t_{p+1}); behind the last real one come (the carried hidden, the previous draft).

    step(hidden[T, .], tokens) -> logits and carried hidden of the last entry. own_ids maps a reduced vocabulary.
    """
    row, drafts, all_logits = list(tokens[1:]), [], []
    for _ in range(k):
        logits, carried = step(hidden, row)
        drafts.append(greedy(logits, own_ids))
        all_logits.append(logits)
        hidden, row = np.concatenate([hidden, carried[None]]), [*row, drafts[-1]]
    return np.array(drafts), np.array(all_logits)
