"""Under masks, bias and penalties the program draws from the law they define, history and all; faults are rejected.

As test_statistics.py, whose law now depends on every token before: penalties and bad words change it within a round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decode import round as decode_round
from jaxspec.sampling.processors import bias, forbidden, grammar, penalties
from tests.decode.test_statistics import LEAST_P, REJECTED, compare, draft, law
from tests.support import exact, grammars
from tests.support.launches import PROMPT, Setting
from tests.support.sizes import cases

K, V = 2, 4
SAMPLES = 12_000  # enough for every fault of FAULTS to fall below REJECTED
FEWER = 8_000  # of the test that finds no fault: one below REJECTED is below LEAST_P with two thirds of the samples
COLD = 0.7
PENALISED = Setting(COLD, repetition=1.8, presence=0.6, frequency=0.8)
BIASED = Setting(0.9, repetition=2.0, bias=((1, 1.2), (3, -1.5)), min_p=0.05)
NO_WORDS = Setting(1.0, bad_words=((1, 0), (0, 3, 1), (3, 3)), allowed_ids=(0, 1, 3))
LONG = Setting(1.1, min_tokens=2, stop_ids=(0, 2))
EVERYTHING = Setting(
    COLD,
    top_k=3,
    top_p=0.9,
    repetition=1.3,
    frequency=-0.5,
    bias=((2, 0.5),),
    bad_words=((2, 2),),
    min_tokens=3,
    stop_ids=(3,),
)
# Texts like 0 2 0 1 3 and 2 2 1 0 1 3, of which 3 is the end.
AUTOMATON = grammars.of_states(V, [{0: 1, 1: 0, 2: 2}, {0: 0, 1: 2, 3: 3}, {0: 0, 2: 1}], ends=(3,))
GRAMMAR = Setting(1.0, automaton=AUTOMATON, stop_ids=(3,))
GRAMMAR_AND_MORE = dataclasses.replace(EVERYTHING, automaton=AUTOMATON)
SETTINGS = (PENALISED, BIASED, NO_WORDS, LONG, EVERYTHING, GRAMMAR, GRAMMAR_AND_MORE)


@cases("drafter", ["draft model", "lookup"], quick=["draft model"], rest=[])
def test_the_targets_law(drafter):
    """Rows under every rule, and rows that ask for nothing, in one batch."""
    rows = [dataclasses.replace(s, rule="standard") for s in (*SETTINGS, Setting())]
    rows += [dataclasses.replace(GRAMMAR_AND_MORE, rule=rule) for rule in ("coupled", "block")]
    p_values, accepted = compare(K, V, FEWER, rows, draft(V) if drafter == "draft model" else (1, 3))
    assert (p_values > LEAST_P).all()
    if drafter == "draft model":
        assert (accepted[:, 0] > 0.6).all()
        assert (accepted[:, -1] > 0.15).all()


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_settings_do_something(setting):
    """Their laws differ from the plain one by more than the samples could hide."""
    plain = Setting(setting.temperature, setting.top_k, setting.top_p, setting.min_p)
    ours, theirs = (law(V, K + 3, PROMPT, s) for s in (setting, plain))
    assert np.abs(ours - theirs).sum() > 0.3
    assert exact.pooled_mass(ours, SAMPLES) < 0.05


@pytest.mark.thorough
def test_a_draft_that_ignores_all_of_it_costs_speed_only(monkeypatch):
    """q is what the drafts were drawn from: whatever it is, the target's law comes out."""
    right = decode_round.propose
    monkeypatch.setattr(decode_round, "propose", lambda *arguments: right(*arguments[:-1], None))
    p_values, accepted = compare(K, V, SAMPLES, [PENALISED, NO_WORDS])
    assert (p_values > LEAST_P).all()
    assert (accepted[:, 0] < 0.65).all()  # above 0.7 in the test before


# Planted faults: what each replaces, given pytest's monkeypatch.


def count_what_was_rejected(patch) -> None:
    right = decode_round.commit

    def wrong(context, state, history, proposal, scores, verdict, ending):
        drafts_too = jnp.concatenate([proposal.tokens, verdict.next_token[:, None]], axis=1)
        counts = penalties.count(state.processing["penalties"], drafts_too)
        found = right(context, state, history, proposal, scores, verdict, ending)
        return dataclasses.replace(found, processing=found.processing | {"penalties": counts})

    patch.setattr(decode_round, "commit", wrong)


def do_not_count_drafts(patch) -> None:
    patch.setattr(penalties, "count", lambda counts, ids: counts)


def bad_words_without_drafts(patch) -> None:
    right = forbidden.completes_bad_word
    none = lambda place: dataclasses.replace(place, i=0 * place.i)
    patch.setattr(forbidden, "completes_bad_word", lambda *given: right(*given[:-1], none(given[-1])))


def applied_otherwise(kind: type, wrong: Callable) -> Callable:
    """A fault of a processor: wrong(its right form) applies in its place."""
    return lambda patch: patch.setattr(kind, "apply", wrong(kind.apply))


def too_short_by_one(right):
    def wrong(self, tables, state, logits, place):
        early = dataclasses.replace(self, min_len=self.min_len - (place.i > 0))
        return right(early, tables, state, logits, place)

    return wrong


def penalise_after_temperature(right):
    return lambda self, tables, state, logits, place: COLD * right(self, tables, state, logits / COLD, place)


def bias_after_penalties(patch) -> None:
    """Both are applied by the last of them."""
    add, penalise = bias.Bias.apply, penalties.Penalties.apply
    seen = []
    patch.setattr(bias.Bias, "apply", lambda self, tables, state, logits, place: seen.append(tables) or logits)
    patch.setattr(
        penalties.Penalties,
        "apply",
        lambda self, tables, state, logits, place: add(
            None, seen[-1], None, penalise(self, tables, state, logits, place), place
        ),
    )


def one_draft_late(right):
    def wrong(self, tables, state, logits, place):
        return right(self, tables, state, logits, dataclasses.replace(place, i=jnp.maximum(place.i - 1, 0)))

    return wrong


def one_token_late(patch) -> None:
    """From one round to the next."""
    right = grammar.Grammar.advance
    patch.setattr(
        grammar.Grammar, "advance", lambda self, tables, state, emitted: right(self, tables, state, emitted[:, :-1])
    )


def no_mask_in_q(patch) -> None:
    """Drafts are drawn under the mask, and q is told without it."""
    right = decode_round.choose

    def wrong(context, history, adjust, *given):
        token, _ = right(context, history, adjust, *given)
        return token, right(context, history, None, *given)[1]

    patch.setattr(decode_round, "choose", wrong)


FAULTS: list[tuple[Callable, Setting]] = [
    (applied_otherwise(grammar.Grammar, one_draft_late), GRAMMAR),
    (one_token_late, GRAMMAR),
    (no_mask_in_q, GRAMMAR),
    (count_what_was_rejected, PENALISED),
    (do_not_count_drafts, PENALISED),
    (applied_otherwise(penalties.Penalties, penalise_after_temperature), PENALISED),
    (bias_after_penalties, BIASED),
    (bad_words_without_drafts, NO_WORDS),
    (applied_otherwise(forbidden.Forbidden, too_short_by_one), LONG),
]


@cases(("fault", "setting"), FAULTS, quick=[(do_not_count_drafts, PENALISED)])
def test_planted_faults_are_rejected(fault, setting, monkeypatch):
    fault(monkeypatch)
    # Prompt lookup compiles sooner, but finds nothing in the first round, which a minimum length is about.
    p_values, _ = compare(K, V, SAMPLES, [setting], draft(V) if setting in (LONG, GRAMMAR) else (1, 3))
    assert p_values.max() < REJECTED
