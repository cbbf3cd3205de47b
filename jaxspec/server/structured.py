"""The form of a request's output: OpenAI's field response_format, and vLLM's field structured_outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.common.errors import UserError, quoted
from jaxspec.grammars.requests import KINDS, StructuredOutputs
from jaxspec.server.refusal import Refusal

FIELDS = ("response_format", "structured_outputs", "text", "tools")
FORMATS = ("text", "json_object", "json_schema")
# Keys of response_format.json_schema. The schema is kept exactly, whatever `strict` says.
SCHEMA_KEYS = ("name", "description", "schema", "strict")


def structured_outputs(given: Mapping[str, Any]) -> StructuredOutputs | None:
    """Return the form that a request's fields ask for, or None. The options of one field hold for the other, too.

    Raises: Refusal for a form that cannot be kept exactly, and for two forms.
    """
    form = response_format(given.get("response_format"))
    own = given.get("structured_outputs")
    name = "response_format" if form else "structured_outputs"
    if form and isinstance(own, dict):
        if any(own.get(kind) is not None for kind in KINDS):
            raise Refusal(400, f"structured_outputs={quoted(own)} and response_format differ: give one", param=name)
        own = {**form, **own}
    try:
        return StructuredOutputs.of(form if own is None and form else own)
    except UserError as error:
        raise Refusal(400, str(error), param=name) from None


def response_format(value: Any) -> dict[str, Any]:
    """Return response_format with vLLM's names. Free text is an empty dict. Raise Refusal for another value."""
    name = "response_format"
    if value is None:
        return {}
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in FORMATS:
        message = f"response_format={quoted(value)} is not supported: its type must be one of {', '.join(FORMATS)}"
        raise Refusal(400, message, param=name)
    for key in value:
        if key != "type" and (key, kind) != ("json_schema", "json_schema"):
            raise Refusal(400, f"response_format has {quoted(key)}, which is not supported beside {kind}", param=name)
    if kind != "json_schema":
        return {"json_object": True} if kind == "json_object" else {}
    described = value.get("json_schema")
    if not isinstance(described, dict) or "schema" not in described:
        message = f"response_format.json_schema={quoted(described)} must be an object with name and schema"
        raise Refusal(400, message, param=name)
    for key in described:
        if key not in SCHEMA_KEYS:
            known = ", ".join(SCHEMA_KEYS)
            message = f"response_format.json_schema has {quoted(key)}, which is not supported: use {known}"
            raise Refusal(400, message, param=name)
    return {"json": described["schema"]}
