"""Checks of a chat's messages: their roles, texts and names."""

from __future__ import annotations

import json
from typing import Any

from jaxspec.common.errors import quoted
from jaxspec.server.refusal import Refusal
from jaxspec.server.tool_formats import no_format, refuse_constant, tool_format

# Role of a message in OpenAI's API -> its role in chat templates.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# Message field that some chat templates show -> roles of the messages that have it.
SHOWN = {"name": tuple(ROLES), "tool_call_id": ("tool",), "reasoning_content": ("assistant",)}
PARTS = ("text", "refusal")  # supported types of a content part, whose text is in the field named like its type
# Message field whose content would be lost -> reason why the message is refused. Other unknown fields are ignored.
UNSUPPORTED = {
    "function_call": "give it as tool_calls",
    "audio": "messages hold text",
    "refusal": "give it as the content",
}


def conversation(messages: Any, template: str) -> list[dict[str, Any]]:
    """Return a chat's messages in the form that chat templates read. Unknown fields are left out, as by OpenAI.

    template: the chat template, which has to use tools if a message has calls or a result.

    Raises: Refusal, which names the field, for messages of another form or with content that is not text.
    """
    if not isinstance(messages, list) or not messages:
        raise Refusal(400, 'messages must be a list of {"role": ..., "content": ...}, not empty', param="messages")
    found = [message_of(f"messages[{i}]", message) for i, message in enumerate(messages)]
    for i, message in enumerate(found):
        name = "tool_calls" if "tool_calls" in message else "role"
        if (name == "tool_calls" or message["role"] == "tool") and tool_format(template) is None:
            value = "" if name == "tool_calls" else "='tool'"
            where = f"messages[{i}].{name}"
            raise Refusal(400, f"{where}{value} is not supported: {no_format(template)}", param=where)
    name_results(found)
    return found


def name_results(messages: list[dict[str, Any]]) -> None:
    """Give each result of a call the name of the function, which some chat templates show and OpenAI's API omits."""
    names = {call.get("id"): call["function"]["name"] for m in messages for call in m.get("tool_calls", ())}
    for message in messages:
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names:
            message["name"] = names[message["tool_call_id"]]


def message_of(where: str, message: Any) -> dict[str, Any]:
    """Return a message's role and content and, if given, its name and what it has of calls of tools.

    where: position for error messages, as "messages[0]".
    """
    if not isinstance(message, dict):
        raise Refusal(400, f"{where}={quoted(message)} must be an object", param=where)
    # Clients send the server's earlier answers back as messages. Empty fields of those ask for nothing.
    given = {name: value for name, value in message.items() if value not in (None, [])}
    role = given.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise Refusal(400, f"{where}.role={quoted(role)} must be one of {', '.join(ROLES)}", param=f"{where}.role")
    for name, reason in UNSUPPORTED.items():
        if name in given:
            raise Refusal(400, f"{where}.{name} is not supported: {reason}", param=f"{where}.{name}")
    found: dict[str, Any] = {"role": ROLES[role]}
    calls = given.get("tool_calls") if role == "assistant" else None
    content = message.get("content")
    found["content"] = "" if calls and content is None else text_of(f"{where}.content", content)
    for name, roles in SHOWN.items():
        if name in given and role in roles:
            found[name] = given[name]
            if not isinstance(found[name], str):
                raise Refusal(400, f"{where}.{name}={quoted(found[name])} must be a string", param=f"{where}.{name}")
    if calls:
        if not isinstance(calls, list):
            raise Refusal(400, f"{where}.tool_calls={quoted(calls)} must be a list", param=f"{where}.tool_calls")
        found["tool_calls"] = [call_of(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    return found


def call_of(where: str, call: Any) -> dict[str, Any]:
    """Return a call of a message, with its arguments as an object, which chat templates write as JSON.

    where: position of the call for error messages, such as "messages[1].tool_calls[0]".
    """
    function = call.get("function") if isinstance(call, dict) and call.get("type", "function") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        message = (
            f'{where}={quoted(call)} must be {{"id": ..., "type": "function", "function": {{"name", "arguments"}}}}'
        )
        raise Refusal(400, message, param=where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}", parse_constant=refuse_constant)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        given = quoted(function.get("arguments"))
        raise Refusal(400, f"{where}.function.arguments={given} must be the JSON text of an object", param=where)
    found = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if call.get("id") is None:
        return found
    if not isinstance(call["id"], str):
        raise Refusal(400, f"{where}.id={quoted(call['id'])} must be a string", param=where)
    return {"id": call["id"], **found}


def text_of(where: str, content: Any) -> str:
    """Return the text of a message's content. The parts of a list are joined by line ends, as in vLLM.

    where: position of the content for error messages, such as "messages[0].content".
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refusal(400, f"{where}={quoted(content)} must be a string, or a list of text parts", param=where)
    return "\n".join(part_of(f"{where}[{i}]", part) for i, part in enumerate(content))


def part_of(where: str, part: Any) -> str:
    """Return the text of a part of a message's content. Raise Refusal for a part that is not text."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in PARTS:
        raise Refusal(400, f"{where}.type={quoted(kind)} is not supported: text is", param=f"{where}.type")
    text = part.get(kind)
    if not isinstance(text, str):
        raise Refusal(400, f'{where} must be {{"type": "{kind}", "{kind}": a string}}', param=where)
    return text
