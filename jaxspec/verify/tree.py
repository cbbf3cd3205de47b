"""The coupled rule on a tree: at each node the target's own token is drawn, and the walk goes to the child that equals
it, or ends there with that token.

What comes out is what plain decoding draws with the same noise, whatever the tree holds. It accepts with the summed
probability of a node's children, as EAGLE-2's rule does (Li et al., https://arxiv.org/abs/2406.16858).
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxspec.common.shapes import Array, Bool, Int
from jaxspec.drafters.base import Proposal
from jaxspec.sampling.rng import take_row
from jaxspec.verify.base import Verdict


def verify(y: Int[Array, "B T"], proposal: Proposal, lawful: Bool[Array, "B T"]) -> Verdict:
    """y, T = K + 1: the target's own token at each place; lawful: where there is one."""
    tree, count = proposal.tree, y.shape[1]
    assert tree is not None
    before = jnp.take_along_axis(jnp.where(lawful, y, -1), tree.parents, axis=1)
    drafts = jnp.pad(proposal.tokens, ((0, 0), (1, 0)))  # of place 0, which nothing has to equal
    place = jnp.arange(count)
    fits = (drafts == before) & (place <= proposal.num_proposed[:, None]) | (place == 0)
    reached = jnp.all(fits[:, None] | ~tree.ancestors, axis=2)
    # Siblings differ, so that one path at most is reached; of two that are alike, the first.
    last = jnp.argmax(jnp.where(reached, tree.depth, -1), axis=1).astype(jnp.int32)
    return Verdict(take_row(tree.depth, last), take_row(y, last), last)
