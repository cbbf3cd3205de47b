"""Conversion of chat conversations to prompts, with the model's chat template."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxspec.api.prompts import BYTES, readable
from jaxspec.common.errors import UserError, error_line, quoted
from jaxspec.common.values import flag
from jaxspec.options.keywords import ChatOptions

NO_TOOLS = "this model's chat template uses no tools"


def tool_template(template: Any) -> str:
    """Return the chat template that renders tools, from a tokenizer's chat_template; empty if there is none."""
    if isinstance(template, Mapping):
        template = template.get("tool_use", template.get("default"))
    return template if isinstance(template, str) else ""


def uses_tools(template: str) -> bool:
    """Return whether a chat template renders tools."""
    return reads(template, "tools")


def reads(template: str, variable: str) -> bool:
    """Return whether a statement of a chat template reads a variable."""
    return re.search(rf"\{{[%{{][^\"'%}}]*\b{re.escape(variable)}\b", template) is not None


def conversations(messages: Any) -> list[Any]:
    """Return one conversation (a list of messages), or several, as a list of conversations.

    Raises: UserError if the argument is not a list or another sequence. Its messages are not checked here.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | BYTES):
        raise UserError(f'{quoted(messages)} is not a conversation: give a list of {{"role": ..., "content": ...}}')
    return [messages] if messages and isinstance(messages[0], Mapping) else list(messages)


@dataclasses.dataclass(frozen=True)
class Rendering:
    """The arguments of one call of a chat template, so that another process can make the call.

    template: the tokenizer's chat_template.
    special_tokens: the tokenizer's special_tokens_map.
    messages: messages of the conversation.
    options: options of transformers' apply_chat_template, and variables of the template.
    """

    template: Any
    special_tokens: Mapping[str, Any]
    messages: Sequence[Any]
    options: Mapping[str, Any]

    def text(self) -> str:
        """Call the template and return the text that it writes. Raise UserError if it fails on the messages."""
        from transformers import PreTrainedTokenizerBase as Base

        apply: Any = Base.apply_chat_template
        tokenizer: Any = types.SimpleNamespace(chat_template=self.template, special_tokens_map=self.special_tokens)
        tokenizer.get_chat_template = functools.partial(Base.get_chat_template, tokenizer)
        try:
            text: str = apply(tokenizer, self.messages, tokenize=False, **self.options)
        except Exception as error:  # the template is a program from the checkpoint, and may raise any error
            line = f"{quoted(self.messages)} does not fit the model's chat template: {error_line(error)}"
            raise UserError(line) from error
        return text


def rendering(
    tokenizer: Any,
    messages: Any,
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> Rendering:
    """Check and return the arguments of a call of the model's chat template.

    messages: messages of the conversation.
    chat_template_kwargs: further variables of the template.
    add_generation_prompt: whether the prompt ends with the opening of an answer. Default: not continue_final_message.
    continue_final_message: whether the final message is left open, so that the output continues it.
    tools: tools that the template describes, with OpenAI's names.

    Raises: UserError if the model has no template, for a variable that the template does not contain, for a content
      that is not text, or if add_generation_prompt and continue_final_message are both true.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise UserError("this model has no chat template: use generate with a plain prompt")
    variables = {} if chat_template_kwargs is None else chat_template_kwargs
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise UserError(f"chat_template_kwargs={quoted(variables)} must map names to values")
    own = inspect.signature(tokenizer.apply_chat_template).parameters
    for name in variables:
        if name in own or not re.search(rf"\b{re.escape(name)}\b", str(template)):
            raise UserError(f"chat_template_kwargs: {quoted(name)} is not a variable of the model's chat template")
    options = {**variables, **opening(add_generation_prompt, continue_final_message)}
    if tools:
        options["tools"] = list(tools)
    if tools or any(isinstance(m, Mapping) and (m.get("tool_calls") or m.get("role") == "tool") for m in messages):
        template = tool_template(template)
        if not uses_tools(template):
            raise UserError(f"{'tools' if tools else 'calls of tools'} cannot be rendered: {NO_TOOLS}")
    return Rendering(template, tokenizer.special_tokens_map, flattened(messages), options)


def as_prompt(tokenizer: Any, text: str) -> Mapping[str, Any]:
    """Encode the text that a chat template wrote, and return it as a prompt. Raise UserError for invalid Unicode."""
    return {"prompt": text, "prompt_token_ids": tokenizer.encode(readable(text), add_special_tokens=False)}


def opening(add_generation_prompt: Any = None, continue_final_message: Any = False) -> ChatOptions:
    """Return the two options of `rendering` with their defaults filled in. Raise UserError if both are true."""
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
    """Return chat messages with each content as one string. Parts of a content are joined by line breaks, as in vLLM.

    Raises: UserError for a content that is not text, because a template would print its Python representation.
    """
    return [{**m, "content": content_of(i, m)} if isinstance(m, Mapping) else m for i, m in enumerate(messages)]


def content_of(index: int, message: Mapping[str, Any]) -> str:
    """Return the text of a chat message. index: number of the message, for error messages.

    Raises: UserError for a content that is not text.
    """
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return ""
    parts = content if isinstance(content, Sequence) and not isinstance(content, str | BYTES) else [content]
    texts: list[Any] = [
        part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part for part in parts
    ]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise UserError(f"messages[{index}] has content={quoted(content)}: give a string, or a list of text parts")
    return "\n".join(texts)
