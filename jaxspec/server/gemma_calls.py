"""The calls of Gemma 4, such as call:weather{city:<|"|>Paris<|"|>,days:[1,2]}, and their arguments as JSON."""

from __future__ import annotations

import json
import re

from jaxspec.common.notations import GEMMA_NAME
from jaxspec.common.notations import GEMMA_QUOTE as MARK

HEAD = re.compile(r"\s*call:\s*([A-Za-z0-9_.-]{1,128})\s*(?=\{)")
SPACE = re.compile(r"\s*")
WORD = re.compile(r"[^\s,:{}\[\]<>]+")
NUMBER = re.compile(r"-?[0-9]")  # the beginning of a number
WORDS = {word: word for word in ("true", "false", "null")} | {"None": "null"}  # None: as Gemma's chat template has it


class CallEnd:
    """The search for the end of a call in a text that grows."""

    def __init__(self) -> None:
        self.at, self.depth, self.quoted = 0, 0, False

    def find(self, text: str, start: int) -> int | None:
        """Return the index after the call that begins at `start`; `start` if none does; None if it is incomplete."""
        if not self.depth:
            head = HEAD.match(text, start)
            if head is None:
                return None if beginning(text[start:]) else start
            self.at = head.end()
        while self.at < len(text):
            if self.quoted:
                end = text.find(MARK, self.at)
                if end < 0:
                    self.at = max(self.at, len(text) - len(MARK) + 1)
                    return None
                self.at, self.quoted = end + len(MARK), False
            elif text.startswith(MARK, self.at):
                self.at, self.quoted = self.at + len(MARK), True
            elif MARK.startswith(text[self.at : self.at + len(MARK)]):
                return None  # the rest may be the beginning of a mark
            else:
                self.depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(text[self.at], 0)
                self.at += 1
                if not self.depth:
                    return self.at
        return None


def beginning(text: str) -> bool:
    """Return whether a call may begin with this text, in front of its arguments."""
    text = text.lstrip()
    called, name = text.startswith("call:"), text.removeprefix("call:").strip()
    return "call:".startswith(text) or (called and re.fullmatch("[A-Za-z0-9_.-]{0,128}", name) is not None)


def read_call(text: str) -> tuple[str, str]:
    """Return the name of the function that a call names, and its arguments as JSON text.

    Raises: ValueError for a text that is no call; RecursionError for values that are nested too deeply.
    """
    head = HEAD.match(text)
    if head is None:
        raise wrong("no call", text, 0)
    arguments, end = value(text, head.end())
    if text[end:].strip():
        raise wrong("text after the call", text, end)
    return head.group(1), arguments


def value(text: str, at: int) -> tuple[str, int]:
    """Return the JSON text of the value that begins at an index, and the index after it. Raise ValueError if none does.

    Values that are no strings keep their text, so that no number loses a digit.
    """
    at = after_space(text, at)
    if text.startswith(MARK, at):
        return string(text, at)
    if text[at : at + 1] in ("{", "["):
        return items(text, at)
    found = WORD.match(text, at)
    if found is None:
        raise wrong("no value", text, at)
    word = found.group()
    if word not in WORDS:
        if not NUMBER.match(word):
            raise wrong("no value", text, at)
        json.loads(word, parse_int=str, parse_float=str)
    return WORDS.get(word, word), found.end()


def string(text: str, at: int) -> tuple[str, int]:
    """Return the JSON text of the string whose first mark is at an index, and the index after its last."""
    start = at + len(MARK)
    end = text.index(MARK, start)
    return json.dumps(text[start:end], ensure_ascii=False), end + len(MARK)


def items(text: str, at: int) -> tuple[str, int]:
    """Return the JSON text of the object or array that begins at an index, and the index after it."""
    opened, closing = text[at], "}" if text[at] == "{" else "]"
    parts: list[str] = []
    at = after_space(text, at + 1)
    while not (text.startswith(closing, at) and not parts):
        name = ""
        if opened == "{":
            name, at = member_name(text, at)
        part, at = value(text, at)
        parts.append(name + part)
        at = after_space(text, at)
        if text.startswith(closing, at):
            break
        if not text.startswith(",", at):
            raise wrong("no comma", text, at)
        at = after_space(text, at + 1)
    return f"{opened}{', '.join(parts)}{closing}", at + 1


def member_name(text: str, at: int) -> tuple[str, int]:
    """Return the JSON text of a member's name and its colon, and the index after the colon."""
    if text.startswith(MARK, at):
        name, at = string(text, at)
    else:
        found = GEMMA_NAME.match(text, at)
        if found is None:
            raise wrong("no name", text, at)
        name, at = json.dumps(found.group(), ensure_ascii=False), found.end()
    at = after_space(text, at)
    if not text.startswith(":", at):
        raise wrong("no colon", text, at)
    return f"{name}: ", at + 1


def wrong(what: str, text: str, at: int) -> json.JSONDecodeError:
    """Return the error for a text that is no call. at: index of the character at fault."""
    return json.JSONDecodeError(what, text, at)


def after_space(text: str, at: int) -> int:
    """Return the index of the first character from `at` that is no white space."""
    return SPACE.match(text, at).end()  # type: ignore[union-attr]
