"""A tiny target, a few of its own texts as training data, and options of a short run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jaxspec import LLM, SamplingParams
from jaxspec.train import data
from jaxspec.train.train_options import TrainOptions
from tests.support import model_folders

VOCAB, LENGTH, PROMPT = 320, 64, 8


def write(root: Path, *, texts: int = 8, copies: int = 8, layers: int = 2) -> None:
    """root/target and root/data: `texts` greedy answers, each of them `copies` times, so that a draft can learn them by
    heart and the held-out prompts are among them."""
    model_folders.write_model(root / "target", vocab_size=VOCAB, layers=layers)
    rng = np.random.default_rng(0)
    prompts = [{"prompt_token_ids": ids.tolist()} for ids in rng.integers(5, VOCAB, (texts, PROMPT))]
    greedy = SamplingParams(temperature=0.0, max_tokens=LENGTH - PROMPT, ignore_eos=True)
    llm = LLM(str(root / "target"), max_num_seqs=texts, max_model_len=LENGTH)
    answers = [out.prompt_token_ids + out.outputs[0].token_ids for out in llm.generate(prompts, greedy, progress=False)]
    tokens = np.tile(np.array(answers, np.uint16), (copies, 1))
    column = lambda value, dtype: np.full(len(tokens), value, dtype)
    (root / "data").mkdir()
    arrays = {
        "tokens": tokens,
        "length": column(LENGTH, np.int32),
        "prompt_length": column(PROMPT, np.int32),
        "category": column(0, np.uint8),
        "temperature": column(0, np.float32),
    }
    data.write_shard(data.shard_path(root / "data", 0), arrays)
    data.write_manifest(root / "data", {"shards": 1})


def options(root: Path, out: str, **changes: Any) -> TrainOptions:
    given: dict[str, Any] = {
        "target": str(root / "target"),
        "data": root / "data",
        "out": root / out,
        "layers": 1,
        "width": 48,
        "heads": 6,
        "kv_heads": 2,
        "mlp_width": 96,
        "vocab_size": 200,
        "steps": 240,
        "batch_size": 8,
        "length": LENGTH,
        "learning_rate": 6e-3,
        "warmup": 10,
        "eval_every": 120,
        "eval_prompts": 4,
        "eval_tokens": 40,
        "seed": 1,
    }
    return TrainOptions(**given | changes)
