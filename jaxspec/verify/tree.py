"""The coupled rule on a tree of drafts.

At each node the target draws its own token. The walk goes on to the child that equals it. If no child does, the walk
ends, and the target's token is the extra token. The emitted tokens are those that plain decoding draws with the same
noise, whatever the tree holds. The walk goes on from a node with the summed probability of its children, as under
EAGLE-2's rule (Li et al., https://arxiv.org/abs/2406.16858).
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxspec.common.shapes import Array, Bool, Int
from jaxspec.drafters.base import Proposal
from jaxspec.sampling.rng import take_row
from jaxspec.verify.base import Verdict


def verify(own: Int[Array, "B T"], proposal: Proposal, valid: Bool[Array, "B T"]) -> Verdict:
    """Accept the path along which every draft equals the target's own token at its parent.

    own: the target's own token at each of the T = K + 1 places.
    valid: whether the target has an own token there.
    """
    tree = proposal.tree
    assert tree is not None
    at_parent = jnp.take_along_axis(jnp.where(valid, own, -1), tree.parents, axis=1)
    drafts = jnp.pad(proposal.tokens, ((0, 0), (1, 0)))  # place 0 is the pending token, always reached
    place = jnp.arange(own.shape[1])
    equal = (drafts == at_parent) & (place <= proposal.num_proposed[:, None]) | (place == 0)
    reached = jnp.all(equal[:, None] | ~tree.ancestors, axis=2)
    # Siblings differ, so at most one path is reached. If two were equal, argmax would take the first.
    last = jnp.argmax(jnp.where(reached, tree.depth, -1), axis=1).astype(jnp.int32)
    return Verdict(take_row(tree.depth, last), take_row(own, last), last)
