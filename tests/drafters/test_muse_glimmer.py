"""Muse Glimmer's assistant proposes in every round what the code of transformers proposes."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.common.errors import UserError
from jaxspec.models.backend import Backend
from jaxspec.models.decoder import bind
from jaxspec.options.sampling_params import SamplingParams
from pallas_kernels.device import here
from tests.drafters.rounds import Pair, recording
from tests.golden.families import SHARED, randomise, save_model, torch_model
from tests.support import lively_heads, lively_models
from tests.support.lively_models import params, plain, serve, texts
from tests.support.sizes import cases
from tests.support.tiny_models import outputs

BLOCK, WINDOW, NEW = 6, 14, 40
PROMPTS = [np.random.default_rng(3).integers(5, 96, 30).tolist(), [7, 8], [9, 4, 2]]
SIZES = {"max_num_seqs": 4, "num_pages": 60, "page_size": 8, "max_model_len": 128, "prefill_chunk": 16}


def torch_pair():
    """A random target that repeats a few tokens, and a random assistant, which is right now and then."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    target = torch_model("muse_glimmer", 0)
    same = ("hidden_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps")
    config = transformers.MuseGlimmerAssistantConfig(
        **{key: SHARED[key] for key in same},
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        intermediate_size=40,
        head_dim=16,
        sliding_window=WINDOW,
        block_size=BLOCK,
        mask_token_id=3,
        target_layer_ids=[2, 0, 3],
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
    )
    config._attn_implementation = "eager"
    assistant = transformers.MuseGlimmerAssistantModel(config).eval()
    generator = torch.Generator().manual_seed(4)
    randomise(assistant, generator)
    with torch.no_grad():
        rows = target.lm_head.weight
        rows[5:8] *= 8  # one of these six tokens is always the argmax token
        rows[8:11] = -rows[5:8]
    return target, assistant


def folders(tmp_path: Path):
    target, assistant = torch_pair()
    save_model(target, "muse_glimmer", tmp_path / "target")
    assistant.save_pretrained(tmp_path / "assistant")
    return target, assistant


def proposed(target, assistant, tokens: list[int]) -> list[int]:
    """The drafts after these tokens, by the class that transformers' generate uses."""
    import torch
    from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator as Generator

    with torch.no_grad():
        done = target(torch.tensor([tokens[:-1]]), use_cache=False, output_hidden_states=True)
        target.generation_config.max_length = 10_000
        ends = target.get_input_embeddings(), target.get_output_embeddings()
        generator = Generator(assistant, *ends, target.generation_config)
        inputs = {"position_ids": torch.arange(len(tokens))[None], "attention_mask": None}
        ids = torch.tensor([tokens])
        found, _ = generator.get_candidates(ids, inputs, done, is_first_iteration=False, n_last_matches=0)
    return found[0, len(tokens) :].tolist()


def generated(target, assistant, prompt: list[int]) -> list[int]:
    """The tokens that transformers generates with the assistant."""
    import torch

    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = torch.tensor([prompt])
    found = target.generate(ids, assistant_model=assistant, speculation_type="dflash", **options)
    return found[0, len(prompt) :].tolist()


@pytest.mark.oracle
@cases("devices", [1, 2], rest=[1])
def test_every_proposal_is_that_of_transformers(devices, tmp_path, monkeypatch):
    """Over more tokens than the window, and with rounds that accept some drafts."""
    target, assistant = folders(tmp_path)
    expected = [generated(target, assistant, prompt) for prompt in PROMPTS]
    pair = Pair.read(tmp_path / "target", tmp_path / "assistant")
    rounds = recording(monkeypatch)
    one = pair.engine(BLOCK - 1, tensor_parallel_size=devices, **SIZES)
    assert outputs(one, PROMPTS, SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)) == expected
    assert len(rounds) < 3 * NEW - 5  # some drafts are accepted
    for done in rounds:
        assert done.drafts == proposed(target, assistant, done.tokens)[: len(done.drafts)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "tree",
    [{"tree_width": 2, "tree_depth": 3, "tree_nodes": 6}, {"tree_choices": [[0], [1], [0, 0], [1, 0], [0, 0, 0]]}],
)
def test_trees_change_no_token(tree):
    """Grown, and fixed; of greedy and of seeded requests."""
    grown = lively_heads.engine("dflash", 5, "muse_glimmer", spec=tree)
    sampling = tuple(params((12,) * 4) + params(12, temperature=1.0, seed=3))
    served = serve(grown, lively_models.PROMPTS, sampling)
    assert texts(served) == plain(lively_models.PROMPTS, sampling, "muse_glimmer")
    assert sum(r.metrics.num_accepted_tokens for r in served) > 0


@pytest.mark.oracle
def test_q_is_of_the_targets_head_without_its_factor_and_bound(tmp_path):
    """transformers samples drafts from the head's own logits, too. The cap of 4 would flatten them."""
    torch = pytest.importorskip("torch")
    target, _ = folders(tmp_path)
    pair = Pair.read(tmp_path / "target", tmp_path / "assistant")
    hidden = np.random.default_rng(0).normal(size=(1, SHARED["hidden_size"])).astype(np.float32)
    drafter = pair.engine(BLOCK - 1, **SIZES).runner.drafters[BLOCK - 1]
    ours = bind(drafter.target_config, pair.target.params).logits(jnp.asarray(hidden), Backend(here()))
    theirs = target.lm_head(torch.from_numpy(hidden)).detach().numpy()
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.oracle
def test_what_is_refused(tmp_path):
    folders(tmp_path)
    path = tmp_path / "assistant" / "config.json"
    raw = json.loads(path.read_text())
    for change, words in (
        ({"layer_types": ["sliding_attention"] * 2}, "list of 3 kinds"),
        ({"layer_types": ["sliding_attention", "chunked_attention", "full_attention"]}, "chunked_attention"),
        ({"sliding_window": BLOCK - 2}, "shorter than a block of 6"),
        ({"sliding_window": None}, "sliding_window"),
        ({"use_sliding_window": False}, "use_sliding_window=False"),
        ({"hidden_size": 64}, "width"),
        ({"target_layer_ids": [1, 2, 9]}, "target_layer_ids"),
        ({"mask_token_id": None}, "mask_token_id"),
    ):
        path.write_text(json.dumps(raw | change))
        with pytest.raises(UserError, match=words):
            Pair.read(tmp_path / "target", tmp_path / "assistant")
