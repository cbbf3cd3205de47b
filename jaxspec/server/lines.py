"""JSON on one line for every client."""

from __future__ import annotations

# Unicode's line ends, which JSON allows in strings. A client that splits lines as str.splitlines does would cut an
# event in two there.
LINE_ENDS = {"\u0085": r"\u0085", "\u2028": r"\u2028", "\u2029": r"\u2029"}


def one_line(json: str) -> str:
    """Escape Unicode's line ends in a JSON text. They occur only inside strings, so the value stays the same."""
    for character, escape in LINE_ENDS.items():
        json = json.replace(character, escape)
    return json
