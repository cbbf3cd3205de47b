"""Reasoning of chats: the fields about it, and the reader that parts it from the content of an output."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxspec.api.chat import reads
from jaxspec.api.grammars import REASONING, Marks
from jaxspec.common.errors import quoted
from jaxspec.grammars.requests import StructuredOutputs
from jaxspec.server.refusal import Refusal

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # OpenAI's values of reasoning_effort
SWITCHES = ("enable_thinking", "thinking")  # variables by which chat templates turn reasoning on and off


def template_variables(given: Mapping[str, Any], template: str) -> Any:
    """Return the chat_template_kwargs of a request, with a variable for its field reasoning_effort.

    A template with a variable of that name gets the value. One that only turns reasoning on and off gets that.

    Raises: Refusal for a template that has neither, and if chat_template_kwargs give the variable another value.
    """
    own = given.get("chat_template_kwargs", {})
    effort = given.get("reasoning_effort")
    if effort is None or not isinstance(own, dict):  # `rendering` refuses another type
        return own
    name = "reasoning_effort"
    if not isinstance(effort, str) or effort not in EFFORTS:
        raise Refusal(400, f"{name}={quoted(effort)} must be one of {', '.join(EFFORTS)}", param=name)
    found: dict[str, Any] = {}
    switch = next((variable for variable in SWITCHES if reads(template, variable)), None)
    if reads(template, name):
        found = {name: effort}
    elif switch:
        found = {switch: effort != "none"}
    elif effort != "none" or any(marks.close in template for marks in REASONING):
        message = f"{name}={effort!r} is not supported: this model's chat template has no variable for it: leave it out"
        raise Refusal(400, message, param=name)
    for variable, value in found.items():
        if own.get(variable, value) != value:
            message = f"{name}={effort!r} and chat_template_kwargs, which give {variable}, differ: give one"
            raise Refusal(400, message, param=name)
    return own | found


def after_reasoning(form: StructuredOutputs | None, marks: Marks) -> StructuredOutputs | None:
    """Return a form that an output has after its reasoning, if it reasons. A form with `after` stays as it is."""
    if form is None or form.after is not None:
        return form
    return dataclasses.replace(form, opening=marks.open, after=marks.close)


def possible_start(text: str, mark: str) -> int:
    """Return how many last characters of a text may be the beginning of a mark."""
    return next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)


def unfinished(text: str, mark: str) -> bool:
    """Return whether a text is the beginning of a mark, and not all of it."""
    return len(text) < len(mark) and mark.startswith(text)


class ReasoningReader:
    """The reader of one sample's text, which parts it into reasoning and the rest as it comes.

    Reasoning is what stands between the opening mark at the beginning of the text and the first closing one. The
    marks, the label and the white space at them are left out.

    marks: marks of the model's reasoning.
    mark: mark that the prompt ends with. After the opening one the text begins inside of reasoning, after the closing
      one it has none.
    """

    def __init__(self, marks: Marks, mark: str | None) -> None:
        self.marks = marks
        self.label = marks.label  # text that may still come at the beginning of the reasoning
        self.text = ""  # the part that is not certain yet
        self.searching = mark is None  # whether the text may still begin with the opening mark
        self.inside = self.stripping = mark == marks.open  # stripping: whether white space at the beginning is left out

    def read(self, text: str, *, ended: bool) -> tuple[str, str]:
        """Add a piece of the text, and return the reasoning and the rest that are certain now.

        ended: whether this is the last piece, after which everything is certain.
        """
        self.text += text
        reasoning = ""
        if self.searching:
            start = self.text.lstrip()
            if unfinished(start, self.marks.open) and not ended:
                return "", ""
            self.searching = False
            if start.startswith(self.marks.open):
                self.text, self.inside, self.stripping = start.removeprefix(self.marks.open), True, True
        if self.inside:
            if unfinished(self.text, self.label) and not ended:
                return "", ""
            self.text, self.label = self.text.removeprefix(self.label), ""
            before, closed, rest = self.text.partition(self.marks.close)
            if closed:
                reasoning = self.released(len(before.rstrip()))
                self.text, self.inside, self.stripping = rest, False, True
            else:
                certain = self.text[: len(self.text) - possible_start(self.text, self.marks.close)].rstrip()
                return self.released(len(self.text) if ended else len(certain)), ""
        return reasoning, self.released(len(self.text))

    def released(self, length: int) -> str:
        """Remove these first characters of the text, and return them without white space at the beginning."""
        found, self.text = self.text[:length], self.text[length:]
        if self.stripping:
            found = found.lstrip()
            self.stripping = not found
        return found
