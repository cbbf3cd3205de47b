"""likeliest_token in plain jnp."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.plain import likeliest


def likeliest_token(x, table, *, num_ids):
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    numbers = (((x.ndim - 1,), (1,)), ((), ()))
    logits = lax.dot_general(x, table, numbers, precision=precision, preferred_element_type=jnp.float32)
    return likeliest(logits[..., :num_ids])
