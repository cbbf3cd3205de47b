"""GGUF files give the same configuration and parameters as the Hugging Face folder they were made from."""

from __future__ import annotations

import dataclasses
import struct

import gguf
import numpy as np
import pytest

import checkpoints
from checkpoints.gguf import Weights, read_header
from tests.checkpoints.files import ARCHITECTURES, assert_same, fails, finish, load, tensors_of, write_gguf
from tests.golden.families import FOLDER

Q = gguf.GGMLQuantizationType


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_float32_files_equal_the_folder(family, tmp_path):
    theirs, expected = load(FOLDER / family)
    ours, params = load(write_gguf(tmp_path / "m.gguf", family))
    assert_same(params, expected, atol=0)
    for field in dataclasses.fields(ours):
        found, wanted = getattr(ours, field.name), getattr(theirs, field.name)
        if field.name == "norm_plus_one":
            continue  # GGUF files have added it already
        if field.name == "family":
            wanted = ARCHITECTURES[family]
        if field.name == "post_norm_eps" and family == "muse_glimmer":
            wanted = 1e-8  # the file does not say; it is that of the published model
        if field.name == "query_scale" and family == "gemma3":
            wanted = 16**-0.5  # the file does not say; real models use the head size
        if field.name == "eos_ids":
            wanted = (2, 5)  # eos and eot
        if field.name in ("rope", "local_rope") and wanted is not None:
            assert found.theta == pytest.approx(wanted.theta)
            assert found.factors == pytest.approx(wanted.factors, rel=1e-6)
            assert found.long_factors == pytest.approx(wanted.long_factors, rel=1e-6)
            assert found.scale == pytest.approx(wanted.scale)
            assert (found.rotated, found.context) == (wanted.rotated, wanted.context)
            assert found.query_growth == pytest.approx(wanted.query_growth)
        else:
            assert found == (pytest.approx(wanted, rel=1e-6) if isinstance(wanted, float) else wanted), field.name


@pytest.mark.parametrize(
    ("kind", "error"),
    [(Q.Q8_0, 0.01), (Q.Q5_0, 0.06), (Q.Q5_1, 0.06), (Q.Q4_0, 0.12), (Q.Q4_1, 0.12), (Q.F16, 1e-3), (Q.BF16, 1e-2)],
)
@pytest.mark.parametrize("devices", [1, 2])
def test_quantised_files_are_near_the_folder(kind, error, devices, tmp_path):
    _, expected = load(FOLDER / "qwen2")
    path = write_gguf(tmp_path / "m.gguf", "qwen2", kind)
    _, params = load(path, devices=devices)
    for name, array in expected.items():
        difference = np.linalg.norm(np.asarray(params[name]) - np.asarray(array)) / np.linalg.norm(array)
        assert difference < error, name
    assert read_header(path).tensors["token_embd.weight"].kind == kind


KINDS = [Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0, Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.IQ4_NL, Q.IQ4_XS, Q.BF16]
KINDS += [Q[name] for name in ("MXFP4", "NVFP4") if name in Q.__members__]  # gguf 0.17 does not know the second


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_slices_of_any_quantisation_are_cut_from_the_whole(kind, tmp_path):
    """Slices begin and end inside blocks; gguf's own reader and arithmetic are the reference."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    columns = max(2 * block, 64)
    packed = np.random.default_rng(0).integers(0, 256, (6, columns // block * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("x", packed, raw_dtype=kind)
    finish(writer)
    tensor = gguf.GGUFReader(tmp_path / "m.gguf").tensors[0]
    with np.errstate(all="ignore"):  # random bytes make infinite scales
        whole = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        weights = Weights(tmp_path / "m.gguf")
        assert weights.shapes() == {"x": (6, columns)}
        for rows, cols in (
            (slice(0, 6), slice(0, columns)),
            (slice(1, 3), slice(5, columns - 7)),
            (slice(2, 6), slice(0, 9)),
        ):
            np.testing.assert_array_equal(weights.read("x", (rows, cols)), whole[rows, cols])


def test_a_file_is_parsed_once_and_values_are_as_gguf_reads_them(tmp_path):
    path = write_gguf(
        tmp_path / "m.gguf", "gemma3", tokenizer={"chat_template": "{{ messages }}", "ggml.scores": [0.5, 1.5]}
    )
    header = read_header(path)
    assert read_header(path) is header
    reader = gguf.GGUFReader(path)
    fields = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert fields == header.meta
    assert {t.name: tuple(t.shape.tolist()[::-1]) for t in reader.tensors} == {
        k: t.shape for k, t in header.tensors.items()
    }
    assert {t.name: t.data_offset for t in reader.tensors} == {k: t.offset for k, t in header.tensors.items()}


def without(family, name):
    return {key: x for key, x in tensors_of(family).items() if key != name}


@pytest.mark.parametrize("name", ["blk.1.ffn_up.weight", "token_embd.weight"])
def test_a_missing_tensor_is_named(name, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "llama2", tensors=without("llama2", name))
    with fails(ValueError, str(path), name, "missing"):
        load(path)


def test_an_extra_tensor_is_named(tmp_path):
    tensors = tensors_of("llama2") | {"blk.0.ffn_gate_inp.weight": np.ones((2, 4), np.float32)}
    with fails(ValueError, "blk.0.ffn_gate_inp.weight", "not part"):
        load(write_gguf(tmp_path / "m.gguf", "llama2", tensors=tensors))


def test_a_wrong_shape_is_named(tmp_path):
    tensors = tensors_of("llama2") | {"blk.0.attn_k.weight": np.ones((64, 4), np.float32)}
    with fails(ValueError, "blk.0.attn_k.weight", "(64, 4)", "(64, 48)"):
        load(write_gguf(tmp_path / "m.gguf", "llama2", tensors=tensors))


@pytest.mark.parametrize("keep", [0.9, 0.01, 0.001])
def test_a_truncated_file_is_named(keep, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "llama2")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with fails(ValueError, str(path), "truncated"):
        load(path)


def test_files_of_another_kind_are_named(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGML" + bytes(100))
    with fails(ValueError, str(path), "not a GGUF"):
        load(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0) + bytes(100))
    with fails(ValueError, str(path), "version 1"):
        load(path)


def test_an_unknown_architecture_is_refused(tmp_path):
    with fails(NotImplementedError, "mamba"):
        load(write_gguf(tmp_path / "m.gguf", "llama2", architecture="mamba"))


@pytest.mark.parametrize(
    ("name", "scales", "kind", "words"),
    [
        ("blk.1.attn_q_norm.weight", [1.7] * 15 + [1.6], NotImplementedError, "must be the same"),
        ("blk.1.attn_q_norm.weight", [1.6] * 16, NotImplementedError, "must be the same"),
        ("blk.4.attn_k_norm.weight", [1.0] * 8, ValueError, "8 scales: 16 are needed"),
        ("blk.0.attn_k_norm.weight", None, ValueError, "0 scales: 16 are needed"),
    ],
)
def test_scales_of_queries_that_are_refused(name, scales, kind, words, tmp_path):
    """A Muse Glimmer's file holds the factor of queries as scales of norms, which the model does not have."""
    tensors = without("muse_glimmer", name) | ({} if scales is None else {name: np.float32(scales)})
    with fails(kind, name, words):
        load(write_gguf(tmp_path / "m.gguf", "muse_glimmer", tensors=tensors))


def test_a_cut_head_is_refused_and_so_is_an_unknown_quantisation(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", "qwen2", Q.Q8_0)
    with fails(ValueError, "cuts through a group of"):
        load(path, devices=4)

    def unknown(*_):
        raise NotImplementedError("Dequantization for Q9_9 is not yet implemented")

    monkeypatch.setattr(gguf.quants, "dequantize", unknown)
    with fails(NotImplementedError, str(path), "token_embd.weight", "Q9_9"):
        load(path)


def test_stop_ids_are_eos_eot_and_the_tokenizers(tmp_path):
    source = checkpoints.resolve(str(write_gguf(tmp_path / "m.gguf", "llama2")))

    class Tokenizer:
        eos_token_id = 2

    assert checkpoints.load_stop_ids(source, Tokenizer) == (2, 5)
