"""What a request asks for -> prompts as token ids, each with its parameters."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jaxspec.async_llm import AsyncLLM
from jaxspec.chat import as_prompt, rendering
from jaxspec.errors import UserError
from jaxspec.prompts import Prompt, encode, text_of
from jaxspec.sampling_params import SamplingParams
from jaxspec.server import control_tokens
from jaxspec.server.fields import Wish
from jaxspec.server.refusal import of_user_error

T = TypeVar("T")
Asked = list[tuple[Mapping[str, Any], SamplingParams]]

SHORT = 10_000  # characters, or ids, that are made ready at once
LONG_PROMPTS = concurrent.futures.ThreadPoolExecutor(1, "jaxspec-prompts")


def room_of(llm: AsyncLLM) -> int:
    """The most tokens of a prompt with its output: what the model has, and the pool."""
    engine = llm.llm.engine
    return min(engine.limits.max_model_len, engine.scheduler.longest_request)


async def prepared(llm: AsyncLLM, wish: Wish, room: int, control: Mapping[int, str]) -> Asked:
    """control: tokens that texts may not hold, by id. Raises Refusal."""
    tokenizer = llm.llm.tokenizer

    def prepare() -> Asked:
        return [(prompt, fitted(wish, len(prompt["prompt_token_ids"]), room)) for prompt in map(as_ids, given)]

    try:
        if control:
            size = sum(len(text) for _, text in control_tokens.texts(wish))
            await unhurried(size, functools.partial(control_tokens.refuse, tokenizer, control, wish))
        if wish.prompts is None:
            given: Sequence[Any] = [await llm.templates.text(rendering(tokenizer, wish.messages, **wish.chat))]
            as_ids = functools.partial(as_prompt, tokenizer)
        else:
            given, as_ids = wish.prompts, functools.partial(encoded, tokenizer)
        return await unhurried(sum(map(len, given)), prepare)
    except UserError as error:
        raise of_user_error(error, wish.source, vars(wish.params), wish.source) from None


async def unhurried(size: int, call: Callable[[], T]) -> T:
    """call(). Long prompts take their time, one after the other in a thread, and hold up no others."""
    if size <= SHORT:
        return call()
    return await asyncio.get_running_loop().run_in_executor(LONG_PROMPTS, call)


def encoded(tokenizer: Any, prompt: Prompt) -> Mapping[str, Any]:
    return {"prompt": text_of(prompt), "prompt_token_ids": encode(tokenizer, prompt)}


def fitted(wish: Wish, num_tokens: int, room: int) -> SamplingParams:
    """The parameters, with all the room that the prompt leaves where no length was asked for."""
    if not wish.fill:
        return wish.params
    most = max(room - num_tokens, 1)  # where there is none the engine refuses the prompt
    return dataclasses.replace(wish.params, max_tokens=most)
