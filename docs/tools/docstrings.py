"""Extension of griffe, which reads the docstrings for the reference: turns this project's forms into known ones."""

from __future__ import annotations

import ast
import re
from typing import Any

import griffe

# Form of a line -> what griffe and Markdown read alike. A name with its text after a function's summary, `name: text`,
# becomes an item of a list; a sentence after "Raises: " is text, not a section's title.
FORMS = {
    r"^(Raises|Returns): (?=\S)": r"**\1** ",
    r"^Example:$": "Examples:",
    r"^([a-z]\w*(?:, [a-z]\w*)*): (?=\S)": r"\n- `\1`: ",
}


class Forms(griffe.Extension):
    """Understands a field's `option("text", default=...)`, and the forms above."""

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
        """Rewrite a docstring's forms. Hide the methods of option classes, which are not for users."""
        for form, known in FORMS.items():
            if obj.docstring:
                obj.docstring.value = re.sub(form, known, obj.docstring.value, flags=re.MULTILINE)
        decorators = obj.parent.decorators if isinstance(obj.parent, griffe.Class) else []
        if any(str(each.value) == "options" for each in decorators) and (obj.is_function or "property" in obj.labels):
            obj.docstring = None
