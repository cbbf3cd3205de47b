"""Reasoning of chats: the fields about it, and the reader that parts it from the content of an output."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxspec.api.chat import reads
from jaxspec.api.grammars import REASONING
from jaxspec.common.errors import quoted
from jaxspec.grammars.requests import StructuredOutputs
from jaxspec.server.refusal import Refusal

OPEN, CLOSE = REASONING
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # OpenAI's values of reasoning_effort
SWITCHES = ("enable_thinking", "thinking")  # variables by which chat templates turn reasoning on and off


def has_marks(tokenizer: Any) -> bool:
    """Return whether both marks of reasoning are tokens that a text shows."""
    special = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
    return all(special.get(mark) is False for mark in REASONING)


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
    elif effort != "none" or CLOSE in template:
        message = f"{name}={effort!r} is not supported: this model's chat template has no variable for it: leave it out"
        raise Refusal(400, message, param=name)
    for variable, value in found.items():
        if own.get(variable, value) != value:
            message = f"{name}={effort!r} and chat_template_kwargs, which give {variable}, differ: give one"
            raise Refusal(400, message, param=name)
    return own | found


def after_reasoning(form: StructuredOutputs | None) -> StructuredOutputs | None:
    """Return a form that an output has after its reasoning, if it reasons. A form with `after` stays as it is."""
    if form is None or form.after is not None:
        return form
    return dataclasses.replace(form, opening=OPEN, after=CLOSE)


def possible_start(text: str, mark: str) -> int:
    """Return how many last characters of a text may be the beginning of a mark."""
    return next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)


class ReasoningReader:
    """The reader of one sample's text, which parts it into reasoning and the rest as it comes.

    Reasoning is what stands between <think> at the beginning of the text and the first </think>. The marks and the
    white space at them are left out.

    mark: mark that the prompt ends with. After OPEN the text begins inside of reasoning, after CLOSE it has none.
    """

    def __init__(self, mark: str | None) -> None:
        self.text = ""  # the part that is not certain yet
        self.searching = mark is None  # whether the text may still begin with OPEN
        self.inside = mark == OPEN
        self.stripping = mark == OPEN  # whether white space at the beginning is left out

    def read(self, text: str, *, ended: bool) -> tuple[str, str]:
        """Add a piece of the text, and return the reasoning and the rest that are certain now.

        ended: whether this is the last piece, after which everything is certain.
        """
        self.text += text
        reasoning = ""
        if self.searching:
            start = self.text.lstrip()
            if OPEN.startswith(start[: len(OPEN)]) and len(start) < len(OPEN) and not ended:
                return "", ""
            self.searching = False
            if start.startswith(OPEN):
                self.text, self.inside, self.stripping = start[len(OPEN) :], True, True
        if self.inside:
            before, closed, rest = self.text.partition(CLOSE)
            if closed:
                reasoning = self.released(len(before.rstrip()))
                self.text, self.inside, self.stripping = rest, False, True
            else:
                certain = self.text[: len(self.text) - possible_start(self.text, CLOSE)].rstrip()
                return self.released(len(self.text) if ended else len(certain)), ""
        return reasoning, self.released(len(self.text))

    def released(self, length: int) -> str:
        """Remove these first characters of the text, and return them without white space at the beginning."""
        found, self.text = self.text[:length], self.text[length:]
        if self.stripping:
            found = found.lstrip()
            self.stripping = not found
        return found
