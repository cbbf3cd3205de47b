"""Extension of griffe, which reads the docstrings for the reference: two forms of them that it does not know."""

from __future__ import annotations

import ast
import re
from typing import Any

import griffe


class Forms(griffe.Extension):
    """Understands a field's `option("text", default=...)`, and sentences that begin with "Raises: "."""

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Give a field of an option class its text and its default."""
        call = attr.value
        if not (isinstance(call, griffe.ExprCall) and str(call.function) == "option"):
            return
        text, *keywords = call.arguments
        attr.docstring = griffe.Docstring(ast.literal_eval(str(text)), parent=attr)
        given = {word.name: word.value for word in keywords if isinstance(word, griffe.ExprKeyword)}
        attr.value = given.get("default")

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Have a sentence of what is raised or returned taken as text, not as the title of a section."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^(Raises|Returns): (?=\S)", r"**\1** ", obj.docstring.value, flags=re.M)
