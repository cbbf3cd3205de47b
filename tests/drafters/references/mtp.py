"""Multi-token prediction by one layer, used again for more drafts: equations of transformers' MtpLayer.

Files of three kinds. DeepSeek's and Qwen3-Next's own layers (latent or gated attention, experts) are replaced by a
plain one; their names, the order of the concatenation and Qwen3-Next's norms (1 + w) are theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.drafters.references import common
from tests.drafters.references.common import Features, Random, Shape, rms


@dataclass(frozen=True)
class Names:
    model_type: str
    embed_norm: str
    hidden_norm: str
    project: str
    last_norm: str
    block: str
    hidden_first: bool = False
    norm_plus_one: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False


def names(kind: str, layers: int) -> Names:
    """The names in a file whose target has `layers` layers."""
    if kind == "deepseek":
        at = f"model.layers.{layers}."
        return Names("deepseek_v3", at + "enorm", at + "hnorm", at + "eh_proj", at + "shared_head.norm", at)
    if kind == "mimo":
        at = "model.mtp_layers.0."
        parts = (at + x for x in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"))
        return Names("mimo", *parts, at, hidden_first=True, qkv_bias=True)
    parts = (f"mtp.{x}" for x in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"))
    return Names("qwen3_next", *parts, "mtp.layers.0.", norm_plus_one=True, qk_norm=True)


def write(
    folder: Path,
    *,
    seed: int,
    target: Shape,
    kind: str = "mimo",
    table: np.ndarray | None = None,
    head: np.ndarray | None = None,
) -> None:
    """table, head: copies of the target's in the file (DeepSeek), where both may be absent."""
    random, of, width = Random(seed), names(kind, target.layers), target.width
    centre = 0.0 if of.norm_plus_one else 1.0
    tensors = {f"{x}.weight": random.norm(width, centre=centre) for x in (of.embed_norm, of.hidden_norm, of.last_norm)}
    tensors[f"{of.project}.weight"] = random.matrix(width, 2 * width)
    block = random.layer(target, qkv_bias=of.qkv_bias, qk_norm=of.qk_norm, centre=centre)
    tensors |= common.prefixed(block, of.block)
    if table is not None:
        tensors[f"{of.block}embed_tokens.weight"] = table
    if head is not None:
        tensors[f"{of.block}shared_head.head.weight"] = head
    config = target.config(of.model_type, target.layers) | {"num_nextn_predict_layers": 1}
    common.write_folder(folder, config, tensors)


def proposals(folder: Path, target: Features, tokens: Sequence[int], k: int, *, before_norm: bool = False):
    """before_norm: the target's hidden states are those that enter its last norm, as vLLM takes them for MiMo."""
    config, w = common.read_folder(folder)
    kind = {"deepseek_v3": "deepseek", "mtp": "deepseek"}.get(config["model_type"], config["model_type"])
    of, eps = names(kind, config["num_hidden_layers"]), config["rms_norm_eps"]
    if of.norm_plus_one:
        w = {name: x + 1 if x.ndim == 1 else x for name, x in w.items()}
    block = common.under(w, of.block)
    table, head = block.get("embed_tokens.weight", target.embed), block.get("shared_head.head.weight", target.head)

    def step(hidden, tokens):
        both = [
            rms(table[tokens], w[f"{of.embed_norm}.weight"], eps),
            rms(hidden, w[f"{of.hidden_norm}.weight"], eps),
        ]
        x = np.concatenate(both[::-1] if of.hidden_first else both, -1) @ w[f"{of.project}.weight"].T
        carried = rms(common.layer(block, x, config)[-1], w[f"{of.last_norm}.weight"], eps)
        return carried @ head.astype(np.float64).T, carried

    hidden = target.taps[config["num_hidden_layers"]] if before_norm else target.hidden
    return common.chain(step, hidden, tokens, k)
