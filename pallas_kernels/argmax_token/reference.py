"""The op argmax_token in plain jnp."""

import jax
import jax.numpy as jnp

from pallas_kernels import plain
from pallas_kernels.device import Device
from pallas_kernels.weights import product
from pallas_kernels.weights.output_first import OutputFirst


def argmax_token(x: jax.Array, table: jax.Array, *, num_ids: int, device: Device) -> jax.Array:
    """Compute all logits, then their argmax."""
    logits = product(x, OutputFirst(table), dtype=jnp.float32, device=device)
    return plain.argmax(logits[..., :num_ids])
