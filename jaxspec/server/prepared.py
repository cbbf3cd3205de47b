"""Preparation of a request for the engine: its prompts as token ids, each with its sampling parameters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxspec.api.async_llm import AsyncLLM
from jaxspec.api.chat import Rendering, as_prompt, rendering
from jaxspec.api.prompts import Prompt, PromptRequest, encode, text_of
from jaxspec.common.errors import UserError
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.server import control_tokens
from jaxspec.server.fields import RequestFields
from jaxspec.server.offload import PROMPTS, offload
from jaxspec.server.refusal import refusal_for

SHORT = 10_000  # largest work, in characters or token ids, that the event loop does itself instead of a thread
# Estimated work for a prompt, a bad word and a chat message besides the work for its text, in characters of text.
PROMPT = 500
WORD = 200
MESSAGE = 50


def room_of(llm: AsyncLLM) -> int:
    """Return the largest number of tokens that a prompt and its output may have together.

    This is the model's context length, or the size of the KV cache's page pool in tokens if that is smaller.
    """
    engine = llm.llm.engine
    return min(engine.limits.max_model_len, engine.scheduler.longest_request)


async def prepared(llm: AsyncLLM, request: RequestFields, room: int, control: Mapping[int, str]) -> list[PromptRequest]:
    """Return the prompts of a request, ready for the engine.

    room: largest number of tokens that a prompt and its output may have together.
    control: text of each control token, such as <|im_end|>, that the request may not contain, by token id.

    Raises: Refusal or UserError for a prompt that cannot be served.
    """
    tokenizer = llm.llm.tokenizer
    try:
        if control:
            size = sum(len(text) for _, text in control_tokens.texts(request))
            await offload(size > SHORT, control_tokens.refuse, tokenizer, control, request, threads=PROMPTS)
        if request.prompts is None:
            opening = request.tools.opening if request.tools else ""
            texts: Sequence[Any] = [await llm.templates.text(await template_call(llm, request)) + opening]
            as_ids = functools.partial(as_prompt, tokenizer)
        else:
            texts = request.prompts
            as_ids = functools.partial(encoded, tokenizer)
    except UserError as error:
        raise refusal_for(error, request.source, vars(request.params), request.source) from None
    large = work(request.params, texts) > SHORT
    return await offload(large, prepare, llm, request, room, texts, as_ids, threads=PROMPTS)


async def template_call(llm: AsyncLLM, request: RequestFields) -> Rendering:
    """Return the checked call of the chat template for a request's messages. Raise UserError as `rendering` does."""
    check = functools.partial(rendering, llm.llm.tokenizer, request.messages, **request.chat)
    return await offload(MESSAGE * len(request.messages) > SHORT, check, threads=PROMPTS)


def work(params: SamplingParams, texts: Sequence[Any]) -> int:
    """Estimate the work of `prepare`, in characters of text. The lists of ids and words are read for each prompt."""
    lists = (params.logit_bias, params.allowed_token_ids, params.stop_token_ids)
    each = PROMPT + WORD * len(params.bad_words) + sum(len(given or ()) for given in lists)
    return sum(map(len, texts)) + each * len(texts)


def prepare(
    llm: AsyncLLM, request: RequestFields, room: int, texts: Sequence[Any], as_ids: Callable[[Any], Mapping[str, Any]]
) -> list[PromptRequest]:
    """Return each text as a prompt for the engine: checked, tokenised and with its sampling parameters.

    texts: the prompts, each a text or a list of token ids.
    room: largest number of tokens that a prompt and its output may have together.
    as_ids: function that returns a text as a prompt with token ids.
    """
    try:
        prompts = [as_ids(text) for text in texts]
    except UserError as error:
        raise refusal_for(error, request.source, vars(request.params), request.source) from None
    return [llm.prepare(prompt, fitted(request, len(prompt["prompt_token_ids"]), room)) for prompt in prompts]


def encoded(tokenizer: Any, prompt: Prompt) -> Mapping[str, Any]:
    """Return a prompt with its text, if it has one, and its token ids."""
    return {"prompt": text_of(prompt), "prompt_token_ids": encode(tokenizer, prompt)}


def fitted(request: RequestFields, num_tokens: int, room: int) -> SamplingParams:
    """Return the sampling parameters for a prompt of num_tokens.

    If the request is a chat without a limit of its own, max_tokens is `room` less num_tokens.

    room: largest number of tokens that a prompt and its output may have together.
    """
    if not request.fill:
        return request.params
    most = max(room - num_tokens, 1)  # if nothing is left, 1 is a valid value, and the engine refuses the prompt
    return dataclasses.replace(request.params, max_tokens=most)
