"""JSON that every client reads as one line."""

from __future__ import annotations

# Line ends of Unicode, which JSON allows in its strings. Clients that split events there, as Python's str.splitlines
# does, would cut an event in two.
LINE_ENDS = {"\u0085": r"\u0085", "\u2028": r"\u2028", "\u2029": r"\u2029"}


def one_line(json: str) -> str:
    """Escape line ends in a JSON text. It holds them in strings only, so the value stays the same."""
    for character, escape in LINE_ENDS.items():
        json = json.replace(character, escape)
    return json
