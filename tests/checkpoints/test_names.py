"""The tables cover every parameter."""

from __future__ import annotations

import pytest

from checkpoints.names import GGUF, HF, gguf_of, hf, hf_of
from jaxspec.models.decoder import parameters
from jaxspec.models.families import FAMILIES as OF_NAME
from tests.support.tiny_models import FAMILIES


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_names_of_every_parameter(config):
    known = parameters(config)
    for table in (hf_of(config), *[gguf_of(config)] * (OF_NAME[config.family].gguf is not None)):
        names = [table.sources(name) for name in known]
        for (name, parameter), parts in zip(known.items(), names, strict=True):
            assert tuple(parts) == (tuple(dict(parameter.parts)) or ("",)), name
        flat = [name for parts in names for name in set(parts.values())]
        assert len(flat) == len(set(flat))


def test_a_tensor_of_several_parts_names_them_in_the_order_of_its_rows():
    fused = "model.layers.1.self_attn.qkv_proj.weight"
    assert list(hf("phi3").sources("layers.1.qkv").items()) == [("q", fused), ("k", fused), ("v", fused)]


def test_layers_keep_their_number():
    assert HF.sources("layers.12.qkv_bias")["k"] == "model.layers.12.self_attn.k_proj.bias"
    assert GGUF.sources("layers.3.down") == {"": "blk.3.ffn_down.weight"}
    assert HF.sources("layers.0.post_mlp_norm") == {}
