"""Gemma 4's assistants propose in every round what the code of transformers proposes."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.common.errors import UserError
from jaxspec.models.backend import Backend
from jaxspec.models.decoder import bind
from jaxspec.options.sampling_params import SamplingParams
from pallas_kernels.device import here
from tests.drafters.rounds import Pair, recording
from tests.golden.families import FAMILIES, SHARED, randomise, save_model, torch_model
from tests.support import lively_heads, lively_models
from tests.support.lively_models import params, plain, serve, texts
from tests.support.sizes import cases
from tests.support.tiny_models import engine, outputs

K = 4
PROMPTS = [np.random.default_rng(3).integers(5, 96, 30).tolist(), [7, 8], [9]]
TEXT = SHARED | {
    "model_type": "gemma4_text",
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "num_kv_shared_layers": 4,
    "final_logit_softcapping": 4.0,
}
SAME = ("head_dim", "global_head_dim", "sliding_window", "rope_parameters", "attention_k_eq_v")
SAME += ("num_global_key_value_heads",)


def torch_assistant(target: str, *, ordered: bool):
    """A random assistant for a golden target."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    own = {key: FAMILIES[target][1][key] for key in SAME if key in FAMILIES[target][1]}
    config = transformers.Gemma4AssistantConfig(
        text_config=TEXT | own,
        backbone_hidden_size=SHARED["hidden_size"],
        use_ordered_embeddings=ordered,
        num_centroids=8,
        centroid_intermediate_top_k=2,
    )
    config.text_config._attn_implementation = config._attn_implementation = "eager"
    model = transformers.Gemma4AssistantForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(4)
    randomise(model, generator)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.7)
            if name.endswith("token_ordering"):
                buffer.copy_(torch.randperm(len(buffer), generator=generator))
    return model


def proposed(target, assistant, tokens: list[int]) -> list[int]:
    """The K drafts after these tokens, by the class that transformers' generate uses."""
    import torch
    from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator as Generator

    with torch.no_grad():
        done = target(
            torch.tensor([tokens[:-1]]), use_cache=False, output_hidden_states=True, return_shared_kv_states=True
        )
    assistant.generation_config.num_assistant_tokens = K
    target.generation_config.max_length = 10_000
    generator = Generator(assistant, target.get_input_embeddings(), target.generation_config)
    ids = torch.tensor([tokens])
    found, _ = generator.get_candidates(ids, {}, done, is_first_iteration=False, n_last_matches=0)
    return found[0, len(tokens) :].tolist()


def folders(tmp_path: Path, name: str, *, ordered: bool):
    target, assistant = torch_model(name, 0), torch_assistant(name, ordered=ordered)
    save_model(target, name, tmp_path / "target")
    assistant.save_pretrained(tmp_path / "assistant")
    return target, assistant


@pytest.mark.oracle
@cases(
    ("name", "ordered", "devices"),
    [("gemma4", False, 1), ("gemma4", True, 1), ("gemma4_dense", True, 1), ("gemma4", True, 2)],
    rest=[("gemma4", False, 1), ("gemma4_dense", True, 1)],
)
def test_every_proposal_is_that_of_transformers(name, ordered, devices, tmp_path, monkeypatch):
    target, assistant = folders(tmp_path, name, ordered=ordered)
    pair = Pair.read(tmp_path / "target", tmp_path / "assistant")
    sizes = {"max_num_seqs": 4, "num_pages": 60, "page_size": 8, "max_model_len": 96, "prefill_chunk": 16}
    greedy = SamplingParams(temperature=0.0, max_tokens=25)
    plain = outputs(engine(pair.target, **sizes), PROMPTS, greedy)
    rounds = recording(monkeypatch)
    spec = {"model": "assistant", "num_speculative_tokens": K}
    one = engine(pair.target, spec, pair.head, tensor_parallel_size=devices, **sizes)
    assert outputs(one, PROMPTS, greedy) == plain
    assert len(rounds) > 30
    for done in rounds:
        assert done.drafts == proposed(target, assistant, done.tokens)[: len(done.drafts)]


@pytest.mark.parametrize("count", [None, 20])
def test_the_argmax_token_of_the_best_clusters_is_that_of_the_logits(count):
    """Also the first of equal logits, as of zeros, and among the first ids alone."""
    model = lively_heads.head("gemma4_assistant")
    assistant, backend = bind(model.config, model.params), Backend(here())
    x = np.random.default_rng(0).normal(size=(6, 2, model.config.width)).astype(np.float32)
    x[0] = 0
    x = jnp.asarray(x)
    expected = jnp.argmax(assistant.logits(x, backend)[..., :count], axis=-1)
    np.testing.assert_array_equal(assistant.argmax_token(x, backend, count), expected)


@cases(("depth", "nodes"), [(1, 3), (3, 6)], rest=[(3, 6)])
def test_trees_change_no_token(depth, nodes):
    spec = {"tree_width": 2, "tree_depth": depth, "tree_nodes": nodes}
    grown, sampling = lively_heads.engine("gemma4_assistant", nodes - 1, spec=spec), tuple(params((12,) * 5))
    served = serve(grown, lively_models.PROMPTS, sampling)
    assert texts(served) == plain(lively_models.PROMPTS, sampling)
    assert sum(r.metrics.num_draft_tokens for r in served) > 0


@pytest.mark.thorough
@pytest.mark.oracle
def test_what_is_refused(tmp_path):
    folders(tmp_path, "gemma4", ordered=True)
    path = tmp_path / "assistant" / "config.json"
    raw = json.loads(path.read_text())
    for change, words in (
        ({"backbone_hidden_size": 64}, "width 64"),
        ({"model_type": "gemma4_unified_assistant"}, "gemma4_unified_assistant"),
        ({"num_centroids": 7}, "2 of 7 clusters"),
        ({"text_config": raw["text_config"] | {"num_key_value_heads": 4}}, "4 key-value heads of 16"),
        (
            {"text_config": raw["text_config"] | {"sliding_window": 99}},
            "has a window of 99 tokens, the target .* keeps",
        ),
    ):
        path.write_text(json.dumps(raw | change))
        with pytest.raises(UserError, match=words):
            Pair.read(tmp_path / "target", tmp_path / "assistant")
    path.write_text(json.dumps(raw))
    tensors = load_file(path.with_name("model.safetensors"))
    save_file(tensors | {"odd": np.zeros(3)}, path.with_name("model.safetensors"))
    with pytest.raises(UserError, match="odd"):
        Pair.read(tmp_path / "target", tmp_path / "assistant")
