"""ModelConfig reads Hugging Face configs and GGUF metadata of every family, and refuses what it would get wrong."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import pytest

from checkpoints import gguf_config, hf_config, rope_scaling
from jaxspec.common.errors import UserError
from jaxspec.models.config import ModelConfig
from jaxspec.models.rope import Rope
from tests.support.tiny_models import FAMILIES

LLAMA = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "eos_token_id": [2, 7],
    "bos_token_id": 1,
}
GEMMA = LLAMA | {
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"],
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 128}
LONGROPE |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
META = {
    "general.architecture": "llama",
    "llama.block_count": 6,
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 5e5,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.eot_token_id": 7,
}


def meta(architecture: str, **more):
    renamed = {key.replace("llama.", f"{architecture}."): value for key, value in META.items()}
    return renamed | {"general.architecture": architecture} | {f"{architecture}.{k}": v for k, v in more.items()}


def from_gguf(raw, **options):
    return gguf_config.model_config(raw, **{"vocab_size": 128, "tied": False} | options)


def test_llama():
    config = hf_config.model_config(LLAMA)
    assert (config.head_dim, config.layers[0].heads_per_group, config.layers[0].qkv_width) == (16, 2, 128)
    assert config.rope == Rope(5e5)
    assert config.windows == (None, None)
    assert not config.tied
    assert config.query_scale == 0.25
    assert config.eos_ids == (2, 7)
    assert hf_config.model_config(LLAMA | {"eos_token_id": 3}).eos_ids == (3,)
    assert hf_config.model_config(LLAMA | {"eos_token_id": None}).eos_ids == ()
    assert hf_config.model_config(LLAMA | {"head_dim": 40}).head_dim == 40


def test_gemma():
    config = hf_config.model_config(GEMMA)
    assert config.windows == (32, None)
    assert config.rope == Rope(1e6, (8.0,) * 8)
    assert config.local_rope == Rope(1e4)
    assert config.embed_scale == 8.0
    assert config.query_scale == 1 / 16
    assert config.norm_plus_one
    assert config.activation == "gelu_tanh"


def test_mistral_and_qwen_windows():
    assert hf_config.model_config(LLAMA | {"model_type": "mistral", "sliding_window": 9}).windows == (9, 9)
    assert hf_config.model_config(LLAMA | {"model_type": "mistral", "sliding_window": None}).windows == (None, None)
    mixed = {"model_type": "qwen2", "sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]}
    config = hf_config.model_config(LLAMA | mixed)
    assert config.windows == (None, 9)
    assert config.qkv_bias


def test_llama3_factors_follow_the_wavelength():
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    raw = LLAMA | {"rope_scaling": scaling | {"original_max_position_embeddings": 256}, "head_dim": 64}
    factors = hf_config.model_config(raw).rope.factors
    for i, factor in enumerate(factors):
        wavelength = 2 * math.pi * 5e5 ** (2 * i / 64)
        if wavelength < 256 / 4:
            assert factor == 1.0
        elif wavelength > 256:
            assert factor == 8.0
        else:
            assert 1.0 < factor < 8.0
    assert list(factors) == sorted(factors)


def test_llama3_of_a_context_that_stands_apart():
    """As transformers reads it: before what the table says."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    key = "original_max_position_embeddings"
    read = lambda table, **more: (
        hf_config.model_config(LLAMA | {"rope_scaling": scaling | table, "head_dim": 64} | more).rope
    )
    expected = read({key: 256})
    assert read({}, **{key: 256}) == read({key: 512}, **{key: 256}) == expected != read({key: 512})
    linear = {"rope_type": "linear", "factor": 2.0}
    assert hf_config.model_config(LLAMA | {"rope_scaling": linear, key: 256}).rope.factors == (2.0,) * 8


@pytest.mark.parametrize("kind", ["qwen2", "mimo"])
def test_biases_that_are_always_there(kind):
    """Whatever attention_bias says; MiMo's own configuration says true."""
    said = [hf_config.model_config(LLAMA | {"model_type": kind} | more) for more in ({}, {"attention_bias": True})]
    assert said[0] == said[1]
    assert said[0].qkv_bias


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"model_type": "qwen2_vl", "vision_config": {"depth": 2}}, "multimodal"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, "mrope_section"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_scaling": YARN | {"llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({"clip_qkv": 8.0}, "clip_qkv"),
        ({"residual_multiplier": 0.2}, "residual_multiplier"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial"),
        ({"hidden_act": "relu2"}, "relu2"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_hugging_face_configs_that_are_refused(change, words):
    with pytest.raises(NotImplementedError, match=words):
        hf_config.model_config(LLAMA | change)


def test_granite_divides_the_residual_stream():
    """Sublayers' results then need no factor; features for drafts have the published scale again."""
    scales = {"embedding_multiplier": 12.0, "attention_multiplier": 0.1, "logits_scaling": 16.0}
    config = hf_config.model_config(LLAMA | {"model_type": "granite", "residual_multiplier": 0.25} | scales)
    assert (config.embed_scale, config.query_scale, config.logit_scale) == (12.0, 0.1, 1 / 16)
    assert (config.residual_scale, config.norm_eps) == (0.25, 1e-5 * 16)


def test_yarn_of_every_family():
    rope = hf_config.model_config(LLAMA | {"model_type": "qwen3", "rope_scaling": YARN}).rope
    assert rope.factors[0] == 1.0  # the fastest stay
    assert rope.factors[-1] == 4.0
    assert rope.scale == pytest.approx(0.1 * math.log(4.0) + 1.0)
    paired = {"mscale": 1.0, "mscale_all_dim": 1.0}
    assert hf_config.model_config(LLAMA | {"rope_scaling": YARN | paired}).rope.scale == 1.0


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_longrope_has_two_lists_of_factors(kind):
    """Phi-3's first files had other names for it."""
    config = hf_config.model_config(LLAMA | {"model_type": "phi3", "rope_scaling": LONGROPE | {"rope_type": kind}})
    assert config.layers[0].rope.factors == (2.0,) * 8
    assert config.within(128).layers[0].rope.factors == (1.0,) * 8
    assert config.within(129).layers[0].rope.factors == (2.0,) * 8
    assert config.rope.scale == pytest.approx(math.sqrt(1 + math.log(4) / math.log(128)))


def test_ministrals_queries_grow_beyond_the_original_context():
    raw = LLAMA | {"model_type": "ministral3", "rope_scaling": YARN | {"llama_4_scaling_beta": 0.1}}
    config = hf_config.model_config(raw)
    assert config.layers[0].rope.query_growth == 0.1
    assert config.within(128).layers[0].rope.query_growth == 0.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "original_max_position_embeddings=None"),
        ({"rope_scaling": LONGROPE | {"long_factor": [1.0] * 7}}, "list of 8 numbers"),
        ({"rope_scaling": LONGROPE | {"short_factor": [0.0] * 8}}, "short_factor=0.0"),
        ({"rope_scaling": YARN | {"partial_rotary_factor": 0.45}}, "rotates 7 of 16"),
        ({"rope_scaling": YARN | {"partial_rotary_factor": 0.1}}, "rotates 1 of 16"),
        ({"rope_scaling": YARN | {"partial_rotary_factor": 0.07}, "head_dim": 64}, "an eighth or more"),
        ({"rope_scaling": YARN, "rope_theta": 1.0}, "above 1 for YaRN"),
        ({"rope_scaling": YARN | {"mscale": "x", "mscale_all_dim": 1.0}}, "mscale_all_dim='x'"),
        ({"rms_norm_eps": None}, "rms_norm_eps=None"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "for each of 2 layers"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 2]}, "0 or 1"),
        ({"model_type": "granite", "residual_multiplier": 0}, "residual_multiplier=0"),
    ],
)
def test_options_of_dense_families_that_cannot_be(change, words):
    with pytest.raises(UserError, match=words):
        hf_config.model_config(LLAMA | {"model_type": "phi3"} | change)


def test_gguf_llama():
    config = from_gguf(META, rope_factors=[1, 2, 3, 4, 5, 6, 7, 8])
    assert config.rope == Rope(5e5, (1, 2, 3, 4, 5, 6, 7, 8))
    assert config.eos_ids == (2, 7)
    assert config.windows == (None,) * 6
    # Converters write Mistral's window into llama files, where nothing uses it.
    assert from_gguf(META | {"llama.attention.sliding_window": 9}).windows == (None,) * 6


def test_gguf_linear_scaling_of_which_only_the_factor_is_said():
    factor = {"llama.rope.scaling.factor": 4.0}
    assert from_gguf(META | factor).rope.factors == (4.0,) * 8
    assert from_gguf(META | factor | {"llama.rope.scaling.type": "none"}).rope.factors == ()


@pytest.mark.parametrize(
    ("pattern", "windows"),
    [
        ({}, (9, 9, 9, 9, 9, None)),
        ({"attention.sliding_window_pattern": 2}, (9, None) * 3),
        ({"attention.sliding_window_pattern": [True, False, False] * 2}, (9, None, None) * 2),
    ],
)
def test_gguf_gemma_layers(pattern, windows):
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    config = from_gguf(meta("gemma3", **{"attention.sliding_window": 9}, **scaling, **pattern))
    assert config.windows == windows
    assert config.rope == Rope(5e5, (8.0,) * 8)
    assert config.local_rope == Rope(1e4)
    assert not config.norm_plus_one
    assert config.query_scale == 0.25


@pytest.mark.parametrize(("architecture", "bias", "norm"), [("qwen2", True, False), ("qwen3", False, True)])
def test_gguf_qwen(architecture, bias, norm):
    config = from_gguf(meta(architecture, **{"attention.key_length": 24}))
    assert (config.qkv_bias, config.qk_norm, config.head_dim) == (bias, norm, 24)


def test_gguf_metadata_that_is_refused():
    with pytest.raises(NotImplementedError, match="'mamba'"):
        from_gguf(meta("mamba"))
    with pytest.raises(NotImplementedError, match="None"):
        from_gguf({})
    with pytest.raises(NotImplementedError, match="'dynamic' in GGUF"):
        from_gguf(META | {"llama.rope.scaling.type": "dynamic"})
    with pytest.raises(ValueError, match=r"llama\.block_count"):
        from_gguf({k: v for k, v in META.items() if k != "llama.block_count"})
    with pytest.raises(ValueError, match=r"gemma3\.attention\.sliding_window"):
        from_gguf(meta("gemma3"))


GGUF_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 1024}


def test_gguf_yarn():
    """Options that the file does not give have YaRN's own defaults. Scaled queries are those of mistral3 alone."""
    options = {"factor": 4.0, "original_max_position_embeddings": 1024}
    assert from_gguf(meta("qwen3", **GGUF_YARN)).rope == rope_scaling.yarn(options, 5e5, 16, 0)
    growing = from_gguf(meta("mistral3", **GGUF_YARN, **{"attention.temperature_scale": 0.1})).rope
    assert growing == rope_scaling.yarn(options | {"llama_4_scaling_beta": 0.1}, 5e5, 16, 0)
    assert growing.query_growth == 0.1
    # OLMo 3's files may name the factor of YaRN's attention without saying YaRN.
    factor = from_gguf(meta("olmo2", **GGUF_YARN, **{"rope.scaling.attn_factor": 1.25})).rope
    assert factor == rope_scaling.yarn(options | {"attention_factor": 1.25}, 5e5, 16, 0)


@pytest.mark.parametrize(
    ("architecture", "more", "kind", "words"),
    [
        ("llama", {"rope.scaling.yarn_ext_factor": 0.5}, NotImplementedError, "llama.rope.scaling.yarn_ext_factor=0.5"),
        ("llama", {"attention.temperature_scale": 0.1}, NotImplementedError, "llama.attention.temperature_scale=0.1"),
        ("olmo2", {"rope.scaling.attn_factor": 1.2, "rope.scaling.type": "none"}, NotImplementedError, "beside rope"),
        ("llama", {"rope.scaling.attn_factor": 1.2}, NotImplementedError, "llama.rope.scaling.attn_factor=1.2"),
        ("llama", {"rope.scaling.original_context_length": None}, ValueError, "original_context_length"),
        ("llama", {"rope.scaling.factor": None}, ValueError, "lacks llama.rope.scaling.factor"),
        (
            "mistral3",
            {"attention.temperature_scale": 0.1, "rope.scaling.type": "none"},
            NotImplementedError,
            "mistral3.attention.temperature_scale=0.1",
        ),
        (
            "mistral3",
            {"attention.temperature_scale": 0.1, "attention.temperature_length": 512},
            NotImplementedError,
            "mistral3.attention.temperature_length=512",
        ),
    ],
)
def test_gguf_yarn_that_is_refused(architecture, more, kind, words):
    with pytest.raises(kind, match=re.escape(words)):
        from_gguf(meta(architecture, **GGUF_YARN | more))


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_json_round_trip(config):
    again = ModelConfig.from_json(json.loads(json.dumps(config.to_json())))
    assert again == config
    assert hash(again) == hash(config)


def test_json_of_another_version():
    with pytest.raises(ValueError, match="flux"):
        ModelConfig.from_json(FAMILIES["llama"].to_json() | {"flux": 1})
    with pytest.raises(UserError, match="per_layer=3 must be a list"):
        ModelConfig.from_json(FAMILIES["llama"].to_json() | {"per_layer": 3})


@pytest.mark.parametrize(
    ("change", "words"),
    [({"num_kv_heads": 3}, "do not divide"), ({"head_dim": 7}, "odd"), ({"windows": (None,)}, "one for each")],
)
def test_shapes_that_cannot_be(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(FAMILIES["llama"], **change)
