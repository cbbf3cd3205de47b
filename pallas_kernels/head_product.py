"""The product with an output head, by the kernel of a few rows where it reads the head's form."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _few_rows, _tiling
from pallas_kernels.device import Device
from pallas_kernels.weights import AnyWeight, product
from pallas_kernels.weights.interleaved import Interleaved


def head_product(x: jax.Array, head: AnyWeight, *, dtype: Any, device: Device) -> jax.Array:
    """Multiply x [..., I] with an output head [I, O]. Return [..., O] in `dtype`.

    The kernel reads a head in 8 bits on a single device. XLA on a GPU would convert all of it to bfloat16 first.
    """
    rows = x.reshape(-1, x.shape[-1])
    read = isinstance(head, Interleaved) and x.dtype == jnp.bfloat16 and _tiling.covers(len(rows), head, device=device)
    if not read:
        return product(x, head, dtype=dtype, device=device)
    found: jax.Array = _few_rows.product(rows, head, device=device).sum(0)
    return found.astype(dtype).reshape(*x.shape[:-1], -1)
