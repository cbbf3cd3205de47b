"""Multimodal checkpoints: the text decoder is read as from a checkpoint of text only, and all else is ignored."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints import hf_config
from pallas_kernels import weights
from pallas_kernels.weights.scaled import Scaled
from tests.checkpoints.files import assert_same, fails, rewrite
from tests.golden.families import FAMILIES, FOLDER, SHARED
from tests.models.forward import run
from tests.support.loaded import load
from tests.support.published_models import FORMATS, publish, tensors_of

# Golden model -> model_type of the multimodal checkpoint, and for each prefix of its tensors the prefix of text only.
LAYOUTS = {
    "gemma4": ("gemma4", {"model.language_model.": "model."}),
    "gemma4_dense": ("gemma4", {"model.language_model.": "model."}),
    "ministral3": ("mistral3", {"language_model.model.": "model.", "language_model.lm_head.": "lm_head."}),
    "mistral": ("mistral3", {"model.language_model.": "model.", "lm_head.": "lm_head."}),
}
VISION = ("model.vision_tower.layers.0.weight", "vision_tower.ln_pre.weight", "multi_modal_projector.norm.weight")


def multimodal(folder: Path, text: Path, kind: str, prefixes: dict[str, str]) -> Path:
    """Write a multimodal checkpoint of type `kind` with the text decoder of the folder `text`."""
    folder.mkdir(exist_ok=True)
    raw = json.loads((text / "config.json").read_text())
    beside = {key: raw.pop(key) for key in ("quantization_config", "tie_word_embeddings") if key in raw}
    (folder / "config.json").write_text(
        json.dumps({"model_type": kind, "text_config": raw, "vision_config": {}, **beside})
    )
    named = {
        new + name.removeprefix(old): x
        for name, x in tensors_of(text).items()
        for new, old in prefixes.items()
        if name.startswith(old)
    }
    save_file(named | {name: np.zeros(3) for name in VISION}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_text_decoder_is_read(name, tmp_path):
    found, expected = load(multimodal(tmp_path, FOLDER / name, *LAYOUTS[name])), load(FOLDER / name)
    assert found.config == expected.config
    assert_same(found.params, expected.params)


def test_a_checkpoint_in_8_bits_keeps_its_form(tmp_path):
    """Modules that are not quantised may be named as the tensors are."""
    in_float32 = lambda tensors: {key: x.astype(np.float32) for key, x in tensors.items()}
    text = rewrite(tmp_path / "text", "ministral3", in_float32)
    new, dense = publish(text, tmp_path / "new", FORMATS["fp8 tensor"])
    plain, left = load_file(dense / "model.safetensors"), "model.layers.1.self_attn.q_proj.weight"
    tensors = {name: x for name, x in tensors_of(new).items() if not name.startswith(left.removesuffix("weight"))}
    save_file(tensors | {left: plain[left]}, new / "model.safetensors")
    ignored = ["model.vision_tower", "lm_head", "language_model." + left.removesuffix(".weight")]
    raw = json.loads((new / "config.json").read_text())
    raw["quantization_config"]["modules_to_not_convert"] = ignored
    (new / "config.json").write_text(json.dumps(raw))
    params = load(multimodal(tmp_path / "all", new, *LAYOUTS["ministral3"])).params
    assert {name for name, x in params.items() if isinstance(x, Scaled)} == {
        *("layers.0.qkv", "layers.0.out", "layers.0.gate_up", "layers.0.down"),
        *("layers.1.out", "layers.1.gate_up", "layers.1.down"),
    }
    for where, x in load(dense).params.items():
        np.testing.assert_allclose(weights.dense(params[where]), x, rtol=1e-6, err_msg=where)


@pytest.mark.parametrize("kind", ["gemma4", "mistral3"])
def test_a_checkpoint_without_text_is_refused(kind):
    with fails(ValueError, "text_config"):
        hf_config.text_part({"model_type": kind, "text_config": 3})


def test_a_checkpoint_whose_text_decoder_is_not_read_is_refused():
    with fails(NotImplementedError, "mistral4"):
        hf_config.check_supported(
            hf_config.text_part({"model_type": "mistral3", "text_config": {"model_type": "mistral4"}})
        )


@pytest.mark.thorough
@pytest.mark.oracle
@pytest.mark.parametrize("tied", [False, True])
def test_what_transformers_writes_of_mistral_3(tied, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = transformers.Ministral3Config(**SHARED | FAMILIES["ministral3"][1] | {"tie_word_embeddings": tied})
    vision = transformers.PixtralVisionConfig(**sizes, image_size=28, patch_size=14)
    whole = transformers.Mistral3Config(vision_config=vision, text_config=text, tie_word_embeddings=tied)
    torch.manual_seed(0)
    model = transformers.Mistral3ForConditionalGeneration(whole).float().eval()
    with torch.no_grad():
        for x in model.parameters():
            x.mul_(10)
    model.save_pretrained(tmp_path)
    tokens = np.random.default_rng(0).integers(3, SHARED["vocab_size"], (2, 32))
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens)).logits.numpy()
    found = load(tmp_path)
    assert found.config.tied == tied
    error = np.linalg.norm(run(found.config, found.params, tokens, (20, 4, 8)) - theirs) / np.linalg.norm(theirs)
    assert error < 1e-4
