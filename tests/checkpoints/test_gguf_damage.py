"""Damaged and absurd GGUF files: one line that says which."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

import checkpoints
from checkpoints.gguf import read_header
from tests.checkpoints.files import Value, fails, raw_gguf, write_gguf
from tests.checkpoints.test_gguf_tokenizer import byte_level_meta, sentence_piece_meta

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def header(tmp_path):
    """write(changes to a real header's metadata, its tensors or both) -> path."""
    real = read_header(write_gguf(tmp_path / "real.gguf", "llama3"))
    tensors = {name: (name, t.shape[::-1], int(t.kind), 32 * i) for i, (name, t) in enumerate(real.tensors.items())}

    def write(meta=None, tensor=None, more=(), **options):
        named = {**real.meta, **(meta or {})}
        first = {"token_embd.weight": tensor} if tensor else {}
        return raw_gguf(
            tmp_path / "m.gguf", [*named.items(), *more], list((tensors | first).values()), size=1 << 20, **options
        )

    return write


def read(path: Path):
    return checkpoints.load_config(checkpoints.resolve(str(path)))


def test_a_real_header_passes(header):
    assert read(header()).num_layers == read(header({"split.count": 1})).num_layers == 2


def nested(depth: int) -> Value:
    return Value(9, struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 4, 0))


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ({"llama.attention.head_count": 0}, ("head_count=0",)),
        ({"llama.attention.head_count": -2}, ("head_count=-2",)),
        ({"llama.attention.head_count": "4"}, ("head_count='4'",)),
        ({"llama.attention.head_count": 4.5}, ("head_count=4.5",)),
        ({"llama.attention.head_count": True}, ("head_count=True",)),
        ({"llama.attention.head_count_kv": 0}, ("head_count_kv=0",)),
        ({"llama.attention.key_length": 0}, ("key_length=0",)),
        ({"llama.block_count": 0}, ("block_count=0",)),
        ({"llama.block_count": 10**8}, ("block_count=100000000",)),
        ({"llama.block_count": 2**62}, ("block_count",)),
        ({"llama.attention.layer_norm_rms_epsilon": NAN}, ("epsilon=nan",)),
        ({"llama.rope.freq_base": INF}, ("freq_base=inf",)),
        ({"llama.rope.freq_base": "x"}, ("freq_base='x'",)),
        ({"tokenizer.ggml.eos_token_id": 2**31}, ("eos", "2147483648")),
        ({"tokenizer.ggml.eos_token_id": "2"}, ("eos", "'2'")),
        ({"general.alignment": 0}, ("alignment=0",)),
        ({"general.alignment": 33}, ("alignment=33",)),
        ({"general.alignment": 2**31}, ("alignment=2147483648",)),
        ({"general.alignment": "32"}, ("alignment='32'",)),
        ({"x": nested(4)}, ("deep",)),
        ({"x": nested(20_000)}, ("deep",)),
        ({"x": Value(99, b"")}, ("type 99",)),
        ({"x": Value(9, struct.pack("<IQ", 99, 3))}, ("type 99",)),
        ({"x": Value(9, struct.pack("<IQ", 0, 2**63))}, ("more than",)),
        ({"x": Value(9, struct.pack("<IQ", 8, 2**24))}, ("end of the file",)),
        ({"x": Value(9, struct.pack("<IQ", 12, 2**24))}, ("header",)),
        ({"x": Value(8, struct.pack("<Q", 2**64 - 1))}, ("end of the file",)),
    ],
)
def test_gguf_metadata_that_is_absurd(meta, words, header):
    path = header(meta)
    with fails(ValueError, str(path), "again", *words):
        read(path)


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ({"llama.attention.head_count": [4, 4]}, ("head_count", "each layer")),
        ({"llama.feed_forward_length": [80, 80]}, ("feed_forward_length", "each layer")),
        ({"llama.rope.dimension_count": 8}, ("rope.dimension_count=8", "partial")),
        ({"llama.attention.value_length": 8}, ("value_length=8",)),
        ({"llama.expert_count": 8}, ("expert_count=8",)),
        ({"llama.attention.causal": False}, ("attention.causal=False",)),
        ({"llama.final_logit_softcapping": 30.0}, ("final_logit_softcapping=30.0",)),
        ({"llama.rope.scale_linear": 4.0}, ("rope.scale_linear=4.0",)),
        ({"llama.rope.scaling.type": ["linear"]}, ("rope scaling ['linear']",)),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}, ("beside rope_freqs",)),
        ({"general.architecture": 5}, ("architecture 5",)),
        ({"split.count": 3}, ("split into 3 files", "llama-gguf-split --merge")),
    ],
)
def test_gguf_metadata_that_would_be_ignored(meta, words, header):
    with fails(NotImplementedError, *words):
        read(header(meta))


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (("token_embd.weight", (), 0, 0), ("0 dimensions",)),
        (("token_embd.weight", (1,) * 5, 0, 0), ("5 dimensions",)),
        (("token_embd.weight", (48, 0), 0, 0), ("(0, 48)",)),
        (("token_embd.weight", (2**32, 2**32), 0, 0), ("truncated",)),
        (("token_embd.weight", (2**63, 2**63, 2**63, 2**63), 0, 0), ("truncated",)),
        (("token_embd.weight", (48, 96), 0, 2**64 - 1), ("truncated",)),
        (("token_embd.weight", (48, 96), 99, 0), ("type 99",)),
        (("token_embd.weight", (47, 96), 8, 0), ("whole blocks",)),
        (("output_norm.weight", (48,), 0, 0), ("twice",)),
        (("rope_freqs.weight2", (48,), 0, 0), ("token_embd.weight is missing",)),
    ],
)
def test_gguf_tensors_that_cannot_be(tensor, words, header):
    path = header(tensor=tensor)
    with fails(ValueError, str(path), *words):
        read(path)


def test_gguf_headers_that_promise_too_much(header, tmp_path):
    with fails(ValueError, "twice"):
        read(header(more=[("llama.block_count", 2)]))
    for counts in ((2**64 - 1, 0), (0, 2**64 - 1), (2**40, 2**40)):
        path = header(counts=counts)
        with fails(ValueError, str(path)):
            read(path)
    for size in (0, 3, 4, 8, 23, 24):
        (tmp_path / f"{size}.gguf").write_bytes(path.read_bytes()[:size])
        with fails(ValueError, f"{size}.gguf"):
            read(tmp_path / f"{size}.gguf")


def test_factors_of_another_head_size(header, tmp_path):
    with fails(ValueError, "8 factors of rope for head_dim 24"):
        read(header({"llama.attention.key_length": 24}))


# Tokenizers


@pytest.mark.parametrize(
    ("meta", "more", "words"),
    [
        (byte_level_meta, {"ggml.unknown_token_id": 10**6}, ("unknown_token_id=1000000",)),
        (byte_level_meta, {"ggml.unknown_token_id": "x"}, ("unknown_token_id='x'",)),
        (byte_level_meta, {"ggml.tokens": [1, 2, 3, 4]}, ("ggml.tokens", "str")),
        (byte_level_meta, {"ggml.tokens": "abc"}, ("ggml.tokens='abc'", "list")),
        (byte_level_meta, {"ggml.merges": ["no such"]}, ()),
        (byte_level_meta, {"ggml.pre": 5}, ("ggml.pre=5",)),
        (byte_level_meta, {"ggml.add_bos_token": "yes"}, ("add_bos_token='yes'",)),
        (byte_level_meta, {"chat_template": 5}, ("chat_template=5",)),
        (sentence_piece_meta, {"ggml.scores": [0.0]}, ("1 scores",)),
        (sentence_piece_meta, {"ggml.token_type": ["x"]}, ("token_type",)),
    ],
)
def test_gguf_tokenizers_that_cannot_be(meta, more, words, tmp_path):
    base = meta("qwen2") if meta is byte_level_meta else meta()
    path = write_gguf(tmp_path / "m.gguf", "llama2", tokenizer=base | more)
    with fails(ValueError, str(path), *words):
        checkpoints.load_tokenizer(checkpoints.resolve(str(path)))


def test_a_piece_of_a_megabyte(tmp_path):
    """Every way to cut it in two would be tried."""
    meta = sentence_piece_meta()
    meta["ggml.tokens"][-1] = "a" * 1_000_000
    path = write_gguf(tmp_path / "m.gguf", "llama2", tokenizer=meta)
    with fails(ValueError, "1000000 characters"):
        checkpoints.load_tokenizer(checkpoints.resolve(str(path)))
