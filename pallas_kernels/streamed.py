"""On CPU: a few rows against a matrix that lies output-first and is read once, row by row.

The compiler's products over several rows, which are its library's, walk down 64 columns at a time and wait for memory;
they take half as long again, or twice as long, as one over a single row. Here each row of the matrix is multiplied with
all rows of x while it is read, in one loop of the compiler's own: a reduction of as many arrays as there are sums.
Several rows of the matrix, far from each other, are read at a time, so that more memory is under way, and what is read
of x serves all of them: the more of them, the less often a large x is read again from beyond the nearest cache. The
compiler may reorder sums there (see `CPU_COMPILER_OPTIONS` in jaxspec/hardware/platforms.py), or it would add up number
by number. Its order depends on how many sums there are, so that the number of rows changes the last bits of each.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from pallas_kernels import plain

MAX_ROWS = 12  # more are faster by the library
SUMS = 24  # at a time: as many as there are registers for
SMALL_X = 5 * 1024  # numbers, which are read again from the nearest cache


def product(x, matrix):
    """Multiply x f32[..., I] with a matrix [O, I] -> f32[..., O].

    A matrix in bfloat16 is read as such, half of the bytes, and converted for the arithmetic.
    """
    rows = x.size // x.shape[-1]
    streams = num_streams(rows, *matrix.shape[::-1])
    # One array's reduction is another loop, which waits for its sums.
    if rows > MAX_ROWS or streams * rows == 1:
        return once(by_library, x, matrix) if matrix.dtype == jnp.bfloat16 else by_library(x, matrix)
    return once(by_streams, x, matrix, streams)


def by_library(x, matrix):
    """Multiply by the compiler's library.

    A call (`once`), where the matrix is converted: the compiler would convert all layers' before the first product.
    """
    return plain.dot(x, matrix.astype(x.dtype), 1, x.dtype)


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


def by_streams(x, matrix, streams):
    """Multiply by one loop over the matrix. (Reshaping is done here, or the compiler moves it through all layers.)"""
    shares = jnp.split(matrix, streams)
    products = [share.astype(x.dtype) * row for row in x.reshape(-1, x.shape[-1]) for share in shares]
    return jnp.concatenate(sums(products)).reshape(*x.shape[:-1], -1)


def sums(arrays):
    """Each one's over its last axis, in one loop. Two arrays or more, of one shape, float32."""
    zeros, last = [jnp.float32(0)] * len(arrays), arrays[0].ndim - 1
    return lax.reduce(arrays, zeros, lambda some, more: [a + b for a, b in zip(some, more, strict=True)], (last,))
