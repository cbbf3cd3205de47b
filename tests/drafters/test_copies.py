"""Tensors of a head that something of the target's stands for: one that is the same is shared, another is used where
the head has a use for it, and refused elsewhere. A single number is enough."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints import forms
from jaxspec.common.errors import UserError
from jaxspec.models.backend import Backend
from jaxspec.models.decoder import bind
from jaxspec.options.quantization import FORMS
from jaxspec.parallel.placement import make_placement
from pallas_kernels.device import CPU
from pallas_kernels.weights.scaled import Scaled
from tests.checkpoints.files import assert_same, fails, rewrite
from tests.drafters.references import dflash, dspark, eagle, eagle3, medusa, mlp, mtp
from tests.drafters.references.common import Shape
from tests.drafters.test_formats import TARGET, within
from tests.golden.families import FOLDER
from tests.support.loaded import load, load_draft
from tests.support.model_folders import write_model

TAPS = {"layer_ids": (0, 1, 3)}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("copies") / "target", layers=4, rope_theta=TARGET.rope_theta)


def loaded(folder: Path, target: Path, method: str | None = None, dtype: str = "float32", degree: int = 1):
    """The draft that a target has in this folder."""
    return load_draft(folder, target, method, dtype=dtype, placement=make_placement(degree))


def add(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    (file,) = folder.glob("*.safetensors")
    save_file(load_file(file) | {name: np.array(x, order="C") for name, x in tensors.items()}, file)


def changed(x: np.ndarray) -> np.ndarray:
    """One number of it is another, by little."""
    x = x.copy()
    x.reshape(-1)[(3 * x.size) // 5] *= np.float32(1.01)
    return x


# What is written, and by which names a file has copies of the target's table, head, norm, and head's rows of d2t.
TABLE, HEAD, NORM, ROWS = "embed", "head", "norm", "rows"
NAMES = {"embed_tokens.weight": TABLE, "verifier_norm.weight": NORM, "verifier_lm_head.weight": ROWS}
WHOLE = {"embed_tokens.weight": TABLE, "lm_head.weight": HEAD, "verifier_norm.weight": NORM}
HEADS: dict[str, tuple[Any, dict[str, Any], dict[str, str]]] = {
    "eagle": (eagle, {}, {"embed_tokens.weight": TABLE}),
    "eagle by vLLM": (eagle, {"vllm": 20}, {"model.embed_tokens.weight": TABLE}),
    "eagle3": (eagle3, TAPS, NAMES),
    "eagle3, all ids": (
        eagle3,
        TAPS | {"draft_vocab_size": None},
        {"embed_tokens.weight": TABLE, "verifier_lm_head.weight": HEAD},
    ),
    "eagle3 by speculators": (eagle3, TAPS | {"speculators": True}, NAMES),
    "p-eagle": (eagle3, TAPS | {"mask_token_id": 5}, NAMES),
    "dflash": (dflash, TAPS, WHOLE | {"verifier_lm_head.weight": HEAD}),
    "dflash by speculators": (dflash, TAPS | {"speculators": True}, NAMES),
    "dspark": (dspark, TAPS, WHOLE),
    "medusa": (medusa, {"own_head": False}, {"lm_head.weight": HEAD}),
    "mtp": (
        mtp,
        {"kind": "deepseek"},
        {"model.layers.4.embed_tokens.weight": TABLE, "model.layers.4.shared_head.head.weight": HEAD},
    ),
    "mtp by MiMo": (mtp, {}, {"model.mtp_layers.0.embed_tokens.weight": TABLE}),
    "mtp by Qwen3-Next": (mtp, {"kind": "qwen3_next"}, {"mtp.embed_tokens.weight": TABLE, "mtp.lm_head.weight": HEAD}),
}
USED = {TABLE: "embed", HEAD: "head"}
CASES = [(name, tensor) for name, (_, _, names) in HEADS.items() for tensor in names]


def written(name: str, folder: Path, target: Path) -> dict[str, np.ndarray]:
    """A head, and the copies that its file may have."""
    reference, options, names = HEADS[name]
    reference.write(folder, seed=0, target=TARGET, **options)
    (file,) = folder.glob("*.safetensors")
    theirs, own = load_file(target / "model.safetensors"), load_file(file)
    stored = {TABLE: "model.embed_tokens.weight", HEAD: "lm_head.weight", NORM: "model.norm.weight"}
    found = {what: theirs[tensor] for what, tensor in stored.items()}
    if "d2t" in own:
        found[ROWS] = found[HEAD][own["d2t"] + np.arange(len(own["d2t"]))]
    return {tensor: found[what] for tensor, what in names.items()}


@pytest.mark.parametrize("name", HEADS)
def test_the_same_is_shared(name, target, tmp_path):
    """Also where the file has it in another dtype."""
    method = "mtp" if HEADS[name][0] is mtp else None
    copies = written(name, tmp_path, target)
    plain = loaded(tmp_path, target, method)
    for dtype in ("float32", "float16", "bfloat16"):
        add(tmp_path, {tensor: x.astype(jnp.dtype(dtype)) for tensor, x in copies.items()})
        found = loaded(tmp_path, target, method)
        assert found.config == plain.config
        assert_same(found.params, plain.params)


@pytest.mark.parametrize(("name", "tensor"), CASES)
def test_another_is_used_or_refused(name, tensor, target, tmp_path):
    method = "mtp" if HEADS[name][0] is mtp else None
    copies = written(name, tmp_path, target)
    plain = loaded(tmp_path, target, method)
    add(tmp_path, copies | {tensor: changed(copies[tensor])})
    what = HEADS[name][2][tensor]
    if what not in USED or tensor.startswith("verifier") or name == "medusa":
        words = (
            "'target'",
            f"its tensor {tensor} differs from the target's",
            "give it the target that it was trained for",
        )
        with fails(UserError, repr(tmp_path.name), *words):
            loaded(tmp_path, target, method)
        return
    found = loaded(tmp_path, target, method)
    own = np.asarray(found.params[USED[what]])
    np.testing.assert_array_equal(own if what == TABLE else own.T, changed(copies[tensor]))
    assert (found.config.has_table, found.config.spec.uses_target_head) == (
        what == TABLE,
        plain.config.spec.uses_target_head and what == TABLE,
    )
    assert_same({name: x for name, x in found.params.items() if name in plain.params}, plain.params)


@pytest.mark.parametrize("name", [name for name, (_, _, names) in HEADS.items() if {HEAD, ROWS} & {*names.values()}])
def test_a_copy_of_a_quantised_head(name, target, tmp_path):
    """It is compared as what it becomes in the form of the target's head."""
    method = "mtp" if HEADS[name][0] is mtp else None
    copies = written(name, tmp_path, target)
    plain = loaded(tmp_path, target, method)
    add(tmp_path, copies)
    for dtype in ("float32", "bfloat16"):
        model = load(target, dtype, quantization="int8+head")
        assert isinstance(model.params["head"], Scaled)
        found = load_draft(tmp_path, target, method, model=model, dtype=dtype)
        assert found.config == plain.config
        assert found.params.keys() == plain.params.keys()
    tensor = next(name for name, what in HEADS[name][2].items() if what in (HEAD, ROWS))
    other = copies[tensor].copy()
    other[5, 7] = -other[5, 7] or 1
    add(tmp_path, {tensor: other})
    if tensor.startswith("verifier") or name == "medusa":
        with fails(UserError, f"its tensor {tensor} differs from the target's"):
            load_draft(tmp_path, target, method, model=model, dtype=dtype)
    else:
        assert "head" in load_draft(tmp_path, target, method, model=model, dtype=dtype).params.keys() - plain.params


@pytest.mark.parametrize("name", FORMS)
def test_the_form_of_a_weight(name):
    x = jax.random.normal(jax.random.key(0), (256, 128)).astype(jnp.bfloat16)
    weight = forms.quantise(x, FORMS[name])
    found = forms.form_of(weight)
    assert found is not None
    np.testing.assert_array_equal(forms.rounded(x, found), weight.dense())


@pytest.mark.parametrize("name", ["eagle", "dflash by speculators"])
def test_over_two_devices(name, target, tmp_path):
    copies = written(name, tmp_path, target)
    add(tmp_path, copies)
    assert not loaded(tmp_path, target, degree=2).config.has_table
    add(tmp_path, {"embed_tokens.weight": changed(copies["embed_tokens.weight"])})
    assert loaded(tmp_path, target, degree=2).config.has_table


def test_a_table_of_another_shape(target, tmp_path):
    written("dflash", tmp_path, target)
    add(tmp_path, {"lm_head.weight": np.ones((320, 24), np.float32)})
    with fails(UserError, "lm_head.weight has shape (320, 24), expected (320, 32)"):
        loaded(tmp_path, target)


def test_ids_that_contradict_each_other(target, tmp_path):
    """t2d says what d2t does."""
    written("eagle3", tmp_path, target)
    (file,) = tmp_path.glob("*.safetensors")
    named = load_file(file)["t2d"]
    loaded(tmp_path, target)
    for wrong in (~named, np.roll(named, 1), named[:-1]):
        add(tmp_path, {"t2d": wrong})
        with (
            fails(UserError, str(tmp_path), "t2d and d2t do not hold the same ids")
            if len(wrong) == 320
            else (fails(UserError, "vocabulary 319"))
        ):
            loaded(tmp_path, target)


def test_a_norm_that_eagle_does_not_have(target, tmp_path):
    """vLLM's converter writes one, which its configuration says is skipped; other files have ones there."""
    written("eagle", tmp_path, target)
    plain, name = loaded(tmp_path, target), "layers.0.input_layernorm.weight"
    add(tmp_path, {name: np.ones(32, np.float32)})
    assert_same(loaded(tmp_path, target).params, plain.params)
    add(tmp_path, {name: changed(np.ones(32, np.float32))})
    with fails(UserError, f"tensor {name} is a norm, which a head of method 'eagle' does not have"):
        loaded(tmp_path, target)
    written("eagle by vLLM", tmp_path / "vllm", target)
    add(tmp_path / "vllm", {f"model.{name}": changed(np.ones(32, np.float32))})
    loaded(tmp_path / "vllm", target)


@pytest.mark.parametrize(
    ("part", "read"),
    [
        ("emb.2.weight", "emb.0.weight"),
        ("head.1.weight", "head.0.weight"),
        ("proj.2.weight", "proj.1.weight"),
        ("ln.1.weight", "ln.0.weight"),
        ("ln.2.bias", "ln.0.bias"),
    ],
)
def test_the_steps_of_a_tied_mlp_speculator(part, read, target, tmp_path):
    mlp.write(tmp_path, seed=0, target=TARGET, n_predict=3, tied=True)
    name, first = f"speculator.{part}", f"speculator.{read}"
    (file,) = tmp_path.glob("*.safetensors")
    loaded(tmp_path, target)
    add(tmp_path, {name: changed(load_file(file)[name])})
    with fails(UserError, f"tie_weights is true, but tensor {name} differs from {first}", "set it to false in"):
        loaded(tmp_path, target)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"tie_weights": False}))
    loaded(tmp_path, target)
    add(tmp_path, {"speculator.emb.9.weight": np.ones((320, 24), np.float32)})
    with fails(UserError, "speculator.emb.9.weight is not part of a head of method 'mlp_speculator'"):
        loaded(tmp_path, target)


# A head in a whole model's checkpoint

# Tensor of the model -> how a refusal begins to name it: parts of one product are compared together.
MODEL = {
    "model.embed_tokens": "model.embed_tokens",
    "lm_head": "lm_head",
    "model.norm": "model.norm",
    "model.layers.2.self_attn.v_proj": "model.layers.2.self_attn.k_proj.weight and 2 more",
    "model.layers.3.mlp.up_proj": "model.layers.3.mlp.gate_proj.weight and 1 more",
    "model.layers.3.mlp.down_proj": "model.layers.3.mlp.down_proj",
}


def medusa_within(target: Path, folder: Path, shape: Shape = TARGET) -> Path:
    shutil.copytree(target, folder)
    medusa.write(folder / "head", seed=0, target=shape)
    (file,) = (folder / "head").glob("*.safetensors")
    add(folder, {f"medusa_head.{name}": x for name, x in load_file(file).items()})
    shutil.rmtree(folder / "head")
    return folder


@pytest.mark.parametrize("method", ["mtp", "medusa"])
def test_a_model_that_is_not_the_target(method, target, tmp_path):
    """Beside a head that stands in another copy of its target, or in another model."""
    folder = within(target, tmp_path / "whole") if method == "mtp" else medusa_within(target, tmp_path / "whole")
    own = loaded(folder, folder, method)
    assert_same(loaded(folder, target, method).params, own.params)
    tensors = load_file(folder / "model.safetensors")
    for name, said in MODEL.items():
        add(folder, {**tensors, f"{name}.weight": changed(tensors[f"{name}.weight"])})
        with fails(UserError, f"its tensor {said}", "from the target's"):
            loaded(folder, target, method)
        assert_same(loaded(folder, folder, method).params, own.params)
    add(folder, tensors)
    for form in ("int8", "fp8_tensor+head"):
        load_draft(folder, target, method, model=load(target, quantization=form))
    add(folder, tensors | {"model.layers.1.self_attn.q_proj.bias": np.ones(32, np.float32)})
    with fails(UserError, "q_proj.bias is not part of"):
        loaded(folder, target, method)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("phi4-mini", "model.layers.1.self_attn.qkv_proj.weight"),
        ("phi4-mini", "model.layers.0.mlp.gate_up_proj.weight"),
        ("gemma4", "model.layers.5.self_attn.q_proj.weight"),
        ("gemma4_dense", "model.layers.2.self_attn.k_proj.weight"),
    ],
)
def test_a_target_with_tensors_of_its_own_kind(family, name, tmp_path):
    """Tensors of several parts, rows in another order, and layers that share keys, or have them as their values."""
    target = rewrite(tmp_path / "target", family)
    c = load(target).config
    shape = Shape(c.vocab_size, c.width, c.num_heads, c.num_kv_heads, c.head_dim, c.mlp_width, c.num_layers)
    folder = medusa_within(target, tmp_path / "whole", shape)
    if family == "gemma4":  # published checkpoints hold it, though nothing reads it
        add(folder, {"model.layers.5.self_attn.k_norm.weight": np.ones(32, np.float32)})
    own = loaded(folder, folder, "medusa")
    assert_same(loaded(folder, target, "medusa").params, own.params)
    add(folder, {name: changed(load_file(folder / "model.safetensors")[name])})
    with fails(UserError, f"its tensor {name}", "differs from the target's"):
        loaded(folder, target, "medusa")


@pytest.mark.parametrize("kind", ["deepseek", "mimo", "qwen3_next"])
def test_a_tensor_of_the_head_that_is_not_read(kind, target, tmp_path):
    folder = within(target, tmp_path / "whole", kind=kind)
    name = f"{mtp.names(kind, 4).block}self_attn.o_proj.bias"
    add(folder, {name: np.ones(32, np.float32)})
    with fails(UserError, f"{name} is not part of a head of method 'mtp'"):
        loaded(folder, folder, "mtp")


def test_a_table_in_the_place_of_one_that_is_scaled(tmp_path):
    """It is read as the target's would be."""
    folder = FOLDER / "gemma3"
    target = load(folder)
    c, table = target.config, np.asarray(target.params["embed"])
    shape = Shape(c.vocab_size, c.width, c.num_heads, c.num_kv_heads, c.head_dim, c.mlp_width, c.num_layers)
    eagle.write(tmp_path, seed=0, target=shape, embed=changed(table))
    head = load_draft(tmp_path, folder, model=target)
    assert head.config.has_table
    backend, ids = Backend(CPU), jnp.arange(c.vocab_size)[None]
    own, theirs = (bind(model.config, model.params).embedded(ids, backend) for model in (head, target))
    assert c.embed_scale > 1
    np.testing.assert_allclose(own, theirs, rtol=0.011)
    assert int((own != theirs).sum()) == 1
