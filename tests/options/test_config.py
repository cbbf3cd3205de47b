"""Options: what is wrong is said in one line, what is not supported is named, nothing is silently ignored."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from jaxspec.options.engine import EngineConfig
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.options.speculative import SpeculativeConfig

NAN = float("nan")
TYPICAL = {"rejection_sample_method": "typical"}
SYNTHETIC = {"rejection_sample_method": "synthetic"}
WRONG = [
    (SamplingParams, {"temperature": -0.1}, "temperature=-0.1 must lie in [0, 1e6]; 0 is greedy"),
    (SamplingParams, {"temperature": NAN}, "temperature=nan must lie in"),
    (SamplingParams, {"temperature": float("inf")}, "temperature=inf must lie in"),
    (SamplingParams, {"top_p": 0.0}, "top_p=0.0 must lie in (0, 1]; 1 turns it off"),
    (SamplingParams, {"top_p": 1.1}, "top_p=1.1 must lie in"),
    (SamplingParams, {"top_p": NAN}, "top_p=nan must lie in"),
    (SamplingParams, {"min_p": -0.1}, "min_p=-0.1 must lie in [0, 1]; 0 turns it off"),
    (SamplingParams, {"min_p": NAN}, "min_p=nan must lie in"),
    (SamplingParams, {"top_k": -2}, "top_k=-2 is below -1; 0 turns it off"),
    (SamplingParams, {"max_tokens": 0}, "max_tokens=0 is below 1"),
    (SamplingParams, {"num_speculative_tokens": -1}, "num_speculative_tokens=-1 is below 0; 0 turns speculation off"),
    (SamplingParams, {"stop": ["a", ""]}, "must hold non-empty strings"),
    (SamplingParams, {"stop": [3]}, "must hold non-empty strings"),
    (SamplingParams, {"bad_words": ["no", ""]}, "bad_words=['no', ''] must hold non-empty strings"),
    (SamplingParams, {"n": 0}, "n=0 is below 1"),
    (SamplingParams, {"min_tokens": -1}, "min_tokens=-1 is below 0"),
    (SamplingParams, {"min_tokens": 17}, "min_tokens=17 is above max_tokens, 16"),
    (SamplingParams, {"repetition_penalty": 0.0}, "repetition_penalty=0.0 must lie in [0.001, 1000]; 1 turns it off"),
    (SamplingParams, {"repetition_penalty": NAN}, "repetition_penalty=nan must lie in"),
    (SamplingParams, {"repetition_penalty": float("inf")}, "repetition_penalty=inf must lie in"),
    (SamplingParams, {"presence_penalty": 2.1}, "presence_penalty=2.1 must lie in [-2, 2]; 0 turns it off"),
    (SamplingParams, {"presence_penalty": NAN}, "presence_penalty=nan must lie in"),
    (SamplingParams, {"frequency_penalty": -2.1}, "frequency_penalty=-2.1 must lie in [-2, 2]; 0 turns it off"),
    (SamplingParams, {"logit_bias": {3: 101.0}}, "logit_bias of id 3 is 101.0: it must lie in [-100, 100]"),
    (SamplingParams, {"logit_bias": {3: NAN}}, "logit_bias of id 3 is nan: it must lie in [-100, 100]"),
    (SamplingParams, {"logit_bias": {3: float("-inf")}}, "allowed_token_ids forbids ids outright"),
    (SamplingParams, {"allowed_token_ids": []}, "allowed_token_ids is empty and would allow nothing: leave it out"),
    (SamplingParams, {"logprobs": -1}, "logprobs=-1 is below 0"),
    (SamplingParams, {"logprobs": 21}, "logprobs=21 is above 20"),
    (SamplingParams, {"prompt_logprobs": -1}, "prompt_logprobs=-1 is below 0"),
    (SamplingParams, {"prompt_logprobs": 21}, "prompt_logprobs=21 is above 20"),
    (SamplingParams, {"temprature": 1.0}, "unknown option 'temprature' of SamplingParams: did you mean 'temperature'?"),
    (SamplingParams, {"max_new_tokens": 5}, "unknown option 'max_new_tokens' of SamplingParams: did you mean"),
    (SamplingParams, {"zzz": 5}, "unknown option 'zzz' of SamplingParams: known options: n, max_tokens, "),
    (SpeculativeConfig, {"num_speculative_tokens": 0}, "num_speculative_tokens=0 is below 1"),
    (SpeculativeConfig, {"num_speculative_token": 3}, "did you mean 'num_speculative_tokens'?"),
    (SpeculativeConfig, {"method": "magic"}, "method='magic' is unknown: use one of draft_model, ngram"),
    (SpeculativeConfig, {"method": "draft_model"}, "method='draft_model' needs model="),
    (
        SpeculativeConfig,
        {"method": "ngram", "model": "x"},
        "method='ngram' uses no draft model, but model='x' is given",
    ),
    (SpeculativeConfig, {"prompt_lookup_min": 0}, "prompt_lookup_min=0 is below 1"),
    (SpeculativeConfig, {"prompt_lookup_max": 1}, "prompt_lookup_max=1 is below prompt_lookup_min=2"),
    (SpeculativeConfig, {"suffix_decoding_max_tree_depth": 1}, "suffix_decoding_max_tree_depth=1 is below 2"),
    (SpeculativeConfig, {"suffix_decoding_max_tree_depth": 65}, "suffix_decoding_max_tree_depth=65 is above 64"),
    (SpeculativeConfig, {"suffix_decoding_max_spec_factor": -1}, "suffix_decoding_max_spec_factor=-1 must lie in [0"),
    (SpeculativeConfig, {"suffix_decoding_min_token_prob": 2}, "suffix_decoding_min_token_prob=2 must lie in [0, 1]"),
    (SpeculativeConfig, {"method": "suffix", "model": "x"}, "method='suffix' uses no draft model, but model='x'"),
    (SpeculativeConfig, {"draft_sample_method": "best"}, "draft_sample_method='best' is unknown"),
    (SpeculativeConfig, {"rejection_sample_method": "no"}, "rejection_sample_method='no' is unknown"),
    *(
        (SpeculativeConfig, TYPICAL | {name: x}, f"{name}={x!r} must ")
        for name in ("posterior_threshold", "posterior_alpha")
        for x in (0.0, -0.1, 1.5, NAN, "0.1")
    ),
    (SpeculativeConfig, {"posterior_alpha": 0.3}, "posterior_alpha=0.3 needs rejection_sample_method='typical'"),
    (SpeculativeConfig, {"max_model_len": 0}, "max_model_len=0 is below 1"),
    (SpeculativeConfig, {"dtype": "int8"}, "dtype='int8' is unknown: use one of auto, float32"),
    (SpeculativeConfig, {"method": "ngram+draft_model"}, "method='ngram+draft_model' needs model="),
    (SpeculativeConfig, {"disable_by_batch_size": 0}, "disable_by_batch_size=0 is below 1"),
    (
        SpeculativeConfig,
        {"synthetic_acceptance_length": 2.0},
        "needs rejection_sample_method='synthetic'",
    ),
    (
        SpeculativeConfig,
        {"synthetic_acceptance_rates": (0.5,)},
        "needs rejection_sample_method='synthetic'",
    ),
    (
        SpeculativeConfig,
        SYNTHETIC,
        "'synthetic' needs one of synthetic_acceptance_length and synthetic_acceptance_rates",
    ),
    (
        SpeculativeConfig,
        SYNTHETIC | {"synthetic_acceptance_length": 2.0, "synthetic_acceptance_rates": (0.5,) * 4},
        "'synthetic' needs one of",
    ),
    (
        SpeculativeConfig,
        SYNTHETIC | {"synthetic_acceptance_length": 5.5},
        "synthetic_acceptance_length=5.5 must lie in [1, K + 1 = 5]",
    ),
    (
        SpeculativeConfig,
        SYNTHETIC | {"synthetic_acceptance_length": 0.5},
        "synthetic_acceptance_length=0.5 must lie in [1, K + 1 = 5]",
    ),
    *(
        (
            SpeculativeConfig,
            SYNTHETIC | {"synthetic_acceptance_rates": rates},
            f"synthetic_acceptance_rates={rates} must be 4 probabilities that do not increase",
        )
        for rates in [(0.5,), (0.5, 0.6, 0.4, 0.3), (1.5, 0.6, 0.4, 0.3), (0.5, 0.4, 0.3, -0.1), (NAN,) * 4]
    ),
    (EngineConfig, {"dtype": "int8"}, "dtype='int8' is unknown"),
    *(
        (
            kind,
            {"kv_cache_dtype": x},
            f"kv_cache_dtype={x!r} is unknown: use one of auto, int8, fp8, fp8_e4m3, fp8_e5m2",
        )
        for kind in (EngineConfig, SpeculativeConfig)
        for x in ("int4", "FP8", None, 8, ["int8"])
    ),
    (EngineConfig, {"max_model_len": 0}, "max_model_len=0 is below 1"),
    (EngineConfig, {"memory_utilization": 0.0}, "memory_utilization=0.0 must lie in (0, 1]"),
    (EngineConfig, {"tensor_parallel_size": 0}, "tensor_parallel_size=0 is below 1"),
    (EngineConfig, {"max_num_seqs": 0}, "max_num_seqs=0 is below 1"),
    (EngineConfig, {"page_size": 0}, "page_size=0 is below 1"),
    (EngineConfig, {"num_pages": 0}, "num_pages=0 is below 1"),
    (EngineConfig, {"rounds_per_launch": 65}, "rounds_per_launch=65 is above 64"),
    (EngineConfig, {"rounds_per_launch": 0}, "rounds_per_launch=0 is below 1"),
    (EngineConfig, {"memory_utilization": 1.5}, "memory_utilization=1.5 must lie in (0, 1]"),
    (EngineConfig, {"prefill_chunk": 100}, "prefill_chunk=100 must be a power of two, at least 16"),
    (EngineConfig, {"max_gap_ms": 0}, "max_gap_ms=0 must be more than 0, or inf for no limit"),
    (EngineConfig, {"max_gap_ms": float("nan")}, "max_gap_ms=nan must be more than 0"),
    (EngineConfig, {"max_gap_ms": "1"}, "max_gap_ms='1' must be a number"),
    (EngineConfig, {"prefill_chunk": 8}, "prefill_chunk=8 must be a power of two"),
    (EngineConfig, {"kernels": "cuda"}, "kernels='cuda' is unknown: use one of reference, pallas"),
    # What passes a comparison and fails on a device, in types and in 32 bits.
    *((SamplingParams, {"top_k": x}, f"top_k={x!r} ") for x in (2**31, NAN, 1.5, "7", None, True)),
    *((SamplingParams, {"seed": x}, f"seed={x!r} ") for x in (1.5, "7", 2**64, -(2**63) - 1, True)),
    (SamplingParams, {"min_tokens": 2**31, "max_tokens": 2**31}, "max_tokens=2147483648 is above 2147483647"),
    (SamplingParams, {"max_tokens": 20.5}, "max_tokens=20.5 must be a whole number"),
    (SamplingParams, {"max_tokens": None}, "max_tokens=None must be a whole number"),
    (SamplingParams, {"n": 16_385}, "n=16385 is above 16384"),
    (SamplingParams, {"logprobs": 2.5}, "logprobs=2.5 must be a whole number"),
    (SamplingParams, {"prompt_logprobs": "2"}, "prompt_logprobs='2' must be a whole number"),
    (SamplingParams, {"num_speculative_tokens": 1.5}, "num_speculative_tokens=1.5 must be a whole number"),
    (SamplingParams, {"temperature": 1e39}, "temperature=1e+39 must lie in [0, 1e6]; 0 is greedy"),
    (SamplingParams, {"temperature": "0.7"}, "temperature='0.7' must be a number"),
    (SamplingParams, {"temperature": None}, "temperature=None must be a number"),
    (SamplingParams, {"temperature": 10**400}, "must be a number"),
    (SamplingParams, {"top_p": 1j}, "top_p=1j must be a number"),
    (SamplingParams, {"repetition_penalty": 1e-38}, "repetition_penalty=1e-38 must lie in [0.001, 1000]"),
    (SamplingParams, {"ignore_eos": "no"}, "ignore_eos='no' must be True or False"),
    (SamplingParams, {"stop": b"end"}, "stop=b'end' must hold non-empty strings"),
    (SamplingParams, {"stop": 3}, "stop=3 must hold non-empty strings"),
    (SamplingParams, {"stop_token_ids": b"12"}, "stop_token_ids=b'12' must be a list of token ids"),
    (SamplingParams, {"stop_token_ids": 5}, "stop_token_ids=5 must be a list of token ids"),
    (SamplingParams, {"stop_token_ids": [2**31]}, "stop_token_ids=2147483648 is above 2147483647"),
    (SamplingParams, {"allowed_token_ids": [1.0]}, "allowed_token_ids=1.0 must be a whole number"),
    (SamplingParams, {"allowed_token_ids": "12"}, "allowed_token_ids='12' must be a list of token ids"),
    (SamplingParams, {"logit_bias": {2.7: 1.0}}, "logit_bias id=2.7 must be a whole number"),
    (SamplingParams, {"logit_bias": {"5": 1.0, 5: 2.0}}, "logit_bias has id 5 twice"),
    (SamplingParams, {"logit_bias": {5: "1"}}, "logit_bias of id 5='1' must be a number"),
    (SamplingParams, {"logit_bias": 7}, "logit_bias=7 must map token ids to numbers"),
    (SpeculativeConfig, {"num_speculative_tokens": 1.5}, "num_speculative_tokens=1.5 must be a whole number"),
    (SpeculativeConfig, {"num_speculative_tokens": 257}, "num_speculative_tokens=257 is above 256"),
    (SpeculativeConfig, {"prompt_lookup_max": 10**6}, "prompt_lookup_max=1000000 is above 64"),
    (SpeculativeConfig, {"adaptive": "no"}, "adaptive='no' must be True or False"),
    (
        SpeculativeConfig,
        SYNTHETIC | {"synthetic_acceptance_length": "2"},
        "synthetic_acceptance_length='2' must be a number",
    ),
    (SpeculativeConfig, SYNTHETIC | {"synthetic_acceptance_rates": 1}, "synthetic_acceptance_rates=1 must be a list"),
    (EngineConfig, {"max_num_seqs": "4"}, "max_num_seqs='4' must be a whole number"),
    (EngineConfig, {"max_model_len": 1.5}, "max_model_len=1.5 must be a whole number"),
    (EngineConfig, {"memory_utilization": "1"}, "memory_utilization='1' must be a number"),
    (EngineConfig, {"enable_prefix_caching": 1}, "enable_prefix_caching=1 must be True or False"),
    (EngineConfig, {"page_size": 2**20, "num_pages": 2**20}, "are more than 2147483647 tokens: lower one"),
    (
        SpeculativeConfig,
        {"model": "x", "draft_tensor_parallel_size": 0},
        "draft_tensor_parallel_size=0 is below 1",
    ),
    (
        SpeculativeConfig,
        {"method": "ngram", "draft_tensor_parallel_size": 2},
        "draft_tensor_parallel_size: method='ngram' has no draft to shard: leave it out",
    ),
    (EngineConfig, {"tensor_paralel_size": 2}, "did you mean 'tensor_parallel_size'?"),
    (EngineConfig, {"gpu_memory_utilization": 0.5}, "did you mean 'memory_utilization'?"),
    (EngineConfig, {"block_size": 16}, "did you mean 'page_size'?"),
    (EngineConfig, {"max_num_batched_tokens": 512}, "did you mean 'prefill_chunk'?"),
    (EngineConfig, {"disable_log_stats": True}, "known options: tokenizer, revision, tensor_parallel_size,"),
]
LATER = [
    (EngineConfig, {"enable_lora": True}),
    (EngineConfig, {"pipeline_parallel_size": 2}),
]
name = lambda value: value.__name__ if isinstance(value, type) else str(value)


@pytest.mark.parametrize(("cls", "given", "message"), WRONG, ids=name)
def test_wrong_values_are_named(cls, given, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        cls(**given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("cls", "given"), LATER, ids=name)
def test_later_features_are_refused_by_name(cls, given):
    (field,) = given
    with pytest.raises(NotImplementedError, match=f"{field}=.* is not supported yet: "):
        cls(**given)


@pytest.mark.parametrize("cls", [SamplingParams, SpeculativeConfig, EngineConfig])
def test_options_are_frozen_hashable_and_keyword_only(cls):
    assert cls() == cls()
    assert hash(cls()) == hash(cls())
    with pytest.raises(dataclasses.FrozenInstanceError):
        cls().dtype = "x"
    with pytest.raises(TypeError):
        cls(1)


def test_a_dict_is_a_speculative_config():
    given = {"model": "draft", "num_speculative_tokens": 6}
    assert SpeculativeConfig.of(given) == SpeculativeConfig(**given)
    assert SpeculativeConfig.of(None) is None
    config = SpeculativeConfig()
    assert SpeculativeConfig.of(config) is config
    with pytest.raises(ValueError, match="did you mean 'num_speculative_tokens'"):
        SpeculativeConfig.of({"num_speculative_tokns": 6})


def test_the_method_follows_from_the_model():
    assert SpeculativeConfig(model="x").method is None  # its checkpoint says
    assert SpeculativeConfig().method == "ngram"


def test_a_draft_model_behind_prompt_lookup():
    both = {"method": "ngram+draft_model", "model": "x"}
    assert SpeculativeConfig(**both).method == "ngram+draft_model"
    assert SpeculativeConfig(**both).lookup == (4, 6)
    assert SpeculativeConfig(**both, prompt_lookup_min=1).lookup == (1, 6)
    assert SpeculativeConfig(method="ngram").lookup == (2, 4)


@pytest.mark.parametrize(
    ("length", "rates"),
    [(1, (0.0,) * 4), (2.25, (1.0, 0.25, 0.0, 0.0)), (3, (1.0, 1.0, 0.0, 0.0)), (5, (1.0,) * 4)],
)
def test_a_synthetic_length_is_rates_that_add_up_to_it(length, rates):
    config = SpeculativeConfig(rejection_sample_method="synthetic", synthetic_acceptance_length=length)
    assert config.synthetic_acceptance_rates == rates
    assert 1 + sum(rates) == length


def test_a_rule_has_the_numbers_of_its_own_options():
    assert SpeculativeConfig(**TYPICAL).rule_options == (0.09, 0.3)
    assert SpeculativeConfig(**TYPICAL, posterior_alpha=1).rule_options == (0.09, 1.0)
    assert SpeculativeConfig(**SYNTHETIC, synthetic_acceptance_length=2.5).rule_options == (1.0, 0.5, 0.0, 0.0)
    assert SpeculativeConfig().rule_options == SpeculativeConfig(rejection_sample_method="block").rule_options == ()


def test_synthetic_rates_are_kept():
    config = SpeculativeConfig(rejection_sample_method="synthetic", synthetic_acceptance_rates=[1, 0.5, 0.5, 0])
    assert config.synthetic_acceptance_rates == (1.0, 0.5, 0.5, 0.0)
    assert SpeculativeConfig().synthetic_acceptance_rates is None


def test_numbers_that_python_refuses_to_write_are_refused_in_a_line():
    with pytest.raises(ValueError, match=r"seed=\(more than 40 digits\) is above 18446744073709551615"):
        SamplingParams(seed=10**5000)


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (1e-6, True), (1e-5, False), (1.0, False)])
def test_tiny_temperatures_are_greedy(temperature, greedy):
    params = SamplingParams(temperature=temperature, top_k=5)
    assert (params.greedy, params.filtered) == (greedy, not greedy)


def test_stop_takes_one_string_or_many():
    assert SamplingParams(stop="a").stop == ("a",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)


def test_forms_of_bias_allowed_ids_and_bad_words():
    """All hashable, so that parameters are."""
    params = SamplingParams(logit_bias={7: 1, 3: -2.5}, allowed_token_ids=[5, 3, 5], bad_words=["a", "b"])
    assert params.logit_bias == ((3, -2.5), (7, 1.0))
    assert params.allowed_token_ids == (5, 3)
    assert params.bad_words == ("a", "b")
    assert SamplingParams(bad_words="a").bad_words == ("a",)
    assert hash(params) == hash(SamplingParams(**{f.name: getattr(params, f.name) for f in dataclasses.fields(params)}))
    assert (SamplingParams().logit_bias, SamplingParams().allowed_token_ids) == ((), None)


@pytest.mark.parametrize(
    ("given", "processed"),
    [
        ({}, False),
        ({"repetition_penalty": 0.9}, True),
        ({"presence_penalty": -1}, True),
        ({"frequency_penalty": 1}, True),
        ({"logit_bias": {3: 1}}, True),
        ({"allowed_token_ids": [3]}, True),
        ({"min_tokens": 1}, True),
        ({"temperature": 0.5, "top_k": 3}, False),
    ],
)
def test_what_changes_logits_is_noticed(given, processed):
    assert SamplingParams(**given).processed is processed


@pytest.mark.parametrize(
    "given",
    [
        {"n": 16_384},
        {"min_tokens": 16},
        {"logprobs": 20},
        {"logprobs": 0},
        {"logit_bias": {1: 100}},
        {"logit_bias": {"7": 1}},
        {"logit_bias": [(7, 1)]},
        {"top_k": 2**31 - 1},
        {"top_k": np.int64(3)},
        {"seed": 2**64 - 1},
        {"seed": -(2**63)},
        {"max_tokens": 2**31 - 1, "min_tokens": 2**31 - 1},
        {"top_p": 1e-45},
        {"temperature": np.float32(0.5)},
        {"temperature": 1e6},
        {"stop_token_ids": np.array([3, 4])},
        {"stop": None, "bad_words": None, "stop_token_ids": None},
    ],
)
def test_values_at_their_limits_are_fine(given):
    SamplingParams(**given)


@pytest.mark.parametrize(("given", "filtered"), [({}, False), ({"top_k": -1}, False), ({"top_k": 1}, True)])
def test_off_switches_are_off(given, filtered):
    assert SamplingParams(**given).filtered is filtered
