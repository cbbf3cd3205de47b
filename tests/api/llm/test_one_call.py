"""jaxspec.generate: transformers' names and defaults, and the model's own; what has no match is refused by name."""

from __future__ import annotations

import json
import shutil

import pytest

import checkpoints
import jaxspec.api.one_call
from jaxspec import SamplingParams, SpeculativeConfig
from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.loading.resolved import resolved
from jaxspec.options.transformers import KNOWN, MAX_NEW_TOKENS, OF_THE_PROGRAM, OF_THE_TEXT, TOP_K
from tests.api.llm.answers import GREEDY, PROMPTS, ids_of

REFUSED = {name: off for names in (OF_THE_TEXT | OF_THE_PROGRAM).values() for name, off in names.items()}
GREEDY_20 = {"temperature": 0.0, "max_tokens": 20}
SAMPLED_20 = {"top_k": 50, "max_tokens": 20}


@pytest.fixture
def own(folder, tmp_path):
    """A copy of the model with a generation_config.json, by what it holds."""

    def write(**config) -> str:
        there = tmp_path / "own"
        shutil.copytree(folder, there, dirs_exist_ok=True)
        (there / "generation_config.json").write_text(json.dumps(config))
        return str(there)

    return write


@pytest.fixture
def asked(llm, monkeypatch):
    """Calls jaxspec.generate; what LLM was given: (its speculation, the prompts, their parameters)."""
    found = []

    class Recorder:
        def __init__(self, model, *, speculative_config):
            self.speculative, self.tokenizer = speculative_config, llm.tokenizer
            self._resolved = resolved(checkpoints.resolve(model))

        def generate(self, prompts, params):
            found.append((self.speculative, prompts, params))
            return found

    monkeypatch.setattr(jaxspec.api.one_call, "LLM", Recorder)

    def call(model, *, prompts=PROMPTS[0], **options):
        return jaxspec.generate(str(model), prompts, **options)[-1]

    return call


# As it runs


def test_greedy_with_a_draft(llm, folder):
    (output,) = jaxspec.generate(
        str(folder), PROMPTS[0], assistant_model=str(folder), num_assistant_tokens=3, max_new_tokens=6
    )
    assert ids_of(output) == ids_of(llm.generate(PROMPTS[0], GREEDY)[0])[:6]
    assert output.metrics.num_drafts > 0


@pytest.mark.thorough
def test_samples_by_lookup(llm, folder):
    options = {"do_sample": True, "temperature": 0.8, "num_return_sequences": 2, "seed": 3, "max_new_tokens": 9}
    (output,) = jaxspec.generate(str(folder), PROMPTS[2], prompt_lookup_num_tokens=2, **options)
    there = SamplingParams(temperature=0.8, top_k=50, n=2, seed=3, max_tokens=9)
    assert [c.token_ids for c in output.outputs] == [c.token_ids for c in llm.generate(PROMPTS[2], there)[0].outputs]


def test_max_length_counts_the_prompt(folder):
    prompts = [PROMPTS[0], [5] * 7]
    outputs = jaxspec.generate(str(folder), prompts, max_length=14, ignore_eos=True)
    assert [len(o.prompt_token_ids) + len(ids_of(o)) for o in outputs] == [14, 14]
    assert [o.prompt for o in outputs] == [PROMPTS[0], None]
    with pytest.raises(UserError, match="prompt 1: max_length=12 counts the prompt's 12 tokens too: raise it"):
        jaxspec.generate(str(folder), ["x", [5] * 12], max_length=12)


# What is asked of LLM


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, GREEDY_20),
        ({"do_sample": False, "temperature": None, "top_p": None, "top_k": None}, GREEDY_20),
        ({"do_sample": True}, SAMPLED_20),
        ({"do_sample": True, "top_k": None}, {"max_tokens": 20}),
        ({"do_sample": True, "top_k": 7, "top_p": 0.5, "min_p": 0.1, "seed": 2}, SAMPLED_20
         | {"top_k": 7, "top_p": 0.5, "min_p": 0.1, "seed": 2}),
        ({"do_sample": True, "num_return_sequences": 3}, SAMPLED_20 | {"n": 3}),
        ({"max_new_tokens": 5, "min_new_tokens": 2}, {"temperature": 0.0, "max_tokens": 5, "min_tokens": 2}),
        ({"max_tokens": 5, "min_tokens": 2}, {"temperature": 0.0, "max_tokens": 5, "min_tokens": 2}),
        ({"repetition_penalty": 1.5, "stop_strings": ["a", "b"]}, GREEDY_20 | {"repetition_penalty": 1.5,
         "stop": ("a", "b")}),
        ({"eos_token_id": 7, "pad_token_id": 0}, GREEDY_20 | {"stop_token_ids": (7,), "ignore_eos": True}),
        ({"eos_token_id": [7, 9]}, GREEDY_20 | {"stop_token_ids": (7, 9), "ignore_eos": True}),
        ({"eos_token_id": None}, GREEDY_20 | {"ignore_eos": True}),
        ({"num_beams": 1, "use_cache": True, "return_dict_in_generate": False, "streamer": None}, GREEDY_20),
        ({"logprobs": 2, "bad_words": "x"}, GREEDY_20 | {"logprobs": 2, "bad_words": "x"}),
    ],
)  # fmt: skip
def test_options_and_defaults(asked, folder, options, expected):
    assert asked(folder, **options) == (None, PROMPTS[0], SamplingParams(**expected))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"assistant_model": "d"}, {"model": "d"}),
        ({"assistant_model": "d", "num_assistant_tokens": 7}, {"model": "d", "num_speculative_tokens": 7}),
        ({"prompt_lookup_num_tokens": 5}, {"method": "ngram", "num_speculative_tokens": 5}),
        ({"prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 3}, {"method": "ngram", "num_speculative_tokens": 5,
         "prompt_lookup_max": 3}),
        ({"prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 1}, {"method": "ngram", "num_speculative_tokens": 5,
         "prompt_lookup_max": 1, "prompt_lookup_min": 1}),
    ],
)  # fmt: skip
def test_speculation(asked, folder, options, expected):
    assert asked(folder, **options)[0] == SpeculativeConfig(**expected)


# The model's own generation config

SAMPLES = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 11, "eos_token_id": 2, "chat_format": "x"}


@pytest.mark.parametrize(
    ("config", "options", "expected"),
    [
        (SAMPLES, {}, {"temperature": 0.6, "top_p": 0.9, "top_k": 11, "max_tokens": 20}),
        (SAMPLES, {"temperature": 0.2, "top_k": None}, {"temperature": 0.2, "top_p": 0.9, "max_tokens": 20}),
        (SAMPLES, {"temperature": 0.0}, {"temperature": 0.0, "top_p": 0.9, "top_k": 11, "max_tokens": 20}),
        (SAMPLES, {"do_sample": False}, GREEDY_20),
        ({"temperature": 0.6, "top_p": 0.9}, {}, GREEDY_20),
        ({"temperature": 0.6, "top_p": None}, {"do_sample": True}, SAMPLED_20 | {"temperature": 0.6}),
        ({"repetition_penalty": 1.1}, {}, GREEDY_20 | {"repetition_penalty": 1.1}),
        ({"max_new_tokens": 99, "max_length": 30}, {}, {"temperature": 0.0, "max_tokens": 99}),
        ({"max_new_tokens": 99}, {"max_tokens": 3}, {"temperature": 0.0, "max_tokens": 3}),
        ({"max_new_tokens": 99}, {"min_new_tokens": 50}, {"temperature": 0.0, "max_tokens": 99, "min_tokens": 50}),
        ({"min_new_tokens": 5}, {"min_tokens": 2}, GREEDY_20 | {"min_tokens": 2}),
        ({"cache_implementation": "hybrid", "output_scores": True, "_from_model_config": True}, {}, GREEDY_20),
        ({"num_beams": 4}, {"num_beams": 1}, GREEDY_20),
        ({"num_beams": 4, "typical_p": 1.0}, {"num_beams": None}, GREEDY_20),
    ],
)
def test_what_the_model_sets_comes_before_the_defaults(asked, own, config, options, expected):
    assert asked(own(**config), **options)[2] == SamplingParams(**expected)


def test_a_model_may_set_the_whole_length(asked, own):
    model = own(max_length=30)
    _, (prompt,), (params,) = asked(model)
    assert params == SamplingParams(temperature=0.0, max_tokens=30 - len(prompt["prompt_token_ids"]))
    assert asked(model, max_new_tokens=4)[2].max_tokens == 4


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"num_beams": 4},
            "num_beams=4 is not supported: one text .* generation_config.json asks for it: give",
        ),
        ({"temperature": "hot"}, "temperature='hot' must be a number. The model's generation_config.json asks for it"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 is below 1, .* The model's"),
        ({"do_sample": "yes"}, "do_sample='yes' must be True or False. The model's"),
    ],
)
def test_what_the_model_sets_may_be_refused(asked, own, config, message):
    with pytest.raises(UserError, match=message):
        asked(own(**config))


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_token": 3}, "unknown option 'max_new_token' of jaxspec.generate: did you mean 'max_new_tokens'"),
        ({"temprature": 3}, "did you mean 'temperature'"),
        ({"max_model_len": 9}, "max_model_len is an option of LLM: make an LLM with it, and call its generate"),
        ({"max_new_tokens": 3, "max_tokens": 3}, "max_new_tokens and max_tokens mean the same: give one of them"),
        ({"n": 2, "num_return_sequences": 2}, "num_return_sequences and n mean the same"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 is below 1"),
        ({"max_length": 0}, "max_length=0 is below 1"),
        ({"num_return_sequences": 0}, "num_return_sequences=0 is below 1"),
        ({"stop_strings": ""}, "stop_strings='' must hold non-empty strings"),
        ({"eos_token_id": True}, r"eos_token_id=True must be a whole number"),
        ({"do_sample": 1}, "do_sample=1 must be True or False"),
        ({"num_assistant_tokens": 3}, "num_assistant_tokens=3 needs assistant_model"),
        ({"max_matching_ngram_size": 3}, "max_matching_ngram_size=3 needs prompt_lookup_num_tokens"),
        ({"prompt_lookup_num_tokens": 0}, "prompt_lookup_num_tokens=0 is below 1"),
        ({"assistant_model": "d", "num_assistant_tokens": 0}, "num_assistant_tokens=0 is below 1"),
        ({"assistant_model": "d", "prompt_lookup_num_tokens": 3}, "give one of assistant_model and prompt_lookup_num"),
    ],
)
def test_refused_before_the_model_is_loaded(options, message):
    with pytest.raises(UserError, match=message):
        jaxspec.generate("no such model", "x", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.7}, "temperature=0.7 takes part in sampling only: give do_sample=True with it"),
        ({"do_sample": False, "top_p": 0.7}, "top_p=0.7 takes part in sampling only"),
        ({"top_k": 5}, "top_k=5 takes part in sampling only"),
        ({"num_return_sequences": 2}, "2 samples of a greedy request would be the same: give do_sample=True"),
        ({"do_sample": True, "temperature": 0}, "temperature=0 is greedy, and do_sample=True is not"),
        ({"min_new_tokens": 30}, "min_new_tokens=30 is above max_tokens, 20"),
    ],
)
def test_what_would_have_no_effect_is_refused(asked, folder, options, message):
    with pytest.raises(UserError, match=message):
        asked(folder, **options)


@pytest.mark.parametrize("name", REFUSED)
def test_what_only_transformers_has_is_refused_by_name(asked, folder, name):
    with pytest.raises(UnsupportedError, match=f"{name}=.* is not supported: ..."):
        jaxspec.generate("no such model", "x", **{name: "something"})
    for nothing in (None, REFUSED[name]):
        assert asked(folder, **{name: nothing})[2] == SamplingParams(**GREEDY_20)


def test_all_of_transformers_options_are_known():
    """By the installed version, and its defaults are those that ask for nothing here."""
    from transformers import GenerationConfig

    options = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - {"transformers_version"}
    assert options - KNOWN - REFUSED.keys() == set()
    assert not KNOWN & REFUSED.keys()
    defaults = GenerationConfig._get_default_generation_params()
    assert {name: defaults[name] for name in REFUSED.keys() & defaults.keys()} == {
        name: REFUSED[name] for name in REFUSED.keys() & defaults.keys()
    }
    assert (defaults["max_length"], defaults["top_k"]) == (MAX_NEW_TOKENS, TOP_K)
