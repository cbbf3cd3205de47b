"""The formats in which families of models write calls of tools, and the reader that finds calls in their texts."""

from __future__ import annotations

import dataclasses
import json
import re
import uuid
from collections.abc import Collection, Iterator
from typing import Literal, NoReturn

from jaxspec.api.chat import NO_TOOLS, uses_tools
from jaxspec.common.notations import GEMMA_QUOTE
from jaxspec.server import gemma_calls
from jaxspec.server.reasoning import possible_start


@dataclasses.dataclass(frozen=True)
class ToolFormat:
    """The format of a family's calls.

    needles: texts that all occur in the family's chat templates.
    absent: texts of which none occurs in them, because they belong to formats that are not read.
    mark: text in front of the calls. Without one, calls are in place of a text.
    many: whether the JSON after the mark is an array of calls.
    end: text after the JSON.
    space: white space between mark, JSON and end, as the family's templates write it.
    arguments: member of a call that holds the arguments.
    parallel: whether an output may have several calls.
    notation: "json", or "gemma" for calls that are read by `gemma_calls` in place of JSON.
    spelled: special tokens that calls contain and that are legal in a grammar as their texts.
    """

    needles: tuple[str, ...]
    absent: tuple[str, ...] = ()
    mark: str = ""
    many: bool = False
    end: str = ""
    space: str = ""
    arguments: str = "arguments"
    parallel: bool = True
    notation: Literal["json", "gemma"] = "json"
    spelled: tuple[str, ...] = ()


FORMATS = {
    "Hermes and Qwen": ToolFormat(
        needles=("<tool_call>", "arguments"),
        absent=("<function=", "<arg_key>"),
        mark="<tool_call>",
        end="</tool_call>",
        space="\n",
    ),
    "Mistral": ToolFormat(needles=("[TOOL_CALLS]",), absent=("[ARGS]", "[CALL_ID]"), mark="[TOOL_CALLS]", many=True),
    "Llama 3": ToolFormat(needles=("ipython", "parameters"), arguments="parameters", parallel=False),
    "Gemma 4": ToolFormat(
        needles=("<|tool_call>call:", GEMMA_QUOTE),
        mark="<|tool_call>",
        end="<tool_call|>",
        notation="gemma",
        spelled=("<|tool_call>", "<tool_call|>", GEMMA_QUOTE),
    ),
}


def tool_format(template: str) -> ToolFormat | None:
    """Return the format of the calls of a chat template, or None if it uses no tools or has another format."""
    if uses_tools(template):
        for form in FORMATS.values():
            if all(text in template for text in form.needles) and not any(text in template for text in form.absent):
                return form
    return None


def no_format(template: str) -> str:
    """Return why a chat template has no format of calls, for error messages."""
    if not uses_tools(template):
        return NO_TOOLS
    return f"this model's chat template writes calls in a form that is not read: those of {', '.join(FORMATS)} are"


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a tool. arguments: text of a JSON object, as the model wrote it."""

    name: str
    arguments: str
    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex[:9])  # Mistral's templates take no other form


class Reader:
    """The reader of one sample's text, which parts it into content and calls as it comes.

    A call is read when it is complete. A text that is no valid call of a known tool stays content. White space
    around calls is left out.

    form: format of the calls.
    names: names of the known tools.
    most: largest number of calls; None for any number. Further ones stay content.
    opened: whether the mark is the end of the prompt, so that the text begins after it.
    only_first: whether the output is either calls or an answer in a form of its own. A mark in such an answer begins no
      call.
    """

    def __init__(
        self, form: ToolFormat, names: Collection[str], most: int | None, *, opened: bool, only_first: bool = False
    ) -> None:
        self.form, self.names, self.most, self.only_first = form, names, most, only_first
        self.text = form.mark if opened else ""  # the part that is neither content nor call yet
        self.num_calls = 0
        self.before_end = False  # whether `text` begins after a call's JSON
        self.after_call = False  # whether there was no content since the last call
        self.begun = False  # whether there was content or a call
        self.restart()

    def restart(self) -> None:
        """Begin the search for the end of the call anew."""
        self.search = (
            gemma_calls.CallEnd() if self.form.notation == "gemma" else JsonEnd("[" if self.form.many else "{")
        )

    def read(self, text: str, *, ended: bool) -> tuple[str, list[Call]]:
        """Add a piece of the text, and return the content and the calls that are certain now.

        ended: whether this is the last piece, after which everything is certain.
        """
        self.text += text
        content, calls = "", list[Call]()
        while True:
            if self.before_end and not self.passed_end(ended):
                return content, calls
            start = self.start()
            if start is None:
                blank = self.after_call and not self.text.strip()
                content += self.released(len(self.text) if ended and not blank else self.num_certain())
                return content, calls
            content += self.released(len(self.text[:start].rstrip()))
            json_start = self.text.index(self.form.mark or "{") + len(self.form.mark)
            end = self.search.find(self.text, json_start)
            if end is None and not ended:
                return content, calls
            found = None if end is None else read_calls(self.text[json_start:end], self.form, self.names)
            if end is None or not found or (self.most is not None and self.num_calls + len(found) > self.most):
                content += self.released(max(end or json_start, 1))
            else:
                self.text = self.text[end:]
                self.num_calls += len(found)
                self.before_end = self.after_call = self.begun = True
                calls += found
            self.restart()

    def released(self, length: int) -> str:
        """Remove these first characters of the text, and return them as content."""
        found, self.text = self.text[:length], self.text[length:]
        if found:
            self.begun, self.after_call = True, False
        return found

    def passed_end(self, ended: bool) -> bool:
        """Remove the end of a call, which may be missing. Return whether that is certain."""
        left = self.text.lstrip()
        if left.startswith(self.form.end):
            self.text = left[len(self.form.end) :]
        elif self.form.end.startswith(left) and not ended:
            return False
        self.before_end = False
        return True

    def start(self) -> int | None:
        """Return the index at which the next call may begin, or None if there is none so far."""
        if self.num_calls == self.most:
            return None
        if self.form.mark:
            at = self.text.find(self.form.mark)
            if at < 0:
                return None
            in_answer = self.only_first and not self.num_calls and (self.begun or bool(self.text[:at].strip()))
            return None if in_answer else at
        at = len(self.text) - len(self.text.lstrip())
        return at if not self.begun and self.text[at : at + 1] == "{" else None

    def num_certain(self) -> int:
        """Return how many first characters are content whatever follows, in a text without a mark."""
        if self.num_calls == self.most:
            return len(self.text)
        mark = self.form.mark
        if not mark:
            return len(self.text) if self.begun or self.text.strip() else 0
        return len(self.text[: len(self.text) - possible_start(self.text, mark)].rstrip())


class JsonEnd:
    """The search for the end of JSON in a text that grows. opening: its first character."""

    def __init__(self, opening: str) -> None:
        self.opening = opening
        self.at, self.depth, self.quoted, self.escaped = 0, 0, False, False

    def find(self, text: str, start: int) -> int | None:
        """Return the index after the JSON that begins at `start`; `start` if none does; None if it is incomplete."""
        if not (first := text[start:].lstrip()):
            return None
        if first[0] != self.opening:
            return start
        for at in range(max(self.at, start), len(text)):
            character = text[at]
            if self.escaped:
                self.escaped = False
            elif self.quoted:
                self.escaped, self.quoted = character == "\\", character != '"'
            elif character == '"':
                self.quoted = True
            elif character in "{[":
                self.depth += 1
            elif character in "}]":
                self.depth -= 1
                if not self.depth:
                    return at + 1
        self.at = len(text)
        return None


DECODER = json.JSONDecoder()
SPACE = re.compile("[ \\t\\r\\n]*")


def read_calls(text: str, form: ToolFormat, names: Collection[str]) -> list[Call]:
    """Return the calls in a text. The list is empty if the text is not valid, or if one of the calls is not."""
    try:
        if form.notation == "gemma":
            name, arguments = gemma_calls.read_call(text)
            return [Call(name, arguments)] if name in names else []
        json.loads(text, parse_constant=refuse_constant)
        calls = []
        for item in values(text) if form.many else [text.strip()]:
            members = dict(pairs(item))
            name, arguments = json.loads(members["name"]), members[form.arguments]
            if not isinstance(name, str) or name not in names or arguments[0] != "{":
                return []
            calls.append(Call(name, arguments))
    except (ValueError, KeyError, RecursionError):
        return []
    return calls


def refuse_constant(name: str) -> NoReturn:
    """Raise JSONDecodeError for NaN and Infinity, which Python reads and JSON does not have."""
    raise json.JSONDecodeError("not JSON", name, 0)


def values(text: str) -> Iterator[str]:
    """Yield the texts of the items of a valid JSON array."""
    at = after_space(text, after_space(text, 0) + 1)
    while text[at] != "]":
        end = DECODER.raw_decode(text, at)[1]
        yield text[at:end]
        at = after_space(text, end)
        at = after_space(text, at + 1) if text[at] == "," else at


def pairs(text: str) -> Iterator[tuple[str, str]]:
    """Yield each member of a valid JSON object: its name, and the text of its value. Other JSON has none."""
    if text[0] != "{":
        return
    at = after_space(text, 1)
    while text[at] != "}":
        name, at = DECODER.raw_decode(text, at)
        start = after_space(text, after_space(text, at) + 1)
        end = DECODER.raw_decode(text, start)[1]
        yield name, text[start:end]
        at = after_space(text, end)
        at = after_space(text, at + 1) if text[at] == "," else at


def after_space(text: str, at: int) -> int:
    """Return the index of the first character from `at` that is no white space."""
    return SPACE.match(text, at).end()  # type: ignore[union-attr]
