"""Random prompts for the training data, drawn from a small grammar (grammar.toml)."""

from __future__ import annotations

import functools
import math
import random
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

DRAWN = ("chat", "story", "code", "summary", "rewrite", "list", "translate", "free")
# Categories whose user messages the target writes: whole messages for "self"; for "begun" the rest of messages whose
# first words are drawn from the grammar. These categories are not symbols of the grammar.
WRITTEN = ("self", "begun")
CATEGORIES = (*DRAWN, *WRITTEN)  # shards hold an index into these categories, so a new one goes to the end
# Slots of a template. {symbol} is a draw of the symbol, {symbol.2} a second draw, {symbol!change} a draw changed by a
# function of CHANGES. {{ and }} are braces.
SLOT = re.compile(r"\{\{|\}\}|\{(?P<symbol>\w+)(?P<draw>\.\d)?(?:!(?P<change>\w+))?\}")
MISSPELT = 0.12  # probability with which `misspelt` changes a word of four letters or more


@functools.cache
def grammar() -> dict[str, tuple[str, ...]]:
    """Return the grammar's symbols, each with its values. A value is a template with slots for other symbols."""
    text = (Path(__file__).parent / "grammar.toml").read_text(encoding="utf-8")
    found = {}
    for symbol, value in tomllib.loads(text).items():
        found[symbol] = tuple(value if isinstance(value, list) else " ".join(value.split()).split(", "))
    return found


def draw(symbol: str, rng: random.Random) -> str:
    """Return a random value of a symbol of the grammar, with the value's slots filled in."""
    values = grammar()[symbol]
    # random() is the only method of Python's generator whose results stay the same in later versions, as documented.
    template = values[int(rng.random() * len(values))]
    drawn: dict[str, str] = {}

    def fill(slot: re.Match[str]) -> str:
        if slot["symbol"] is None:  # the slot is {{ or }}, a brace
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
    """Return the text with mistakes in words of at least four letters: two letters swapped, one dropped or doubled."""

    def change(word: re.Match[str]) -> str:
        letters = word[0]
        if rng.random() >= MISSPELT:
            return letters
        at = 1 + int(rng.random() * (len(letters) - 3))
        a, b = letters[at], letters[at + 1]
        middle = (b + a, a, a + a + b)[int(rng.random() * 3)]
        return letters[:at] + middle + letters[at + 2 :]

    return re.sub(r"[A-Za-z]{4,}", change, text)


CHANGES: dict[str | None, Callable[[str, random.Random], str]] = {
    None: lambda text, rng: text,
    "capital": lambda text, rng: text[:1].upper() + text[1:],
    "misspelt": misspelt,
}


@functools.cache
def num_texts(symbol: str) -> int:
    """Return the number of ways to fill in a symbol of the grammar. Changes of draws (CHANGES) are not counted.

    Ways that give the same text count separately. So do ways in which two slots draw the same value, though `draw`
    avoids these.
    """
    total = 0
    for value in grammar()[symbol]:
        total += math.prod(num_texts(name.split(".")[0]) for name in slots(value))
    return total


def slots(template: str) -> set[str]:
    """Return the names of a template's slots, such as "symbol" or "symbol.2"."""
    return {m["symbol"] + (m["draw"] or "") for m in SLOT.finditer(template) if m["symbol"]}
