"""argmax_token in plain jnp."""

import jax.numpy as jnp

from pallas_kernels import plain
from pallas_kernels.weights import product
from pallas_kernels.weights.output_first import OutputFirst


def argmax_token(x, table, *, num_ids, device):
    logits = product(x, OutputFirst(table), dtype=jnp.float32, device=device)
    return plain.argmax(logits[..., :num_ids])
