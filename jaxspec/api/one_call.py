"""generate(): loads a model and completes prompts in one call, with transformers' option names and defaults."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, Unpack

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

T = TypeVar("T")


def generate(
    model: str,
    prompts: Prompt | Sequence[Prompt],
    *,
    assistant_model: str | None = None,
    **options: Unpack[GenerateOptions],
) -> list[RequestOutput]:
    """Load `model` and complete the prompts, as transformers' `generate` does with these options.

    Decoding is greedy with at most 20 new tokens, unless the options or the model's generation_config.json (of a
    Hugging Face folder) change that. An option of this call takes precedence over that file, and the file over
    transformers' defaults. So a model whose file sets do_sample is sampled, with the temperature, top_k, top_p, min_p
    and repetition_penalty of that file; do_sample=False makes decoding greedy. None turns an option off.

    Args:
      model: as in LLM.
      prompts: as in LLM.generate.
      assistant_model: the draft model. It proposes at most `num_assistant_tokens` tokens a round, 4 by default.
      options: transformers' do_sample, max_new_tokens, max_length, min_new_tokens, temperature, top_k (50 by default
        when sampling), top_p, min_p, repetition_penalty, num_return_sequences, stop_strings, eos_token_id,
        num_assistant_tokens, prompt_lookup_num_tokens, max_matching_ngram_size; and the fields of SamplingParams by
        their own names. pad_token_id is accepted and ignored, because nothing is padded.

    Raises: UserError for an unknown option, which names the nearest known one, or for an option that would have no
      effect; UnsupportedError for an option that only transformers has, unless its value has no effect.
    """
    given = renamed(options)
    speculative = speculation(assistant_model, options)
    sampling_params({"max_length": LARGEST} | given, options)  # raises errors before the model is loaded
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
    """Return transformers' options by jaxspec's names. The value None is kept, and turns the option off.

    do_sample and max_length keep their names. Options about drafts (DRAFTS) are left out, and so are options that
    jaxspec lacks if their values have no effect.

    Raises: UserError for an unknown or repeated option, UnsupportedError for other values of options that it lacks.
    """
    found: dict[str, Any] = {}
    for name, value in options.items():
        if name not in KNOWN:
            refuse(name, value)
            continue
        ours = NAMES.get(name, name)
        if ours in found:
            theirs = next(theirs for theirs, same in NAMES.items() if same == ours)
            raise UserError(f"{theirs} and {ours} mean the same: give one of them")
        if name not in DRAFTS and name != "pad_token_id":  # pad_token_id is ignored, because nothing is padded
            found[ours] = value
    if found.get("do_sample") is not None:
        flag("do_sample", found["do_sample"])
    if "eos_token_id" in options:  # these ids replace the model's own stop ids
        ids = found["stop_token_ids"]
        found["stop_token_ids"] = ids if ids is None or isinstance(ids, Iterable) else (ids,)
        found.setdefault("ignore_eos", True)
    return found


def speculation(assistant_model: str | None, options: Mapping[str, Any]) -> SpeculativeConfig | None:
    """Return the SpeculativeConfig for transformers' options about drafts, or None without speculation.

    Raises: UserError for options that exclude each other, or that have no effect without another.
    """
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
    """Return those options of the model's generation_config.json that the caller does not give, by jaxspec's names.

    Raises: UserError or UnsupportedError for an option of that file that cannot be used.
    """
    config = checkpoints.load_generation_config(llm._resolved.source)
    heeded = OF_THE_MODEL.union(*OF_THE_TEXT.values()) - options.keys()
    try:
        own = renamed({name: config[name] for name in heeded & config.keys()})
        sampling_params({"max_length": LARGEST} | own, config)
    except UserError as error:
        raise type(error)(
            f"{error}. The model's generation_config.json asks for it: give the option, or None, to override that"
        ) from None
    return own


def with_defaults(given: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request parameters: the caller's (`given`), else the model's (`own`), else transformers' defaults.

    Raises: UserError for parameters of the caller that contradict each other or have no effect.
    """
    lengths = {"max_tokens", "max_length"}
    if lengths & given.keys():
        own = {name: value for name, value in own.items() if name not in lengths}
    asked = {**own, **given}
    if asked.get("max_tokens") is not None:  # max_tokens takes precedence over max_length, as in transformers
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
    """Return request parameters as SamplingParams. Without max_tokens, max_length is used in its place, 20 by default.

    asked: values by jaxspec's names.
    options: the caller's options, whose names error messages use.
    """
    fields = {name: value for name, value in asked.items() if value is not None and name != "do_sample"}
    longest = fields.pop("max_length", MAX_NEW_TOKENS)
    return with_given_names(
        options, NAMES | {"max_length": "max_tokens"}, SamplingParams, {"max_tokens": longest} | fields
    )


def limited(prompt_request: PromptRequest, longest: int) -> SamplingParams:
    """Return the sampling parameters of a prompt, with max_tokens set to what the prompt leaves of `longest`.

    longest: largest number of tokens of the prompt and its output together.

    Raises: UserError if the prompt leaves nothing.
    """
    left = longest - len(prompt_request.ids)
    if left < 1:
        raise UserError(
            f"prompt {prompt_request.index}: max_length={longest} counts the prompt's {len(prompt_request.ids)} tokens "
            "too: raise it, or give max_new_tokens"
        )
    return dataclasses.replace(prompt_request.params, max_tokens=left)


def with_given_names(
    options: Mapping[str, Any], names: Mapping[str, str], cls: type[T], fields: Mapping[str, Any]
) -> T:
    """Return cls(**fields). If that raises UserError, replace jaxspec's option names in the message by the caller's.

    options: the caller's options.
    names: jaxspec's option name by the caller's name.
    """
    try:
        return cls(**fields)
    except UserError as error:
        text = str(error)
        for theirs in names.keys() & options.keys():
            text = re.sub(rf"\b{names[theirs]}\b", theirs, text)
        raise type(error)(text) from None
