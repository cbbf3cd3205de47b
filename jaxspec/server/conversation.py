"""Checks of a chat's messages: their roles, texts and names."""

from __future__ import annotations

from typing import Any

from jaxspec.common.errors import quoted
from jaxspec.server.refusal import Refusal

# Role of a message in OpenAI's API -> its role in chat templates.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
PARTS = ("text", "refusal")  # supported types of a content part, whose text is in the field named like its type
# Message field whose content would be lost -> reason why the message is refused. Other unknown fields are ignored.
UNSUPPORTED = {
    "tool_calls": "no tool is called",
    "function_call": "no function is called",
    "audio": "messages hold text",
    "refusal": "give it as the content",
}


def conversation(messages: Any) -> list[dict[str, str]]:
    """Return a chat's messages in the form that chat templates read. Unknown fields are left out, as by OpenAI.

    Raises: Refusal, which names the field, for messages of another form or with content that is not text.
    """
    if not isinstance(messages, list) or not messages:
        raise Refusal(400, 'messages must be a list of {"role": ..., "content": ...}, not empty', param="messages")
    return [message_of(f"messages[{i}]", message) for i, message in enumerate(messages)]


def message_of(where: str, message: Any) -> dict[str, str]:
    """Return a message's role, content and, if given, name. where: position for error messages, as "messages[0]"."""
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
    found = {"role": ROLES[role], "content": text_of(f"{where}.content", message.get("content"))}
    if "name" in given:  # some chat templates show the name
        found["name"] = given["name"]
        if not isinstance(found["name"], str):
            raise Refusal(400, f"{where}.name={quoted(found['name'])} must be a string", param=f"{where}.name")
    return found


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
