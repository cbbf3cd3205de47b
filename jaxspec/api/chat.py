"""Conversations -> prompts, through the model's chat template."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxspec.api.prompts import BYTES, readable
from jaxspec.common.errors import UserError, quoted, said
from jaxspec.common.values import flag
from jaxspec.options.keywords import ChatOptions


def conversations(messages: Any) -> list[Any]:
    """One conversation or several as a list of conversations. Raises UserError for what is none."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | BYTES):
        raise UserError(f'{quoted(messages)} is no conversation: give a list of {{"role": ..., "content": ...}}')
    return [messages] if messages and isinstance(messages[0], Mapping) else list(messages)


@dataclasses.dataclass(frozen=True)
class Rendering:
    """A call of a chat template.

    template, special_tokens: the tokenizer's, as its chat_template and special_tokens_map are.
    options: of transformers' apply_chat_template, and variables of the template.
    """

    template: Any
    special_tokens: Mapping[str, Any]
    messages: Sequence[Any]
    options: Mapping[str, Any]

    def text(self) -> str:
        """The text that the template makes. Raises UserError where it does not take the messages."""
        from transformers import PreTrainedTokenizerBase as Base

        apply: Any = Base.apply_chat_template
        tokenizer: Any = types.SimpleNamespace(chat_template=self.template, special_tokens_map=self.special_tokens)
        tokenizer.get_chat_template = functools.partial(Base.get_chat_template, tokenizer)
        try:
            return apply(tokenizer, self.messages, tokenize=False, **self.options)
        except Exception as error:  # the template is a program of the model's, and raises what it likes
            raise UserError(f"{quoted(self.messages)} does not fit the model's chat template: {said(error)}") from error


def rendering(
    tokenizer: Any,
    messages: Any,
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
) -> Rendering:
    """Prepare a call of the model's chat template, which writes its own BOS.

    chat_template_kwargs: what the template reads besides.
    add_generation_prompt: whether the prompt ends with the opening of an answer; by default it does, unless the final
      message is continued.
    continue_final_message: leaves the final message open, so that the output continues it.

    Raises: UserError where there is no template, or it is not told such a thing.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise UserError("this model has no chat template: use generate with a plain prompt")
    named = {} if chat_template_kwargs is None else chat_template_kwargs
    if not isinstance(named, Mapping) or not all(isinstance(name, str) for name in named):
        raise UserError(f"chat_template_kwargs={quoted(named)} must map names to values")
    own = inspect.signature(tokenizer.apply_chat_template).parameters
    for name in named:
        if name in own or not re.search(rf"\b{re.escape(name)}\b", str(template)):
            raise UserError(f"chat_template_kwargs: {quoted(name)} is nothing that the model's chat template is told")
    options = {**named, **opening(add_generation_prompt, continue_final_message)}
    return Rendering(template, tokenizer.special_tokens_map, flattened(messages), options)


def as_prompt(tokenizer: Any, text: str) -> Mapping[str, Any]:
    """A text that a chat template made as a prompt of token ids. Raises UserError for what is no text."""
    return {"prompt": text, "prompt_token_ids": tokenizer.encode(readable(text), add_special_tokens=False)}


def opening(add_generation_prompt: Any = None, continue_final_message: Any = False) -> ChatOptions:
    """Both options with their defaults. Raises UserError where they exclude each other."""
    continues = flag("continue_final_message", continue_final_message)
    opens = not continues if add_generation_prompt is None else flag("add_generation_prompt", add_generation_prompt)
    if opens and continues:
        raise UserError(
            "add_generation_prompt=True opens a new message, continue_final_message=True continues the last one: give "
            "one of them",
            param="add_generation_prompt",
        )
    return {"add_generation_prompt": opens, "continue_final_message": continues}


def flattened(messages: Iterable[Any]) -> list[Any]:
    """The messages, their contents as text: parts of it are joined by line breaks, as in vLLM. Raises UserError for a
    content that is none: templates would show it as Python does."""
    return [{**m, "content": content_of(i, m)} if isinstance(m, Mapping) else m for i, m in enumerate(messages)]


def content_of(index: int, message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        raise UserError(f"messages[{index}].tool_calls is not supported without a content: no tool is called")
    parts = content if isinstance(content, Sequence) and not isinstance(content, str | BYTES) else [content]
    texts: list[Any] = [p.get("text") if isinstance(p, Mapping) and p.get("type") == "text" else p for p in parts]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise UserError(f"messages[{index}] has content={quoted(content)}: give a string, or a list of text parts")
    return "\n".join(texts)
