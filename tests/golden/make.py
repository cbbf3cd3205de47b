"""Makes golden files, with torch: `python -m tests.golden.make [FAMILY ...]` (all of them), `... smollm2 MODEL.gguf`.

Each family's folder holds a random model as transformers saves it, and expected.safetensors with token ids and float32
logits. smollm2.json holds greedy continuations of the real model, computed in float32 from the dequantised weights.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.golden.families import FAMILIES, FOLDER, POSITIONS, SHARED, save_model, torch_logits, torch_model

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea,",
    "In 2024, the three most common mistakes are: 1.",
)
NEW_TOKENS = 64


def families(*wanted: str) -> None:
    """A family's place among all is its seed: new ones come last."""
    for seed, family in enumerate(FAMILIES):
        if wanted and family not in wanted:
            continue
        folder = FOLDER / family
        shutil.rmtree(folder, ignore_errors=True)
        model = torch_model(family, seed)
        save_model(model, family, folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        tokens = np.random.default_rng(seed).integers(3, SHARED["vocab_size"], (2, POSITIONS))
        logits = torch_logits(model, tokens)
        save_file({"tokens": tokens.astype(np.int32), "logits": logits}, folder / "expected.safetensors")
        print(family, "logits of size", float(np.abs(logits).mean()))


def smollm2(path: Path):
    """The real model in torch, float32, read by gguf's own reader: nothing of this repository takes part."""
    import gguf
    import torch
    import transformers

    tensors = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    names = {"token_embd": "embed_tokens", "output_norm": "norm"}
    for i in range(config.num_hidden_layers):
        layer = {
            "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "attn_output": "self_attn.o_proj",
        }
        layer |= {f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"}
        layer |= {f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
        names |= {f"blk.{i}.{ours}": f"layers.{i}.{theirs}" for ours, theirs in layer.items()}
    state = {}
    for name, x in tensors.items():
        if ".attn_q." in name or ".attn_k." in name:  # 64 rows a head, neighbours rotated against each other
            x = np.concatenate([np.concatenate([head[0::2], head[1::2]]) for head in np.split(x, len(x) // 64)])
        stem = name.removesuffix(".weight")
        state[f"model.{names[stem]}.weight"] = torch.from_numpy(np.array(x, dtype=np.float32))
    model = transformers.LlamaForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"]  # tied
    assert not unexpected
    model.tie_weights()
    return model


def greedy(path: Path) -> list[dict]:
    """Ids and greedy continuation of each prompt, by torch in float32 and transformers' GGUF tokenizer."""
    import transformers

    model = smollm2(path)
    model.generation_config.eos_token_id = None  # nothing stops early: every prompt gives as many tokens
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    rows = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
        rows.append({"prompt": prompt, "ids": ids[0].tolist(), "new_ids": out[0, ids.shape[1] :].tolist()})
    return rows


if __name__ == "__main__":
    if sys.argv[1:2] == ["smollm2"]:
        text = ",\n".join(json.dumps(row) for row in greedy(Path(sys.argv[2])))
        (FOLDER / "smollm2.json").write_text(f"[\n{text}\n]\n", encoding="utf-8")
    else:
        families(*sys.argv[1:])
