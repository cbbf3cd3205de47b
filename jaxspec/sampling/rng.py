"""Counter-based random numbers: a key depends on the request's seed, a position and a purpose, on nothing else.

So a request's tokens do not depend on which rows share its batch, nor on where a launch ended. Keys of the standard
rule are those of the position where the round *starts*: round starts strictly increase, so no number serves twice.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.common.shapes import Array, Float, Int, Key, Shaped, UInt

# What a number is for. "shared" is the coupled rule's noise, one vector per absolute position.
PURPOSES = {"draft": 0, "accept": 1, "residual": 2, "shared": 3}


def keys(
    of_row: UInt[Array, "B 2"],
    position: Int[Array, "B ..."],
    purpose: str,
    offset: Int[Array, "B ..."] | Int[Array, ""] | int = 0,
) -> Key[Array, "B ..."]:
    """One key a row, or some, which take no longer to compile. of_row: `of_seed`."""
    offset = jnp.broadcast_to(jnp.asarray(offset, jnp.int32), position.shape)
    return folded(of_row, position, PURPOSES[purpose], offset)


@jax.jit  # lowered once in a program, wherever it is called
def folded(of_row: jax.Array, position: jax.Array, purpose: jax.Array, offset: jax.Array) -> jax.Array:
    """`keys` of a purpose's number."""
    shape, fold = position.shape, jax.jit(jax.vmap(jax.random.fold_in))
    each = lambda x: jnp.broadcast_to(x, shape).reshape(-1)
    rows = jax.random.wrap_key_data(of_row, impl="threefry2x32")
    keys = each(rows.reshape(-1, *(1,) * (len(shape) - 1)))
    for part in (position, purpose, offset):
        keys = fold(keys, each(part))
    return keys.reshape(shape)


def of_seed(seed: UInt[Array, "B 2"]) -> UInt[Array, "B 2"]:
    """seed: a row's high and its low word -> what its keys are made of, once a launch."""
    rows = jnp.broadcast_to(jax.random.key(0, impl="threefry2x32"), seed.shape[:1])
    for word in (seed[:, 0], seed[:, 1]):  # high, low
        rows = jax.vmap(jax.random.fold_in)(rows, word)
    return jax.random.key_data(rows)


def gumbel(keys: Key[Array, "*some"], size: int) -> Float[Array, "*some {size}"]:
    """Standard Gumbel noise, so many numbers a key.

    mode="high": the default mode caps near 16 and would never sample the tail of a large vocabulary.
    """
    drawn = jax.vmap(lambda key: jax.random.gumbel(key, (size,), jnp.float32, mode="high"))(keys.reshape(-1))
    return drawn.reshape(*keys.shape, size)


def uniform(keys: Key[Array, "*some"]) -> Float[Array, "*some"]:
    """Uniform numbers in [0, 1)."""
    return jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(keys.reshape(-1)).reshape(keys.shape)


def seed_words(seed: int) -> tuple[int, int]:
    """A 64-bit seed as two uint32 words (high, low). Negative seeds wrap."""
    seed &= (1 << 64) - 1
    return seed >> 32, seed & 0xFFFFFFFF


def take_row(x: Shaped[Array, "B T *rest"], index: Int[Array, " B"]) -> Shaped[Array, " B *rest"]:
    """x at index of its second axis."""
    return lax.squeeze(jnp.take_along_axis(x, index.reshape(-1, 1, *(1,) * (x.ndim - 2)), axis=1), (1,))
