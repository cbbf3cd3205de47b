"""Requests of OpenAI's Responses API, rewritten as requests for chats. Nothing is stored between requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxspec.common.errors import quoted
from jaxspec.common.values import unknown
from jaxspec.server.fields import HARMLESS, SAMPLING, RequestFields, required
from jaxspec.server.refusal import Refusal

# Field -> its name in a request for a chat. Fields of the same name are SAME.
RENAMED = {
    "input": "messages",
    "text": "response_format",
    "reasoning": "reasoning_effort",
    "max_output_tokens": "max_completion_tokens",
    "include": "logprobs",
}
SAME = (
    *("model", "stream", "stream_options", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"),
    *("store", "service_tier", "moderation"),
)
OTHER_NAMES = ("max_tokens", "n", "logprobs", "prompt_logprobs", "token_origins")  # fields that responses do not have
OWN = ("instructions", "top_logprobs")
# Unsupported field -> (values that are accepted because they ask for nothing; reason or remedy for the error message).
STATELESS: dict[str, tuple[tuple[Any, ...], str]] = {
    "previous_response_id": ((), "nothing is stored: send the earlier items in input"),
    "conversation": ((), "nothing is stored: send the earlier items in input"),
    "prompt": ((), "nothing is stored: send its text in input"),
    "background": ((False,), "nothing is stored: wait for the answer, or stream it"),
    "background_options": ((), "nothing is stored: wait for the answer, or stream it"),
    "truncation": (("disabled",), "the input is never cut"),
    "context_management": (([],), "the input is never cut"),
    "max_tool_calls": ((), "only the client calls tools"),
    "image": ((), "the output is text"),
    "access_programs": ((), "only the client calls tools"),
}
LOGPROBS = "message.output_text.logprobs"
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")  # reasoning is part of the output in any case, as plain text
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal", "reasoning_text": "text"}
TEXTS["summary_text"] = "text"  # type of a content part -> its field with the text


@dataclasses.dataclass(frozen=True)
class ResponseFields:
    """The checked fields of a request for a response. given: the fields that are not null; chat: those of its chat."""

    given: Mapping[str, Any]
    chat: RequestFields


def response_fields(body: Mapping[str, Any], parse: Callable[[dict[str, Any]], RequestFields]) -> ResponseFields:
    """Parse and check the body of a request for a response. Raise Refusal, which names the field.

    parse: function that parses the fields of a chat.
    """
    given = {name: value for name, value in body.items() if value is not None}
    asked = chat_body(given)
    try:
        chat = parse(asked)
    except Refusal as error:
        names = {"verbosity": "text"} | {new: old for old, new in RENAMED.items()}
        first = (error.param or "").partition("[")[0]
        if first in names:
            error.param = names[first]
        raise
    return ResponseFields(given, dataclasses.replace(chat, source="input"))


def chat_body(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of the chat that a request for a response asks for. Raise Refusal for what has no equivalent."""
    sampling = [name for name in SAMPLING if name not in OTHER_NAMES]
    known = [*RENAMED, *SAME, *OWN, *sampling]
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name in STATELESS:
            values, instead = STATELESS[name]
            if value not in values:
                raise Refusal(400, f"{name}={quoted(value)} is not supported: {instead}", param=name)
        elif name in (*SAME, *sampling, *HARMLESS):
            found[name] = value
        elif name not in known:
            message = str(unknown(name, "the request", known, "field"))
            raise Refusal(400, message, param=name[:80], code="unknown_parameter")
    found["messages"] = messages_of(required(given, "input"), given.get("instructions"))
    if "max_output_tokens" in given:
        found["max_completion_tokens"] = given["max_output_tokens"]
    if "tools" in given:
        found["tools"] = [tool_of(f"tools[{i}]", tool) for i, tool in enumerate(listed(given, "tools"))]
    choice = given.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        found["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    for name in listed(given, "include"):
        if name not in INCLUDED:
            raise Refusal(400, f"include has {quoted(name)}: {' and '.join(INCLUDED)} are supported", param="include")
    found["logprobs"] = LOGPROBS in given.get("include", ()) or "top_logprobs" in given
    found["top_logprobs"] = given.get("top_logprobs")
    text = members(given, "text", ("format", "verbosity"))
    found["verbosity"] = text.get("verbosity")
    found["response_format"] = format_of(text.get("format"))
    found["reasoning_effort"] = members(given, "reasoning", ("effort", "summary", "generate_summary")).get("effort")
    return found


def listed(given: Mapping[str, Any], name: str) -> list[Any]:
    """Return the value of a field that is a list, or an empty list. Raise Refusal for another value."""
    value = given.get(name, [])
    if not isinstance(value, list):
        raise Refusal(400, f"{name}={quoted(value)} must be a list", param=name)
    return value


def members(given: Mapping[str, Any], name: str, known: tuple[str, ...]) -> Mapping[str, Any]:
    """Return the value of a field that is an object, or an empty one. Raise Refusal for another value or member."""
    value = given.get(name, {})
    if not isinstance(value, dict):
        raise Refusal(400, f"{name}={quoted(value)} must be an object", param=name)
    for member in value:
        if member not in known:
            message = f"{name} has {quoted(member)}, which is not supported: use {', '.join(known)}"
            raise Refusal(400, message, param=name)
    return value


def format_of(value: Any) -> Any:
    """Return text.format as response_format, whose schema is one level deeper."""
    if not isinstance(value, dict) or value.get("type") != "json_schema":
        return value
    return {"type": "json_schema", "json_schema": {name: v for name, v in value.items() if name != "type"}}


def tool_of(where: str, tool: Any) -> dict[str, Any]:
    """Return a tool in the form of chats. Raise Refusal for a tool that is no function. where: its position."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        raise Refusal(400, f"{where}.type={quoted(kind)} is not supported: function is", param="tools")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def messages_of(given: Any, instructions: Any) -> list[dict[str, Any]]:
    """Return the messages of a chat for the fields `input` and `instructions`.

    The reasoning, the message and the calls of a turn of the assistant are one message of a chat.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise Refusal(400, f"input={quoted(given)} must be a string, or a list of items, not empty", param="input")
    if not isinstance(instructions, str | None):
        raise Refusal(400, f"instructions={quoted(instructions)} must be a string", param="instructions")
    messages = [{"role": "system", "content": instructions}] if instructions else []
    for i, item in enumerate(given):
        where = f"input[{i}]"
        if not isinstance(item, dict):
            raise Refusal(400, f"{where}={quoted(item)} must be an object", param="input")
        kind = item.get("type") or "message"
        if not isinstance(kind, str) or kind not in ITEMS:
            message = f"{where}.type={quoted(kind)} is not supported: {', '.join(ITEMS)} are"
            raise Refusal(400, message, param="input")
        ITEMS[kind](messages, where, item)
    return messages


def add_message(messages: list[dict[str, Any]], where: str, item: Mapping[str, Any]) -> None:
    """Add a message. One of the assistant completes a turn that has reasoning alone. where: position in the input."""
    content = text_of(f"{where}.content", item.get("content"))
    last = messages[-1] if messages else {}
    if item.get("role") == last.get("role") == "assistant" and not last["content"] and "tool_calls" not in last:
        last["content"] = content
    else:
        messages.append({"role": item.get("role"), "content": content})


def add_reasoning(messages: list[dict[str, Any]], where: str, item: Mapping[str, Any]) -> None:
    """Begin a turn of the assistant with its reasoning, or with the summary of it. where: position in the input."""
    text = text_of(where, item.get("content") or item.get("summary") or "")
    messages.append({"role": "assistant", "content": "", "reasoning_content": text})


def add_call(messages: list[dict[str, Any]], where: str, item: Mapping[str, Any]) -> None:
    """Add a call to the turn of the assistant. where: position in the input."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    call = {"id": item.get("call_id"), "type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(call)


def add_result(messages: list[dict[str, Any]], where: str, item: Mapping[str, Any]) -> None:
    """Add the result of a call. where: position in the input."""
    content = text_of(f"{where}.output", item.get("output"))
    messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})


ITEMS: dict[str, Callable[[list[dict[str, Any]], str, Mapping[str, Any]], None]] = {
    "message": add_message,
    "reasoning": add_reasoning,
    "function_call": add_call,
    "function_call_output": add_result,
}


def text_of(where: str, content: Any) -> str:
    """Return the text of a content. The parts of a list are joined by line ends. where: position in the input."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refusal(400, f"{where}={quoted(content)} must be a string, or a list of text parts", param="input")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(TEXTS[kind]) if isinstance(kind, str) and kind in TEXTS else None
        if not isinstance(text, str):
            message = f"{where}[{i}] of type {quoted(kind)} is not supported: text is, such as input_text"
            raise Refusal(400, message, param="input")
        texts.append(text)
    return "\n".join(texts)
