"""Prompts from the grammar."""

from __future__ import annotations

import random

import pytest

from jaxspec.train import prompts


def test_every_symbol_is_defined_and_used():
    used = {name.split(".")[0] for values in prompts.grammar().values() for v in values for name in prompts.slots(v)}
    assert used | set(prompts.DRAWN) == set(prompts.grammar())
    braces = [v for values in prompts.grammar().values() for v in values if "{" in prompts.SLOT.sub("", v)]
    assert not braces


def test_enough_for_a_training_run():
    assert sum(map(prompts.num_texts, prompts.DRAWN)) > 200_000
    for category in prompts.DRAWN:
        assert prompts.num_texts(category) > 200_000, category
    rng = random.Random(0)
    drawn = [prompts.draw(prompts.DRAWN[i % 8], rng) for i in range(4000)]
    assert len(set(drawn)) > 3200


def test_drawn_by_a_seed():
    texts = lambda seed: [prompts.draw("code", random.Random(seed)) for _ in range(3)]
    assert texts(1) == texts(1)
    assert texts(1) != texts(2)


@pytest.fixture
def grammar(monkeypatch):
    """Puts another grammar in its place."""

    def put(**values):
        monkeypatch.setattr(prompts, "grammar", lambda: values)
        prompts.num_texts.cache_clear()

    yield put
    prompts.num_texts.cache_clear()


def test_a_symbol_stands_for_one_value_in_a_template(grammar):
    grammar(pair=("{a} {a} {a.2} {{{a}}}",), a=("x", "y"))
    found = {prompts.draw("pair", random.Random(seed)) for seed in range(30)}
    assert found == {"x x y {x}", "y y x {y}"}
    assert prompts.num_texts("pair") == 4


def test_misspelt(grammar):
    text = "The quick brown fox jumps over the lazy dog and whatever follows after that. " * 5
    wrong = prompts.misspelt(text, random.Random(0))
    pairs = list(zip(text.split(), wrong.split(), strict=True))
    changed = [(a, b) for a, b in pairs if a != b]
    assert 0.03 < len(changed) / len(pairs) < 0.2
    assert all(len(a.strip(".")) >= 4 and a[0] == b[0] and abs(len(a) - len(b)) <= 1 for a, b in changed)
    grammar(text=("{a!capital} is",), a=("the dog",))
    assert prompts.draw("text", random.Random(0)) == "The dog is"
