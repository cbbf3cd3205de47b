"""Which variant of a program serves a batch."""

from __future__ import annotations

import itertools

import pytest

from jaxspec.decode.state import Variant
from jaxspec.runtime import programs
from jaxspec.runtime.programs import WORTH_COMPILING, Variants
from tests.support.lively_models import PROMPTS, new_engine, params, serve, texts

COUPLED, STANDARD = frozenset({"coupled"}), frozenset({"standard"})
GREEDY, WIDE = Variant(), Variant(COUPLED, filters=True, logprobs=5, processors=True)


@pytest.mark.parametrize(
    ("one", "other", "covered"),
    [
        (WIDE, GREEDY, True),
        (GREEDY, GREEDY, True),
        (GREEDY, WIDE, False),
        (WIDE, Variant(STANDARD), False),
        (Variant(logprobs=5), Variant(logprobs=5), True),
        (Variant(logprobs=20), Variant(logprobs=5), True),
        (Variant(logprobs=5), Variant(logprobs=20), False),
        (Variant(), Variant(logprobs=5), False),
        (Variant(logprobs=5), Variant(processors=True), False),
        (Variant(COUPLED, filters=True), Variant(filters=True), True),
    ],
)
def test_covers(one, other, covered):
    assert one.covers(other) is covered


def test_a_narrow_batch_uses_a_wide_program_for_a_while():
    variants = Variants()
    assert variants.choose("p", WIDE) == WIDE
    assert [variants.choose("p", GREEDY) for _ in range(WORTH_COMPILING + 2)] == [WIDE] * WORTH_COMPILING + [GREEDY] * 2
    assert variants.choose("p", Variant(filters=True)) == WIDE
    assert variants.choose("p", Variant(STANDARD)) == Variant(STANDARD), "nothing there covers it"
    assert variants.choose("q", GREEDY) == GREEDY, "of another shape there is none"


def test_garbage_is_collected_again(monkeypatch):
    for collects in (True, False):
        monkeypatch.setattr(programs.gc, "isenabled", lambda collects=collects: collects)
        done: list[str] = []
        monkeypatch.setattr(programs.gc, "disable", lambda done=done: done.append("off"))
        monkeypatch.setattr(programs.gc, "enable", lambda done=done: done.append("on"))
        with pytest.raises(KeyboardInterrupt), programs.lowering():
            raise KeyboardInterrupt
        assert done == (["off", "on"] if collects else ["off"])


def test_a_wide_batch_never_uses_a_narrow_program():
    for first, second in itertools.permutations([GREEDY, Variant(logprobs=5), Variant(STANDARD)], 2):
        variants = Variants()
        variants.choose("p", first)
        assert variants.choose("p", second).covers(second)


def test_what_a_wide_program_says_is_the_same():
    engine = new_engine()
    engine.grown_shape = lambda *requests: (4, 4)
    prompts, greedy = PROMPTS[1:3], params((20, 20))
    serve(engine, prompts, params((2, 2), temperature=1.0, seed=1, top_k=5, logprobs=2, presence_penalty=1.0))
    compiled = engine.runner.programs.num_compiled
    wide = texts(serve(engine, prompts, greedy))
    assert engine.runner.programs.num_compiled == compiled
    serve(engine, prompts, greedy, rounds=1)
    assert engine.runner.programs.num_compiled == compiled + 1, "worth a program of its own by now"
    assert texts(serve(engine, prompts, greedy)) == wide
