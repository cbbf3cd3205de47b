"""Counter-based random numbers: a key depends only on the request's seed, a position, a purpose and an offset.

A request's tokens therefore depend neither on the other rows of its batch nor on where a launch ends. The standard rule
uses keys of the position at which the round *starts*. Round starts strictly increase, so that no key is used twice.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.common.shapes import Array, Float, Int, Key, Shaped, UInt

# Purposes of random numbers. "shared" is the noise of the coupled rule, one vector per absolute position.
PURPOSES = {"draft": 0, "accept": 1, "residual": 2, "shared": 3}


def keys(
    of_row: UInt[Array, "B 2"],
    position: Int[Array, "B ..."],
    purpose: str,
    offset: Int[Array, "B ..."] | Int[Array, ""] | int = 0,
) -> Key[Array, "B ..."]:
    """Return a key for each position. Many positions take no longer to compile than one.

    of_row: result of `of_seed`.
    """
    offset = jnp.broadcast_to(jnp.asarray(offset, jnp.int32), position.shape)
    result: Key[Array, "B ..."] = folded(of_row, position, PURPOSES[purpose], offset)
    return result


@jax.jit  # lowered once per program, for all of its calls
def folded(of_row: jax.Array, position: jax.Array, purpose: jax.Array, offset: jax.Array) -> jax.Array:
    """Return `keys` for the number of a purpose."""
    shape = position.shape
    fold = jax.jit(jax.vmap(jax.random.fold_in))

    def each(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x, shape).reshape(-1)

    rows = jax.random.wrap_key_data(of_row, impl="threefry2x32")
    keys = each(rows.reshape(-1, *(1,) * (len(shape) - 1)))
    for part in (position, purpose, offset):
        keys = fold(keys, each(part))
    return keys.reshape(shape)


def of_seed(seed: UInt[Array, "B 2"]) -> UInt[Array, "B 2"]:
    """Return the data from which a row's keys are derived, once per launch.

    seed: high and low word of each row's seed.
    """
    rows = jnp.broadcast_to(jax.random.key(0, impl="threefry2x32"), seed.shape[:1])
    for word in (seed[:, 0], seed[:, 1]):  # high, low
        rows = jax.vmap(jax.random.fold_in)(rows, word)
    return jax.random.key_data(rows)


def gumbel(keys: Key[Array, "*some"], size: int) -> Float[Array, "*some {size}"]:
    """Return standard Gumbel noise, `size` numbers per key.

    mode="high" is needed: the default mode is bounded near 16 and would never sample the tail of a large vocabulary.
    """
    drawn = jax.vmap(lambda key: jax.random.gumbel(key, (size,), jnp.float32, mode="high"))(keys.reshape(-1))
    return drawn.reshape(*keys.shape, size)


def uniform(keys: Key[Array, "*some"]) -> Float[Array, "*some"]:
    """Return a uniform number in [0, 1) for each key."""
    return jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(keys.reshape(-1)).reshape(keys.shape)


def seed_words(seed: int) -> tuple[int, int]:
    """Return a 64-bit seed as two uint32 words (high, low). Negative seeds wrap."""
    seed &= (1 << 64) - 1
    return seed >> 32, seed & 0xFFFFFFFF


def take_row(x: Shaped[Array, "B T *rest"], index: Int[Array, " B"]) -> Shaped[Array, " B *rest"]:
    """Return x[b, index[b]] of each row b."""
    index = index.reshape(-1, 1, *(1,) * (x.ndim - 2))
    return lax.squeeze(jnp.take_along_axis(x, index, axis=1), (1,))
