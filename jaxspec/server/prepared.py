"""What a request asks for -> prompts as token ids, each with its parameters."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxspec.async_llm import AsyncLLM
from jaxspec.errors import UserError
from jaxspec.prompts import Ask, encode, text_of
from jaxspec.sampling_params import SamplingParams
from jaxspec.server.fields import Wish
from jaxspec.server.refusal import of_user_error

SHORT = 10_000  # characters, or ids, that are made ready at once
PROMPT, WORD = 500, 200  # characters that take as long as what is done for each prompt, and for a bad word
LONG_PROMPTS = concurrent.futures.ThreadPoolExecutor(1, "jaxspec-prompts")


def room_of(llm: AsyncLLM) -> int:
    """The most tokens of a prompt with its output: what the model has, and the pool."""
    engine = llm.llm.engine
    return min(engine.limits.max_model_len, engine.num_pages * engine.layout.page_size - engine.num_drafts)


async def prepared(llm: AsyncLLM, wish: Wish, room: int) -> list[Ask]:
    """Long prompts take their time, one after the other in a thread, and hold up no others. Raises Refusal or
    UserError."""
    if work(wish) <= SHORT:
        return prepare(llm, wish, room)
    return await asyncio.get_running_loop().run_in_executor(LONG_PROMPTS, prepare, llm, wish, room)


def work(wish: Wish) -> int:
    """Estimate the work of `prepare`, in characters that take as long. Each prompt goes through all lists."""
    params, said = wish.params, wish.prompts or [message["content"] for message in wish.messages]
    lists = (params.logit_bias, params.allowed_token_ids, params.stop_token_ids)
    each = PROMPT + WORD * len(params.bad_words) + sum(len(given or ()) for given in lists)
    return sum(map(len, said)) + each * (1 if wish.prompts is None else len(said))


def prepare(llm: AsyncLLM, wish: Wish, room: int) -> list[Ask]:
    try:
        prompts = encoded(llm, wish)
    except UserError as error:
        raise of_user_error(error, wish.source, vars(wish.params), wish.source) from None
    return [llm.prepare(prompt, fitted(wish, len(prompt["prompt_token_ids"]), room)) for prompt in prompts]


def encoded(llm: AsyncLLM, wish: Wish) -> list[Mapping[str, Any]]:
    if wish.prompts is None:
        return [llm.llm.render_chat(wish.messages, wish.template)]
    tokenizer = llm.llm.tokenizer
    return [{"prompt": text_of(p), "prompt_token_ids": encode(tokenizer, p)} for p in wish.prompts]


def fitted(wish: Wish, num_tokens: int, room: int) -> SamplingParams:
    """The parameters, with all the room that the prompt leaves where no length was asked for."""
    if not wish.fill:
        return wish.params
    most = max(room - num_tokens, 1)  # where there is none the engine refuses the prompt
    return dataclasses.replace(wish.params, max_tokens=most)
