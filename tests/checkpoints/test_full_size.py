"""Names and shapes of the tensors of published models, from transformers' models without memory (the meta device)."""

from __future__ import annotations

import types

import pytest

import checkpoints.safetensors
from checkpoints.assemble import check
from checkpoints.tensor_file import text_decoder_names
from jaxspec.models.decoder import parameters
from tests.golden.families import torch_class
from tests.support.sizes import cases

KEYS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
KEYS += ("num_key_value_heads", "max_position_embeddings", "tie_word_embeddings")


def longrope(count: int) -> dict:
    factors = {"short_factor": [1.0] * count, "long_factor": [2.0] * count}
    return {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096, **factors}


GRANITE = {"attention_multiplier": 0.0078125, "embedding_multiplier": 12.0, "residual_multiplier": 0.22}
# Model -> its model_type, its values of KEYS, and further options.
PUBLISHED = {
    "granite-3.3-8b": ("granite", (49159, 4096, 12800, 40, 32, 8, 131072, True), GRANITE | {"logits_scaling": 16.0}),
    "phi-3.5-mini": ("phi3", (32064, 3072, 8192, 32, 32, 32, 131072, False), {"rope_parameters": longrope(48)}),
    "phi-4": ("phi3", (100352, 5120, 17920, 40, 40, 10, 16384, False), {}),
    "phi-4-mini": (
        "phi3",
        (200064, 3072, 8192, 32, 24, 8, 131072, True),
        {"partial_rotary_factor": 0.75, "rope_parameters": longrope(48)},
    ),
    "smollm3-3b": ("smollm3", (128256, 2048, 11008, 36, 16, 4, 65536, True), {}),
    "olmo-2-1b": ("olmo2", (100352, 2048, 8192, 16, 16, 16, 4096, False), {}),
    "olmo-2-32b": ("olmo2", (100352, 5120, 27648, 64, 40, 8, 4096, False), {}),
    "olmo-3-7b": ("olmo3", (100278, 4096, 11008, 32, 32, 32, 65536, False), {}),
    "olmo-3-32b": ("olmo3", (100278, 5120, 27648, 64, 40, 8, 65536, False), {}),
    "ministral-3-3b": ("ministral3", (131072, 3072, 9216, 26, 32, 8, 262144, True), {}),
    "muse-glimmer-30b": ("muse_glimmer_text", (202048, 6656, 19968, 52, 32, 2, 131072, False), {}),
    "ministral-3-8b": ("ministral3", (131072, 4096, 14336, 34, 32, 8, 262144, False), {}),
}


@pytest.mark.oracle
@cases("name", PUBLISHED, quick=["phi-4-mini"])
def test_tensors_of_a_published_model(name):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    kind, sizes, options = PUBLISHED[name]
    theirs = transformers.CONFIG_MAPPING[kind](**dict(zip(KEYS, sizes, strict=True)), pad_token_id=None, **options)
    whole, kind = torch_class(theirs)
    with torch.device("meta"):
        model = kind(whole)
    stored = {tensor: tuple(x.shape) for tensor, x in model.state_dict().items()}
    shapes = {tensor: stored[name] for tensor, name in text_decoder_names(stored).items()}
    config = checkpoints.safetensors.parse(theirs.to_dict())
    file = types.SimpleNamespace(shapes=lambda: shapes, where=name, grouped=lambda tensor: False)
    check(config, parameters(config), checkpoints.safetensors.table_of(config, file), file)
