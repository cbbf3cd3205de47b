"""What a request asks for -> prompts as token ids, each with its parameters."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jaxspec.api.async_llm import AsyncLLM
from jaxspec.api.chat import as_prompt, rendering
from jaxspec.api.prompts import Ask, Prompt, encode, text_of
from jaxspec.common.errors import UserError
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.server import control_tokens
from jaxspec.server.fields import Wish
from jaxspec.server.refusal import of_user_error

T = TypeVar("T")

SHORT = 10_000  # characters, or ids, that are made ready at once
# Characters that take as long as what is done for each prompt, bad word and message.
PROMPT, WORD, MESSAGE = 500, 200, 50
LONG_PROMPTS = concurrent.futures.ThreadPoolExecutor(1, "jaxspec-prompts")


def room_of(llm: AsyncLLM) -> int:
    """Return the most tokens of a prompt with its output: the model's context, or what the pool holds."""
    engine = llm.llm.engine
    return min(engine.limits.max_model_len, engine.scheduler.longest_request)


async def prepared(llm: AsyncLLM, wish: Wish, room: int, control: Mapping[int, str]) -> list[Ask]:
    """Prepare the prompts of a request. control: tokens that texts may not hold, by id. Raise Refusal or UserError."""
    tokenizer = llm.llm.tokenizer
    try:
        if control:
            size = sum(len(text) for _, text in control_tokens.texts(wish))
            await unhurried(size, functools.partial(control_tokens.refuse, tokenizer, control, wish))
        if wish.prompts is None:
            call = functools.partial(rendering, tokenizer, wish.messages, **wish.chat)
            texts: Sequence[Any] = [await llm.templates.text(await unhurried(MESSAGE * len(wish.messages), call))]
            as_ids = functools.partial(as_prompt, tokenizer)
        else:
            texts, as_ids = wish.prompts, functools.partial(encoded, tokenizer)
    except UserError as error:
        raise of_user_error(error, wish.source, vars(wish.params), wish.source) from None
    return await unhurried(work(wish.params, texts), functools.partial(prepare, llm, wish, room, texts, as_ids))


def work(params: SamplingParams, texts: Sequence[Any]) -> int:
    """Estimate the work of `prepare`, in characters that take as long. Each prompt goes through all lists."""
    lists = (params.logit_bias, params.allowed_token_ids, params.stop_token_ids)
    each = PROMPT + WORD * len(params.bad_words) + sum(len(given or ()) for given in lists)
    return sum(map(len, texts)) + each * len(texts)


async def unhurried(size: int, call: Callable[[], T]) -> T:
    """Call, in a thread where it takes long: one after the other, so that it holds up no others."""
    if size <= SHORT:
        return call()
    return await asyncio.get_running_loop().run_in_executor(LONG_PROMPTS, call)


def prepare(
    llm: AsyncLLM, wish: Wish, room: int, texts: Sequence[Any], as_ids: Callable[[Any], Mapping[str, Any]]
) -> list[Ask]:
    try:
        prompts = [as_ids(text) for text in texts]
    except UserError as error:
        raise of_user_error(error, wish.source, vars(wish.params), wish.source) from None
    return [llm.prepare(prompt, fitted(wish, len(prompt["prompt_token_ids"]), room)) for prompt in prompts]


def encoded(tokenizer: Any, prompt: Prompt) -> Mapping[str, Any]:
    return {"prompt": text_of(prompt), "prompt_token_ids": encode(tokenizer, prompt)}


def fitted(wish: Wish, num_tokens: int, room: int) -> SamplingParams:
    """The parameters, with all the room that the prompt leaves where no length was asked for."""
    if not wish.fill:
        return wish.params
    most = max(room - num_tokens, 1)  # where there is none the engine refuses the prompt
    return dataclasses.replace(wish.params, max_tokens=most)
