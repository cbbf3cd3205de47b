"""merge_tokens on TPU: scalar loops over SMEM, whose size bounds T and B (to some 10,000 tokens)."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def merge_tokens(tokens, next_tokens, query_start, num_rejected, *, fill, device):
    (t,) = tokens.shape
    (b,) = next_tokens.shape
    if t == 0:  # every row is only its next token; a kernel takes no empty operand
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


def _kernel(tokens, next_tokens, query_start, num_rejected, merged, rejected, *, fill):
    def put(i, token, is_rejected):
        merged[i] = jnp.int32(token)
        rejected[i] = jnp.int32(is_rejected)

    def each(start, end, body):
        lax.fori_loop(start, end, lambda i, _: body(i), None)

    def merge_row(b):
        start, end = query_start[b], query_start[b + 1]
        kept_end = end - num_rejected[b]
        each(start, kept_end, lambda i: put(i + b, tokens[i], 0))
        put(kept_end + b, next_tokens[b], 0)
        each(kept_end, end, lambda i: put(i + b + 1, fill, 1))

    num_rows = next_tokens.shape[0]
    each(0, num_rows, merge_row)
    each(query_start[num_rows] + num_rows, merged.shape[0], lambda i: put(i, fill, 1))
