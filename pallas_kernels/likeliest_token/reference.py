"""likeliest_token in plain jnp."""

import jax
import jax.numpy as jnp
from jax import lax


def likeliest_token(x, table, *, num_ids):
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    numbers = (((x.ndim - 1,), (1,)), ((), ()))
    logits = lax.dot_general(x, table, numbers, precision=precision, preferred_element_type=jnp.float32)
    return likeliest(logits[..., :num_ids])


def likeliest(x: jax.Array) -> jax.Array:
    """jnp.argmax of x [..., V] over the last axis. XLA's goes number by number on CPU: 0.69 ms for 5 x 49,152, against
    0.11 for these two reductions."""

    def first_of_the_largest(x: jax.Array) -> jax.Array:
        ids = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
        return jnp.min(jnp.where(x == jnp.max(x, axis=-1, keepdims=True), ids, x.shape[-1] - 1), axis=-1)

    by_index = lambda x: jnp.argmax(x, axis=-1).astype(jnp.int32)
    return lax.platform_dependent(x, cpu=first_of_the_largest, default=by_index)
