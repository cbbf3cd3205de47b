"""What an acceptance rule gives back."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.shapes import Array, Bool, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Verdict:
    """What a rule says of a proposal.

    num_accepted i32[B]: drafts kept, 0..K_b.
    next_token i32[B]: the one extra token that follows them.
    last i32[B]: of a tree, the place of the last one that is kept; None: a chain's stand in a row.
    """

    num_accepted: jax.Array
    next_token: jax.Array
    last: jax.Array | None = None


def leading(accepted: Bool[Array, "B K"], num_proposed: Int[Array, " B"]) -> Int[Array, " B"]:
    """How many drafts stand before the first failure, among the num_proposed real ones."""
    real = jnp.arange(accepted.shape[1])[None, :] < num_proposed[:, None]
    return jnp.sum(jnp.cumprod((accepted & real).astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
