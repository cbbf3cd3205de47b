"""Comparison of the demo with the transformers library: the same prompts and weights, on the same machine."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from checkpoints.names import HF
from jaxspec.common.errors import UserError
from jaxspec.models.decoder import parameters
from pallas_kernels.weights import dense

if TYPE_CHECKING:
    from jaxspec.api.llm import LLM
    from jaxspec.models.model import Model

DTYPES = ("float32", "bfloat16")
WARM_UP_TOKENS = 4


def compare(llm: LLM, prompts: Sequence[Any], max_tokens: int, plain: Sequence[list[int]]) -> dict[str, Any]:
    """Answer the prompts greedily with transformers, one at a time, and return the measurements of each dtype.

    plain: token ids of jaxspec's plain answers. The entry "same_answers" counts the answers that equal them.

    Raises: UserError if torch is missing or `build` does not support the model.
    """
    check()
    import torch

    device = "cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu"
    ids = [torch.tensor([prompt["prompt_token_ids"]], device=device) for prompt in prompts]
    found: dict[str, Any] = {}
    for dtype in DTYPES:
        model = build(llm.target, list(llm.stop_ids)).to(device, getattr(torch, dtype))
        answers, seconds = [], []
        for prompt in ids:
            answer(model, prompt, min(WARM_UP_TOKENS, max_tokens))
            started = time.perf_counter()
            answers.append(answer(model, prompt, max_tokens))
            seconds.append(time.perf_counter() - started)
        found[dtype] = {
            "tokens": sum(map(len, answers)),
            "seconds": sum(seconds),
            "tokens_per_second": sum(map(len, answers)) / sum(seconds),
            "tokens_per_second_per_prompt": [len(a) / s for a, s in zip(answers, seconds, strict=True)],
            "same_answers": sum(a == b for a, b in zip(answers, plain, strict=True)),
        }
    return found


def check() -> None:
    """Raise UserError if torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise UserError("--compare-transformers needs torch: pip install torch, or leave the option out")


def answer(model: Any, ids: Any, max_tokens: int) -> list[int]:
    """Return the new token ids of one greedy answer. ids: the prompt's ids [1, length]."""
    import torch

    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens)
    found: list[int] = out[0, ids.shape[1] :].tolist()
    return found


def build(model: Model, stop_ids: list[int]) -> Any:
    """Return a torch model with the weights of this model.

    stop_ids: token ids that end an answer.

    Raises: UserError for a family other than Llama, and for scaled rotary embeddings.
    """
    import torch
    import transformers

    c = model.config
    if c.family != "llama" or c.rope.factors:
        raise UserError(f"--compare-transformers does not build this {c.family} model: leave the option out")
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.width,
        intermediate_size=c.mlp_width,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.max_model_len,
        rms_norm_eps=c.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
        tie_word_embeddings=c.tied,
        eos_token_id=stop_ids,
        pad_token_id=stop_ids[0],
    )
    built: Any = transformers.LlamaForCausalLM(config)
    built.eval()
    state = {name: torch.from_numpy(x) for name, x in tensors(model).items()}
    missing, unexpected = built.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing  # missing if the output head is tied to the embedding
    assert not unexpected, unexpected
    built.tie_weights()
    return built


def tensors(model: Model) -> dict[str, np.ndarray]:
    """Return a model's parameters in float32, with the names and shapes that they have in Hugging Face's files.

    A matrix is [outputs, inputs]. Matrices that jaxspec merges into one are split again.
    """
    found = {}
    for where, parameter in parameters(model.config).items():
        x = np.array(dense(model.params[where]), np.float32)
        if parameter.kind == "matrix":
            x = x.T
        for part, name in HF.sources(where).items():
            own = split(x, dict(parameter.parts), part) if part else x
            found[name] = np.ascontiguousarray(own)
    return found


def split(x: np.ndarray, columns: dict[str, int], part: str) -> np.ndarray:
    """Return one part of a merged matrix [O, ...], which holds several projections of the same input.

    The matrix is transposed: what were its columns are its rows. The rows are in groups. Each group holds columns[name]
    rows of every part, in the order of `columns`.
    """
    names = list(columns)
    start = sum(columns[name] for name in names[: names.index(part)])
    groups = x.reshape(-1, sum(columns.values()), *x.shape[1:])
    return groups[:, start : start + columns[part]].reshape(-1, *x.shape[1:])
