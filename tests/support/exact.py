"""What the tests hold samples against: plain numpy in float64, and a chi-square that can fail."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from jaxspec.cache.pages import allocate
from jaxspec.models.paged import PagedModel
from jaxspec.parallel.placement import make_placement


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def distribution(
    logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """[..., V] -> probabilities, with sorts: temperature, min-p, top-k, top-p; what ties with a threshold stays."""
    z = np.asarray(logits, np.float64) / temperature
    size = z.shape[-1]
    if min_p > 0:
        p = softmax(z)
        z = np.where(p >= p.max(axis=-1, keepdims=True) * min_p, z, -np.inf)
    if 0 < top_k < size:
        kth = np.sort(z, axis=-1)[..., size - top_k, None]
        z = np.where(z >= kth, z, -np.inf)
    if top_p < 1:
        p = softmax(z)
        best_first = -np.sort(-p, axis=-1)
        needed = np.argmax(np.cumsum(best_first, axis=-1) >= top_p, axis=-1)[..., None]
        z = np.where(p >= np.take_along_axis(best_first, needed, axis=-1), z, -np.inf)
    return softmax(z)


def allowed(
    size: int,
    output: Sequence[int],
    allowed_ids: Sequence[int] | None = None,
    bad_words: Sequence[Sequence[int]] = (),
    min_tokens: int = 0,
    stop_ids: Sequence[int] = (),
) -> list[bool]:
    """Which ids may follow this output."""
    ok = [allowed_ids is None or i in allowed_ids for i in range(size)]
    for word in bad_words:
        *start, last = word
        if not start or list(output[-len(start) :]) == start:
            ok[last] = False
    if len(output) < min_tokens:
        for i in stop_ids:
            ok[i] = False
    return ok


def biased(logits: np.ndarray, ok: Sequence[bool], bias: Sequence[tuple[int, float]] = ()) -> np.ndarray:
    """logits [V] with what is forbidden at -inf and the bias added."""
    z = [float(x) if fine else -np.inf for x, fine in zip(logits, ok, strict=True)]
    for i, value in bias:
        z[i] += value
    return np.array(z)


def penalised(
    logits: np.ndarray,
    prompt: Sequence[int],
    output: Sequence[int],
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> np.ndarray:
    """logits [V] after the three penalties."""
    z = [float(x) for x in logits]
    for i in {*prompt, *output}:
        z[i] = z[i] / repetition if z[i] > 0 else z[i] * repetition
    for i in output:
        z[i] -= frequency
    for i in set(output):
        z[i] -= presence
    return np.array(z)


def next_logits(model: PagedModel, params, prompt: Sequence[int], length: int) -> list[np.ndarray]:
    """The model's logits after every continuation of the prompt: for i < length, [V]*i + [V], in one dense pass."""
    size, start = model.config.vocab_size, len(prompt)
    tails = np.array(list(itertools.product(range(size), repeat=length - 1)), np.int32).reshape(-1, length - 1)
    rows = len(tails)
    tokens = np.concatenate([np.tile(np.array(prompt, np.int32), (rows, 1)), tails], axis=1)
    row_pages = -(-tokens.shape[1] // model.layout.page_size)
    assert rows * row_pages <= model.layout.num_pages, "give the model more pages"
    positions = np.tile(np.arange(tokens.shape[1], dtype=np.int32), (rows, 1))
    table = np.arange(rows * row_pages, dtype=np.int32).reshape(rows, row_pages)

    def run(params, pages, tokens):
        done = model.forward(params, pages, tokens, jnp.asarray(positions), tokens < 0, jnp.asarray(table))
        return done.decoder.logits(done.hidden[:, start - 1 :], model.backend)

    logits = np.asarray(jax.jit(run)(params, allocate(model.layout, make_placement()), tokens), np.float64)
    logits = logits.reshape(*(size,) * (length - 1), length, size)
    # Position i does not depend on what follows it: take the first of those continuations.
    return [logits[(slice(None),) * i + (0,) * (length - 1 - i) + (i,)] for i in range(length)]


def joint(conditionals: Sequence[np.ndarray]) -> np.ndarray:
    """p(next | prefix) for each length, [V]*i + [V] -> the law of the sequence [V]*length."""
    law = np.ones(())
    for p in conditionals:
        law = law[..., None] * p
    return law


def histogram(sequences: np.ndarray, size: int) -> np.ndarray:
    """Sequences [samples, n] of ids below size -> counts [size]*n."""
    shape = (size,) * sequences.shape[1]
    cells = np.ravel_multi_index(tuple(sequences.T), shape)
    return np.bincount(cells, minlength=size ** len(shape)).reshape(shape)


def chi_square(counts: np.ndarray, law: np.ndarray, least: float = 5.0) -> float:
    """p-value of counts under law. Cells expecting fewer than `least` are pooled; one count of the impossible is 0."""
    counts, law = counts.ravel(), law.ravel()
    if counts[law == 0].sum():
        return 0.0
    expected = counts.sum() * law / law.sum()
    order = np.argsort(expected)
    counts, expected = counts[order], expected[order]
    pooled = np.searchsorted(expected, least)
    while 0 < pooled < len(expected) - 1 and expected[:pooled].sum() < least:
        pooled += 1
    if pooled:
        counts = np.append(counts[pooled:], counts[:pooled].sum())
        expected = np.append(expected[pooled:], expected[:pooled].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    if len(expected) < 2:
        return 1.0
    return float(stats.chi2.sf(((counts - expected) ** 2 / expected).sum(), len(expected) - 1))


def pooled_mass(law: np.ndarray, samples: int, least: float = 5.0) -> float:
    """How much of the law chi_square cannot tell apart."""
    return float(law[law * samples < least].sum())
