"""Counter-based random numbers: a key depends only on the request's seed, a position, a purpose and an offset.

A request's tokens therefore depend neither on the other rows of its batch nor on the number of rounds in a launch (one
run of the decoding program). The standard acceptance rule uses keys of the position at which the round *starts*. These
positions strictly increase, so that no key is used twice.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.common.shapes import Array, Float, Int, Key, Shaped, UInt

# Purpose of random numbers -> its number. "shared" is the noise of the coupled acceptance rule, one vector for each
# absolute position.
PURPOSES = {"draft": 0, "accept": 1, "residual": 2, "shared": 3}


def keys(
    of_row: UInt[Array, "B 2"],
    position: Int[Array, "B ..."],
    purpose: str,
    offset: Int[Array, "B ..."] | Int[Array, ""] | int = 0,
) -> Key[Array, "B ..."]:
    """Return a random key for each position. Many positions take no longer to compile than one.

    of_row: data of each row's seed, the result of `of_seed`.
    position: index of a token in its row, or several for each row.
    purpose: a name in PURPOSES.
    offset: number that distinguishes keys of the same position and purpose.
    """
    offset = jnp.broadcast_to(jnp.asarray(offset, jnp.int32), position.shape)
    result: Key[Array, "B ..."] = folded(of_row, position, PURPOSES[purpose], offset)
    return result


@jax.jit  # jit makes JAX lower this function once per program, for all calls
def folded(of_row: jax.Array, position: jax.Array, purpose: jax.Array, offset: jax.Array) -> jax.Array:
    """Compute the result of `keys`. purpose: number of the purpose, from PURPOSES."""
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
    """Return the data from which each row's random keys are derived.

    The decoding program computes this data once per launch (run of the program).

    seed: high and low word of each row's seed.
    """
    rows = jnp.broadcast_to(jax.random.key(0, impl="threefry2x32"), seed.shape[:1])
    for word in (seed[:, 0], seed[:, 1]):  # the high word, then the low word
        rows = jax.vmap(jax.random.fold_in)(rows, word)
    return jax.random.key_data(rows)


def gumbel(keys: Key[Array, "*some"], size: int) -> Float[Array, "*some {size}"]:
    """Return standard Gumbel noise, `size` numbers for each key.

    mode="high" is needed: the numbers of JAX's default mode stay below about 16, so that the tail of a large vocabulary
    would never be sampled.
    """
    drawn = jax.vmap(lambda key: jax.random.gumbel(key, (size,), jnp.float32, mode="high"))(keys.reshape(-1))
    return drawn.reshape(*keys.shape, size)


def uniform(keys: Key[Array, "*some"]) -> Float[Array, "*some"]:
    """Return a uniform random number in [0, 1) for each key."""
    return jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(keys.reshape(-1)).reshape(keys.shape)


def seed_words(seed: int) -> tuple[int, int]:
    """Return a 64-bit seed as two uint32 words (high, low). A negative seed is taken modulo 2**64."""
    seed &= (1 << 64) - 1
    return seed >> 32, seed & 0xFFFFFFFF


def take_row(x: Shaped[Array, "B T *rest"], index: Int[Array, " B"]) -> Shaped[Array, " B *rest"]:
    """Return x[b, index[b]] for each row b."""
    index = index.reshape(-1, 1, *(1,) * (x.ndim - 2))
    return lax.squeeze(jnp.take_along_axis(x, index, axis=1), (1,))
