"""A chat's messages: roles, text, names."""

from __future__ import annotations

from typing import Any

from jaxspec.common.errors import quoted
from jaxspec.server.refusal import Refusal

# OpenAI's role -> the chat templates'.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
PARTS = ("text", "refusal")  # of a content that is a list: each has its text under its own name
# A message's fields that hold a part of what was said -> why they are refused. Any other unknown one is ignored.
SAID = {
    "tool_calls": "no tool is called",
    "function_call": "no function is called",
    "audio": "messages hold text",
    "refusal": "give it as the content",
}


def conversation(messages: Any) -> list[dict[str, str]]:
    """The messages as chat templates take them, without fields that are unknown here, as OpenAI's server reads them.
    Raises Refusal, which names the place, for what is no text."""
    if not isinstance(messages, list) or not messages:
        raise Refusal(400, 'messages must be a list of {"role": ..., "content": ...}, not empty', param="messages")
    return [message_of(f"messages[{i}]", message) for i, message in enumerate(messages)]


def message_of(where: str, message: Any) -> dict[str, str]:
    if not isinstance(message, dict):
        raise Refusal(400, f"{where}={quoted(message)} must be an object", param=where)
    given = {name: value for name, value in message.items() if value not in (None, [])}  # as clients send answers back
    role = given.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise Refusal(400, f"{where}.role={quoted(role)} must be one of {', '.join(ROLES)}", param=f"{where}.role")
    for name, reason in SAID.items():
        if name in given:
            raise Refusal(400, f"{where}.{name} is not supported: {reason}", param=f"{where}.{name}")
    found = {"role": ROLES[role], "content": text_of(f"{where}.content", message.get("content"))}
    if "name" in given:  # templates may show it
        found["name"] = given["name"]
        if not isinstance(found["name"], str):
            raise Refusal(400, f"{where}.name={quoted(found['name'])} must be a string", param=f"{where}.name")
    return found


def text_of(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refusal(400, f"{where}={quoted(content)} must be a string, or a list of text parts", param=where)
    return "\n".join(part_of(f"{where}[{i}]", part) for i, part in enumerate(content))  # as vLLM joins them


def part_of(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in PARTS:
        raise Refusal(400, f"{where}.type={quoted(kind)} is not supported: text is", param=f"{where}.type")
    text = part.get(kind)
    if not isinstance(text, str):
        raise Refusal(400, f'{where} must be {{"type": "{kind}", "{kind}": a string}}', param=where)
    return text
