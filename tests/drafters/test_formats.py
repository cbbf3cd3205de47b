"""How heads are published: file by file, and where a config.json is easily misread or does not fit its target."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import checkpoints
from checkpoints import head_folders
from jaxspec.common.errors import UserError
from jaxspec.inspect import info
from jaxspec.loading.resolved import ResolvedModel, resolved_draft
from jaxspec.models.decoder import abstract_params
from jaxspec.models.reading import Reading
from jaxspec.parallel.placement import make_placement
from tests.checkpoints.files import assert_same, fails
from tests.drafters.references import dflash, dspark, eagle, eagle3, medusa, mlp, mtp
from tests.drafters.references.common import Shape
from tests.support.loaded import load, load_draft, resolve
from tests.support.model_folders import write_model, write_tokenizer

TARGET = Shape(vocab_size=320, width=32, heads=4, kv_heads=2, head_dim=8, mlp=48, layers=4, rope_theta=5e5)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("formats") / "target", layers=4, rope_theta=TARGET.rope_theta)


def read(folder: Path, target: Path, method: str | None = None) -> Reading:
    found = resolved_draft(checkpoints.resolve(str(folder)), resolve(target), method).reading
    assert found is not None
    return found


def parameters(folder: Path, target: Path, method: str | None = None) -> dict[str, Any]:
    reading = read(folder, target, method)
    return head_folders.load(folder, reading, abstract_params(reading.config, "float32", make_placement()))


def rewrite(folder: Path, **changes: Any) -> None:
    """Keys of config.json, of those within its parts too; ... takes one out."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    for part in (raw, *(x for x in raw.values() if isinstance(x, dict))):
        known = changes.keys() if part is raw else changes.keys() & part.keys()
        part |= {key: changes[key] for key in known}
        for key in [key for key, value in part.items() if value is ...]:
            del part[key]
    path.write_text(json.dumps(raw))


# Files


def save(folder: Path, names: dict[str, str]) -> None:
    """The tensors of a head in other files: of safetensors or of torch. names: tensor -> file."""
    (old,) = folder.glob("*.safetensors")
    tensors = load_file(old)
    old.unlink()
    for file in set(names.values()):
        part = {name: tensors[name] for name in tensors if names[name] == file}
        if file.endswith(".safetensors"):
            save_file(part, folder / file)
        else:
            torch = pytest.importorskip("torch")
            torch.save({name: torch.from_numpy(x) for name, x in part.items()}, folder / file)


LAYOUTS = (
    *("model.safetensors", "medusa_lm_head.safetensors", "pytorch_model.bin", "medusa_lm_head.pt"),
    *("model-{}-of-00002.safetensors", "pytorch_model-{}-of-00002.bin"),
)


@pytest.mark.parametrize("config", [True, False])
@pytest.mark.parametrize("file", LAYOUTS)
def test_every_name_of_a_file(file, config, target, tmp_path):
    """Medusa's heads, whose config.json says nothing that the tensors do not."""
    medusa.write(tmp_path, seed=0, target=TARGET, heads=3, layers=2)
    wanted = parameters(tmp_path, target)
    (old,) = tmp_path.glob("*.safetensors")
    where = {name: file.format(f"0000{i % 2 + 1}") for i, name in enumerate(sorted(load_file(old)))}
    save(tmp_path, where)
    if "{}" in file:
        index = file.replace("-{}-of-00002", "") + ".index.json"
        (tmp_path / index).write_text(json.dumps({"weight_map": where}))
    if not config:
        (tmp_path / "config.json").unlink()
    assert_same(parameters(tmp_path, target), wanted)


@pytest.mark.parametrize("reference", [eagle, eagle3, dflash, mlp])
def test_a_config_json_that_is_needed(reference, target, tmp_path):
    reference.write(tmp_path, seed=0, target=TARGET)
    (tmp_path / "config.json").unlink()
    with fails(UserError, tmp_path.name, "config.json is missing or lacks"):
        read(tmp_path, target, {mlp: "mlp_speculator"}.get(reference))


# Traps: what is written, what is changed in config.json, what has to be understood.

IDS = {"layer_ids": (0, 1, 3)}
TRAPS: dict[str, tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "layers by their output": (dflash, IDS, {}, {"taps": (1, 2, 4)}),
    "layers by their input": (dflash, IDS | {"speculators": True}, {}, {"taps": (0, 1, 3)}),
    "EAGLE-3's layers": (eagle3, IDS, {}, {"taps": (0, 1, 3)}),
    "EAGLE-3's layers by their output": (
        eagle3,
        IDS,
        {"eagle_aux_hidden_state_layer_ids": ..., "target_layer_ids": [0, 1, 3]},
        {"taps": (1, 2, 4)},
    ),
    "layers null": (eagle3, {"speculators": True}, {"eagle_aux_hidden_state_layer_ids": None}, {"taps": (2, 2, 1)}),
    "norm_before_residual unsaid": (
        eagle3,
        IDS | {"speculators": True},
        {"norm_before_residual": ...},
        {"norm_before_residual": False},
    ),
    "norm_before_residual": (eagle3, IDS, {"norm_before_residual": True}, {"norm_before_residual": True}),
    "norms that only tensors show": (
        eagle3,
        IDS | {"norm_before_fc": True, "fc_norm": True},
        {"norm_before_fc": ..., "fc_norm": ...},
        {"norm_before_fc": True, "norm_taps": True, "norm_output": False},
    ),
    "a context that is not meant": (eagle3, IDS, {"max_position_embeddings": 8}, {"max_model_len": 512}),
    "the same within": (
        eagle3,
        IDS | {"speculators": True},
        {"max_position_embeddings": 8, "vocab_size": 320},
        {"max_model_len": 512, "vocab_size": 320},
    ),
    "DSpark": (dspark, IDS, {}, {"method": "dspark", "from_pending": True, "max_drafts": 5, "markov_rank": 6}),
    "DSpark's form of DFlash": (
        dspark,
        IDS | {"rank": None},
        {},
        {"method": "dspark", "from_pending": True, "markov_rank": 0, "taps": (1, 2, 4)},
    ),
    "DSpark unsaid": (
        dspark,
        IDS | {"speculators": True, "kind": "rnn"},
        {"sample_from_anchor": ..., "markov_rank": ...},
        {"from_pending": True, "markov_rank": 6, "markov_kind": "rnn", "reduced_vocab_size": 24},
    ),
    "DFlash unsaid": (dflash, IDS | {"speculators": True}, {"sample_from_anchor": ...}, {"from_pending": False}),
    "DFlash from the pending token": (
        dflash,
        IDS | {"speculators": True},
        {"sample_from_anchor": True},
        {"method": "dflash", "from_pending": True, "max_drafts": 5},
    ),
    "rope_theta": (eagle, {}, {}, {"theta": 5e5}),
    "rope_theta unsaid": (eagle, {"rope_theta": False}, {}, {"theta": 1e4}),
    "rope_theta in another place": (
        dflash,
        IDS,
        {"rope_theta": ..., "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"theta": 1e6},
    ),
    "fc.bias unsaid": (eagle, {}, {}, {"bias": True}),
    "no fc.bias, though said": (eagle, {"bias": False}, {"bias": True}, {"bias": False}),
    "a table of its own": (eagle, {"embed": np.ones((320, 32), np.float32)}, {}, {"has_head": False}),
    "vLLM's EAGLE": (eagle, {"vllm": 40}, {}, {"reduced_vocab_size": 40, "has_head": True, "width": 32}),
    "fewer heads said": (medusa, {"heads": 5, "said_heads": 2}, {}, {"num_drafts": 5, "depth": 1}),
    "more heads said": (medusa, {"heads": 2, "said_heads": 5}, {"medusa_num_layers": 4}, {"num_drafts": 2, "depth": 1}),
    "no heads said": (
        medusa,
        {"heads": 4, "layers": 2},
        {"medusa_num_heads": ..., "medusa_num_layers": ...},
        {"num_drafts": 4, "depth": 2},
    ),
}


@pytest.mark.parametrize("name", TRAPS)
def test_what_is_understood(name, target, tmp_path):
    reference, options, changes, wanted = TRAPS[name]
    reference.write(tmp_path, seed=0, target=TARGET, **options)
    rewrite(tmp_path, **changes)
    config = read(tmp_path, target).config
    known = vars(config.spec) | vars(config) | {"theta": config.rope.theta}
    found = {key: known[key] for key in wanted}
    assert found == wanted
    parameters(tmp_path, target)  # and its tensors are these


@pytest.mark.parametrize("name", ["eagle", "eagle3", "eagle3 by speculators", "dflash"])
def test_biases_of_attention(name, target, tmp_path):
    """Those of queries, keys and values are read, and must be there where they are said. The output has none."""
    reference, options = METHODS[name]
    reference.write(tmp_path, seed=0, target=TARGET, **options, qkv_bias=True)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    biases = [key for key in tensors if key.endswith("_proj.bias")]
    assert len(biases) == 3 * read(tmp_path, target).config.num_layers
    found = parameters(tmp_path, target)
    for said in (False, ...):  # the tensors are what counts
        rewrite(tmp_path, attention_bias=said)
        assert_same(parameters(tmp_path, target), found)
    more = re.sub("[qkv]_proj", "o_proj", biases[0])
    save_file(tensors | {more: np.ones(32, np.float32)}, file)
    with fails(UserError, f"{more} is not part of a head"):
        parameters(tmp_path, target)
    rewrite(tmp_path, attention_bias=True)
    save_file({key: x for key, x in tensors.items() if key not in biases}, file)
    with fails(UserError, "_proj.bias is missing"):
        parameters(tmp_path, target)


def test_a_method_that_is_not_read(target, tmp_path):
    dflash.write(tmp_path, seed=0, target=TARGET, **IDS, speculators=True)
    rewrite(tmp_path, speculators_model_type="dflash2")
    with fails(UserError, "speculators_model_type='dflash2' is not read: take a checkpoint of dspark, dflash, eagle3"):
        read(tmp_path, target)
    rewrite(tmp_path, speculators_model_type="dflash")
    assert read(tmp_path, target).config.spec.method == "dflash"


@pytest.mark.parametrize("case", ["differences", "ids", "Medusa's ids"])
def test_ids_of_a_reduced_vocabulary(case, target, tmp_path):
    """d2t is what is added to an own id; token_map the target's id itself."""
    ids = np.array([2, 3, 7, 100, 319])
    if case == "Medusa's ids":
        medusa.write(tmp_path, seed=0, target=dataclasses.replace(TARGET, vocab_size=5), heads=2, vllm=True)
        name, stored = "token_map", ids
    elif case == "ids":
        eagle.write(tmp_path, seed=0, target=TARGET, vllm=5)
        name, stored = "token_map", ids
    else:
        eagle3.write(tmp_path, seed=0, target=TARGET, draft_vocab_size=5, **IDS)
        name, stored = "d2t", ids - np.arange(5)
    file = tmp_path / "model.safetensors"
    save_file({key: x for key, x in load_file(file).items() if key != "t2d"} | {name: stored}, file)
    found = parameters(tmp_path, target)
    assert found["d2t"].tolist() == ids.tolist()
    assert found["t2d"][ids].tolist() == [0, 1, 2, 3, 4]
    assert int((found["t2d"] == 5).sum()) == 315
    save_file(load_file(file) | {name: stored + 1}, file)
    with pytest.raises(UserError, match="d2t names ids twice, or beyond the target's 320"):
        parameters(tmp_path, target)


# MTP: within the target's own checkpoint


def within(target: Path, folder: Path, *, kind: str = "deepseek", layers: int = 1, **options: Any) -> Path:
    """A copy of the target whose checkpoint has heads, numbered on."""
    shutil.copytree(target, folder)
    tensors = load_file(target / "model.safetensors")
    for k in range(layers):
        mtp.write(folder / "head", seed=k, target=TARGET, kind=kind, **options)
        of = mtp.names(kind, TARGET.layers).block
        number = lambda name, of=of, k=k: name.replace(of, re.sub(r"\d+", lambda m: str(int(m[0]) + k), of))
        tensors |= {number(name): x for name, x in load_file(folder / "head" / "model.safetensors").items()}
        shutil.rmtree(folder / "head")
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", ["deepseek", "mimo"])
def test_several_layers(kind, target, tmp_path, caplog):
    """The first makes every draft, which is said; the target's own weights are found beside them."""
    one, three = (within(target, tmp_path / str(n), kind=kind, layers=n) for n in (1, 3))
    assert read(one, target, "mtp").config.layers_there == 1
    assert read(three, target, "mtp").config.layers_there == 3
    models = [load(path) for path in (one, three)]
    assert_same(models[1].params, models[0].params)
    found = []
    for path, model in zip((one, three), models, strict=True):
        assert "layers for multi-token prediction" not in caplog.text
        found.append(load_draft(path, path, "mtp", model=model).params)
    assert "3 has 3 layers for multi-token prediction: the first makes every draft, the others none" in caplog.text
    assert_same(found[1], found[0])


@pytest.mark.parametrize("kind", ["deepseek", "mimo"])
def test_a_model_that_is_named_as_its_own_draft(kind, target, tmp_path):
    """Its heads are meant where it has the target's layers, or another copy of it has; unless `method` says more."""
    folder = within(target, tmp_path / "own", kind=kind)
    own = resolve(folder)
    small = dataclasses.replace(own.config, num_layers=2, windows=own.config.windows[:2])
    another = ResolvedModel(checkpoints.Source("hf", tmp_path / "another", "another"), small)
    assert read(folder, target).config.spec.method == "mtp"
    assert resolved_draft(own.source, another).reading is None
    assert resolved_draft(own.source, own, "draft_model").reading is None
    assert load_draft(folder, folder).config.spec.method == "mtp"


def test_norms_that_are_added_to_one(target, tmp_path):
    folder = within(target, tmp_path / "own", kind="qwen3_next")
    stored = load_file(folder / "model.safetensors")["mtp.pre_fc_norm_hidden.weight"]
    np.testing.assert_array_equal(parameters(folder, target, "mtp")["hidden_norm"], stored + 1)


# What does not fit

METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "eagle": (eagle, {}),
    "eagle by vLLM": (eagle, {"vllm": 20}),
    "eagle3": (eagle3, {"layer_ids": (0, 1, 3)}),
    "eagle3 by speculators": (eagle3, {"layer_ids": (0, 1, 3), "speculators": True}),
    "p-eagle": (eagle3, {"layer_ids": (0, 1, 3), "mask_token_id": 5}),
    "mtp": (mtp, {"kind": "deepseek"}),
    "medusa": (medusa, {}),
    "mlp_speculator": (mlp, {}),
    "dflash": (dflash, {"layer_ids": (0, 1, 3)}),
    "dflash by speculators": (dflash, {"layer_ids": (0, 1, 3), "speculators": True}),
    "dspark": (dspark, {"layer_ids": (0, 1, 3)}),
}
LAYERS = ("eagle3", "eagle3 by speculators", "p-eagle", "mtp", "dflash", "dflash by speculators", "dspark")
OTHERS = {"width": {"width": 24}, "vocabulary": {"vocab_size": 400}, "layers": {"layers": 8}}
MISFITS = [(name, what) for name in METHODS for what in OTHERS if what != "layers" or name in LAYERS]


@pytest.mark.parametrize(("name", "what"), MISFITS)
def test_a_head_for_another_target(name, what, target, tmp_path):
    """Of another width, vocabulary or number of layers, where its checkpoint tells."""
    (reference, options), (changed,) = METHODS[name], OTHERS[what].items()
    options = options | ({"layer_ids": (4, 5, 7)} if what == "layers" and "layer_ids" in options else {})
    reference.write(tmp_path / "head", seed=0, target=dataclasses.replace(TARGET, **OTHERS[what]), **options)
    both = (
        rf"the draft 'head' was made for a target of {what}.* {changed[1]}, 'target' has {getattr(TARGET, changed[0])}"
    )
    reads = r"the draft 'head' reads layers \w+=\W4, 5, 7\W, 'target' has 4"
    with pytest.raises(UserError, match=f"^({both}|{reads}): give it the target that it was trained for$"):
        read(tmp_path / "head", target, "mtp" if reference is mtp else None)


@pytest.mark.parametrize("name", METHODS)
def test_a_head_with_another_tokenizer(name, target, tmp_path):
    """It brings one only where it is published so; without, it is taken for its target's."""
    reference, options = METHODS[name]
    reference.write(tmp_path / "head", seed=0, target=TARGET, **options)
    if reference is mtp:
        return  # it comes with its target
    assert info.describe(str(target), str(tmp_path / "head"))["draft_fits"]
    write_tokenizer(tmp_path / "head", text="entirely different words " * 5)
    problem = info.describe(str(target), str(tmp_path / "head"))["draft_problem"]
    assert "the draft 'head' has another tokenizer than the target 'target'" in problem


# jaxspec info

TOLD: dict[str, dict[str, Any]] = {
    "eagle": {"layers_read": [], "own_table": False, "own_head": False, "bias": True, "max_drafts": None},
    "eagle by vLLM": {"proposes": 20, "own_head": True},
    "eagle3": {"layers_read": [0, 1, 3], "proposes": 24, "own_head": True, "norm_output": False, "mask_id": None},
    "p-eagle": {"mask_id": 5, "max_drafts": None},
    "mtp": {"layers_read": [], "own_head": False, "layers_there": 1, "remark": None},
    "medusa": {"layers_read": [], "num_drafts": 3, "max_drafts": 3, "own_table": False, "own_head": True},
    "mlp_speculator": {"max_drafts": 3, "own_table": True, "own_head": True, "scale_input": False},
    "dflash": {"layers_read": [1, 2, 4], "block_size": 5, "max_drafts": 4, "mask_id": 3, "own_head": False},
    "dflash by speculators": {"layers_read": [0, 1, 3], "proposes": 24, "own_head": True},
    "dspark": {"layers_read": [1, 2, 4], "max_drafts": 5, "markov_rank": 6, "own_table": False, "own_head": False},
}


@pytest.mark.parametrize("name", TOLD)
def test_info_says_what_was_understood(name, target, tmp_path, capsys):
    reference, options = METHODS[name]
    if reference is mtp:  # a target that is named as its own draft
        target = folder = within(target, tmp_path / "head", kind="mimo")
        wanted = TOLD[name] | {"layers_read": [4], "hidden_first": True}
    else:
        folder, wanted = tmp_path / "head", TOLD[name]
        reference.write(folder, seed=0, target=TARGET, **options)
    document = info.describe(str(target), str(folder))
    head = document["draft"]["head"]
    assert head["method"] == read(folder, target, "mtp" if reference is mtp else None).config.spec.method
    assert {key: head[key] for key in wanted} == wanted
    info.show(document)
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "understood" in shown
    assert info.describe(str(target))["model"].get("head") is None
