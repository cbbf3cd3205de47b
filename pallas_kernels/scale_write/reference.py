"""The op scale_write in plain jnp: a scatter that drops tokens whose slots are outside the pages."""

import jax
import jax.numpy as jnp


def scale_write(scales: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    """Scatter new[i] to the slot slots[i] of the pages' scales."""
    p, _, width = scales.shape
    heads = new.shape[1]
    size = width // heads
    page = jnp.where(slots < 0, p, slots // size)  # a scatter with mode="drop" would wrap negative indices
    offset = slots % size
    if slots.shape[0] == 1:  # XLA would copy all scales for a scatter of one token; the second one is dropped
        page, offset = jnp.pad(page, (0, 1), constant_values=p), jnp.pad(offset, (0, 1))
        new = jnp.pad(new, ((0, 1), (0, 0)))
    return scales.reshape(p, heads, size).at[page, :, offset].set(new, mode="drop").reshape(scales.shape)
