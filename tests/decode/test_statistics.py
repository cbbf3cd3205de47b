"""The whole program draws from the target's law, and the test that says so rejects programs that do not.

Tiny random models: the law of the first K + 3 tokens (a bonus token and a second round are in them) is enumerated with
the target alone, filtered in numpy, and compared with tens of thousands of samples of every setting of SETTINGS; the
settings are rows of one batch. Seeds are fixed, so a p-value is a constant of the program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decode import round as decode_round
from jaxspec.models.model import Model
from jaxspec.sampling import rng
from jaxspec.sampling.distribution import process
from jaxspec.verify import block, rules, standard
from tests.support import exact
from tests.support.launches import PROMPT, Launches, Setting, blend, model, paged
from tests.support.sizes import cases

LEAST_P = 1e-4  # below it the program is wrong
REJECTED = 1e-9  # a planted fault has to fall below this
ROWS = 512  # of a launch; of more, each takes longer
SAMPLES = 12_000  # enough for every fault of FAULTS to fall below REJECTED
EVERY_RULE = [name for name, rule in rules.RULES.items() if rule.lossless and name != rules.GREEDY]
ANY_RULE = {"rule": "standard", "num_drafts": None}  # what a law does not depend on


def settings(size: int, **how) -> list[Setting]:
    """Temperatures 0.7 and 1.0, without filters and with top-k and top-p, which leave each other something to do."""
    filters = ({}, {"top_k": size - 1, "top_p": 0.85})
    return [Setting(t, **f, **how) for t in (0.7, 1.0) for f in filters]


def target(size: int):
    return model(size, seed=5)


def draft(size: int):
    """Like the target, but not too much: drafts are accepted often and rejected often."""
    return blend(target(size), model(size, seed=6), 0.45)


@functools.cache
def law(size: int, length: int, prompt: tuple[int, ...], setting: Setting) -> np.ndarray:
    """The target's law of the next `length` tokens under a setting [V]*length."""
    conditionals = [
        exact.distribution(z, setting.temperature, setting.top_k, setting.top_p, setting.min_p)
        for z in adjusted_logits(size, length, prompt, setting)
    ]
    return exact.joint(conditionals)


def adjusted_logits(size: int, length: int, prompt: tuple[int, ...], setting: Setting) -> list[np.ndarray]:
    """As `logits`, after masks, bias and penalties; after a stop id only that id follows."""
    s, found = setting, logits(size, length, prompt)
    if not (s.params(length).processed or s.bad_words or s.stop_ids or s.automaton):
        return found

    def after(z: np.ndarray, output: tuple[int, ...]) -> np.ndarray:
        if (stopped := next((i for i in output if i in s.stop_ids), None)) is not None:
            return np.where(np.arange(size) == stopped, 0.0, -np.inf)
        ok = exact.allowed(size, output, s.allowed_ids, s.bad_words, s.min_tokens, s.stop_ids)
        if s.automaton:
            now = s.automaton.advance(0, output)
            if now < 0:  # after a text of probability 0
                return z
            ok = s.automaton.legal(now) & ok
        return exact.penalised(exact.biased(z, ok, s.bias), prompt, output, s.repetition, s.presence, s.frequency)

    outputs = lambda z: np.ndindex(*z.shape[:-1])
    return [np.array([after(z[o], o) for o in outputs(z)]).reshape(z.shape) for z in found]


@functools.cache
def logits(size: int, length: int, prompt: tuple[int, ...]) -> list[np.ndarray]:
    return exact.next_logits(paged(target(size), 2 * size ** (length - 1)), target(size).params, prompt, length)


def compare(
    num_drafts: int,
    size: int,
    samples: int,
    rows: Sequence[Setting],
    drafter=None,
    *,
    prompt: tuple[int, ...] = PROMPT,
    **options,
) -> tuple[np.ndarray, np.ndarray]:
    """-> (p-value of each setting, drafts accepted per position [settings, K])."""
    length = num_drafts + 3
    drafter = draft(size) if drafter is None else drafter
    options |= {"length": length, "rows_each": ROWS // len(rows), "prompt": prompt}
    tokens, accepted = Launches(target(size), drafter, num_drafts, rows, **options).sample(samples)
    p_values = [
        exact.chi_square(exact.histogram(t, size), law(size, length, prompt, dataclasses.replace(r, **ANY_RULE)))
        for t, r in zip(tokens, rows, strict=True)
    ]
    print(f"K={num_drafts} V={size} p-values {np.array(p_values)} accepted {accepted.round(2).tolist()}")
    return np.array(p_values), accepted


@cases(
    ("rule", "num_drafts", "size", "samples"),
    [
        (rule, *how)
        for rule in ("standard", "block")
        for how in [(1, 5, 26_000), (2, 4, 50_000), (3, 3, 50_000), (4, 3, 100_000)]
    ],
    quick=[("standard", 1, 5, 26_000)],  # block: its exact law
    rest=[("block", 2, 4, 50_000)],
)
def test_a_rule_with_numbers_of_the_round_draws_from_the_targets_law(rule, num_drafts, size, samples):
    p_values, accepted = compare(num_drafts, size, samples, settings(size, rule=rule))
    assert (p_values > LEAST_P).all()
    assert (accepted[:, 0] > 0.4).all()  # both outcomes are frequent,
    assert (accepted[:, 0] < 0.9).all()
    assert (accepted[:, -1] > 0.05).all()  # and so is the bonus token
    for setting in settings(size):
        assert exact.pooled_mass(law(size, num_drafts + 3, PROMPT, setting), samples) < 0.02


@cases("greedy_draft", [False, True], rest=[False])
def test_the_coupled_rule_draws_from_the_targets_law(greedy_draft):
    """Half of the rows are coupled, half standard, in one batch."""
    rows = settings(4, rule="coupled") + settings(4)
    p_values, accepted = compare(2, 4, SAMPLES, rows, greedy_draft=greedy_draft)
    assert (p_values > LEAST_P).all()
    coupled, drawn = accepted[:4, 0], accepted[4:, 0]
    # A one-hot proposal loses nothing by the coupling, a drawn one a little.
    low, high = (0.97, 1.03) if greedy_draft else (0.9, 1.0)
    assert (low * drawn < coupled).all()
    assert (coupled < high * drawn).all()


def reduced() -> Model:
    """A draft that has ids 1 and 3 of four."""
    m = draft(4)
    ids = {"d2t": jnp.array([1, 3], jnp.int32), "t2d": jnp.array([2, 0, 2, 1], jnp.int32)}
    params = {**m.params, **ids, "head": m.params["head"][:, ids["d2t"]]}
    return Model(dataclasses.replace(m.config, reduced_vocab_size=2), params)


@cases("greedy_draft", [False, True], rest=[True])
def test_a_reduced_vocabulary_draws_from_the_targets_law(greedy_draft):
    """The draft lacks two of four ids, which the target emits often; half of the rows are coupled."""
    rows = [Setting(t, rule=rule) for t in (0.7, 1.0) for rule in EVERY_RULE]
    p_values, accepted = compare(2, 4, SAMPLES, rows, reduced(), greedy_draft=greedy_draft)
    assert (p_values > LEAST_P).all()
    assert (accepted[:, 0] > 0.2).all()


# A draft has none of the allowed ids of the first of these, and none that may follow id 3 in the second.
NOTHING_TO_PROPOSE = (
    {"allowed_ids": (0, 2), "bias": ((0, -1.0),)},
    {"bad_words": ((3, 1), (3, 3))},
)


@cases("greedy_draft", [False, True], rest=[False])
def test_a_draft_without_any_allowed_id_draws_from_the_targets_law(greedy_draft):
    rows = [Setting(1.0, rule=rule, **how) for how in NOTHING_TO_PROPOSE for rule in EVERY_RULE]
    p_values, accepted = compare(2, 4, SAMPLES, rows, reduced(), greedy_draft=greedy_draft)
    assert (p_values > LEAST_P).all()
    assert not accepted[: len(EVERY_RULE), 0].any() or greedy_draft
    assert (accepted[len(EVERY_RULE) :, 0] > 0.2).all()


@pytest.mark.thorough
def test_and_one_that_proposes_nevertheless_does_not(monkeypatch):
    """What every rule was given before proposals ended there: an id that q gives nothing."""
    monkeypatch.setattr(decode_round, "leading", lambda accepted, num_proposed: num_proposed)
    rows = [Setting(1.0, **how) for how in NOTHING_TO_PROPOSE]
    p_values, _ = compare(2, 4, SAMPLES, rows, reduced())
    assert (p_values < REJECTED).all()


@cases("rule", EVERY_RULE, rest=["block"])
def test_prompt_lookup_draws_from_the_targets_law(rule):
    rows = settings(3, rule=rule)
    p_values, accepted = compare(3, 3, SAMPLES, rows, (1, 3), prompt=(0, 2, 1, 0, 2, 1, 0))
    assert (p_values > LEAST_P).all()
    assert (accepted[:, 0] > 0.1).all()


@pytest.mark.thorough
def test_prompt_lookup_with_a_draft_model_draws_from_the_targets_law():
    """Looked-up tokens are certain, the draft's are drawn: both kinds stand in a round, coupled rows beside others."""
    prompt = (0, 2, 1, 0, 2, 1, 0)
    rows = [Setting(t, rule=rule) for t in (0.7, 1.0) for rule in EVERY_RULE]
    p_values, accepted = compare(3, 3, SAMPLES, rows, ((2, 3), draft(3)), prompt=prompt)
    assert (p_values > LEAST_P).all()
    assert (accepted[:, 0] > 0.1).all()


@pytest.mark.thorough
def test_rows_with_fewer_drafts_draw_from_the_targets_law():
    rows = [Setting(0.8, min_p=0.1, num_drafts=k, rule=rule) for rule in EVERY_RULE for k in range(4)]
    p_values, _ = compare(3, 3, SAMPLES, rows)
    assert (p_values > LEAST_P).all()


# Planted faults: what each replaces, given pytest's monkeypatch.


def always_accept(patch) -> None:
    patch.setattr(standard, "leading", lambda accepted, num_proposed: num_proposed)
    patch.setattr(block, "judged", lambda p, proposal: (p[..., 0] * 0 + 1, p[:, 1:, 0] * 0 + 1))


def extra_from(patch, wrong: Callable) -> None:
    for rule in (standard, block):
        patch.setattr(rule, "residual_distribution", wrong)


def recover_from_p(patch) -> None:
    extra_from(patch, lambda p, proposal, num_accepted, weight=1.0: rng.take_row(p, num_accepted))


def bonus_from_q(patch) -> None:
    right = standard.residual_distribution

    def wrong(p, proposal, num_accepted, *weight):
        bonus = (num_accepted >= proposal.num_proposed)[:, None]
        return jnp.where(bonus, proposal.probs[:, -1], right(p, proposal, num_accepted, *weight))

    extra_from(patch, wrong)


def leading_run_of_the_block(patch) -> None:
    """Up to the first number that is not below its chance, where the largest length counts."""
    right = block.judged

    def wrong(p, proposal):
        weights, chances = right(p, proposal)
        return weights, jnp.cumprod(chances, axis=1)

    patch.setattr(block, "judged", wrong)


def numbers_of_absolute_positions(patch) -> None:
    """A round's own numbers in their place: what the round before saw behind its last token is used again."""
    right = rng.keys
    patch.setattr(rng, "keys", lambda seed, position, purpose, offset=0: right(seed, position + offset, purpose))


def top_p_before_temperature(patch) -> None:
    def wrong(logits, rows, *, filters, **how):
        cold = dataclasses.replace(rows, temperature=jnp.ones_like(rows.temperature))
        return process(process(logits, cold, filters=filters, **how), rows, filters=False)

    patch.setattr(decode_round, "process", wrong)


def recover_with_the_drafts_noise(patch) -> None:
    patch.setitem(rng.PURPOSES, "residual", rng.PURPOSES["draft"])


def accept_with_the_drafts_noise(patch) -> None:
    patch.setitem(rng.PURPOSES, "accept", rng.PURPOSES["draft"])


def same_numbers_every_round(patch) -> None:
    right = rng.keys
    patch.setattr(rng, "keys", lambda seed, position, *rest: right(seed, position * 0, *rest))


# (fault, rule, whether the draft is greedy)
FAULTS: list[tuple[Callable, str, bool]] = [
    (always_accept, "standard", False),
    (recover_from_p, "standard", False),
    (recover_from_p, "standard", True),
    (bonus_from_q, "standard", False),
    (top_p_before_temperature, "standard", False),
    (top_p_before_temperature, "coupled", False),
    (recover_with_the_drafts_noise, "standard", False),
    (accept_with_the_drafts_noise, "standard", False),
    (same_numbers_every_round, "standard", False),
    (always_accept, "block", False),
    (recover_from_p, "block", False),
    (recover_from_p, "block", True),
    (bonus_from_q, "block", False),
    (leading_run_of_the_block, "block", False),
    (accept_with_the_drafts_noise, "block", False),
    (numbers_of_absolute_positions, "block", False),
    (same_numbers_every_round, "coupled", False),
]


@cases(
    ("fault", "rule", "greedy_draft"),
    FAULTS,
    rest=[(bonus_from_q, "standard", False), (leading_run_of_the_block, "block", False)],
)
def test_planted_faults_are_rejected(fault, rule, greedy_draft, monkeypatch):
    fault(monkeypatch)
    # Three drafts are the fewest of which a round sees numbers that the next would use again at absolute positions.
    num_drafts, size = (3, 3) if fault is numbers_of_absolute_positions else (2, 4)
    p_values, _ = compare(num_drafts, size, SAMPLES, settings(size, rule=rule), greedy_draft=greedy_draft)
    assert p_values.min() < REJECTED
