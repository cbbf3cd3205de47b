"""What messages say of values and errors: one line, whole sentences."""

from __future__ import annotations

import pickle

import pytest

from jaxspec.common.errors import UnsupportedError, UserError, error_line, quoted

TOOL = [{"type": "function", "function": {"name": "f", "description": "weather of the whole world"}}]


class Failing:
    def __repr__(self):
        raise KeyError("no")


def nested(depth: int) -> list:
    found: list = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("value", "most", "text"),
    [
        ("short", 80, "'short'"),
        ("x" * 78, 80, f"'{'x' * 78}'"),
        ("x" * 79, 80, f"'{'x' * 79}...'"),
        (TOOL, 71, "[{'type': 'function', 'function': {'name': 'f', 'description': 'weather...'}}]"),
        (TOOL, 41, "[{'type': 'function', 'function': {'name'...}}]"),
        ("it's " * 4, 9, "\"it's it'...\""),
        ('"it\'s" ' * 4, 7, "'\"it\\'s...'"),  # an escaped quote ends nothing
        (["]", "(", 1, 2], 9, "[']', '('...]"),
        (range(3), 4, "rang..."),
        (10**80, 10, "1000000000..."),
        (Failing(), 80, "<Failing>"),
    ],
)
def test_a_long_value_is_cut_and_closed(value, most, text):
    assert quoted(value, most) == text


def test_what_python_does_not_write():
    assert quoted(-(10**5000), 40) == "-(more than 40 digits)"
    assert quoted([10**5000]) == "<list>"
    assert quoted(nested(100_000)) == "<list>"


def test_a_long_error_is_cut():
    assert error_line(OSError("a\n b")) == "OSError: a b"
    assert error_line(OSError("x" * 10_000)) == "OSError: " + "x" * 591 + "..."


@pytest.mark.parametrize("kind", [UserError, UnsupportedError])
def test_where_an_error_lies_and_what_it_is_called_stay_with_it(kind):
    """Through another place in front, and through another process."""
    error = pickle.loads(pickle.dumps(kind("too long", param="prompt", code="too_long").within("prompt 1: ")))
    assert (type(error), str(error), error.param, error.code) == (kind, "prompt 1: too long", "prompt", "too_long")
