"""Heads in the format of the speculators library: read back by jaxspec, and by that library where it is installed."""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import checkpoints
from checkpoints import speculators
from jaxspec import LLM, SamplingParams
from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.drafters import methods
from jaxspec.loading.convert import FORMATS, convert
from jaxspec.models.model import Model
from tests.checkpoints.files import assert_same, fails
from tests.drafters.references import dflash, dspark, eagle, eagle3, medusa
from tests.drafters.references.common import Random, Shape, random_features
from tests.support.loaded import load, load_draft
from tests.support.model_folders import write_model
from tests.support.sizes import cases

K, DTYPE = 4, jnp.dtype("float32")
TARGET = Shape(vocab_size=320, width=32, heads=4, kv_heads=2, head_dim=8, mlp=48, layers=8, rope_theta=5e5)
TAPS = {"layer_ids": (0, 3, 4)}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}

# A head of some writer's -> (its reference, how it writes it, what is changed in config.json, what it is there).
HEADS: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "eagle3": (eagle3, TAPS, {}, "eagle3"),
    "eagle3, the target's head": (eagle3, TAPS | {"draft_vocab_size": None}, {}, "eagle3"),
    "eagle3, default layers": (eagle3, {"nested": True, "rope_theta": False}, {}, "eagle3"),
    "eagle3, all its norms": (eagle3, TAPS | {"fc_norm": True, "norm_output": True}, {}, "eagle3"),
    "eagle3, other norms": (eagle3, TAPS | {"norm_before_fc": True, "norm_before_residual": True}, {}, "eagle3"),
    "eagle3, Llama 3's positions": (eagle3, TAPS, {"rope_scaling": LLAMA3}, "eagle3"),
    "eagle3, Qwen3's layers": (eagle3, TAPS, {}, "eagle3"),
    "eagle3, two layers": (eagle3, TAPS | {"layers": 2, "first_layer": "layers.0."}, {}, "eagle3"),
    "eagle3 by speculators": (eagle3, TAPS | {"speculators": True}, {}, "eagle3"),
    "p-eagle": (eagle3, TAPS | {"mask_token_id": 5}, {}, "peagle"),
    "dflash": (dflash, TAPS, {}, "dflash"),
    "dflash by speculators": (dflash, TAPS | {"speculators": True}, {}, "dflash"),
    "dspark": (dspark, TAPS, {}, "dspark"),
    "dspark by speculators": (dspark, TAPS | {"speculators": True, "kind": "rnn", "from_pending": False}, {}, "dspark"),
}
QUICK = ["eagle3", "eagle3, the target's head", "p-eagle", "dflash", "dspark by speculators"]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("speculators")
    folder = write_model(root / "target", layers=TARGET.layers, rope_theta=TARGET.rope_theta)
    tensors = load_file(folder / "model.safetensors")
    rng = np.random.default_rng(7)  # or norms of 1 would hide one that is left out
    noisy = lambda x: (x * (1 + 0.3 * rng.standard_normal(x.shape))).astype(np.float32) if x.ndim == 1 else x
    save_file({name: noisy(x) for name, x in tensors.items()}, folder / "model.safetensors")
    return folder


def write(folder: Path, name: str) -> str:
    """What it is in speculators."""
    reference, options, changes, kind = HEADS[name]
    reference.write(folder, seed=3, target=TARGET, **options)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    if "Qwen3" in name:
        norms = {f"midlayer.self_attn.{x}_norm.weight": Random(i).norm(TARGET.head_dim) for i, x in enumerate("qk")}
        save_file(load_file(folder / "model.safetensors") | norms, folder / "model.safetensors")
    return kind


def converted(folder: Path, target: Path, name: str, **options: Any) -> tuple[Path, Path, str]:
    kind = write(folder / "head", name)
    convert(str(folder / "head"), folder / "there", to="speculators", target=str(target), **options)
    return folder / "head", folder / "there", kind


def load_target(folder: Path) -> Model:
    return load(folder, DTYPE)


def drafts(folder: Path, target: Path) -> Model:
    return load_draft(folder, target, dtype=DTYPE)


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", HEADS)
def test_it_is_read_back(name, target, tmp_path):
    """The same configuration, and the same numbers."""
    head, there, kind = converted(tmp_path, target, name)
    mine, theirs = drafts(head, target), drafts(there, target)
    params = dict(mine.params)
    if kind in ("eagle3", "peagle") and "head" not in params:  # a copy of the target's now
        params["head"] = load_target(target).params["head"]
        mine = dataclasses.replace(mine, config=dataclasses.replace(mine.config, has_head=True))
    assert theirs.config == mine.config
    assert_same(theirs.params, params)
    said = config_of(there)
    assert said["speculators_model_type"] == said["speculators_config"]["algorithm"] == kind
    assert said["speculators_config"]["verifier"] == {
        "name_or_path": str(target),
        "architectures": ["LlamaForCausalLM"],
    }
    assert {"embed_tokens.weight", "lm_head.weight"} <= load_file(there / "model.safetensors").keys() or (
        not speculators.KINDS[kind].copies
    )


def test_what_the_targets_table_is_read_with(target, tmp_path):
    """That library has a table of its own there: the product of both."""
    dspark.write(tmp_path / "head", seed=3, target=TARGET, **TAPS, kind="rnn", table=False)
    convert(str(tmp_path / "head"), tmp_path / "there", to="speculators", target=str(target))
    mine, theirs = drafts(tmp_path / "head", target), drafts(tmp_path / "there", target)
    assert theirs.config == dataclasses.replace(mine.config, markov_table=True)
    expected = np.asarray(load_target(target).params["embed"]) @ np.asarray(mine.params["markov.before_in"])
    np.testing.assert_allclose(np.asarray(theirs.params["markov.before"]), expected, atol=1e-5, rtol=1e-5)
    same = lambda params: {name: x for name, x in params.items() if not name.startswith("markov.before")}
    assert_same(same(theirs.params), same(mine.params))


def test_what_is_written(target, tmp_path):
    """By that library's names, in its types, and nothing of ours: what its own checkpoints hold."""
    head, there, _ = converted(tmp_path, target, "eagle3")
    old, new = load_file(head / "model.safetensors"), load_file(there / "model.safetensors")
    attention = [f"self_attn.{x}_proj" for x in "qkvo"]
    layer = [*attention, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "hidden_norm"]
    layer += ["post_attention_layernorm"]
    assert new.keys() == {
        *(f"layers.0.{part}.weight" for part in layer),
        *("fc.weight", "norm.weight", "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"),
    }
    np.testing.assert_array_equal(new["layers.0.hidden_norm.weight"], old["midlayer.hidden_norm.weight"])
    theirs = load_file(target / "model.safetensors")
    np.testing.assert_array_equal(new["embed_tokens.weight"], theirs["model.embed_tokens.weight"])
    assert (new["d2t"].dtype, new["t2d"].dtype) == (np.int64, np.bool_)
    assert new["t2d"].nonzero()[0].tolist() == (new["d2t"] + np.arange(24)).tolist()
    said = config_of(there)
    assert (said["eagle_aux_hidden_state_layer_ids"], said["draft_vocab_size"]) == ([0, 3, 4], 24)
    assert said["transformer_layer_config"]["vocab_size"] == 320
    assert said["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3


def test_layers_are_named_by_their_input(target, tmp_path):
    """Those that z-lab's file names by their output; and its block, of which the first place makes no draft."""
    head, there, _ = converted(tmp_path, target, "dflash")
    assert config_of(head)["dflash_config"]["target_layer_ids"] == [0, 3, 4]
    said = config_of(there)
    assert said["aux_hidden_state_layer_ids"] == [1, 4, 5]
    assert (said["sample_from_anchor"], said["block_size"], said["mask_token_id"]) == (False, 5, 3)
    assert said["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert "embed_tokens.weight" not in load_file(there / "model.safetensors")


def test_what_it_said_already_stays(target, tmp_path):
    """Proposals, a table of its own, its tokenizer's fingerprint; the target is the one that is named now."""
    write(tmp_path / "head", "eagle3 by speculators")
    tensors, own = load_file(tmp_path / "head" / "model.safetensors"), np.ones((320, 32), np.float32)
    save_file(tensors | {"embed_tokens.weight": own}, tmp_path / "head" / "model.safetensors")
    said = config_of(tmp_path / "head")
    said["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 7
    (tmp_path / "head" / "config.json").write_text(json.dumps(said))
    (tmp_path / "head" / "tokenizer.sha256").write_text("0" * 64 + "\n")
    convert(str(tmp_path / "head"), tmp_path / "there", to="speculators", target=str(target), dtype="bfloat16")
    found = config_of(tmp_path / "there")["speculators_config"]
    assert found["proposal_methods"][0]["speculative_tokens"] == 7
    assert found["verifier"]["name_or_path"] == str(target) != said["speculators_config"]["verifier"]["name_or_path"]
    new = load_file(tmp_path / "there" / "model.safetensors")
    np.testing.assert_array_equal(new["embed_tokens.weight"].astype(np.float32), own)
    assert {str(x.dtype) for x in new.values()} == {"bfloat16", "int64", "bool"}
    assert (tmp_path / "there" / "tokenizer.sha256").read_text() == "0" * 64 + "\n"


def rewritten(folder: Path, change: Callable[[str, np.ndarray], np.ndarray]) -> None:
    file = folder / "model.safetensors"
    save_file({name: np.ascontiguousarray(change(name, x)) for name, x in load_file(file).items()}, file)


@pytest.fixture(scope="module")
def repeating(target, tmp_path_factory) -> Path:
    """A target that mostly says a token again: its head is its table, its layers say little."""
    folder = shutil.copytree(target, tmp_path_factory.mktemp("repeating") / "target")
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    quiet = lambda name, x: x * np.float32(0.06) if name.endswith(("o_proj.weight", "down_proj.weight")) else x
    rewritten(folder, lambda name, x: table if name == "lm_head.weight" else quiet(name, x))
    return folder


def repeat_too(folder: Path, target: Path) -> None:
    """Makes of a head of EAGLE-3, which reads what goes into the target's last norm last, one that says what the target
    said, and something of its own."""
    theirs = load_file(target / "model.safetensors")["model.norm.weight"]
    last = np.concatenate([np.zeros((32, 64)), np.eye(32)], axis=1).astype(np.float32)
    known = {"fc.weight": last, "norm.weight": theirs}
    rewritten(folder, lambda name, x: known.get(name, x * np.float32(0.5 if "_proj" in name else 1)))


@cases("name", ["eagle3", "p-eagle", "dflash", "dspark"], quick=["eagle3"], rest=["dflash"])
def test_it_speculates_as_before(name, repeating, tmp_path):
    """Plain decoding's tokens, and as many drafts accepted as with the folder that was converted."""
    reference, options = HEADS[name][:2]
    last = {"draft_vocab_size": None, "layer_ids": (0, 3, 8)} if reference is eagle3 else {}
    reference.write(tmp_path / "head", seed=3, target=TARGET, **options | last)
    if reference is eagle3:
        repeat_too(tmp_path / "head", repeating)
    convert(str(tmp_path / "head"), tmp_path / "there", to="speculators", target=str(repeating))
    texts = np.random.default_rng(0).integers(5, 320, (4, 8)).tolist()
    prompts = [{"prompt_token_ids": ids} for ids in texts]
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    speculative = [{"model": str(tmp_path / x), "num_speculative_tokens": K} for x in ("head", "there")]
    found = [
        LLM(str(repeating), speculative_config=how, max_model_len=64).generate(prompts, greedy, progress=False)
        for how in (None, *(x | {"adaptive": False} for x in speculative))
    ]
    tokens = [[o.outputs[0].token_ids for o in outputs] for outputs in found]
    assert tokens[1] == tokens[2] == tokens[0]
    accepted = [[o.metrics.mean_acceptance_length for o in outputs] for outputs in found[1:]]
    assert accepted[0] == accepted[1]
    assert reference is not eagle3 or 1.15 < np.mean(accepted[0]) < K + 1


# That library itself


def library_says(folder: Path, tokens: list[int], taps: dict[int, np.ndarray], drafts: list[int], patch: Any) -> Any:
    """(logits [K, _] of so many drafts after these tokens, the model): what it computes of them in training, where
    drafts are shown to it as text. Its own mask for plain attention, as that for GPUs is compiled."""
    torch, theirs = pytest.importorskip("torch"), pytest.importorskip("speculators")
    config = theirs.SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = theirs.SpeculatorModel.from_pretrained(folder, config=config).eval()
    kind, count, start = config.speculators_model_type, len(drafts), len(tokens)
    blocks = kind in ("dflash", "dspark")

    length = start + 3 * count  # what lies beyond the drafts is not seen
    text = [*(tokens if blocks else tokens[1:]), *drafts]
    ids = torch.tensor([text + [9] * (length - len(text))])
    hidden = np.random.default_rng(1).standard_normal((1, length, len(model.target_layer_ids) * config_width(model)))
    hidden[0, : start - 1] = np.concatenate([taps[i] for i in model.target_layer_ids], -1)
    mask = torch.zeros(1, length)
    mask[0, start - 1] = 1  # where a block begins
    said: list[dict[str, Any]] = []

    def metrics(*args: Any, **known: Any) -> Any:
        said.append({"logits": args[0] if args else known["logits"]} | known)
        return torch.tensor(0.0), {}

    core = importlib.import_module(f"speculators.models.{kind}.core")
    patch.setattr(core, "compute_metrics", metrics)
    own = {"ttt_steps": count} if kind == "eagle3" else {"max_anchors": 1} if blocks else {"num_depths": count}
    if kind == "peagle":  # all depths at the last token that is known, none at others
        at = torch.tensor([*range(length), *[start - 2] * (count - 1)])
        depth = torch.tensor([0] * length + list(range(1, count)))
        patch.setattr(core, "generate_cod_sample_indices", lambda **_: (at, depth))
    with torch.no_grad():
        model(
            hidden_states=torch.tensor(hidden, dtype=torch.float32),
            input_ids=ids,
            document_ids=torch.zeros(1, length, dtype=torch.long),
            loss_mask=mask,
            verifier_last_hidden_states=torch.zeros(1, length, config_width(model)),
            **own,
        )
    logits = [x["logits"][0].numpy() for x in said]
    if kind == "eagle3":
        return np.stack([x[start - 2] for x in logits]), model
    if kind == "peagle":
        return np.concatenate([logits[0][start - 2 : start - 1], logits[0][length:]]), model
    first = 0 if config.sample_from_anchor else 1
    return logits[0][first : first + count], model


def config_width(model: Any) -> int:
    return model.config.transformer_layer_config.hidden_size


@pytest.mark.parametrize("name", HEADS)
def test_the_library_says_the_same(name, target, tmp_path, monkeypatch):
    """Of random tokens and features its logits are those of a reference in float64 that reads the folder which was
    converted; its are float32, of layers 32 wide: 1e-4 is more than ten times what they differ by."""
    pytest.importorskip("speculators")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    head, there, kind = converted(tmp_path, target, name)
    count = config_of(there)["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    tokens, features = random_features(TARGET, 11, seed=5)
    table = load_file(target / "model.safetensors")
    lent = dataclasses.replace(features, embed=table["model.embed_tokens.weight"], head=table["lm_head.weight"])
    reference = HEADS[name][0]
    propose = reference.parallel_proposals if kind == "peagle" else reference.proposals
    drafts_, wanted = propose(head, lent, tokens, count)
    found, model = library_says(there, tokens, features.taps, drafts_.tolist(), monkeypatch)

    rope, size = drafts(head, target).config.rope, TARGET.head_dim
    steps = rope.theta ** (-np.arange(0, size, 2) / size) / np.array(rope.factors or 1.0)
    np.testing.assert_allclose(model.rotary_emb.inv_freq.numpy(), steps, rtol=1e-5)
    if "rope_scaling" in HEADS[name][2]:
        return  # the references know no other positions
    np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=1e-4)
    own = np.arange(found.shape[1]) + (0 if model.d2t is None else model.d2t.numpy())
    assert own[found.argmax(-1)].tolist() == drafts_.tolist()
    for name, x in model.state_dict().items():
        assert not bool(x.isnan().any()), name


# What cannot be written


def test_options(target, tmp_path):
    write(tmp_path / "head", "eagle3")
    source, free = str(tmp_path / "head"), tmp_path / "there"
    with fails(UserError, "to='gguf' is unknown: use one of jaxspec, safetensors, speculators"):
        convert(source, free, to="gguf")
    with fails(UserError, "to='speculators' needs the head's target", "give target"):
        convert(source, free, to="speculators")
    with fails(UserError, "is of to='speculators'", "leave it out"):
        convert(source, free, target=str(target))
    with fails(FileExistsError, "not empty"):
        convert(source, target, to="speculators", target=str(target))
    with fails(UserError, "smollm2-135m-instruct", "is of format 'gguf'", "give its hub id, or a folder"):
        convert(source, free, to="speculators", target="smollm2-135m-instruct")
    with fails(UserError, "target is a model of its own", "convert one of eagle3, dflash, dspark"):
        convert(str(target), free, to="speculators", target=str(target))
    assert not free.exists()


@pytest.mark.parametrize("reference", [eagle, medusa])
def test_methods_that_are_not_there(reference, target, tmp_path):
    reference.write(tmp_path / "head", seed=0, target=TARGET)
    method = reference.__name__.split(".")[-1]
    with fails(UnsupportedError, f"head is a head of method {method!r}", "speculators has eagle3, dflash, dspark"):
        convert(str(tmp_path / "head"), tmp_path / "there", to="speculators", target=str(target))


def test_a_target_of_the_hub_is_named_by_its_id(target):
    assert speculators.verifier(checkpoints.Source("hf", target, "org/name"))["name_or_path"] == "org/name"


def test_methods_are_ours():
    assert set(speculators.METHODS) <= methods.METHODS.keys()
    assert {*speculators.METHODS, "peagle"} == speculators.KINDS.keys()
    assert tuple(FORMATS) == ("jaxspec", "safetensors", "speculators")


REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "width 24: in a head of eagle3, speculators 0.9.0 reads the target's width, 32": (eagle3, TAPS | {"width": 24}),
    "layers [1, 1, 2] to read": (eagle3, {"layer_ids": (1, 1, 2)}),
    "d2t for all 320 ids": (eagle3, TAPS | {"draft_vocab_size": 320}),
    "norm_before_fc and fc_norm: in a head of eagle3, speculators 0.9.0 reads one of the two": (
        eagle3,
        TAPS | {"norm_before_fc": True, "fc_norm": True},
    ),
}


@pytest.mark.parametrize("line", REFUSED)
def test_heads_that_are_not_there(line, target, tmp_path):
    reference, options = REFUSED[line]
    reference.write(tmp_path / "head", seed=0, target=TARGET, **options)
    with fails(UnsupportedError, line):
        convert(str(tmp_path / "head"), tmp_path / "there", to="speculators", target=str(target))


def test_layers_that_are_not_there(target, tmp_path):
    """DFlash's without norms of queries and keys; a table that is scaled; biases."""
    write(tmp_path / "head", "dflash")
    name = tmp_path / "head" / "model.safetensors"
    kept = {key: x for key, x in load_file(name).items() if not key.endswith(("q_norm.weight", "k_norm.weight"))}
    save_file(kept, name)
    with fails(UnsupportedError, "layers without norms of queries and keys", "layers of Qwen3's kind"):
        convert(str(tmp_path / "head"), tmp_path / "there", to="speculators", target=str(target))
    config = checkpoints.load_config(checkpoints.resolve(str(target)))
    head = dataclasses.replace(drafts(tmp_path / "head", target).config, qk_norm=True)
    with fails(UnsupportedError, "a table scaled by 5.5"):
        speculators.check("head", head, dataclasses.replace(config, embed_scale=5.5))
    with fails(UnsupportedError, "biases of queries, keys and values"):
        speculators.check("head", dataclasses.replace(head, qkv_bias=True), config)
    with fails(UnsupportedError, "a narrower way to 8 rare ids", "one way to all"):
        speculators.check("head", dataclasses.replace(head, rare_vocab_size=8, rare_width=4), config)


def test_damage(target, tmp_path):
    """A head without one of its tensors or for another target, a target without its table."""
    write(tmp_path / "head", "eagle3")
    name = tmp_path / "head" / "model.safetensors"
    tensors = load_file(name)
    write_it = lambda: convert(str(tmp_path / "head"), tmp_path / "there", to="speculators", target=str(target))
    save_file({key: x for key, x in tensors.items() if key != "norm.weight"}, name)
    with fails(UserError, "tensor norm.weight is missing"):
        write_it()
    save_file(tensors | {"d2t": tensors["d2t"] + 400}, name)
    with fails(UserError, "d2t repeats ids, or holds ids beyond the target's 320"):
        write_it()
    save_file(tensors, name)
    bare = shutil.copytree(target, tmp_path / "bare")
    theirs = load_file(bare / "model.safetensors")
    save_file({key: x for key, x in theirs.items() if "embed" not in key}, bare / "model.safetensors")
    with fails(UserError, "bare", "tensor model.embed_tokens.weight is missing", "needs a copy"):
        convert(str(tmp_path / "head"), tmp_path / "there", to="speculators", target=str(bare))
