"""The options of `generate` in the transformers library: jaxspec's names for them, and why some are not supported."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxspec.common.errors import UnsupportedError, UserError, quoted
from jaxspec.common.values import unknown
from jaxspec.options.engine import EngineConfig
from jaxspec.options.keywords import GenerateOptions

MAX_NEW_TOKENS, TOP_K = 20, 50  # defaults of max_new_tokens and top_k in the transformers library

# Names in SamplingParams of transformers' options, by transformers' names, where the names differ.
NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "stop_strings": "stop",
    "eos_token_id": "stop_token_ids",
}
# Names in SpeculativeConfig of transformers' options, by transformers' names.
DRAFTS = {
    "num_assistant_tokens": "num_speculative_tokens",
    "prompt_lookup_num_tokens": "num_speculative_tokens",
    "max_matching_ngram_size": "prompt_lookup_max",
}
# Options that only a sampled request may have, by name, each with the values that a greedy request may still pass.
SAMPLED: dict[str, tuple[float, ...]] = {"temperature": (0, 1), "top_k": (0, -1, TOP_K), "top_p": (1,), "min_p": (0,)}
KNOWN = frozenset(GenerateOptions.__annotations__)
# Options that are taken from a model's generation config if the caller does not give them. End ids are not among them,
# because the engine stops at the model's end ids in any case.
OF_THE_MODEL = {"do_sample", "max_length", "repetition_penalty", *SAMPLED, *NAMES} - {"eos_token_id"}

# Unsupported options that change the text: {reason or remedy: {option: value that has no effect}}. Because they change
# the text, other values are refused in a model's generation config, too.
OF_THE_TEXT: dict[str, dict[str, Any]] = {
    "one text is decoded at a time, no beams are searched": {
        "num_beams": 1,
        "num_beam_groups": 1,
        "diversity_penalty": 0.0,
        "length_penalty": 1.0,
        "early_stopping": False,
        "constraints": None,
        "force_words_ids": None,
    },
    "the distribution is the target's own; top_k, top_p and min_p filter it": {
        "typical_p": 1.0,
        "top_h": None,
        "epsilon_cutoff": 0.0,
        "eta_cutoff": 0.0,
        "penalty_alpha": None,
        "dola_layers": None,
        "guidance_scale": 1,
        "negative_prompt_ids": None,
        "watermarking_config": None,
        "assistant_ensemble_weight": None,
    },
    "use repetition_penalty, frequency_penalty or presence_penalty": {
        "no_repeat_ngram_size": 0,
        "exponential_decay_length_penalty": None,
    },
    "use bad_words, which are strings": {"bad_words_ids": None},
    "use logit_bias or allowed_token_ids": {
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
        "sequence_bias": None,
        "forced_bos_token_id": None,
        "forced_eos_token_id": None,
        "prefix_allowed_tokens_fn": None,
        "logits_processor": None,
    },
    "use stop_strings, eos_token_id or max_new_tokens": {"stopping_criteria": None, "max_time": None},
    "use min_new_tokens": {"min_length": 0},
    "only models with an encoder have it": {
        "encoder_repetition_penalty": 1.0,
        "encoder_no_repeat_ngram_size": 0,
        "decoder_start_token_id": None,
    },
    "tokens of the prompt are not changed": {"token_healing": False},
}
# Unsupported options that change how the text is computed or what is returned: {reason or remedy: {option: value that
# has no effect}}. A model's generation config may have other values, which are ignored.
OF_THE_PROGRAM: dict[str, dict[str, Any]] = {
    "give prompts: strings or lists of token ids, without padding": {
        "inputs": None,
        "input_ids": None,
        "attention_mask": None,
        "bos_token_id": None,
    },
    "give its options by their names": {"generation_config": None},
    "the model's own tokenizer is used; LLM takes another by its name": {
        "tokenizer": None,
        "assistant_tokenizer": None,
    },
    "use LLM.stream": {"streamer": None},
    "use logprobs": {"output_scores": False, "output_logits": False, "renormalize_logits": False},
    "RequestOutputs are returned": {
        "return_dict_in_generate": False,
        "output_attentions": False,
        "output_hidden_states": False,
    },
    "LLM chooses the number of drafts by what it measures; SpeculativeConfig(adaptive=False) keeps it": {
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.4,
        "assistant_early_exit": None,
        "assistant_lookbehind": 10,
        "target_lookbehind": 10,
        "is_assistant": False,
        "speculation_type": None,
        "use_mtp": False,
    },
    "LLM has its own cache and programs, and options for them": {
        "use_cache": True,
        "cache_implementation": None,
        "cache_config": None,
        "max_cache_len": None,
        "past_key_values": None,
        "prefill_chunk_size": None,
        "low_memory": None,
        "compile_config": None,
        "disable_compile": None,
        "continuous_batching_config": None,
        "synced_gpus": None,
        "custom_generate": None,
        "trust_remote_code": None,
        "remove_invalid_values": False,
    },
}


def refuse(name: str, value: Any) -> None:
    """Raise UnsupportedError or UserError for an option that `generate` lacks, unless its value has no effect."""
    for reason, names in (OF_THE_TEXT | OF_THE_PROGRAM).items():
        if name in names:
            if value is None or value == names[name]:
                return
            raise UnsupportedError(f"{name}={quoted(value)} is not supported: {reason}")
    if name in {field.name for field in dataclasses.fields(EngineConfig)} | {"speculative_config"}:
        raise UserError(f"{name} is an option of LLM: make an LLM with it, and call its generate")
    raise unknown(name, "jaxspec.generate", sorted(KNOWN))
