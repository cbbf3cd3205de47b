"""Processors against plain numpy: masks and bias, penalties, and all of it at every offset of a round."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.engine import batch
from jaxspec.engine.request import Request
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.sampling import processors
from jaxspec.sampling.arrays import padded
from tests.support import exact

V, B, M, K = 11, 16, 20, 4
NAMES = [name for name in processors.PROCESSORS if name != "grammar"]
WORDS, LENGTH = 5, 4  # most bad words of a row, and their longest


@dataclasses.dataclass(frozen=True)
class Wish:
    """One row: what is committed, what is drafted, what is asked for."""

    prompt: Sequence[int] = (1, 2)
    output: Sequence[int] = ()
    drafts: Sequence[int] = (0,) * K
    allowed_ids: Sequence[int] | None = None
    bad_words: Sequence[Sequence[int]] = ()
    min_tokens: int = 0
    stop_ids: Sequence[int] = ()
    bias: Sequence[tuple[int, float]] = ()
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0


@jax.jit
def adjusted(logits, rows, prompt_len, tokens, num_tokens, stop_ids, drafts, num_drafts):
    text = processors.Text(tokens, num_tokens, prompt_len, stop_ids, V)
    adjust = processors.adjuster(rows, processors.tables(rows, text), processors.init(rows, text), text)
    return adjust(logits, drafts, num_drafts)


def request(wish: Wish) -> Request:
    return Request(
        id=0,
        prompt=list(wish.prompt),
        params=SamplingParams(
            max_tokens=M,
            min_tokens=wish.min_tokens,
            repetition_penalty=wish.repetition,
            presence_penalty=wish.presence,
            frequency_penalty=wish.frequency,
            logit_bias=dict(wish.bias),
            allowed_token_ids=wish.allowed_ids,
        ),
        seed=0,
        rule=0,
        stop_ids=tuple(wish.stop_ids),
        max_len=2 * M,
        num_speculative_tokens=K,
        bad_words=tuple(map(tuple, wish.bad_words)),
        output=list(wish.output),
    )


def arrays(wishes: Sequence[Wish], junk: int = 0, room: batch.Room = batch.FEW):
    """-> (Processors, prompt_len, tokens, num_tokens, stop_ids, drafts); junk stands where nothing is committed yet."""
    requests = [request(wish) for wish in wishes]
    column = lambda lists, width, fill=-1: padded(lists, len(wishes), width, fill)
    num_tokens = np.array([r.num_tokens for r in requests], np.int32)
    tokens, stop_ids = column([r.tokens for r in requests], M, junk), column([r.stop_ids for r in requests], 3)
    drafts = column([w.drafts for w in wishes], K)
    prompt_len = np.array([len(r.prompt) for r in requests], np.int32)
    rows = processors.of_requests(NAMES, requests, len(wishes), room, V)
    return rows, prompt_len, tokens, num_tokens, stop_ids, drafts


def found(logits: np.ndarray, wishes: Sequence[Wish], offset: int, junk: int = 0) -> np.ndarray:
    """What the library makes of logits [B,V] after `offset` drafts, the same for short lists as for long ones."""
    logits = jnp.asarray(logits, jnp.float32)
    few, many = (
        adjusted(logits, *jax.tree.map(jnp.asarray, arrays(wishes, junk, room)), offset)
        for room in (batch.FEW, dataclasses.replace(batch.MANY, bad_words=(8, 6)))
    )
    np.testing.assert_array_equal(few, many)
    return np.asarray(few)


def expected(logits: np.ndarray, w: Wish, offset: int) -> np.ndarray:
    """The same of one row, in numpy."""
    output = [*w.output, *w.drafts[:offset]]
    ok = exact.allowed(len(logits), output, w.allowed_ids, w.bad_words, w.min_tokens, w.stop_ids)
    return exact.penalised(exact.biased(logits, ok, w.bias), w.prompt, output, w.repetition, w.presence, w.frequency)


def random_wish(rng: np.random.Generator) -> Wish:
    """Half of everything is asked for; few ids, so that bad words are met."""
    ids = lambda n, most=V: tuple(int(i) for i in rng.integers(0, most, n))
    maybe = lambda value, otherwise: value if rng.random() < 0.5 else otherwise
    narrow = 3 if rng.random() < 0.5 else V
    distinct = lambda n: tuple(int(i) for i in rng.permutation(V)[:n])
    prompt = ids(rng.integers(1, 6), narrow)
    return Wish(
        prompt=prompt,
        output=ids(rng.integers(0, 8), narrow),
        drafts=ids(K, narrow),
        allowed_ids=maybe(distinct(rng.integers(1, V + 1)), None),
        bad_words=maybe(tuple(ids(rng.integers(1, LENGTH + 1), narrow) for _ in range(rng.integers(0, WORDS + 1))), ()),
        min_tokens=int(maybe(rng.integers(0, 12), 0)),
        stop_ids=maybe(distinct(rng.integers(0, 4)), ()),
        bias=maybe(tuple((i, float(rng.normal() * 3)) for i in distinct(rng.integers(0, 5))), ()),
        repetition=float(maybe(rng.uniform(0.5, 2.0), 1.0)),
        presence=float(maybe(rng.uniform(-2, 2), 0.0)),
        frequency=float(maybe(rng.uniform(-2, 2), 0.0)),
    )


@pytest.mark.parametrize("seed", range(20))
def test_equals_numpy(seed):
    """Every row has wishes of its own, some none; after 0..K drafts."""
    rng = np.random.default_rng(seed)
    wishes = [random_wish(rng) for _ in range(B - 2)] + [Wish(), Wish(prompt=(V - 1,), output=(V - 1, 0))]
    logits = rng.normal(size=(B, V)).astype(np.float32) * 3
    for offset in range(K + 1):
        got = found(logits, wishes, offset, junk=int(rng.integers(V)))
        for row, wish in enumerate(wishes):
            np.testing.assert_allclose(got[row], expected(logits[row], wish, offset), rtol=2e-6, atol=2e-6)
        np.testing.assert_array_equal(got[-2:], logits[-2:])  # those that ask for nothing


def test_the_cases_are_many():
    """Else the test above would prove little: the reference forbids, for each reason, ids that it allows elsewhere."""
    rng = np.random.default_rng(0)
    seen = dict.fromkeys(("allowed_ids", "bad_words", "min_tokens"), 0)
    across = 0
    for wish in (random_wish(rng) for _ in range(500)):
        for offset in range(K + 1):
            output = [*wish.output, *wish.drafts[:offset]]
            for name in seen:
                how = {name: getattr(wish, name)} | ({"stop_ids": wish.stop_ids} if name == "min_tokens" else {})
                seen[name] += not all(exact.allowed(V, output, **how))
            long = [w for w in wish.bad_words if len(w) - 1 > offset > 0]
            across += not all(exact.allowed(V, output, bad_words=long))
    assert min(seen.values()) > 100, seen
    assert across > 10


def banned(wish: Wish, offset: int = 0) -> list[int]:
    """Ids at -inf, of a row that has company."""
    company = Wish(prompt=(3,), output=(4, 5), bad_words=((4, 5, 6),), repetition=1.5)
    return np.flatnonzero(found(np.zeros((2, V)), [wish, company], offset)[0] == -np.inf).tolist()


A, C, D, E = 3, 4, 5, 6
# (what is asked for and where, drafts before, ids that are forbidden)
BANS = [
    # A bad word is complete with its last id, when all others stand before it.
    ({"bad_words": ((A,),)}, 0, [A]),
    ({"bad_words": ((A, C),), "output": (A,)}, 0, [C]),
    ({"bad_words": ((A, C),), "output": (A, D)}, 0, []),
    ({"bad_words": ((A, C),)}, 0, []),
    ({"bad_words": ((A, C, D),), "output": (A, C)}, 0, [D]),
    ({"bad_words": ((A, C, D),), "output": (C,)}, 0, []),
    ({"bad_words": ((A, A, A),), "output": (A,)}, 0, []),
    ({"bad_words": ((A, A, A),), "output": (A, A)}, 0, [A]),
    ({"bad_words": ((A,), (C, D), (A, C, E)), "output": (A, C)}, 0, [A, D, E]),
    # In the output only: not in the prompt, and not across its end.
    ({"bad_words": ((A, C),), "prompt": (A,)}, 0, []),
    ({"bad_words": ((A, C, D),), "prompt": (1, A), "output": (C,)}, 0, []),
    ({"bad_words": ((A, C, D),), "prompt": (1, A), "drafts": (C, 0, 0, 0)}, 1, []),
    # Across the end of what is committed, and in the drafts alone.
    ({"bad_words": ((A, C, D),), "output": (A,), "drafts": (C, D, 0, 0)}, 0, []),
    ({"bad_words": ((A, C, D),), "output": (A,), "drafts": (C, D, 0, 0)}, 1, [D]),
    ({"bad_words": ((A, C, D),), "output": (A,), "drafts": (C, D, 0, 0)}, 2, []),
    ({"bad_words": ((A, C, D, E),), "output": (A,), "drafts": (C, D, 0, 0)}, 2, [E]),
    ({"bad_words": ((A, C, D),), "drafts": (0, A, C, 0)}, 3, [D]),
    ({"bad_words": ((A, C),), "drafts": (A, 0, 0, 0)}, 2, []),
    # The last id of the vocabulary is one like others, and nothing stands for "none".
    ({"bad_words": ((V - 1,),)}, 0, [V - 1]),
    ({"bad_words": ((V - 1, 0),), "output": (V - 1,)}, 0, [0]),
    ({"stop_ids": (A,), "min_tokens": 0}, 0, []),
    ({"allowed_ids": (0, 1, V - 1)}, 0, list(range(2, V - 1))),
    # Stop ids are free once min_tokens are there, also where drafts make up the number.
    ({"stop_ids": (A, V - 1), "min_tokens": 3, "output": (1, 2)}, 0, [A, V - 1]),
    ({"stop_ids": (A, V - 1), "min_tokens": 3, "output": (1, 2)}, 1, []),
    ({"stop_ids": (A,), "min_tokens": 3, "prompt": (1,) * 5}, 2, [A]),
    ({"stop_ids": (A,), "min_tokens": 3, "prompt": (1,) * 5}, 3, []),
    # All that is forbidden adds up, and no bias lifts it.
    ({"allowed_ids": (A, C), "bad_words": ((A,),), "bias": ((A, 100.0), (D, 100.0))}, 0, [*range(A), *range(D, V), A]),
]


@pytest.mark.parametrize(("wish", "offset", "ids"), BANS)
def test_what_is_forbidden(wish, offset, ids):
    assert banned(Wish(**wish), offset) == sorted(ids)


# (what is asked for, the logits of three ids, what becomes of them); 1 and 2 are the prompt.
ORDER = [
    # Repetition divides what is positive and multiplies what is not, of prompt and output.
    ({"repetition": 2.0, "output": (3,)}, (4.0, -3.0, 6.0, 8.0), (4.0, -6.0, 3.0, 4.0)),
    # Presence once, frequency once an occurrence, of the output alone.
    ({"presence": 0.5, "output": (3, 3, 0)}, (1.0, 1.0, 1.0, 1.0), (0.5, 1.0, 1.0, 0.5)),
    ({"frequency": 0.5, "output": (3, 3, 0)}, (1.0, 1.0, 1.0, 1.0), (0.5, 1.0, 1.0, 0.0)),
    # Repetition sees the biased logit (1 - 3) * 2; it comes before the others, (8 / 2) - 1 - 2.
    ({"repetition": 2.0, "bias": ((1, -3.0),)}, (0.0, 1.0, 0.0, 0.0), (0.0, -4.0, 0.0, 0.0)),
    ({"repetition": 2.0, "presence": 1.0, "frequency": 1.0, "output": (3, 3)}, (0, 0, 0, 8.0), (0, 0, 0, 1.0)),
    # Forbidden stays forbidden, whatever rewards it.
    (
        {"repetition": 0.5, "presence": -2.0, "allowed_ids": (0,), "output": (3,)},
        (1.0, 1.0, 1.0, 1.0),
        (1.0, -np.inf, -np.inf, -np.inf),
    ),
]


@pytest.mark.parametrize(("wish", "logits", "becomes"), ORDER)
def test_the_order(wish, logits, becomes):
    z = np.zeros((1, V))
    z[0, :4] = logits
    np.testing.assert_allclose(found(z, [Wish(**wish)], 0)[0, :4], becomes, rtol=1e-6)
    output = wish.get("output", ())
    drafted = Wish(**wish | {"output": (), "drafts": (*output, *(0,) * (K - len(output)))})
    np.testing.assert_allclose(found(z, [drafted], len(output))[0, :4], becomes, rtol=1e-6)


def test_the_draft_that_is_chosen_does_not_count_itself():
    """At offset i the history is what comes before x_{i+1}: another x_{i+1} changes nothing."""
    how = {"frequency": 1.0, "repetition": 1.5, "bad_words": ((A, C), (C, C)), "output": (A,)}
    z = np.random.default_rng(1).normal(size=(1, V))
    for offset in range(K):
        drafts = [(C, D, A, C)[:offset] + (other,) * (K - offset) for other in (C, E)]
        one, two = (found(z, [Wish(**how, drafts=d)], offset) for d in drafts)
        np.testing.assert_array_equal(one, two)


def test_what_is_not_committed_does_not_count():
    """Buffers hold what an earlier round rejected; it is no history."""
    wish = Wish(output=(A, C), repetition=2.0, frequency=1.0, bad_words=((C, 7), (7, 7, 7), (7,) * 4))
    z = np.random.default_rng(2).normal(size=(1, V))
    np.testing.assert_array_equal(found(z, [wish], 0, junk=0), found(z, [wish], 0, junk=7))
