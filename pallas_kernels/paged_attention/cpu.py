"""paged_attention on CPU: the plain form, but that scores of a few rows are found while keys are read where they lie
(see `streamed`). The library's product wants them gathered, and takes longer than that."""

import functools

import jax.numpy as jnp

from pallas_kernels.paged_attention import reference
from pallas_kernels.streamed import SUMS, sums


def score(query, key):
    """As `reference.score`."""
    num_rows = query.shape[2]
    if query.dtype != jnp.float32 or not 1 < num_rows <= SUMS:
        return reference.score(query, key)
    found = sums([key * query[:, None, :, r] for r in range(num_rows)])
    return jnp.stack(found, axis=1).transpose(0, 3, 1, 2)


paged_attention = functools.partial(reference.paged_attention, score=score)
