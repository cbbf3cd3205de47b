"""Products of a few rows x with a weight matrix on CPU. The matrix is stored output-first and read once, row by row.

For a product with several rows of x, XLA calls a library. The library walks down 64 columns at a time and waits for
memory: such a product takes 1.5 to 2 times as long as a product with a single row of x. In this file each row of the
matrix is multiplied with all rows of x while it is read. XLA generates one loop for this: a reduction over as many
arrays as there are sums.

Several rows of the matrix, far from each other, are read at a time. This keeps more memory reads in flight. Each
element of x that is read serves all these rows of the matrix. So a large x is read less often from memory beyond the
nearest cache.

XLA must be allowed to reorder the sums (see `CPU_COMPILER_OPTIONS` in jaxspec/hardware/platforms.py), or it would add
one element at a time. The order that XLA chooses depends on the number of sums. So the number of rows of x changes the
last bits of each sum.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from pallas_kernels import plain

MAX_ROWS = 12  # largest number of rows of x; for more rows the library is faster
SUMS = 24  # largest number of sums computed at a time: registers hold no more
SMALL_X = 5 * 1024  # largest number of elements of an x that stays in the nearest cache

T = TypeVar("T")


def product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Multiply x f32[..., I] with a matrix [O, I]. Return f32[..., O].

    A matrix of a smaller dtype, bfloat16 or 8 bits, is read in that dtype and converted to float32 for the arithmetic.
    """
    rows = x.size // x.shape[-1]
    streams = num_streams(rows, *matrix.shape[::-1])
    # A reduction of a single array would compile to another loop, which waits for each addition.
    if rows > MAX_ROWS or streams * rows == 1:
        return by_library(x, matrix) if matrix.dtype == x.dtype else once(by_library, x, matrix)
    return once(by_streams, x, matrix, streams)


def by_library(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Multiply x with a matrix by the library that XLA calls.

    A matrix of a smaller dtype is converted first. For such a matrix, callers wrap this function in `once`. Otherwise
    XLA would convert the matrices of all layers before the first product.
    """
    return plain.dot(x, matrix.astype(x.dtype), 1, x.dtype)


def num_streams(rows: int, depth: int, width: int) -> int:
    """Return the number of rows of the matrix [width, depth] that are read at a time. rows: number of rows of x."""
    most = 2 if rows > 1 and rows * depth <= SMALL_X else 4
    for streams in (4, 2):
        if streams <= most and streams * rows <= SUMS and width % streams == 0:
            return streams
    return 1


def once(function: Callable[..., T], *args: Any) -> T:
    """Return function(*args), compiled as a separate function that XLA does not inline.

    XLA would otherwise inline the function into every loop that reads its result, and recompute it for every output.
    Only arrays and pytrees of arrays are traced; other arguments are static.
    """

    def traced(arg: Any) -> bool:
        return all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(arg))

    static = tuple(i for i, arg in enumerate(args) if not traced(arg))
    with set_xla_metadata(inlineable="false"):
        result: T = jax.jit(function, static_argnums=static)(*args)
    return result


def by_streams(x: jax.Array, matrix: jax.Array, streams: int) -> jax.Array:
    """Multiply x with a matrix in one loop over the matrix, `streams` rows at a time.

    The result is reshaped in this function, because XLA would move a reshape by the caller through all layers.
    """
    shares = jnp.split(matrix, streams)
    products = [share.astype(x.dtype) * row for row in x.reshape(-1, x.shape[-1]) for share in shares]
    return jnp.concatenate(sums(products)).reshape(*x.shape[:-1], -1)


def sums(arrays: Sequence[jax.Array], axes: int = 1) -> list[jax.Array]:
    """Return the sum of each array over its last axes, all in one loop.

    arrays: two or more float32 arrays of the same shape.
    axes: number of the last axes to sum over.
    """

    def add(some: Sequence[jax.Array], more: Sequence[jax.Array]) -> list[jax.Array]:
        return [a + b for a, b in zip(some, more, strict=True)]

    zeros = [jnp.float32(0)] * len(arrays)
    last = range(arrays[0].ndim - axes, arrays[0].ndim)
    found: list[jax.Array] = lax.reduce(arrays, zeros, add, tuple(last))
    return found
