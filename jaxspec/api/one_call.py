"""generate(): the one-call form, with transformers' option names and defaults."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack

import checkpoints
from jaxspec.api.llm import LLM
from jaxspec.api.outputs import RequestOutput
from jaxspec.api.prompts import Prompt, PromptRequest, prompt_requests
from jaxspec.common.errors import UserError
from jaxspec.common.values import LARGEST, flag
from jaxspec.options.keywords import GenerateOptions
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.options.speculative import SpeculativeConfig
from jaxspec.options.transformers import (
    DRAFTS,
    KNOWN,
    MAX_NEW_TOKENS,
    NAMES,
    OF_THE_MODEL,
    OF_THE_TEXT,
    SAMPLED,
    TOP_K,
    refuse,
)


def generate(
    model: str,
    prompts: Prompt | Sequence[Prompt],
    *,
    assistant_model: str | None = None,
    **options: Unpack[GenerateOptions],
) -> list[RequestOutput]:
    """Load `model` and complete the prompts, as transformers' `generate` does with these options.

    Decoding is greedy with 20 new tokens, unless the options or the model's generation_config.json (of a Hugging Face
    folder) change that. A given option comes first, then the model's own, then transformers' default. So a model whose
    file has do_sample samples, with the temperature, top_k, top_p, min_p and repetition_penalty of that file;
    do_sample=False makes it greedy. None turns an option off.

    Args:
      assistant_model: the draft, which proposes `num_assistant_tokens`, 4 by default.
      options: transformers' do_sample, max_new_tokens, max_length, min_new_tokens, temperature, top_k (50 by default
        when sampling), top_p, min_p, repetition_penalty, num_return_sequences, stop_strings, eos_token_id,
        num_assistant_tokens, prompt_lookup_num_tokens, max_matching_ngram_size; and the fields of SamplingParams by
        their own names. pad_token_id is accepted and ignored, because nothing is padded.

    Raises: UserError for an unknown option, which names the nearest known one, or for an option that would have no
      effect; UnsupportedError for options that only transformers has.
    """
    given = renamed(options)
    speculative = speculation(assistant_model, options)
    sampling_params({"max_length": LARGEST} | given, options)  # refuses before the loading
    llm = LLM(model, speculative_config=speculative)
    requested = with_defaults(given, model_defaults(llm, options))
    params = sampling_params(requested, options)
    longest = requested.get("max_length")
    if longest is None:
        return llm.generate(prompts, params)
    asked = prompt_requests(llm.tokenizer, prompts, params)
    whole = [{"prompt": prompt_request.text, "prompt_token_ids": prompt_request.ids} for prompt_request in asked]
    return llm.generate(whole, [limited(prompt_request, longest) for prompt_request in asked])


def renamed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options by jaxspec's names, do_sample and max_length aside, without those of DRAFTS. None: off."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        if name not in KNOWN:
            refuse(name, value)
            continue
        ours = NAMES.get(name, name)
        if ours in found:
            theirs = next(theirs for theirs, same in NAMES.items() if same == ours)
            raise UserError(f"{theirs} and {ours} mean the same: give one of them")
        if name not in DRAFTS and name != "pad_token_id":  # nothing is padded
            found[ours] = value
    if found.get("do_sample") is not None:
        flag("do_sample", found["do_sample"])
    if "eos_token_id" in options:  # replaces the model's own
        ids = found["stop_token_ids"]
        found["stop_token_ids"] = ids if ids is None or isinstance(ids, Iterable) else (ids,)
        found.setdefault("ignore_eos", True)
    return found


def speculation(assistant_model: str | None, options: Mapping[str, Any]) -> SpeculativeConfig | None:
    """Return the speculation that these options ask for."""
    asked = {name: options[name] for name in DRAFTS if options.get(name) is not None}
    lookup = "prompt_lookup_num_tokens" in asked
    if lookup and assistant_model is not None:
        raise UserError(
            "give one of assistant_model and prompt_lookup_num_tokens: both together are the method "
            "'ngram+draft_model' of LLM's speculative_config"
        )
    for name, needed, there in (
        ("num_assistant_tokens", "assistant_model, the draft that proposes them", assistant_model is not None),
        ("max_matching_ngram_size", "prompt_lookup_num_tokens, the number of drafts", lookup),
    ):
        if name in asked and not there:
            raise UserError(f"{name}={asked[name]} needs {needed}")
    if assistant_model is None and not lookup:
        return None
    fields = {DRAFTS[name]: value for name, value in asked.items()}
    longest = asked.get("max_matching_ngram_size")
    if longest is not None:
        fields["prompt_lookup_min"] = 1 if longest == 1 else None
    with_draft = {"model": assistant_model} if assistant_model is not None else {"method": "ngram"}
    return with_given_names(asked, DRAFTS, SpeculativeConfig, with_draft | fields)


def model_defaults(llm: LLM, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's generation options that the caller does not give, by jaxspec's names."""
    config = checkpoints.load_generation_config(llm._resolved.source)
    heeded = OF_THE_MODEL.union(*OF_THE_TEXT.values()) - options.keys()
    try:
        own = renamed({name: config[name] for name in heeded & config.keys()})
        sampling_params({"max_length": LARGEST} | own, config)
    except UserError as error:
        raise type(error)(
            f"{error}. The model's generation_config.json asks for it: give the option, or None, to overrule that"
        ) from None
    return own


def with_defaults(given: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request parameters: the caller's, else the model's, else transformers' defaults."""
    lengths = {"max_tokens", "max_length"}
    if lengths & given.keys():
        own = {name: value for name, value in own.items() if name not in lengths}
    asked = {**own, **given}
    if asked.get("max_tokens") is not None:  # takes precedence, as in transformers
        asked.pop("max_length", None)
    if asked.pop("do_sample", None):
        if given.get("do_sample") and given.get("temperature") == 0:
            raise UserError("temperature=0 is greedy, and do_sample=True is not: leave one of them out")
        return {"top_k": TOP_K} | asked
    for name, harmless in SAMPLED.items():
        if given.get(name) is not None and given[name] not in harmless:
            raise UserError(f"{name}={given[name]} takes part in sampling only: give do_sample=True with it")
    if asked.get("n") not in (None, 1):
        raise UserError(f"{asked['n']} samples of a greedy request would be the same: give do_sample=True with them")
    return {name: value for name, value in asked.items() if name not in SAMPLED} | {"temperature": 0.0}


def sampling_params(asked: Mapping[str, Any], options: Mapping[str, Any]) -> SamplingParams:
    """Return these request parameters as SamplingParams. max_length, if given, is used as max_tokens."""
    fields = {name: value for name, value in asked.items() if value is not None and name != "do_sample"}
    longest = fields.pop("max_length", MAX_NEW_TOKENS)
    return with_given_names(
        options, NAMES | {"max_length": "max_tokens"}, SamplingParams, {"max_tokens": longest} | fields
    )


def limited(prompt_request: PromptRequest, longest: int) -> SamplingParams:
    """Return the parameters of a prompt that may have `longest` tokens together with its output."""
    left = longest - len(prompt_request.ids)
    if left < 1:
        raise UserError(
            f"prompt {prompt_request.index}: max_length={longest} counts the prompt's {len(prompt_request.ids)} tokens "
            "too: raise it, or give max_new_tokens"
        )
    return dataclasses.replace(prompt_request.params, max_tokens=left)


def with_given_names(options: Mapping[str, Any], names: Mapping[str, str], cls: Any, fields: Mapping[str, Any]) -> Any:
    """Return cls(**fields). An error names the options as the caller did."""
    try:
        return cls(**fields)
    except UserError as error:
        text = str(error)
        for theirs in names.keys() & options.keys():
            text = re.sub(rf"\b{names[theirs]}\b", theirs, text)
        raise type(error)(text) from None
