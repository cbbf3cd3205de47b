"""JSON texts that every client reads as a single line."""

from __future__ import annotations

# Characters that Unicode counts as line ends and that JSON allows in strings. A client that splits lines as
# str.splitlines does would cut an event in two at such a character.
LINE_ENDS = {"\u0085": r"\u0085", "\u2028": r"\u2028", "\u2029": r"\u2029"}


def one_line(json: str) -> str:
    """Escape Unicode's line ends in a JSON text. The value stays the same: they occur only inside its strings."""
    for character, escape in LINE_ENDS.items():
        json = json.replace(character, escape)
    return json
