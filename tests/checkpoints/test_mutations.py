"""Real files, damaged at random: reading one works, or ends in one short line, and soon."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import json
import shutil
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import checkpoints
from checkpoints import orbax, safetensors
from checkpoints.gguf import Weights, read_header
from jaxspec.models.limits import LIMITS
from tests.checkpoints.files import shard, write_gguf
from tests.checkpoints.test_gguf_tokenizer import byte_level_meta
from tests.golden.families import FAMILIES, FOLDER
from tests.support import tiny_models
from tests.support.model_folders import write_tokenizer
from tests.support.sizes import cases

SECONDS = 5.0  # of computing, for one file; it takes milliseconds
steady = functools.partial(settings, derandomize=True, suppress_health_check=list(HealthCheck))
number = itertools.count()

DEEP: list = []
for _ in range(200):
    DEEP = [DEEP]
ABSURD = [
    *(None, True, False, -1, 0, 1, 3, 7, 2.5, 1e-300, 1e39, 10**8, 2**31, 2**63, 2**64 - 1, 10**400),
    *(float("nan"), float("inf"), -float("inf"), "", "7", "../x", "x\0y", "line\nline", "x" * 10_000),
    *([], [1], ["x"], [None] * 3, {}, {"a": 1}, {"rope_type": "linear"}, DEEP),
]


@contextlib.contextmanager
def reads_or_says_why():
    begun = time.process_time()
    try:
        yield
    except (ValueError, NotImplementedError, OSError) as error:
        said = str(error)
    else:
        said = ""
    assert "\n" not in said
    assert len(said) < 600
    assert time.process_time() - begun < SECONDS


@pytest.fixture(scope="module")
def scratch():
    """A folder for files of ever new names: headers are kept by name."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder).resolve()


def sane(config: Any) -> None:
    """What was read despite the damage is a model that could be."""
    for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "width", "vocab_size", "norm_eps"):
        _, least, most = LIMITS[name]
        assert least <= getattr(config, name) <= most
    assert len(config.windows) == config.num_layers
    assert all(0 <= i < 2**31 for i in config.eos_ids)


@st.composite
def mutated_json(draw: Callable, raw: Any) -> str:
    """One to three values replaced, removed or added somewhere in the tree."""
    raw = json.loads(json.dumps(raw))
    for _ in range(draw(st.integers(1, 3))):
        at = raw
        while True:
            if not isinstance(at, dict | list) or not at:
                break
            key = draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
            if isinstance(at[key], dict | list) and at[key] and draw(st.booleans()):
                at = at[key]
                continue
            how = draw(st.sampled_from(["replace", "replace", "remove", "add"]))
            if how == "remove":
                del at[key]
            elif how == "add" and isinstance(at, list):
                at.append(copy.deepcopy(draw(st.sampled_from(ABSURD))))
            else:
                at[key] = copy.deepcopy(draw(st.sampled_from(ABSURD)))
            break
    return json.dumps(raw)


@st.composite
def mutated_bytes(draw: Callable, data: bytes, first: int) -> bytes:
    """Bytes flipped, overwritten with absurd numbers or taken out within the first so many; or the end cut off."""
    out = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        if not out:
            break
        at = draw(st.integers(0, min(len(out), first) - 1))
        how = draw(st.sampled_from(["flip", "number", "remove", "cut"]))
        if how == "flip":
            out[at] ^= draw(st.integers(1, 255))
        elif how == "number":
            value = struct.pack("<Q", draw(st.sampled_from([0, 1, 2**16, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1])))
            size = draw(st.sampled_from([4, 8]))
            out[at : at + size] = value[:size]
        elif how == "remove":
            del out[at : at + draw(st.integers(1, 16))]
        else:
            del out[at:]
    return bytes(out)


class Tokenizer:
    eos_token_id = 9


def read_folder(folder: Path) -> None:
    """All that is read of a folder before its weights."""
    source = checkpoints.resolve(str(folder))
    with reads_or_says_why():
        sane(checkpoints.load_config(source))
        assert all(0 <= i < 2**31 for i in checkpoints.load_stop_ids(source, Tokenizer))


@cases("family", FAMILIES, quick=["gemma3"])
def test_config_json(family, scratch):
    real = json.loads((FOLDER / family / "config.json").read_text())
    older = {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}, "sliding_window_pattern": 2}
    versions = st.sampled_from([real, real | older | {"rope_parameters": None, "layer_types": None}])

    @steady(max_examples=120)
    @given(versions.flatmap(mutated_json))
    def mutate(text):
        (scratch / "config.json").write_text(text)
        read_folder(scratch)

    mutate()
    (scratch / "config.json").unlink()


@cases("name", ["config.json", "generation_config.json", orbax.CONFIG_FILE], quick=["config.json"])
def test_json_byte_by_byte(name, scratch):
    folder = scratch / name.replace(".", "-")
    folder.mkdir()
    (folder / "config.json").write_bytes((FOLDER / "llama3" / "config.json").read_bytes())
    raw = {"eos_token_id": [2, 7], "temperature": 0.6} if name.startswith("generation") else tiny_models.BASE.to_json()
    real = (folder / name).read_bytes() if name == "config.json" else json.dumps(raw).encode()

    @steady(max_examples=150)
    @given(mutated_bytes(real, len(real)) | mutated_json(json.loads(real)).map(str.encode))
    def mutate(data):
        (folder / name).write_bytes(data)
        read_folder(folder)

    mutate()


def test_index_and_headers_of_shards(scratch):
    folder = shard(scratch / "shards", "llama2")
    real = json.loads((folder / safetensors.INDEX).read_text())
    name = "model-00002-of-00003.safetensors"
    tensors = (folder / name).read_bytes()
    first = 8 + struct.unpack_from("<Q", tensors)[0]

    def read():
        with reads_or_says_why():
            shards = safetensors.Shards(folder)
            for tensor, shape in shards.shapes().items():
                shards.read(tensor, tuple(slice(0, 2) for _ in shape))

    @steady(max_examples=150)
    @given(mutated_json(real))
    def mutate_index(text):
        (folder / safetensors.INDEX).write_text(text)
        read()

    @steady(max_examples=150)
    @given(mutated_bytes(tensors, first))
    def mutate_header(data):
        (folder / name).write_bytes(data)
        read()

    mutate_index()
    (folder / safetensors.INDEX).write_text(json.dumps(real))
    mutate_header()
    shutil.rmtree(folder)


@cases("family", ["llama3", "gemma3"], quick=["llama3"])
def test_gguf(family, scratch):
    meta = {key: value for key, value in byte_level_meta("qwen2").items() if key != "ggml.merges"}
    meta = {k: v[:40] if isinstance(v, list) else v for k, v in meta.items()} | {"ggml.merges": ["a b"]}
    path = write_gguf(scratch / f"{family}.gguf", family, gguf.GGMLQuantizationType.Q8_0, tokenizer=meta)
    data = path.read_bytes()
    first = min(tensor.offset for tensor in read_header(path).tensors.values())

    @steady(max_examples=350)
    @given(mutated_bytes(data, first))
    def mutate(changed):
        path = scratch / f"{next(number)}.gguf"
        path.write_bytes(changed)
        with reads_or_says_why():
            source = checkpoints.resolve(str(path))
            sane(checkpoints.load_config(source))
            weights = Weights(path)
            for tensor, shape in weights.shapes().items():
                weights.read(tensor, tuple(slice(0, 2) for _ in shape))
        with reads_or_says_why():
            checkpoints.load_tokenizer(checkpoints.resolve(str(path)))
        path.unlink()

    mutate()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_tokenizer_files(name, scratch):
    folder = scratch / f"{name}.d"
    folder.mkdir()
    write_tokenizer(folder)
    real = json.loads((folder / name).read_text())
    if "model" in real:  # fewer tokens: as much to damage, and quicker
        real["model"]["vocab"] = dict(list(real["model"]["vocab"].items())[:30])
        real["model"]["merges"] = []
    source = checkpoints.Source("hf", folder, "damaged")

    @steady(max_examples=100)
    @given(mutated_json(real).map(str.encode) | mutated_bytes(json.dumps(real).encode(), 2000))
    def mutate(data):
        (folder / name).write_bytes(data)
        with reads_or_says_why():
            checkpoints.load_tokenizer(source)

    mutate()
