"""Counter-based random numbers: a key depends on the request's seed, a position and a purpose, on nothing else.

So a request's tokens do not depend on which rows share its batch, nor on where a launch ended. Keys of the standard
rule are those of the position where the round *starts*: round starts strictly increase, so no number serves twice.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.shapes import Array, Float, Int, Key, Shaped, UInt

# What a number is for. "shared" is the coupled rule's noise, one vector per absolute position.
PURPOSES = {"draft": 0, "accept": 1, "residual": 2, "shared": 3}


def keys(
    seed: UInt[Array, "B 2"],
    position: Int[Array, " B"],
    purpose: str,
    offset: Int[Array, " B"] | Int[Array, ""] | int = 0,
) -> Key[Array, " B"]:
    """One key a row. seed: its high and its low word."""
    offset = jnp.broadcast_to(jnp.asarray(offset, jnp.int32), position.shape)

    def one(words, position, offset):
        key = jax.random.key(0, impl="threefry2x32")
        for part in (words[0], words[1], position, PURPOSES[purpose], offset):
            key = jax.random.fold_in(key, part)
        return key

    return jax.vmap(one)(seed, position, offset)


def gumbel(keys: Key[Array, " B"], size: int) -> Float[Array, "B {size}"]:
    """Standard Gumbel noise, one key a row.

    mode="high": the default mode caps near 16 and would never sample the tail of a large vocabulary.
    """
    return jax.vmap(lambda key: jax.random.gumbel(key, (size,), jnp.float32, mode="high"))(keys)


def uniform(keys: Key[Array, " B"]) -> Float[Array, " B"]:
    """Uniform numbers in [0, 1)."""
    return jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(keys)


def seed_words(seed: int) -> tuple[int, int]:
    """A 64-bit seed as two uint32 words (high, low). Negative seeds wrap."""
    seed &= (1 << 64) - 1
    return seed >> 32, seed & 0xFFFFFFFF


def take_row(x: Shaped[Array, "B T *rest"], index: Int[Array, " B"]) -> Shaped[Array, " B *rest"]:
    """x at index of its second axis."""
    return lax.squeeze(jnp.take_along_axis(x, index.reshape(-1, 1, *(1,) * (x.ndim - 2)), axis=1), (1,))
