"""The op kv_write in plain jnp: a scatter that drops tokens whose slots are outside the pages."""

import jax
import jax.numpy as jnp


def kv_write(pages: jax.Array, kv: jax.Array, slots: jax.Array) -> jax.Array:
    """Scatter kv[i] to the slot slots[i] of the pages."""
    p, s, *head = pages.shape
    slots = jnp.where(slots < 0, p * s, slots)  # a scatter with mode="drop" would wrap negative indices
    if slots.shape[0] == 1:
        # XLA turns a scatter of one token into a select over the whole cache, which is then copied. A scatter of two
        # tokens stays in place, so a second token is added, which is dropped.
        slots, kv = jnp.pad(slots, (0, 1), constant_values=p * s), jnp.pad(kv, ((0, 1), (0, 0), (0, 0)))
    return pages.reshape(p * s, *head).at[slots].set(kv, mode="drop").reshape(pages.shape)
