"""The decoder computes what torch computes: live where torch is installed, and against golden files everywhere."""

from __future__ import annotations

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import checkpoints
from jaxspec.models import families
from jaxspec.models.backend import Backend
from jaxspec.models.decoder import abstract_params, bind, no_cache
from jaxspec.models.rows import whole_rows
from jaxspec.models.sharding import for_degree
from jaxspec.parallel.placement import make_placement
from pallas_kernels.device import here
from tests.golden.families import FAMILIES, FOLDER, POSITIONS, SHARED, save_model, torch_logits, torch_model
from tests.models.forward import run
from tests.models.greedy import greedy_tokens
from tests.support.sizes import cases

# The prompt in one pass, token by token from the cache, and a prompt followed by verification-sized passes.
CHUNKINGS = {"prompt": (POSITIONS,), "decode": (1,) * POSITIONS, "verify": (20, *(4,) * 7)}
TOLERANCE = 1e-4  # relative, of the norm over all positions


def load(folder, dtype="float32"):
    source = checkpoints.resolve(str(folder))
    config = checkpoints.load_config(source)
    return config, checkpoints.load_params(source, config, abstract_params(config, dtype, make_placement()))


def relative_error(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


RENAMED = {name: family for name, family in families.FAMILIES.items() if family.reads_as in families.FAMILIES}


def test_every_family_is_compared():
    assert {family for family, *_ in FAMILIES.values()} | set(RENAMED) == set(families.FAMILIES)


@pytest.mark.parametrize("family", RENAMED)
def test_a_family_under_another_name_computes_what_that_does(family, tmp_path):
    """transformers lacks it, so no golden file can be made: that of the family whose defaults it has serves."""
    golden = FOLDER / RENAMED[family].reads_as
    written = json.loads((golden / "config.json").read_text(encoding="utf-8")) | {"model_type": family}
    (tmp_path / "config.json").write_text(json.dumps(written), encoding="utf-8")
    shutil.copy(golden / "model.safetensors", tmp_path)
    expected = load_file(golden / "expected.safetensors")
    config, params = load(tmp_path)
    assert config.family == family
    assert relative_error(run(config, params, expected["tokens"], (POSITIONS,)), expected["logits"]) < TOLERANCE


QUICK = ["llama3", "qwen3", "gemma3", "granite", "phi4-mini", "olmo3", "ministral3", "muse_glimmer"]


@cases("family", FAMILIES, quick=QUICK)
def test_golden_logits(family):
    expected = load_file(FOLDER / family / "expected.safetensors")
    config, params = load(FOLDER / family)
    assert np.abs(expected["logits"]).mean() > 0.5  # else the comparison would say little
    for name, chunks in CHUNKINGS.items():
        error = relative_error(run(config, params, expected["tokens"], chunks), expected["logits"])
        assert error < TOLERANCE, (name, error)


SHARDED = [(family, 4) for family in ("llama3", "granite", "phi3", "phi4-mini", "olmo2", "olmo3", "ministral3")]
SHARDED += [("muse_glimmer", degree) for degree in (2, 4)]


@pytest.mark.skipif(jax.device_count() < 4, reason="wants 4 devices: --xla_force_host_platform_device_count")
@cases(("family", "degree"), [*SHARDED, ("olmo2", 2), ("smollm3", 2)], quick=[("olmo3", 4)])
def test_golden_logits_over_devices(family, degree):
    """Also where key-value heads are copied, and where a norm is over the heads of all devices."""
    expected = load_file(FOLDER / family / "expected.safetensors")
    source, placement = checkpoints.resolve(str(FOLDER / family)), make_placement(degree)
    config = for_degree(checkpoints.load_config(source), degree)
    params = checkpoints.load_params(source, config, abstract_params(config, "float32", placement))
    found = run(config, params, expected["tokens"], (24, 24), placement)
    assert relative_error(found, expected["logits"]) < TOLERANCE


@pytest.mark.thorough
@pytest.mark.oracle
def test_features_of_granite_have_the_published_scale(tmp_path):
    """The decoder's own residual stream is divided by residual_multiplier."""
    torch = pytest.importorskip("torch")
    model = torch_model("granite", 3)
    save_model(model, "granite", tmp_path)
    tokens = np.random.default_rng(3).integers(3, SHARED["vocab_size"], (2, 8))
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens), output_hidden_states=True).hidden_states
    config, params = load(tmp_path)
    rows, backend = whole_rows(*tokens.shape), Backend(here())
    _, _, tapped = bind(config, params)(jnp.asarray(tokens), no_cache(config), rows, backend, taps=(0, 1))
    for ours, expected in zip(tapped, theirs, strict=False):
        assert relative_error(np.asarray(ours), expected.numpy()) < TOLERANCE


@pytest.mark.thorough
@pytest.mark.oracle
@pytest.mark.parametrize("length", [32, 33])
def test_the_longest_text_chooses_longropes_factors(length, tmp_path):
    """Up to the original context of 32 the short ones, beyond it the long ones."""
    pytest.importorskip("torch")
    model = torch_model("phi4-mini", 7)
    save_model(model, "phi4-mini", tmp_path)
    tokens = np.random.default_rng(7).integers(3, SHARED["vocab_size"], (2, length))
    theirs = torch_logits(model, tokens)
    config, params = load(tmp_path)
    near, far = (run(config.within(n), params, tokens, (length,)) for n in (length, 65 - length))
    assert relative_error(near, theirs) < TOLERANCE < relative_error(far, theirs)


@pytest.mark.thorough
@pytest.mark.oracle
@pytest.mark.parametrize("family", FAMILIES)
def test_live_logits(family, tmp_path):
    pytest.importorskip("torch")
    seed = 100
    model = torch_model(family, seed)
    save_model(model, family, tmp_path)
    tokens = np.random.default_rng(seed).integers(3, SHARED["vocab_size"], (2, POSITIONS))
    theirs = torch_logits(model, tokens)
    config, params = load(tmp_path)
    for name, chunks in CHUNKINGS.items():
        error = relative_error(run(config, params, tokens, chunks), theirs)
        assert error < TOLERANCE, (name, error)


# Gemma 4 and Muse Glimmer have such tests of their own. Phi-4 mini changes its factors within the text in transformers.
DENSE = ("granite", "phi3", "smollm3", "olmo2", "olmo3", "ministral3")


@pytest.mark.oracle
@cases("devices", [1, 2], rest=[1, 2])
@cases("family", DENSE, rest=["olmo3"])
def test_greedy_tokens_are_those_of_transformers(family, devices, tmp_path):
    """Over 200 tokens, several times the windows and the contexts of rotary embeddings."""
    pytest.importorskip("torch")
    ours, theirs = greedy_tokens(family, torch_model(family, 0), devices, tmp_path)
    assert ours == theirs


@pytest.fixture(scope="module")
def smollm2():
    try:
        source = checkpoints.resolve("smollm2-135m-instruct")
    except ConnectionError as error:
        pytest.skip(str(error))
    config = checkpoints.load_config(source)
    tokenizer = checkpoints.load_tokenizer(source)
    return (
        source,
        config,
        tokenizer,
        checkpoints.load_params(source, config, abstract_params(config, "float32", make_placement())),
    )


@pytest.mark.thorough
@pytest.mark.real
def test_smollm2_continues_as_torch_does(smollm2):
    """Fed torch's greedy tokens, the argmax at every position is torch's next token: that is greedy equality."""
    _, config, tokenizer, params = smollm2
    for row in json.loads((FOLDER / "smollm2.json").read_text(encoding="utf-8")):
        assert tokenizer(row["prompt"]).input_ids == row["ids"]
        tokens = np.asarray([row["ids"] + row["new_ids"]])
        length = -(-tokens.shape[1] // 16) * 16  # one compiled shape for all prompts; padding comes last
        padded = np.pad(tokens, ((0, 0), (0, length - tokens.shape[1])))
        logits = run(config, params, padded, (length,))[0]
        predicted = logits.argmax(-1)[len(row["ids"]) - 1 : tokens.shape[1] - 1]
        assert predicted.tolist() == row["new_ids"], row["prompt"]


@pytest.mark.thorough
@pytest.mark.real
@pytest.mark.oracle
def test_smollm2_weights_and_logits_as_torch(smollm2):
    """The weights and logits equal those of a torch model filled by gguf's own reader."""
    pytest.importorskip("torch")
    from tests.golden import make

    source, config, _, params = smollm2
    model = make.smollm2(source.path)
    embed = model.get_input_embeddings().weight.detach().numpy()
    np.testing.assert_array_equal(np.asarray(params["embed"]), embed)
    row = json.loads((FOLDER / "smollm2.json").read_text(encoding="utf-8"))[0]
    tokens = np.asarray([(row["ids"] + row["new_ids"])[:48]])
    theirs = torch_logits(model, tokens)
    for chunks in ((48,), (16, 16, 16)):
        assert relative_error(run(config, params, tokens, chunks), theirs) < TOLERANCE
