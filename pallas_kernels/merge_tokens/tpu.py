"""The op merge_tokens on TPU: scalar loops over SMEM, whose size bounds T and B (to some 10,000 tokens)."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._types import Ref
from pallas_kernels.device import Device


def merge_tokens(
    tokens: jax.Array,
    next_tokens: jax.Array,
    query_start: jax.Array,
    num_rejected: jax.Array,
    *,
    fill: int,
    device: Device,
) -> tuple[jax.Array, jax.Array]:
    """Merge the rows in one kernel that loops over them."""
    (t,) = tokens.shape
    (b,) = next_tokens.shape
    if t == 0:  # every row has only its next token, and a kernel accepts no empty operand
        return next_tokens, jnp.zeros(b, bool)
    smem = pl.BlockSpec(memory_space=pltpu.MemorySpace.SMEM)
    merged, rejected = pl.pallas_call(
        functools.partial(_kernel, fill=fill),
        in_specs=[smem] * 4,
        out_specs=[smem] * 2,
        out_shape=[jax.ShapeDtypeStruct((t + b,), jnp.int32)] * 2,
        interpret=device.interpret,
        name="merge_tokens",
    )(tokens, next_tokens, query_start, num_rejected)
    return merged, rejected != 0


def _kernel(
    tokens: Ref, next_tokens: Ref, query_start: Ref, num_rejected: Ref, merged: Ref, rejected: Ref, *, fill: int
) -> None:
    def put(i: jax.Array, token: jax.Array | int, is_rejected: int) -> None:
        merged[i] = jnp.int32(token)
        rejected[i] = jnp.int32(is_rejected)

    def each(start: jax.Array | int, end: jax.Array | int, body: Callable[[jax.Array], None]) -> None:
        lax.fori_loop(start, end, lambda i, _: body(i), None)

    def merge_row(b: jax.Array) -> None:
        start, end = query_start[b], query_start[b + 1]
        kept_end = end - num_rejected[b]
        each(start, kept_end, lambda i: put(i + b, tokens[i], 0))
        put(kept_end + b, next_tokens[b], 0)
        each(kept_end, end, lambda i: put(i + b + 1, fill, 1))

    num_rows = next_tokens.shape[0]
    each(0, num_rows, merge_row)
    each(query_start[num_rows] + num_rows, merged.shape[0], lambda i: put(i, fill, 1))
