"""The form of a request's output: SamplingParams.structured_outputs, checked and made canonical."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from jaxspec.common.errors import UnsupportedError, UserError, error_line, quoted
from jaxspec.common.values import unknown, whole
from jaxspec.grammars.calls import calls_node
from jaxspec.grammars.json_text import JSON
from jaxspec.grammars.nodes import Node, choice, literal
from jaxspec.grammars.regex import whole as matching
from jaxspec.grammars.schema import schema_node

KINDS = ("json", "json_object", "regex", "choice", "grammar")
OPTIONS = ("max_depth", "after")
MAX_DEPTH = 4  # default of max_depth
DEEPEST = 8  # largest max_depth: each level doubles the states of a value without a schema
LONGEST = 1 << 18  # largest number of characters of a grammar


@dataclasses.dataclass(frozen=True)
class StructuredOutputs:
    """The form of an output. Equal forms are equal objects.

    kind: one of KINDS, or "calls".
    text: the schema, the choices or the form of calls as JSON, or the regular expression; empty for json_object.
    max_depth: as in `schema_node`.
    after: text of the token after which the form begins, such as "</think>"; None if it begins at once.
    opening: text of the token that opens reasoning, such as "<think>". An output that does not begin with it has its
      form at once. None if the form begins after `after` in any case.
    spelled: texts of special tokens that are legal in the form as these texts. Others are no part of a text.
    """

    kind: str
    text: str = ""
    max_depth: int = MAX_DEPTH
    after: str | None = None
    opening: str | None = None
    spelled: tuple[str, ...] = ()

    @property
    def is_json(self) -> bool:
        return self.kind in ("json", "json_object", "calls")

    def node(self) -> Node:
        """Return the node of the texts of this form."""
        if self.kind == "json":
            return schema_node(json.loads(self.text), self.max_depth)
        if self.kind == "json_object":
            return JSON.any_object(self.max_depth)
        if self.kind == "calls":
            form = json.loads(self.text)
            answer = form.pop("answer", None)
            calls = calls_node(form, self.max_depth)
            return calls if answer is None else choice(calls, StructuredOutputs(**answer).node())
        if self.kind == "regex":
            return matching(self.text)
        return choice(*map(literal, json.loads(self.text)))

    @classmethod
    def of_calls(cls, form: Mapping[str, Any], spelled: tuple[str, ...] = ()) -> StructuredOutputs:
        """Return the form of calls of tools, which `calls_node` describes. Raise UserError as `check` does.

        form: as in `calls_node`; its member `answer` has the fields of a form that may come in place of the calls.
        """
        found = cls("calls", json_text(form), spelled=spelled)
        found.check()
        return found

    def check(self) -> None:
        """Raise UserError for a form that is too long or cannot be kept exactly."""
        if len(self.text) > LONGEST:
            raise UserError(
                f"structured_outputs: {self.kind} has {len(self.text)} characters, at most {LONGEST} may be"
            )
        self.node()

    @classmethod
    def of(cls, given: Any) -> StructuredOutputs | None:
        """Return the form that a mapping of vLLM's names gives, or None if it asks for none.

        Raises: UserError for a form that cannot be kept exactly.
        """
        if given is None or isinstance(given, StructuredOutputs):
            return given
        if not isinstance(given, Mapping):
            raise UserError(f"structured_outputs={quoted(given)} must be a dict with one of {', '.join(KINDS)}")
        for name in given:
            if name not in KINDS + OPTIONS:
                raise unknown(str(name), "structured_outputs", KINDS + OPTIONS, "key")
        kinds = [kind for kind in KINDS if given.get(kind) is not None]
        if len(kinds) != 1:
            raise UserError(f"structured_outputs has {', '.join(kinds) or 'no form'}: give one of {', '.join(KINDS)}")
        depth = MAX_DEPTH if given.get("max_depth") is None else given["max_depth"]
        after = given.get("after")
        if after is not None and (not isinstance(after, str) or not after):
            raise UserError(f"structured_outputs: after={quoted(after)} must be the text of a token, such as </think>")
        text = TEXTS[kinds[0]](given[kinds[0]])
        found = cls(kinds[0], text, whole("structured_outputs: max_depth", depth, 1, DEEPEST), after)
        found.check()
        return found


def json_text(schema: Any) -> str:
    """Return a schema in the order of its keys, given as a dict, as JSON text or as a pydantic model."""
    if hasattr(schema, "model_json_schema"):
        try:
            schema = schema.model_json_schema()
        except Exception as error:  # pydantic's own, for types that have no schema
            raise UserError(f"structured_outputs: {quoted(schema)} has no JSON schema: {error_line(error)}") from None
    try:
        if isinstance(schema, str):
            schema = json.loads(schema, object_pairs_hook=without_repetition)
        if not isinstance(schema, Mapping | bool):
            raise TypeError
        return json.dumps(schema, allow_nan=False)
    except UserError:
        raise
    except (TypeError, ValueError, RecursionError):
        message = "must be a JSON schema: a dict, its text as JSON, or a pydantic model"
        raise UserError(f"structured_outputs: json={quoted(schema)} {message}") from None


def without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object's (name, value) pairs as a dict. Raise UserError if a name occurs twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise UserError(f"structured_outputs: the schema has {quoted(twice)} twice in one object: give it once")
    return found


def regex_text(regex: Any) -> str:
    """Return a regular expression. Raise UserError for another type."""
    if not isinstance(regex, str):
        raise UserError(f"structured_outputs: regex={quoted(regex)} must be a string")
    return regex


def choice_text(choices: Any) -> str:
    """Return choices as JSON. Raise UserError unless they are strings that are not empty."""
    listed = list(choices) if isinstance(choices, list | tuple) else []
    if not listed or not all(isinstance(text, str) and text for text in listed):
        raise UserError(f"structured_outputs: choice={quoted(choices)} must be a list of strings that are not empty")
    return json.dumps(sorted(set(listed)))


def object_text(wanted: Any) -> str:
    """Return "", because json_object needs no specification. Raise UserError unless its value is True."""
    if wanted is not True:
        raise UserError(f"structured_outputs: json_object={quoted(wanted)} must be True, or left out")
    return ""


def grammar_text(_: Any) -> str:
    """Raise UnsupportedError for a context-free grammar."""
    raise UnsupportedError("structured_outputs: grammar (a context-free grammar) is not supported: use json or regex")


TEXTS = {"json": json_text, "regex": regex_text, "choice": choice_text, "json_object": object_text}
TEXTS["grammar"] = grammar_text
