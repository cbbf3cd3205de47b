"""Prompts by the hundred thousand, drawn from a small grammar (grammar.toml)."""

from __future__ import annotations

import functools
import math
import random
import re
import tomllib
from pathlib import Path
from typing import Any

DRAWN = ("chat", "story", "code", "summary", "rewrite", "list", "translate", "free")
# Shards hold a category's index, so new ones come last. These two are no symbols: the target writes the message, all of
# "self" and what follows the first words of a drawn one in "begun".
WRITTEN = ("self", "begun")
CATEGORIES = (*DRAWN, *WRITTEN)
# {symbol}, {symbol.2} a second draw of it, {symbol!change} changed; {{ and }} are braces.
SLOT = re.compile(r"\{\{|\}\}|\{(?P<symbol>\w+)(?P<draw>\.\d)?(?:!(?P<change>\w+))?\}")
MISSPELT = 0.12  # share of words


@functools.cache
def grammar() -> dict[str, tuple[str, ...]]:
    """Symbol -> its values, templates themselves."""
    text = (Path(__file__).parent / "grammar.toml").read_text(encoding="utf-8")
    listed = lambda value: value if isinstance(value, list) else " ".join(value.split()).split(", ")
    return {symbol: tuple(listed(value)) for symbol, value in tomllib.loads(text).items()}


def draw(symbol: str, rng: random.Random) -> str:
    """A value of the symbol, its slots filled in."""
    values = grammar()[symbol]
    # Of Python's generator only random() is promised to stay the same.
    template = values[int(rng.random() * len(values))]
    drawn: dict[str, str] = {}

    def fill(slot: re.Match[str]) -> str:
        if slot["symbol"] is None:
            return slot[0][0]
        name = slot["symbol"] + (slot["draw"] or "")
        while name not in drawn:
            value = draw(slot["symbol"], rng)
            others = [v for other, v in drawn.items() if other.split(".")[0] == slot["symbol"]]
            if value not in others or len(grammar()[slot["symbol"]]) <= len(others):
                drawn[name] = value
        return CHANGES[slot["change"]](drawn[name], rng)

    return SLOT.sub(fill, template)


def misspelt(text: str, rng: random.Random) -> str:
    """The text with two letters swapped, one dropped or one doubled in some of its longer words."""

    def change(word: re.Match[str]) -> str:
        letters = word[0]
        if rng.random() >= MISSPELT:
            return letters
        at = 1 + int(rng.random() * (len(letters) - 3))
        a, b = letters[at], letters[at + 1]
        middle = (b + a, a, a + a + b)[int(rng.random() * 3)]
        return letters[:at] + middle + letters[at + 2 :]

    return re.sub(r"[A-Za-z]{4,}", change, text)


CHANGES: dict[str | None, Any] = {
    None: lambda text, rng: text,
    "capital": lambda text, rng: text[:1].upper() + text[1:],
    "misspelt": misspelt,
}


@functools.cache
def num_texts(symbol: str) -> int:
    """How many different fillings the symbol has, equal texts of different fillings counted apart."""
    return sum(math.prod(num_texts(name.split(".")[0]) for name in slots(value)) for value in grammar()[symbol])


def slots(template: str) -> set[str]:
    return {m["symbol"] + (m["draw"] or "") for m in SLOT.finditer(template) if m["symbol"]}
