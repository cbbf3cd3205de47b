"""The coupled acceptance rule: draft and target draw tokens with shared noise, and equal tokens are accepted.

Source: Daliri et al., https://arxiv.org/abs/2408.07978 (drafter-invariant speculation).
Drafts are accepted up to the first one that differs from the target's token. The noise is one Gumbel vector G_i for
each absolute position i. The target's token is y_i = argmax(log p_i + G_i), whatever the drafts are. So a seeded
request gives the same tokens as decoding without drafts and with the same seed. The rule is greedy decoding on logits
plus noise, and verifies drafts as the greedy rule does.
"""

from __future__ import annotations

import itertools

import numpy as np

from jaxspec.common.shapes import Array, Float, Int, UInt
from jaxspec.sampling import rng
from jaxspec.verify.greedy import verify as verify


def shared_noise(
    seed: UInt[Array, "B 2"], position: Int[Array, "B ..."], vocab_size: int
) -> Float[Array, "B ... {vocab_size}"]:
    """Return the Gumbel noise that draft and target share for the tokens at these absolute positions."""
    return rng.gumbel(rng.keys(seed, position, "shared"), vocab_size)


def joint(p: Float[np.ndarray, " V"], q: Float[np.ndarray, " V"]) -> Float[np.ndarray, "V V"]:
    """Compute P(draft token = a, target token = b) under shared Gumbel noise exactly, as an array [a, b].

    Sampling by Gumbel noise is an exponential race: with independent exponential variables E_v, the draft's token
    minimises E_v / q_v, and the target's token minimises E_v / p_v. Let s = E_a, t = E_b and r = t / s. All other
    tokens must lose both races. That leaves an integral over r of 1 / c(r)^2, where c is piecewise linear.
    """
    size = len(p)
    result = np.zeros((size, size))
    for a, b in itertools.product(range(size), repeat=2):
        if q[a] == 0 or p[b] == 0:
            continue
        if a == b:
            result[a, a] = 1.0 / sum(max(q[v] / q[a], p[v] / p[a]) for v in range(size))
            continue
        others = [v for v in range(size) if v not in (a, b)]
        low, high = q[b] / q[a], (p[b] / p[a] if p[a] > 0 else np.inf)
        kinks = [q[v] * p[b] / (q[a] * p[v]) for v in others if p[v] > 0]
        cuts = [low, *sorted(k for k in kinks if low < k < high), high]
        for left, right in itertools.pairwise(cuts):
            if right <= left:
                continue
            middle = left + 1.0 if right == np.inf else (left + right) / 2
            steep = [v for v in others if middle * p[v] / p[b] > q[v] / q[a]]
            slope = 1.0 + sum(p[v] / p[b] for v in steep)
            start = 1.0 + sum(q[v] / q[a] for v in others if v not in steep)
            # The added term is the integral of (start + slope * r)^-2 from left to right.
            result[a, b] += (1 / (start + slope * left) - 1 / (start + slope * right)) / slope
    return result


def output_distribution(
    p: Float[Array, "N T V"], q: Float[Array, "N K V"], tokens: Int[Array, "N K"]
) -> tuple[Float[np.ndarray, "N T"], Float[np.ndarray, "N T V"]]:
    """Compute the exact distribution of the outcome under this rule, as `standard.output_distribution` does.

    The computation is in numpy, on the host.
    """
    rows = zip(np.asarray(p), np.asarray(q), np.asarray(tokens), strict=True)
    lengths, extras = zip(*(row_distribution(*row) for row in rows), strict=True)
    return np.stack(lengths), np.stack(extras)


def row_distribution(
    p: Float[np.ndarray, "T V"], q: Float[np.ndarray, "K V"], tokens: Int[np.ndarray, " K"]
) -> tuple[Float[np.ndarray, " T"], Float[np.ndarray, "T V"]]:
    """Compute the result of `output_distribution` for one row."""
    places = zip(p.astype(float), q.astype(float), tokens, strict=False)  # p has one more place, after the last draft
    lengths, extras = [], []
    reach = 1.0  # probability that all drafts so far are accepted
    for p_i, q_i, x in places:
        target_given_draft = joint(p_i, q_i)[x] / q_i[x]
        accept = target_given_draft[x]
        rejected = np.where(np.arange(len(p_i)) == x, 0.0, target_given_draft)
        lengths.append(reach * (1 - accept))
        extras.append(rejected / rejected.sum() if rejected.sum() > 0 else p_i)
        reach *= accept
    return np.array([*lengths, reach]), np.array([*extras, np.asarray(p[-1], float)])
