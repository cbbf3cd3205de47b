"""On GPU: the compiler's product where x may be a single row.

The compiler makes a slow reduction of a product with one row. With a few rows of zeros more it is a matrix product,
which is faster for matrices too large for `_split_product` (see docs/notes/gpu.md).
"""

import jax.numpy as jnp

from pallas_kernels import plain

ROWS = 8


def linear(weights, x):
    """x [..., I] times weights [I, O] -> [..., O], as `plain.linear`."""
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] > 1:
        return plain.linear(weights, x)
    y = plain.linear(weights, jnp.pad(rows, ((0, ROWS - 1), (0, 0))))
    return y[:1].reshape(*x.shape[:-1], -1)
