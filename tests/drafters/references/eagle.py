"""EAGLE-1: equations of eagle-llm's cnets.Model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.drafters.references import common
from tests.drafters.references.common import Features, Random, Shape


def write(
    folder: Path,
    *,
    seed: int,
    target: Shape,
    embed: np.ndarray | None = None,  # the target's table: most files hold a copy
    bias: bool | None = None,  # None: unsaid, which means true
    rope_theta: bool = True,  # False: unsaid, so 10000
    vllm: int = 0,  # vLLM's own form, with a head over so many of the target's ids
    qkv_bias: bool = False,
) -> None:
    random = Random(seed)
    block = random.layer(target, qkv_bias=qkv_bias)
    del block["input_layernorm.weight"]  # it has none: W_fc's output enters attention as it is
    tensors = common.prefixed(block, "layers.0.") | {"fc.weight": random.matrix(target.width, 2 * target.width)}
    if bias is not False:
        tensors["fc.bias"] = random.bias(target.width)
    if embed is not None:
        tensors["embed_tokens.weight"] = embed
    config = target.config() | ({} if bias is None else {"bias": bias}) | ({"attention_bias": True} if qkv_bias else {})
    if not rope_theta:
        del config["rope_theta"]
    if vllm:
        tensors["lm_head.weight"] = random.matrix(vllm, target.width)
        tensors = common.prefixed(tensors, "model.")
        tensors["token_map"] = np.sort(random.rng.choice(target.vocab_size, vllm, replace=False))
        inner = config | {"skip_prenorm": True, "skip_output_norm": True, "architectures": ["LlamaForCausalLM"]}
        config = {"model_type": "eagle", "architectures": ["EAGLEModel"], "model": inner, "truncated_vocab_size": vllm}
    common.write_folder(folder, config | {"architectures": ["LlamaForCausalLM"]}, tensors)


def proposals(folder: Path, target: Features, tokens: Sequence[int], k: int):
    said, w = common.read_folder(folder)
    config, w = said.get("model", said), {name.removeprefix("model."): x for name, x in w.items()}
    block = common.under(w, "layers.0.")

    def step(hidden, tokens):
        both = np.concatenate([w.get("embed_tokens.weight", target.embed)[tokens], hidden], -1)
        x = both @ w["fc.weight"].T + w.get("fc.bias", 0.0)
        carried = common.layer(block, x, config, reads=x)[-1]
        return carried @ w.get("lm_head.weight", target.head).T, carried

    return common.chain(step, target.hidden, tokens, k, w.get("token_map"))
