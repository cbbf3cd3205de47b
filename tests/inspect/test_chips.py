"""Whether models fit on chips that are not here: bytes a device, by hand and by where arrays lie on real meshes."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from jaxspec.bench.presets import preset
from jaxspec.common.errors import UserError
from jaxspec.hardware.accelerators import ACCELERATORS
from jaxspec.hardware.chips import chips
from jaxspec.inspect.fit import Fit, Wanted, fit, page_bytes, remedies, weight_bytes
from jaxspec.inspect.fit import document as fit_document
from jaxspec.inspect.info import show_chips
from jaxspec.models.decoder import abstract_params
from jaxspec.models.sharding import for_degree
from jaxspec.options.engine import EngineConfig
from jaxspec.parallel.placement import make_placement
from tests.support.commands import answers_no, refused, run
from tests.support.model_folders import write_model
from tests.support.tpu_topology import tpu_compile

TINY = preset("tiny")  # 512 ids, 2 layers of width 64, MLP 128, 4 query and 2 key-value heads of 16, a head of its own
TINY_DRAFT = preset("tiny-draft")  # 1 layer of width 32, MLP 64, 2 query heads and 1 key-value head of 16, tied
EIGHT = dataclasses.replace(TINY, num_heads=16, num_kv_heads=8)
ISSUE = ("qwen3-32b", "--draft", "qwen3-0.6b", "--chips", "v5e:2x4")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("v5e:2x4", "v5e:8"),
        ("v5e:8", "v5e:8"),
        ("v4:2x2x4", "v4:16"),
        ("v6e", "v6e:1"),
        ("h200:4", "H200:4"),
        ("TPU v5p:4", "v5p:4"),
    ],
)
def test_chips_by_name(text, name):
    assert chips(text).name == name
    assert chips(name) == chips(text)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("v9:4", f"--chips 'v9' is unknown: use one of {', '.join(ACCELERATORS)}"),
        ("", f"--chips '' is unknown: use one of {', '.join(ACCELERATORS)}"),
        ("v5e:2y4", "--chips 'v5e:2y4': '2y4' is not a number of v5e devices: give it as v5e:4 or v5e:2x2"),
        ("v5e:", "--chips 'v5e:': '' is not a number of v5e devices: give it as v5e:4 or v5e:2x2"),
        ("v5e:2x", "--chips 'v5e:2x': '2x' is not a number of v5e devices: give it as v5e:4 or v5e:2x2"),
        ("v5e:-1", "--chips 'v5e:-1': '-1' is not a number of v5e devices: give it as v5e:4 or v5e:2x2"),
        ("v5e:²", "--chips 'v5e:²': '²' is not a number of v5e devices: give it as v5e:4 or v5e:2x2"),
        ("v5e:2x2x2", "--chips 'v5e:2x2x2': '2x2x2' is not a number of v5e devices: give it as v5e:4 or v5e:2x2"),
        ("v4:1x1x1x4", "--chips 'v4:1x1x1x4': '1x1x1x4' is not a number of v4 devices: give it as v4:4 or v4:2x2x2"),
        ("h200:2x2", "--chips 'h200:2x2': '2x2' is not a number of H200 devices: give it as H200:4"),
        ("v5e:0x4", "--chips 'v5e:0x4' are 0 devices, which must lie in 1..10000: give it as v5e:4 or v5e:2x2"),
        ("l4:10001", "--chips 'l4:10001' are 10001 devices, which must lie in 1..10000: give it as L4:4"),
    ],
)
def test_what_is_no_such_name_is_told_in_a_line(text, line):
    with pytest.raises(UserError) as wrong:
        chips(text)
    assert str(wrong.value) == line


def test_a_long_number_is_not_read():
    with pytest.raises(UserError, match="is not a number of v5e devices"):
        chips("v5e:" + "9" * 5000)


def test_by_hand():
    """On four v5e, the target cut over two, the draft by one."""
    found = fit(Wanted(TINY, TINY_DRAFT, chips("v5e:2x2"), 2, max_num_seqs=4, max_model_len=1000))
    # Matrices in bfloat16, norms in float32. Cut: table and head by ids, qkv, out, gate_up, down. Whole: norms, which
    # are two a layer and one at the end of 64, and those of query and key of 16.
    matrices = 2 * 512 * 64 + 2 * (64 * (4 + 2 * 2) * 16 + 4 * 16 * 64 + 64 * 2 * 128 + 128 * 64)
    assert found.target_weights == 2 * matrices // 2 + 4 * (2 * (2 * 64 + 2 * 16) + 64)
    drafts = 512 * 32 + 32 * (2 + 2 * 1) * 16 + 2 * 16 * 32 + 32 * 2 * 64 + 64 * 32
    assert found.draft_weights == 2 * drafts + 4 * (2 * 32 + 2 * 16 + 32)
    # 32 tokens; a key and a value of one head a device, 128 lanes each.
    assert found.target_page == 2 * 32 * 2 * 128 * 2
    assert found.draft_page == 1 * 32 * 2 * 128 * 2
    assert found.features_page == 0
    logits = 6 * 4 * (4 + 1) * 512 * 4
    grammars = 64 << 20
    assert found.temporary == logits + 2048 * (4 * 128 + 8 * 64 + 2 * (4 + 2 * 2) * 16) * 4 + grammars
    assert found.memory == int(15.75 * 2**30 * 0.9)
    free = found.memory - found.temporary - found.target_weights - found.draft_weights
    assert (found.free, found.pages) == (free, free // (2 * 32 * 2 * 128 * 2 + 32 * 2 * 128 * 2))
    assert found.tokens == 32 * found.pages
    assert found.longest_context == 2048  # the model's own
    assert found.rows == found.pages // 32  # 1,000 tokens and four drafts are 32 pages
    assert found.problems == ()


@pytest.mark.parametrize(("config", "degree"), [(TINY, 2), (TINY_DRAFT, 1), (EIGHT, 2), (EIGHT, 4), (EIGHT, 8)])
@pytest.mark.parametrize("vocab_size", [512, 509])  # the second is not cut
def test_weights_lie_as_on_devices_that_are_here(config, degree, vocab_size):
    config = dataclasses.replace(config, vocab_size=vocab_size)
    placement = make_placement(degree)
    each = dict.fromkeys(placement.mesh.devices.flat, 0)
    for p in abstract_params(config, "bfloat16", placement).values():
        for device, index in p.sharding.devices_indices_map(p.shape).items():
            size = p.dtype.itemsize
            for whole, part in zip(p.shape, index, strict=True):
                size *= len(range(*part.indices(whole)))
            each[device] += size
    assert set(each.values()) == {weight_bytes(config, "bfloat16", degree)}


def test_key_value_heads_that_are_fewer_are_copied():
    """And no device holds less than one; a TPU stores 16 keys and values for the 12 of six heads."""
    by = lambda config, degree, platform: page_bytes(for_degree(config, degree), "bfloat16", degree, platform)
    size = {"gpu": 16 * 2 * 2 * 16 * 2, "tpu": 32 * 2 * 2 * 128 * 2}  # tokens, layers, key and value, size, bytes
    for platform, one in size.items():
        assert [by(EIGHT, n, platform) for n in (2, 4, 8, 16)] == [4 * one, 2 * one, one, one]
    six = dataclasses.replace(TINY, num_heads=6, num_kv_heads=6)
    assert by(six, 1, "tpu") == 8 * size["tpu"]
    copied = fit(Wanted(TINY, None, chips("v5e:4")))
    assert (copied.target_page, copied.problems) == (size["tpu"], ())


def test_a_head_keeps_features():
    found = fit(Wanted(EIGHT, preset("eagle3", EIGHT), chips("v5e:4"), draft_tensor_parallel_size=4))
    assert preset("eagle3", EIGHT).spec.features_width == 64
    assert found.features_page == 32 * 128 * 2  # a quarter of them, padded to whole lanes


WINDOWS = dataclasses.replace(TINY, windows=(100, None), max_model_len=1 << 20)
LONG = {"max_model_len": 1 << 20, "dtype": "float32"}


def test_layers_with_a_window_by_hand(capsys):
    """Rows, each with a window, 64 rounds of a token and two pages; and the 2,048 tokens of a pass."""
    asked = Wanted(WINDOWS, None, chips("L4"), max_num_seqs=32, **LONG)
    plain = dataclasses.replace(WINDOWS, windows=(None, None))
    alike, found = fit(dataclasses.replace(asked, target=plain)), fit(asked)
    page = 16 * 2 * 2 * 16 * 4  # tokens, key and value, heads, size, bytes; of each of the two layers
    assert (found.target_page, found.window_page) == (2 * page, page)
    assert found.window_pages == (32 + 8) * (-(-(100 + 1 + 64) // 16) + 2) + 2048 // 16
    assert (alike.pages, alike.window_pages, alike.window_page) == (found.free // (2 * page), None, 0)
    assert found.pages == (found.free - found.window_pages * page) // page > 1.9 * alike.pages
    document = fit_document(asked)
    show_chips({"model": "a", "draft": None} | document)
    saved = (found.pages - found.window_pages) * page / 1e9
    assert f"{found.window_pages} pages, which saves {saved:.2f} GB a device" in " ".join(
        capsys.readouterr().out.split()
    )


def test_the_memory_that_a_row_needs_with_a_window_by_hand():
    """With so much memory a row fits. Of the layer with a window only what is needed counts, whatever the memory."""
    longest = 1 << 27
    long = dataclasses.replace(WINDOWS, max_model_len=longest)
    asked = Wanted(long, None, chips("L4"), max_num_seqs=32, max_model_len=longest, dtype="float32")

    def given(memory: int) -> Fit:
        """The device's memory is such that the engine may use this much."""
        kind = asked.chips.kind
        share = kind.programs_memory / kind.memory * EngineConfig.memory_utilization
        kind = dataclasses.replace(kind, memory=math.ceil(memory / share), available=None)
        return fit(dataclasses.replace(asked, chips=dataclasses.replace(asked.chips, kind=kind)))

    found = fit(asked)
    page, needed = 16 * 2 * 2 * 16 * 4, (32 + 8) * (-(-(100 + 1 + 64) // 16) + 2) + 2048 // 16
    need = found.memory - found.free + longest // 16 * page + needed * page
    few = given(found.memory - found.free + 5 * page)
    assert [each.window_pages is None for each in (found, few)] == [False, True]
    for each in (found, few):
        assert each.problems[0].startswith(f"{need / 1e9:.2f} GB a device are needed for a row of {longest} tokens")
    assert [given(need + more).rows for more in (-page, page)] == [0, 1]


def test_no_more_rows_than_have_window_pages():
    """The pool of layers with a window has room for max_num_seqs rows."""
    wide = dataclasses.replace(WINDOWS, num_kv_heads=4, head_dim=256)
    found = fit(Wanted(wide, None, chips("T4"), max_num_seqs=16, max_model_len=40_000, dtype="float32"))
    assert found.window_pages is not None
    assert found.rows == 16 < found.pages // (40_000 // 16)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3 does not divide num_heads=16: use one of 1, 2, 4, 8"),
        ({"tensor_parallel_size": 16}, "tensor_parallel_size=16 needs that many devices, v5e:8 has 8: lower it"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0 is below 1"),
        (
            {"tensor_parallel_size": 4, "draft_tensor_parallel_size": 8},
            "draft_tensor_parallel_size=8 does not divide tensor_parallel_size=4: use one of 1, 2, 4",
        ),
        ({"draft_tensor_parallel_size": 0}, "draft_tensor_parallel_size=0 does not divide tensor_parallel_size=8: use"),
        (
            {"draft_tensor_parallel_size": 4},
            "draft_tensor_parallel_size=4 does not divide num_heads=2: use one of 1, 2",
        ),
        ({"max_model_len": 4096}, "max_model_len=4096 exceeds the model's own 2048: lower it"),
        ({"dtype": "int3"}, "dtype='int3' is unknown"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens=0 is below 1"),
    ],
)
def test_what_no_engine_is_made_with_is_refused(options, line):
    with pytest.raises(UserError) as wrong:
        fit(Wanted(EIGHT, TINY_DRAFT, chips("v5e:2x4"), **options))
    assert str(wrong.value).startswith(line)


BIG = preset("qwen3-8b")


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        (Wanted(BIG, None, chips("v5e"), max_model_len=64), ["--quantization int8", "--chips v5e:2", "--chips v6e:1"]),
        (
            Wanted(BIG, None, chips("A100-40GB"), dtype="float32", max_model_len=64),
            ["--dtype bfloat16", "--quantization int8", "--chips A100-40GB:2", "--chips H100:1"],
        ),
        (Wanted(BIG, None, chips("v5e:4"), 1), ["--tensor-parallel-size 2", "--chips v5e:8", "--chips v6e:4"]),
        (
            Wanted(preset("qwen3-32b"), None, chips("v5e:8"), dtype="float32"),
            ["--dtype bfloat16", "--quantization int8", "--chips v5e:16", "--chips v6e:8"],
        ),
    ],
)
def test_remedies_work(asked, wanted):
    """The least of each kind, each by itself."""
    found = fit(asked)
    assert found.problems
    assert remedies(asked, found) == wanted


def test_the_longest_context_is_the_longest():
    asked = Wanted(preset("qwen3-32b"), preset("qwen3-0.6b"), chips("v5e:8"))
    longest = fit(asked).longest_context
    assert 0 < longest < asked.longest
    assert f"--max-model-len {longest}" in remedies(asked, fit(asked))
    assert fit(dataclasses.replace(asked, max_model_len=longest)).rows == 1
    assert fit(dataclasses.replace(asked, max_model_len=longest + 1)).rows == 0


def test_the_command(capsys):
    document = json.loads(run(capsys, "info", *ISSUE, "--draft-tensor-parallel-size", "8", "--json")[0])
    assert (document["model"], document["draft"]) == ISSUE[0:3:2]
    assert document["chips"]["name"] == "v5e:8"
    assert (document["tensor_parallel_size"], document["draft_tensor_parallel_size"]) == (8, 8)
    assert document["fit"]["target_page"] == 64 * 32 * 2 * 128 * 2
    assert (document["fits"], document["fit"]["rows"] > 0, document["would_fit"]) == (True, True, [])


@pytest.mark.parametrize("name", ["v5e", "H100", "T4"])
def test_one_chip_is_a_device(capsys, tmp_path, name):
    """Of checkpoints, --chips and --device say the same of one."""
    model, draft = (str(write_model(tmp_path / each, layers=n)) for each, n in (("target", 2), ("draft", 1)))
    ask = lambda *options: json.loads(run(capsys, "info", model, "--draft", draft, *options, "--json")[0])
    several, one = ask("--chips", name)["fit"], ask("--device", name)
    assert several["dtype"] == one["model"]["dtype"]
    assert several["target_weights"] == one["model"]["weight_bytes"] > one["draft"]["weight_bytes"]
    assert several["draft_weights"] == one["draft"]["weight_bytes"]
    for here, there in {"memory": "memory_bytes", "temporary": "temporary_bytes", "tokens": "tokens_that_fit"}.items():
        assert several[here] == one[there] > 0


def test_the_table_is_narrow(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    out, line = answers_no(capsys, "info", *ISSUE)
    assert line.startswith("jaxspec: qwen3-32b and qwen3-0.6b on v5e:8: 17.13 GB a device are needed for a row")
    assert max(map(len, out.splitlines())) <= 80
    text = " ".join(out.replace("│", " ").split())
    assert "8.19 GB of weights, sharded over 8" in text
    assert "no: 17.13 GB a device are needed for a row of 40960 tokens, 15.22 GB are there; --max-model-len" in text
    assert "--chips v6e:8 would" in text
    assert "fits yes" in " ".join(run(capsys, "info", *ISSUE[:3], "--chips", "H200:4")[0].replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--tensor-parallel-size", "8"], "--tensor-parallel-size 8 needs --chips: give both, or neither"),
        (
            ["--chips", "v5e", "--device", "v5e"],
            "--device 'v5e' and --chips 'v5e' exclude each other",
        ),
        (["--chips", "v5e:2y4"], "--chips 'v5e:2y4': '2y4' is not a number of v5e devices"),
        (["--chips", "v5e", "--draft", "./none"], "./none does not exist"),
    ],
)
def test_the_command_refuses(capsys, arguments, line):
    assert refused(capsys, "info", "tiny", *arguments).startswith(f"jaxspec: {line}")


def test_no_device_is_looked_for():
    code = (
        "from jaxspec.inspect import info; d = info.on_chips('qwen3-32b', 'qwen3-0.6b', 'v5e:2x4'); "
        "from jax._src.xla_bridge import backends_are_initialized; print(backends_are_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


@pytest.mark.parametrize("name", ["v5e:1x1", "v6e:1x1"])
def test_the_memory_of_a_chip_is_what_its_compiler_says(name):
    """The compiler refuses a program that is too large."""
    size = jax.ShapeDtypeStruct((1 << 18, 1 << 18), jnp.bfloat16)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"exceeds available HBM \([\d.]+G\)") as refusal:
        tpu_compile(name, lambda x: (x + 1) @ x, size)
    available = float(re.search(r"available HBM \(([\d.]+)G", str(refusal.value))[1])
    assert chips(name).kind.programs_memory == int(available * 2**30)
