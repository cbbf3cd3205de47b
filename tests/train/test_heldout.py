"""The 64 prompts on which drafts are measured: jaxspec/train/heldout.json."""

from __future__ import annotations

import functools
import random
import re

import pytest

from jaxspec.train import evaluate, prompts

HELDOUT = evaluate.read_prompts(evaluate.HELDOUT)
ASKED = [category for category in prompts.DRAWN if category != "free"]  # which is no user's message
ANYTHING = ("passage", "talk")  # the instruction around it tells enough


@functools.cache
def pattern(symbol: str) -> str:
    """Matches all that the symbol can become, and more: a second {symbol} may differ from the first."""
    if symbol in ANYTHING:
        return "(?s:.+)"
    return "(?:" + "|".join(matched(value) for value in dict.fromkeys(prompts.grammar()[symbol])) + ")"


def matched(template: str) -> str:
    parts, end = [], 0
    for slot in prompts.SLOT.finditer(template):
        parts.append(re.escape(template[end : slot.start()]))
        # A changed value has other letters, but as many words.
        changed = slot["change"] == "misspelt" and slot["symbol"] not in ANYTHING
        plain = pattern(slot["symbol"]) if slot["symbol"] else re.escape(slot[0][0])
        parts.append(".+" if changed else f"(?i:{plain})" if slot["change"] else plain)
        end = slot.end()
    return "".join(parts) + re.escape(template[end:])


def source(text: str) -> str | None:
    """The category whose templates can make this text."""
    return next((category for category in ASKED if re.fullmatch(pattern(category), text)), None)


def test_sixteen_of_each():
    assert {category: len(texts) for category, texts in HELDOUT.items()} == dict.fromkeys(
        ("chat", "story", "code", "summary"), 16
    )
    assert len({text for texts in HELDOUT.values() for text in texts}) == 64


@pytest.mark.parametrize("category", HELDOUT)
def test_no_template_makes_them(category):
    assert [text for text in HELDOUT[category] if source(text)] == []


def test_what_templates_make_would_be_found():
    rng = random.Random(0)
    for category in ASKED:
        for _ in range(20):
            text = prompts.draw(category, rng)
            assert source(text), text
