"""The op paged_attention on CPU: plain jnp as in `reference`, but with another product for scores of a few query rows.

These scores are summed up while the keys are read from their pages (see `pallas_kernels.streamed`). The product of the
library that XLA calls takes longer, because it needs the keys gathered first.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention import reference
from pallas_kernels.streamed import SUMS, sums


def score(query: jax.Array, key: jax.Array) -> jax.Array:
    """Return attention scores as `reference.score` does, for a few float32 query rows by one reduction."""
    num_rows = query.shape[2]
    if query.dtype != jnp.float32 or not 1 < num_rows <= SUMS:
        return reference.score(query, key)
    found = sums([key * query[:, None, :, r] for r in range(num_rows)])
    return jnp.stack(found, axis=1).transpose(0, 3, 1, 2)


paged_attention = functools.partial(reference.paged_attention, score=score)
