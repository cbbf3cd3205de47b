"""On CPU: a few rows against a matrix that lies output-first and is read once, row by row.

The compiler's products over several rows, which are its library's, walk down 64 columns at a time and wait for memory;
they take half as long again, or twice as long, as one over a single row. Here each row of the matrix is multiplied with
all rows of x while it is read, in one loop of the compiler's own: a reduction of as many arrays as there are sums.
Several rows of the matrix, far from each other, are read at a time, so that more memory is under way, and what is read
of x serves all of them: the more of them, the less often a large x is read again from beyond the nearest cache. The
compiler may reorder sums there (see `CPU_COMPILER_OPTIONS` in jaxspec/platforms.py), or it would add up number by
number. Its order depends on how many sums there are, so that the number of rows changes the last bits of each.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from pallas_kernels import plain

MAX_ROWS = 12  # more are faster by the library
SUMS = 24  # at a time: as many as there are registers for
SMALL_X = 5 * 1024  # numbers, which are read again from the nearest cache


def linear(weights, x):
    """x [..., I] times weights [I, O], the transpose of a matrix that lies output-first, as `plain.linear`. Weights in
    bfloat16 are read as such, half of the bytes, and widened for the arithmetic."""
    rows = x.size // x.shape[-1]
    streams = num_streams(rows, *weights.shape)
    # One array's reduction is another loop, which waits for its sums.
    if x.dtype != jnp.float32 or rows > MAX_ROWS or streams * rows == 1:
        narrow = x.dtype == jnp.float32 and weights.dtype == jnp.bfloat16
        return once(widened, x, weights.T) if narrow else plain.linear(weights, x)
    return once(product, x, weights.T, streams)


def widened(x, matrix):
    """By the library. A call, so that the compiler does not widen all layers' matrices before the first product."""
    return plain.linear(matrix.astype(x.dtype).T, x)


def num_streams(rows, depth, width):
    """How many rows of the matrix [width, depth] are read at a time."""
    most = 2 if rows > 1 and rows * depth <= SMALL_X else 4
    return next(s for s in (4, 2, 1) if s == 1 or (s <= most and s * rows <= SUMS and width % s == 0))


def once(function, *args):
    """function(*args), computed by itself: else the compiler makes it part of every loop that reads it, to be computed
    anew for every output. Only arrays are traced."""
    static = tuple(i for i, arg in enumerate(args) if not isinstance(arg, jax.Array))
    with set_xla_metadata(inlineable="false"):
        return jax.jit(function, static_argnums=static)(*args)


def product(x, matrix, streams):
    """x [..., I], matrix [O, I] -> [..., O]. (Reshaping is done here, or the compiler moves it through all layers.)"""
    shares = jnp.split(matrix, streams)
    products = [share.astype(x.dtype) * row for row in x.reshape(-1, x.shape[-1]) for share in shares]
    return jnp.concatenate(sums(products)).reshape(*x.shape[:-1], -1)


def sums(arrays):
    """Each one's over its last axis, in one loop. Two arrays or more, of one shape, float32."""
    zeros, last = [jnp.float32(0)] * len(arrays), arrays[0].ndim - 1
    return lax.reduce(arrays, zeros, lambda some, more: [a + b for a, b in zip(some, more, strict=True)], (last,))
