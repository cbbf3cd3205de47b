"""paged_attention on CPU: the plain form, with another product for the scores of a few query rows.

These scores are summed up while the keys are read from their pages (see `streamed`). The library's product needs the
keys gathered first, and takes longer.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention import reference
from pallas_kernels.streamed import SUMS, sums


def score(query: jax.Array, key: jax.Array) -> jax.Array:
    """Return the scores like `reference.score`, for a few float32 rows by one reduction."""
    num_rows = query.shape[2]
    if query.dtype != jnp.float32 or not 1 < num_rows <= SUMS:
        return reference.score(query, key)
    found = sums([key * query[:, None, :, r] for r in range(num_rows)])
    return jnp.stack(found, axis=1).transpose(0, 3, 1, 2)


paged_attention = functools.partial(reference.paged_attention, score=score)
