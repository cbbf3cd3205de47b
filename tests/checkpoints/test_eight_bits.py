"""Weights of 8 bits: what is read back is what was rounded, in all formats and on any number of devices."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import checkpoints
from checkpoints import eight_bits, head_folders
from checkpoints.safetensors import Shards
from jaxspec import LLM, SamplingParams
from jaxspec.common.errors import UserError
from jaxspec.loading.convert import convert
from jaxspec.parallel.placement import make_placement
from tests.checkpoints.files import assert_same, fails
from tests.drafters.references import eagle3, medusa
from tests.drafters.references.common import Shape
from tests.support.loaded import load, load_draft
from tests.support.model_folders import write_model
from tests.support.sizes import cases

DTYPE = jnp.dtype("float32")
TARGET = Shape(vocab_size=320, width=64, kv_heads=4, head_dim=8, mlp=48, layers=6)


def expected(x: np.ndarray) -> np.ndarray:
    """In float64, a group after the other, along the last axis."""
    found = np.array(x, np.float64, order="C")
    for group in found.reshape(-1, 32):
        step = 2.0**-126
        while np.abs(group).max() > 127 * step:
            step *= 2
        group[:] = np.rint(group / step) * step
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A target, a draft model and heads; some of their rows are no whole groups."""
    root = tmp_path_factory.mktemp("eight")
    write_model(root / "target", width=64, kv_heads=4, layers=6)
    write_model(root / "draft", width=64, kv_heads=4, layers=1, seed=3)
    eagle3.write(root / "eagle3", seed=1, target=TARGET, draft_vocab_size=96)
    medusa.write(root / "medusa", seed=1, target=TARGET)
    return root


def draft(folder: Path, name: str | Path, devices: int = 1):
    """Its parameters, beside the target's on so many devices."""
    placement = make_placement(devices)
    return load_draft(folder / name, folder / "target", dtype=DTYPE, placement=placement).params


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30, 2.0**-133])
def test_the_nearest_of_what_eight_bits_hold(scale):
    x = np.random.default_rng(0).standard_normal((5, 96)) * scale
    x[0, :32], x[1, 32:64], x[2, 0] = 0, 127 * scale, -127.5 * scale
    x = x.astype(np.float32)
    whole, power = eight_bits.quantised(x)
    assert (whole.dtype, whole.shape, power.shape) == (np.int8, (5, 96), (5, 3))
    found = eight_bits.dequantised(whole, np.repeat(power, 32, axis=-1))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found.astype(np.float64), expected(x))
    for axis, turned in ((-1, x), (0, x.T)):
        again = eight_bits.rounded(turned, axis)
        np.testing.assert_array_equal(again, found.astype(np.float32) if axis else found.astype(np.float32).T)


@pytest.mark.parametrize("name", ["eagle3", "medusa"])
def test_a_head(folder, name, tmp_path):
    """On several devices the same numbers, wherever these cut the groups."""
    convert(str(folder / name), tmp_path / "new", weight_bits=8)
    stored, after = Shards(folder / name), Shards(tmp_path / "new")
    before = {key: head_folders.whole(stored, key) for key in stored.shapes()}
    assert after.shapes() == {key: x.shape for key, x in before.items()}
    narrow = [key for key, x in before.items() if eight_bits.fits(x.shape)]
    assert narrow
    for key, x in before.items():
        found = head_folders.whole(after, key)
        np.testing.assert_array_equal(found.astype(np.float64), expected(x) if key in narrow else x)
        assert after.dtype(key) == "BF16" if key in narrow else found.dtype == x.dtype
    assert_same(draft(folder, tmp_path / "new", 4), draft(folder, tmp_path / "new"))
    sizes = {name: x.nbytes for name, x in load_file(tmp_path / "new" / "model.safetensors").items()}
    for key in narrow:
        assert sizes[key] + sizes[key + eight_bits.SCALE] == before[key].size * (1 + 2 / 32)


def test_any_part_of_it(tmp_path):
    """Parts that begin and end within a group, and groups of a whole row."""
    rng = np.random.default_rng(1)
    whole = rng.integers(-127, 128, (6, 96)).astype(np.int8)
    scales = {"a": (2.0 ** rng.integers(-9, 3, (6, 3))), "b": (2.0 ** rng.integers(-9, 3, (6, 1)))}
    scales = {name: x.astype(jnp.bfloat16) for name, x in scales.items()}
    beside = {f"{name}_scale": x for name, x in scales.items()}
    save_file(dict.fromkeys(scales, whole) | beside, tmp_path / "x.safetensors")
    shards = Shards(tmp_path)
    for name, scale in scales.items():
        full = (whole * np.repeat(scale.astype(np.float64), 96 // scale.shape[1], axis=1)).astype(jnp.bfloat16)
        for rows in (slice(None), slice(2, 5)):
            for columns in (slice(None), slice(0, 32), slice(5, 70), slice(40, 50), slice(95, 96), slice(64, 64)):
                np.testing.assert_array_equal(shards.read(name, (rows, columns)), full[rows, columns])


def test_a_model(folder, tmp_path):
    """Its matrices, along what their products sum over, and its table."""
    convert(str(folder / "draft"), tmp_path / "draft", weight_bits=8)
    read = lambda path: load(path, DTYPE).params
    before, after = read(folder / "draft"), read(tmp_path / "draft")
    changed = 0
    for name, x in before.items():
        x, found = np.asarray(x), np.asarray(after[name])
        if x.ndim == 2:
            turned = x if name == "embed" else x.T
            exact = expected(turned) if turned.shape[-1] % 32 == 0 else turned
            changed += int((exact != turned).any())
            np.testing.assert_array_equal(found if name == "embed" else found.T, exact, err_msg=name)
            x = found
        np.testing.assert_array_equal(found, x)
    assert changed >= 4


def test_a_draft_without_a_tokenizer(folder, tmp_path):
    """Its target's fingerprint stays, and compression finds the bits that are no longer there."""
    source = checkpoints.resolve(str(folder / "draft"))
    params = load(folder / "draft", jnp.bfloat16).params
    checkpoints.save(tmp_path / "old", params, checkpoints.load_config(source), fingerprint="0" * 64)
    convert(str(tmp_path / "old"), tmp_path / "new", weight_bits=8)
    old, new = (checkpoints.resolve(str(tmp_path / name)) for name in ("old", "new"))
    assert checkpoints.load_config(new) == checkpoints.load_config(old)
    assert checkpoints.load_fingerprint(new) == checkpoints.load_fingerprint(old)
    size = lambda source: sum(path.stat().st_size for path in source.path.rglob("params/**/*"))
    assert size(new) < 0.85 * size(old)


@cases("name", ["eagle3", "medusa", "draft"], quick=["eagle3"])
def test_the_target_says_the_same(folder, name, tmp_path):
    convert(str(folder / name), tmp_path / "new", weight_bits=8)
    how = {"dtype": "float32", "max_model_len": 64, "num_pages": 32, "page_size": 4}
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    tokens = lambda **more: LLM(str(folder / "target"), **how, **more).generate("Count", greedy)[0].outputs[0].token_ids
    assert tokens(speculative_config={"model": str(tmp_path / "new"), "num_speculative_tokens": 2}) == tokens()


def test_what_is_refused(folder, tmp_path):
    source, free = str(folder / "eagle3"), tmp_path / "free"
    for bits in (4, 16, "8", True):
        with fails(UserError, f"weight_bits={bits!r}", "give 8"):
            convert(source, free, weight_bits=bits)
    with fails(UserError, "weight_bits=8 is of to='jaxspec'"):
        convert(source, free, to="speculators", target=str(folder / "target"), weight_bits=8)
    (tmp_path / "broken").mkdir()
    x = np.ones((2, 32), np.float32)
    for number in (np.nan, np.inf):
        x[1, 3] = number
        save_file({"0.linear.weight": x}, tmp_path / "broken" / "model.safetensors")
        with fails(UserError, "tensor 0.linear.weight holds values that are not finite"):
            head_folders.convert(tmp_path / "broken", free, weight_bits=8)
        with fails(UserError, "tensor embed holds values that are not finite"):
            eight_bits.rounded(x, name="embed")
    assert not free.exists()


@pytest.mark.parametrize("scales", [(2, 2), (3, 1), (2, 0), (), (2,)])
def test_scales_that_do_not_fit(scales, tmp_path):
    save_file({"w": np.ones((2, 33), np.int8), "w_scale": np.ones(scales, np.float32)}, tmp_path / "x.safetensors")
    with fails(UserError, "tensor w has shape (2, 33), which its scales"):
        Shards(tmp_path)


def test_integers_without_scales(folder, tmp_path):
    """Are integers: no head's matrix."""
    convert(str(folder / "eagle3"), tmp_path / "new", weight_bits=8)
    path = tmp_path / "new" / "model.safetensors"
    save_file({name: x for name, x in load_file(path).items() if name != "fc.weight_scale"}, path)
    with fails(NotImplementedError, "fc.weight is stored as"):
        draft(folder, tmp_path / "new")
