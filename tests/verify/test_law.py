"""Every rule emits the target's law: its acceptance probabilities exactly, and what `verify` draws by statistics.

A rule joins by its line in the registry.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.drafters.base import Proposal
from jaxspec.verify import block, coupled, rules, standard
from jaxspec.verify.base import Case, Verdict
from jaxspec.verify.coupled import shared_noise
from pallas_kernels.plain import argmax
from tests.support import exact

V, K = 3, 3
START = 11  # num_tokens of all rows


NAMES = [name for name, rule in rules.RULES.items() if rule.lossless and name != rules.GREEDY]


@functools.cache
def law(name: str) -> Callable:
    """(p [n,T,V], q [n,K,V], drafts [n,K]) -> (P(i accepted) [n,T], the extra token's law [n,T,V]), T = K + 1."""
    function = rules.implementation(name).output_distribution
    if rules.RULES[name].noise == "shared":
        return lambda *x: function(*map(jnp.asarray, x))  # which is numpy's
    compiled = jax.jit(function)

    def run(p: np.ndarray, q: np.ndarray, drafts: np.ndarray) -> tuple[np.ndarray, ...]:
        more = V ** drafts.shape[1] - len(drafts)  # of few shapes: each is compiled
        whole = (np.concatenate([x, np.repeat(x[:1], more, axis=0)]) for x in (p, q, drafts))
        return tuple(np.asarray(x)[: len(drafts)] for x in compiled(*whole))

    return run


def draw(name: str, p: np.ndarray, q: np.ndarray, num_proposed: np.ndarray) -> tuple[np.ndarray, Verdict]:
    """Drafts from q and the verdict on them, in as many rows as num_proposed has: p [K+1,V], q [K,V]."""
    rows, shared = len(num_proposed), rules.RULES[name].noise == "shared"
    seed = jnp.stack([jnp.zeros(rows, jnp.uint32), jnp.arange(rows, dtype=jnp.uint32)], axis=1)
    every_row = lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.float32), (rows, *x.shape))
    uniform = np.random.default_rng(0).random((rows, K, 1))
    drawn = jnp.asarray((uniform > np.cumsum(q, axis=-1)).sum(axis=-1), jnp.int32)

    @jax.jit  # traced afresh: a test may have planted a fault
    def run(seed, drawn, num_proposed):
        logits, probs, own = jnp.log(every_row(p)), every_row(q), jnp.zeros((rows, K + 1), jnp.int32)
        if shared:
            noise = jnp.stack([shared_noise(seed, jnp.full(rows, START + i), V) for i in range(K + 1)], axis=1)
            drawn, own = argmax(jnp.log(probs) + noise[:, :-1]), argmax(logits + noise)
        case = Case(logits, own, Proposal(drawn, probs, num_proposed), seed, jnp.full(rows, START), jnp.zeros(0))
        return drawn, rules.implementation(name).verify(case)

    return jax.device_get(run(seed, drawn, jnp.asarray(num_proposed)))


def random_laws(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Distributions [*shape, V], a third with a zero, a sixth one-hot."""
    p = rng.dirichlet(np.ones(V), shape)
    kind, where = rng.integers(6, size=shape), rng.integers(V, size=shape)
    at = np.eye(V)[where]
    p = np.where((kind < 2)[..., None], p * (1 - at), p)
    p = np.where((kind == 2)[..., None], at, p)
    return p / p.sum(axis=-1, keepdims=True)


@functools.cache
def tables(length: int, seed: int = 4) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """p(next | prefix) and q(next | prefix), [V]*i + [V] for prefixes of i < length + K tokens; q is p now and then,
    and now and then nothing: a draft that has none of the allowed ids. With this seed block goes on from residuals of
    several tokens, which not every one has."""
    rng = np.random.default_rng(seed)
    p = [random_laws(rng, *(V,) * i) for i in range(length + K)]
    q = [np.where(rng.random((V,) * i + (1,)) < 0.15, p[i], random_laws(rng, *(V,) * i)) for i in range(length + K)]
    q = [np.where(rng.random((V,) * i + (1,)) < 0.1, 0.0, q[i]) for i in range(length + K)]
    return p, q


def num_drafts(prefix: tuple[int, ...]) -> int:
    """K_b of a round that starts after this prefix: all of 0..K occur, and it depends on what was emitted."""
    return (3 + 2 * len(prefix) + sum(prefix)) % (K + 1)


def path(table: list[np.ndarray], prefix: tuple[int, ...], drafts: np.ndarray, rows: int) -> list[np.ndarray]:
    """The table's distributions after prefix, prefix + drafts[:1]...: `rows` of them."""
    return [table[len(prefix) + i][prefix + tuple(drafts[:i])] for i in range(rows)]


def emitted_law(round_laws: Callable, length: int) -> np.ndarray:
    """The law of the first `length` tokens, [V]*length, by following every draft, accepted length and extra token
    through as many rounds as it takes."""
    p, q = tables(length)
    emitted = np.zeros((V,) * length)
    reached = {(): 1.0}  # prefix at which a round starts -> its probability
    while reached:
        prefix = min(reached, key=len)
        mass = reached.pop(prefix)
        for drafts, proposed, p_rows, q_rows in proposals(p, q, prefix):
            lengths, extras = round_laws(p_rows, q_rows, drafts)
            weight = mass * proposed[:, None, None] * np.asarray(lengths)[..., None] * np.asarray(extras)
            for n, i, token in zip(*np.nonzero(weight), strict=True):
                sequence = (*prefix, *drafts[n, :i].tolist(), int(token))
                if len(sequence) >= length:
                    emitted[sequence[:length]] += weight[n, i, token]
                else:
                    reached[sequence] = reached.get(sequence, 0.0) + weight[n, i, token]
    return emitted


def proposals(p: list[np.ndarray], q: list[np.ndarray], prefix: tuple[int, ...]) -> Iterator[tuple[np.ndarray, ...]]:
    """All that may be proposed after prefix, by its length k <= K_b: (drafts [n,k], their chances [n], p [n,k+1,V],
    q [n,k,V]). A proposal ends early where q is nothing."""
    most = num_drafts(prefix)
    for k in range(most + 1):
        drafts = np.array(list(itertools.product(range(V), repeat=k)), np.int32).reshape(V**k, k)
        p_rows = np.array([path(p, prefix, x, k + 1) for x in drafts])
        q_rows = np.array([path(q, prefix, x, k + 1) for x in drafts])
        proposed = np.prod(np.take_along_axis(q_rows[:, :k], drafts[..., None], axis=-1), axis=(1, 2))
        there = (proposed > 0) & ((k == most) | (q_rows[:, k].sum(axis=-1) == 0))
        if there.any():
            yield drafts[there], proposed[there], p_rows[there], q_rows[there, :k]


def distance(round_laws: Callable, length: int) -> float:
    """Total variation between what the rule emits and the target's law."""
    target = exact.joint(tables(length)[0][:length])
    return float(np.abs(emitted_law(round_laws, length) - target).sum() / 2)


@pytest.mark.parametrize("rule", NAMES)
def test_the_emitted_tokens_have_the_targets_law(rule):
    """Five tokens: K + 1 of a first round's bonus and at least one more round, up to five rounds."""
    assert distance(law(rule), 5) < 1e-6


def always_accept(p, q, drafts, lengths, extras):
    return np.eye(lengths.shape[1])[[-1] * len(lengths)], extras


def recover_from_p(p, q, drafts, lengths, extras):
    return lengths, p


def bonus_from_q(p, q, drafts, lengths, extras):
    return lengths, np.concatenate([extras[:, :-1], q[:, -1:] if q.shape[1] else extras[:, -1:]], axis=1)


def accept_by_halves(p, q, drafts, lengths, extras):
    """A little too strict everywhere: half of what was fully accepted is cut at the last draft."""
    if lengths.shape[1] == 1:
        return lengths, extras
    moved = lengths[:, -1:] / 2
    return np.concatenate([lengths[:, :-2], lengths[:, -2:-1] + moved, lengths[:, -1:] - moved], axis=1), extras


@pytest.mark.parametrize("fault", [always_accept, recover_from_p, bonus_from_q, accept_by_halves])
@pytest.mark.parametrize("rule", NAMES)
def test_planted_faults_do_not(rule, fault):
    def faulty(p, q, drafts):
        lengths, extras = map(np.asarray, law(rule)(p, q, drafts))
        return fault(p, q, drafts, lengths, extras)

    far = distance(faulty, 4)
    print(rule, fault.__name__, far)
    assert far > 0.01


P = np.array([[0.5, 0.3, 0.2], [0.1, 0.0, 0.9], [0.6, 0.4, 0.0], [0.2, 0.3, 0.5]])
Q = np.array([[0.2, 0.5, 0.3], [0.3, 0.3, 0.4], [0.5, 0.0, 0.5]])
ROWS = 60_000


NUM_PROPOSED = np.arange(ROWS, dtype=np.int32) % (K + 1)


def compare(rule: str, drafts: np.ndarray, verdict: Verdict) -> list[float]:
    """p-values, one for each K_b, of (drafts, number accepted, extra token) against the rule's own law."""
    assert (verdict.num_accepted <= NUM_PROPOSED).all()
    p_values = []
    for k in range(K + 1):
        rows = k == NUM_PROPOSED
        seen = np.concatenate([drafts[rows, :k], verdict.next_token[rows, None]], axis=1)
        shape = (V,) * (k + 1) + (k + 1,)
        cells = np.ravel_multi_index((*seen.T, verdict.num_accepted[rows]), shape)
        all_drafts = np.array(list(itertools.product(range(V), repeat=k)), np.int32).reshape(V**k, k)
        chance = np.prod([Q[i, all_drafts[:, i]] for i in range(k)], axis=0) * np.ones(V**k)
        possible = chance > 0
        repeated = lambda x, n=possible.sum(): np.broadcast_to(x, (n, *x.shape))
        lengths, extras = law(rule)(repeated(P[: k + 1]), repeated(Q[:k]), all_drafts[possible])
        expected = np.zeros((V**k, V, k + 1))
        joint = chance[possible, None, None] * np.asarray(lengths)[..., None] * np.asarray(extras)
        expected[possible] = joint.transpose(0, 2, 1)
        p_values.append(exact.chi_square(np.bincount(cells, minlength=expected.size), expected))
    return p_values


@pytest.mark.parametrize("rule", NAMES)
def test_verify_draws_from_its_law(rule):
    p_values = compare(rule, *draw(rule, P, Q, NUM_PROPOSED))
    print(rule, p_values)
    assert min(p_values) > 1e-4


from_the_target = lambda p, proposal, num_accepted, *weight: p[jnp.arange(len(p)), num_accepted]


def only_the_path_so_far(p, proposal):
    """Without what may follow, as if each length were the last."""
    weights, _ = block_judged(p, proposal)
    return weights, weights[:, 1:]


block_judged = block.judged
FAULTS = [
    (standard, "leading", lambda accepted, num_proposed: num_proposed),
    (standard, "residual_distribution", from_the_target),
    (block, "residual_distribution", from_the_target),
    (block, "judged", only_the_path_so_far),
]


@pytest.mark.parametrize(("rule", "name", "wrong"), FAULTS)
def test_a_faulty_verify_does_not(rule, name, wrong, monkeypatch):
    """Of two drafts or more: with one, block is the standard rule."""
    file = rule.__name__.split(".")[-1]
    with monkeypatch.context() as patch:
        patch.setattr(rule, name, wrong)
        drawn = draw(file, P, Q, NUM_PROPOSED)
    p_values = compare(file, *drawn)
    print(file, name, p_values)
    assert max(p_values[2:]) < 1e-9


def kept(name: str, p: list[np.ndarray], q: list[np.ndarray], prefix: tuple[int, ...] = ()) -> float:
    """Drafts that a round after prefix keeps, in expectation."""
    rounds = [(proposed, law(name)(p_rows, q_rows, x)[0]) for x, proposed, p_rows, q_rows in proposals(p, q, prefix)]
    return float(sum((proposed * (lengths @ np.arange(lengths.shape[1]))).sum() for proposed, lengths in rounds))


def test_block_keeps_no_fewer_drafts_than_standard():
    p, q = tables(5)
    prefixes = [prefix for n in range(3) for prefix in itertools.product(range(V), repeat=n)]
    more = np.array([kept("block", p, q, prefix) - kept("standard", p, q, prefix) for prefix in prefixes])
    assert (more > -1e-6).all()
    assert (more > 0.01).any()


def test_block_keeps_as_many_as_in_the_paper():
    """Its example of section 2: of two drafts 10/9 under the standard rule, 11/9 under block."""
    p, q = np.array([[1 / 3, 2 / 3]] * 3), np.array([[2 / 3, 1 / 3]] * 2)
    drafts = np.array(list(itertools.product(range(2), repeat=2)))
    chance = np.prod(np.take_along_axis(q.T, drafts, axis=0), axis=1)
    every = lambda x: np.broadcast_to(x, (len(drafts), *x.shape))
    for name, expected in (("standard", 10 / 9), ("block", 11 / 9)):
        lengths = np.asarray(law(name)(every(p), every(q), drafts)[0])
        assert chance @ lengths @ np.arange(3) == pytest.approx(expected, abs=1e-6)


def test_block_is_the_standard_rule_for_drafts_that_are_certain():
    drafts = np.array(list(itertools.product(range(V), repeat=K)), np.int32)
    p = random_laws(np.random.default_rng(3), len(drafts), K + 1)
    (lengths, extras), (expected, laws_of_extra) = (
        law(name)(p, np.eye(V)[drafts], drafts) for name in ("block", "standard")
    )
    np.testing.assert_allclose(lengths, expected, atol=1e-6)
    reached = np.asarray(expected)[..., None]  # where a length never occurs, what would follow it does not matter
    np.testing.assert_allclose(reached * extras, reached * laws_of_extra, atol=1e-6)


PAIRS = {
    "random": ([0.5, 0.3, 0.2], [0.2, 0.5, 0.3]),
    "equal": ([0.5, 0.3, 0.2], [0.5, 0.3, 0.2]),
    "zeros": ([0.6, 0.4, 0.0, 0.0], [0.0, 0.3, 0.3, 0.4]),
    "disjoint": ([0.6, 0.4, 0.0, 0.0], [0.0, 0.0, 0.3, 0.7]),
    "one-hot draft": ([0.5, 0.3, 0.2], [0.0, 1.0, 0.0]),
    "one-hot target": ([0.0, 1.0, 0.0], [0.2, 0.3, 0.5]),
    "five": ([0.1, 0.2, 0.3, 0.15, 0.25], [0.3, 0.05, 0.25, 0.3, 0.1]),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_the_coupled_joint_is_that_of_the_noise(pair):
    """Against numpy's own Gumbel noise; and its margins are q and p exactly."""
    p, q = map(np.array, PAIRS[pair])
    joint = coupled.joint(p, q)
    np.testing.assert_allclose(joint.sum(axis=1), q, atol=1e-12)
    np.testing.assert_allclose(joint.sum(axis=0), p, atol=1e-12)
    noise = np.random.default_rng(1).gumbel(size=(200_000, len(p)))
    with np.errstate(divide="ignore"):
        both = np.stack([np.argmax(np.log(q) + noise, axis=1), np.argmax(np.log(p) + noise, axis=1)], axis=1)
    joint = np.where(joint < 1e-15, 0.0, joint)
    assert exact.chi_square(exact.histogram(both, len(p)), joint) > 1e-4
    agreement = np.trace(joint)
    total_variation = np.abs(p - q).sum() / 2
    assert (1 - total_variation) / (1 + total_variation) - 1e-12 <= agreement <= 1 - total_variation + 1e-12
