"""On GPU: the compiler's product where x may be a single row.

The compiler makes a slow reduction of a product with one row. As a few rows it is a matrix product, which is faster for
matrices too large for `_split_product` (see docs/notes/gpu.md).
"""

import functools

from pallas_kernels import plain


def linear(weights, x):
    """x [..., I] times weights [I, O] -> [..., O], as `plain.linear`."""
    return plain.as_few_rows(functools.partial(plain.linear, weights), x)
