"""Key-value heads that are fewer than the devices: each group of query heads is split, with copies of its key and value
beside each part."""

from __future__ import annotations

import numpy as np
import pytest

import checkpoints
from jaxspec.common.errors import UserError
from jaxspec.models.decoder import abstract_params
from jaxspec.models.sharding import for_degree
from jaxspec.parallel.placement import make_placement
from tests.checkpoints.files import write_gguf
from tests.golden.families import FOLDER


def read(path, degree: int):
    source = checkpoints.resolve(str(path))
    config = for_degree(checkpoints.load_config(source), degree)
    return config, checkpoints.load_params(source, config, abstract_params(config, "float32", make_placement(degree)))


@pytest.mark.parametrize("family", ["llama3", "qwen2"])
@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_where_they_stand(tmp_path, family, kind):
    """By hand from what is read without copies; qwen2 has biases, llama's GGUF other orders of rows."""
    path = FOLDER / family if kind == "hf" else write_gguf(tmp_path / "model.gguf", family)
    own, expected = read(path, 1)
    degree = own.num_heads
    config, found = read(path, degree)
    layer = config.layers[0]
    assert layer.kv_copies == degree // own.num_kv_heads > 1
    assert (layer.num_kv_heads, layer.heads_per_group, for_degree(config, 1)) == (degree, 1, own)
    for name, array in expected.items():
        mine = np.asarray(array)
        if "qkv" in name:
            head = own.head_dim
            groups = mine.reshape(*mine.shape[:-1], own.num_kv_heads, -1, head)
            query, kv = groups[..., :-2, :], groups[..., -2:, :]
            parts = [
                np.concatenate([query[..., g, q : q + 1, :], kv[..., g, :, :]], axis=-2)
                for g in range(own.num_kv_heads)
                for q in range(own.layers[0].heads_per_group)
            ]
            mine = np.concatenate(parts, axis=-2).reshape(*mine.shape[:-1], -1)
        if "gate_up" not in name:  # whose blocks may be narrower
            np.testing.assert_array_equal(np.asarray(found[name]), mine, err_msg=name)
    assert {s.data.shape[-1] for s in found["layers.0.qkv"].addressable_shards} == {3 * own.head_dim}


def test_orbax_has_them_once(tmp_path):
    config, params = read(FOLDER / "llama3", 1)
    checkpoints.save(tmp_path / "model", params, config)
    with pytest.raises(UserError, match="use a tensor_parallel_size of at most 2, or the model's safetensors or GGUF"):
        read(tmp_path / "model", 4)


@pytest.mark.parametrize(("degree", "heads"), [(1, 2), (2, 2), (3, 2), (4, 4), (6, 2), (8, 2)])
def test_how_many_there_are(degree, heads):
    """Four query heads: a degree that divides neither leaves them as they are, to be refused."""
    config, _ = read(FOLDER / "llama3", 1)
    assert (config.num_heads, config.num_kv_heads) == (4, 2)
    assert for_degree(config, degree).num_kv_heads == heads
    assert for_degree(for_degree(config, degree), 1) == config
