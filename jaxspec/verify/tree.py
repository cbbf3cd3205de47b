"""The coupled acceptance rule on a tree of drafts, where a node's children are alternative next tokens.

The rule walks down the tree. At each node the target draws its own token. The walk goes on to the child that equals
this token. If no child equals it, the walk ends, and the target's token is the extra token. The emitted tokens are
those that decoding without drafts draws with the same noise, whatever the tree holds. The probability that
the walk goes on from a node is the sum of the target's probabilities of the node's children. So it is under EAGLE-2's
rule (Li et al., https://arxiv.org/abs/2406.16858).
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxspec.common.shapes import Array, Bool, Int
from jaxspec.drafters.base import Proposal
from jaxspec.sampling.rng import take_row
from jaxspec.verify.base import Verdict


def verify(own: Int[Array, "B T"], proposal: Proposal, valid: Bool[Array, "B T"]) -> Verdict:
    """Accept the longest path from the root on which each draft equals the target's own token at the draft's parent.

    own: the target's own token at each of the T = K + 1 places (nodes of the tree). Place 0 is the root.
    valid: whether the target has an own token at each place.
    """
    tree = proposal.tree
    assert tree is not None
    at_parent = jnp.take_along_axis(jnp.where(valid, own, -1), tree.parents, axis=1)
    # Place 0 is always reached. It is the pending token: accepted, but not in the KV caches yet.
    drafts = jnp.pad(proposal.tokens, ((0, 0), (1, 0)))
    place = jnp.arange(own.shape[1])
    equal = (drafts == at_parent) & (place <= proposal.num_proposed[:, None]) | (place == 0)
    reached = jnp.all(equal[:, None] | ~tree.ancestors, axis=2)
    # The children of a node differ, so all reached places are on one path. The last one is the deepest. If two
    # children were equal, argmax would take the first.
    last = jnp.argmax(jnp.where(reached, tree.depth, -1), axis=1).astype(jnp.int32)
    return Verdict(take_row(tree.depth, last), take_row(own, last), last)
