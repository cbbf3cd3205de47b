"""The fields of a chat about tools: which tools the output may call, and whether it has to call one."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

from jaxspec.common.errors import UserError, quoted
from jaxspec.common.values import flag
from jaxspec.grammars.requests import StructuredOutputs
from jaxspec.server.refusal import Refusal
from jaxspec.server.tool_formats import Reader, ToolFormat, no_format, tool_format

NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
CHOICES = ("none", "auto", "required")
NO_ARGUMENTS = {"type": "object", "properties": {}}  # schema of a function without `parameters`


@dataclasses.dataclass(frozen=True)
class Tools:
    """The tools of a chat, which the output may call.

    form: format of the calls.
    described: tools as chat templates read them.
    most: largest number of calls; None for any number.
    forced: whether the output has to call.
    grammar: form of the output, which guarantees valid calls; None if any text may come.
    special: whether the mark is a special token, which is no part of a text and not legal in a grammar.
    shown: whether the output's text has to show special tokens, because calls contain some.
    only_first: as in `Reader`.
    """

    form: ToolFormat
    described: list[dict[str, Any]]
    most: int | None
    forced: bool
    grammar: StructuredOutputs | None
    special: bool
    shown: bool
    only_first: bool

    @property
    def opening(self) -> str:
        """Mark that the prompt ends with, because a grammar cannot contain it."""
        return self.form.mark if self.forced and self.special else ""

    def sampling(self) -> dict[str, Any]:
        """Return the sampling fields that the tools change."""
        found: dict[str, Any] = {"skip_special_tokens": False} if self.shown else {}
        return found if self.grammar is None else found | {"structured_outputs": self.grammar}

    def reader(self) -> Reader:
        """Return the reader of a sample."""
        names = frozenset(tool["function"]["name"] for tool in self.described)
        return Reader(self.form, names, self.most, opened=bool(self.opening), only_first=self.only_first)


def tools_of(
    given: Mapping[str, Any], template: str, special_tokens: Collection[str], answer: StructuredOutputs | None
) -> Tools | None:
    """Return the tools of a request's fields, or None if the output may call none.

    template: the chat template.
    special_tokens: texts of the tokenizer's special tokens.
    answer: form of an output that calls none; None for any text.

    Raises: Refusal for fields that cannot be served, and for tools that the chat template does not know.
    """
    functions = [function_of(f"tools[{i}]", tool) for i, tool in enumerate(listed(given))]
    names = [function["name"] for function in functions]
    choice, named = choice_of(given.get("tool_choice", "auto"), names)
    parallel = flag("parallel_tool_calls", given.get("parallel_tool_calls", True))
    if not functions or choice == "none":
        return None
    form = tool_format(template)
    if form is None:
        raise Refusal(400, f"tools are not supported: {no_format(template)}", param="tools")
    if len(set(names)) < len(names):
        raise Refusal(400, f"tools have the names {quoted(names)}: each may occur once", param="tools")
    forced = choice != "auto"
    spelled = tuple(text for text in form.spelled if text in special_tokens)
    special = form.mark in special_tokens and form.mark not in spelled
    if named is not None:
        functions = [function for function in functions if function["name"] == named]
    most = None if parallel and form.parallel and named is None else 1
    grammar = None
    strict = any(flag(f"tools: {f['name']}: strict", f.get("strict") or False) for f in functions)
    if special and not forced and (strict or answer):
        message = "strict tools and forms of the output are not supported for this model with tool_choice='auto', "
        message += f"because {form.mark} is a special token: leave them out, or give tool_choice='required'"
        raise Refusal(400, message, param="tools")
    answer = None if forced else answer
    if forced or strict or answer:
        free = not forced and answer is None
        grammar = grammar_of(form, functions, most, free=free, special=special, answer=answer, spelled=spelled)
    described = [{"type": "function", "function": {k: f[k] for k in f if k != "strict"}} for f in functions]
    shown = bool(spelled) or (special and not forced)
    return Tools(form, described, most, forced, grammar, special, shown, only_first=answer is not None)


def listed(given: Mapping[str, Any]) -> list[Any]:
    """Return the entries of the field `tools`. Raise Refusal for another value than a list."""
    tools = given.get("tools", [])
    if not isinstance(tools, list):
        raise Refusal(400, f"tools={quoted(tools)} must be a list of functions", param="tools")
    return tools


def function_of(where: str, tool: Any) -> dict[str, Any]:
    """Return the function of an entry of `tools`. where: its position, for error messages."""
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict):
        message = (
            f'{where}={quoted(tool)} must be {{"type": "function", "function": {{"name": ..., "parameters": ...}}}}'
        )
        raise Refusal(400, message, param="tools")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        message = f"{where}.function.name={quoted(name)} must have 1 to 128 of the characters A-Z a-z 0-9 _ . -"
        raise Refusal(400, message, param="tools")
    found = {key: value for key, value in function.items() if value is not None}
    found.setdefault("parameters", NO_ARGUMENTS)
    if not isinstance(found["parameters"], dict):
        message = f"{where}.function.parameters={quoted(found['parameters'])} must be a JSON schema"
        raise Refusal(400, message, param="tools")
    if not isinstance(found.get("description", ""), str):
        message = f"{where}.function.description={quoted(found['description'])} must be a string"
        raise Refusal(400, message, param="tools")
    return found


def choice_of(value: Any, names: list[str]) -> tuple[str, str | None]:
    """Return tool_choice as one of CHOICES, and the name of the function if it names one. names: those of all tools."""
    if isinstance(value, dict) and value.get("type") == "function" and isinstance(value.get("function"), dict):
        name = value["function"].get("name")
        if isinstance(name, str) and name in names:
            return "required", name
        known = ", ".join(names) or "none"
        raise Refusal(
            400, f"tool_choice names {quoted(name)}, which is none of the tools: {known}", param="tool_choice"
        )
    if not isinstance(value, str) or value not in CHOICES:
        message = f"tool_choice={quoted(value)} is not supported: give {', '.join(CHOICES)} or a function"
        raise Refusal(400, message, param="tool_choice")
    if value == "required" and not names:
        raise Refusal(400, "tool_choice='required' needs tools", param="tool_choice")
    return value, None


def grammar_of(
    form: ToolFormat,
    functions: list[dict[str, Any]],
    most: int | None,
    *,
    free: bool,
    special: bool,
    answer: StructuredOutputs | None,
    spelled: tuple[str, ...],
) -> StructuredOutputs:
    """Return the form of outputs that call these functions.

    free: whether a text without calls is allowed, too.
    special: as in `Tools`. The prompt ends with such a mark, so that without an array there is one call.
    answer: form of an output that may come in place of the calls.
    spelled: special tokens that are legal as their texts.
    """
    mark = "" if special else form.mark + form.space
    if form.many:
        marks = {"open": mark + "[", "begin": "", "between": ", ", "end": "", "close": "]"}
    else:
        end = "" if special else form.space + form.end
        marks = {"open": "", "begin": mark, "between": form.space, "end": end, "close": ""}
    asked: dict[str, Any] = {
        "tools": [[f["name"], f["parameters"]] for f in functions],
        "most": 1 if special and not form.many else most,
        "arguments": form.arguments,
        "notation": form.notation,
        "free": free,
        "mark": form.mark,
        **marks,
    }
    if answer is not None:
        asked["answer"] = dataclasses.asdict(answer)
    try:
        found = StructuredOutputs.of_calls(asked, spelled)
        return found if answer is None else dataclasses.replace(found, after=answer.after)
    except UserError as error:
        message = str(error).replace("structured_outputs: ", "", 1)
        raise Refusal(400, f"tools: {message}", param="tools") from None
