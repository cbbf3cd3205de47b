"""TypedDicts of keyword arguments, for editors and type checkers: options of engines, chats, requests and `generate`.

At run time the option classes themselves check the arguments. Tests check that the names and types in this file equal
those of the option classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


class EngineOptions(TypedDict, total=False):
    """Types of EngineConfig's fields, for functions that take them as keyword arguments."""

    tokenizer: str | None
    revision: str | None
    tensor_parallel_size: int
    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    max_model_len: int | None
    max_num_seqs: int
    page_size: int | None
    num_pages: int | None
    memory_utilization: float
    enable_prefix_caching: bool
    rounds_per_launch: int | None
    prefill_chunk: int | None
    max_gap_ms: float | None
    grammar_pool_mib: int
    kernels: str | None
    compilation_cache: bool
    warm_up: bool
    wait_for_warm_up: bool
    enable_lora: bool
    pipeline_parallel_size: int


class ChatOptions(TypedDict, total=False):
    """Types of the options of a chat template, the keyword arguments of `jaxspec.api.chat.rendering`."""

    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool
    tools: Sequence[Mapping[str, Any]] | None


class SamplingOptions(TypedDict, total=False):
    """Types of SamplingParams' fields, for functions that take them as keyword arguments."""

    n: int
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Any
    allowed_token_ids: tuple[int, ...] | list[int] | None
    bad_words: str | tuple[str, ...] | list[str]
    seed: int | None
    stop: str | tuple[str, ...] | list[str]
    stop_token_ids: tuple[int, ...] | list[int]
    ignore_eos: bool
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    logprobs: int | None
    prompt_logprobs: int | None
    num_speculative_tokens: int | None
    token_origins: bool
    structured_outputs: Any


class GenerateOptions(SamplingOptions, total=False):
    """Types of the keyword arguments of `jaxspec.generate`: SamplingParams' fields, and options of transformers."""

    do_sample: bool | None
    max_new_tokens: int | None
    max_length: int | None
    min_new_tokens: int | None
    num_return_sequences: int | None
    stop_strings: str | list[str] | None
    eos_token_id: int | list[int] | None
    pad_token_id: int | None
    num_assistant_tokens: int | None
    prompt_lookup_num_tokens: int | None
    max_matching_ngram_size: int | None
