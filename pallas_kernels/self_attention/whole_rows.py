"""GPU kernel for all steps after the qkv product: bias, norms of the heads, rotary embedding, cache write, attention.

A program (block of the kernel's grid) reads all keys of one row and one key-value head. So no other program needs the
new queries, keys and values of this row and head. They are the rows of one tile, computed in this kernel rather than in
the separate kernel `attention_heads.heads`. The new queries attend to the new keys while the first keys of earlier
tokens are being read.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels._few_rows import prefetch_options, whole
from pallas_kernels._overlap import WARPS, prefetch
from pallas_kernels._types import Carry, Ref
from pallas_kernels.device import Device
from pallas_kernels.forms import lowered_once
from pallas_kernels.paged_attention.gpu import (
    MIN_ROWS,
    attend,
    attend_to_pages,
    initial_carry,
    keys_at_a_time,
    num_splits,
    num_stages,
    result,
)
from pallas_kernels.self_attention.attention_heads import halves, new_rows, num_queries, start_reading, store_queries


def covers(num_tokens: int, parts: jax.Array, pages: jax.Array, block_table: jax.Array, device: Device) -> bool:
    """Return whether the kernel supports these arguments and should be used for them.

    `num_splits` must leave all keys of a row to one program. A tile of MIN_ROWS rows must have room for all new
    queries, keys and values of a row and key-value head.

    num_tokens: number of new tokens of each row.
    parts: partial sums of the qkv product, as in `attention`.
    """
    _, s, g2, _ = pages.shape
    b, n = block_table.shape
    one = device.shares_much and num_splits(b * g2 // 2, n * s, True) == 1
    return one and num_tokens * (num_queries(parts, pages) + 2) <= MIN_ROWS


@lowered_once("eps", "scale", "window", "soft_cap", "device")
def attention(
    parts: jax.Array,
    bias: jax.Array | None,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    pages: jax.Array,
    slots: jax.Array,
    block_table: jax.Array,
    kv_len: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    eps: float,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    then: jax.Array | None = None,
    device: Device,
) -> tuple[jax.Array, jax.Array]:
    """Compute the attention of M tokens, and write the tokens' keys and values to the pages.

    Return the heads' results [M, H * D], and the updated pages.

    parts: [splits, M, (H + 2G) * D], partial sums of the qkv product.
    cos, sin: f32[M, D / 2].
    then: weight matrix of the next product, whose first rows are prefetched; or None.
    All other arguments are those of `self_attention`.
    """
    p, s, g2, d = pages.shape
    _, m, width = parts.shape
    b = len(kv_len)
    operands: dict[str, Any] = {
        "parts": parts,
        "bias": bias,
        "q_norm": q_norm,
        "k_norm": k_norm,
        "slots": slots,
        "cos": cos,
    }
    operands |= {"sin": sin, "block_table": block_table, "kv_len": kv_len}
    operands = {name: value for name, value in operands.items() if value is not None}
    grid = (g2 // 2, b)
    block_keys = keys_at_a_time(d, pages.dtype)
    next_weights, ahead = prefetch_options(then, m, math.prod(grid), device)
    outputs = {"mixed": (m, width - g2 * d), "pages": (p * s, g2, d)}
    names = (*operands, *("next_out" for _ in next_weights), "old_pages", *outputs)
    arrays = *operands.values(), *next_weights, pages.reshape(outputs["pages"])
    mixed, new_pages = pl.pallas_call(
        functools.partial(
            _kernel, names=names, num_tokens=m // b, page_size=s, block_keys=block_keys, ahead=ahead,
            eps=eps, window=window, scale=scale, soft_cap=soft_cap, device=device,
        ),
        grid=grid,
        in_specs=[whole((1, 1) if name == "next_out" else x.shape) for name, x in zip(names, arrays, strict=False)],
        out_specs=[whole(shape) for shape in outputs.values()],
        out_shape=[jax.ShapeDtypeStruct(shape, pages.dtype) for shape in outputs.values()],
        input_output_aliases={len(arrays) - 1: 1},
        compiler_params=plgpu.CompilerParams(
            num_warps=WARPS, num_stages=num_stages(True, 2 * block_keys * d * pages.dtype.itemsize)
        ),
        interpret=device.interpret,
        name="attention",
    )(*arrays)  # fmt: skip
    return mixed, new_pages.reshape(pages.shape)


def _kernel(
    *refs: Ref,
    names: tuple[str, ...],
    num_tokens: int,
    page_size: int,
    block_keys: int,
    ahead: dict[str, Any] | None,
    eps: float,
    window: int | None,
    scale: float,
    soft_cap: float | None,
    device: Device,
) -> None:
    ref = dict(zip(names, refs, strict=True))
    pages, block_table = ref["pages"], ref["block_table"]
    d, row_pages, group = pages.shape[2], block_table.shape[1], num_queries(ref["parts"], pages)
    head, b = pl.program_id(0), pl.program_id(1)

    row = jnp.arange(MIN_ROWS, dtype=jnp.int32)
    # token of each row of the tile, and its part of the key-value head: a query, the key or the value (`start_reading`)
    token, part = lax.div(row, group + 2), lax.rem(row, group + 2)
    rows = head, b * num_tokens + token, part, token < num_tokens
    position = ref["kv_len"][b] - num_tokens  # position of the row's first new token in its text
    begin = 0 if window is None else jnp.maximum(position - window + 1, 0)
    end = jnp.clip(position, 0, row_pages * page_size)
    read = start_reading(ref, *rows)

    def first() -> tuple[list[jax.Array], Carry]:
        """Return the tile of new queries, keys and values, and the softmax state after the new keys."""
        new = new_rows(ref, read, *rows, eps=eps)
        seen = (part == group)[None, :] & (token[None, :] <= token[:, None]) & (position >= 0)
        if window is not None:
            seen &= token[None, :] > token[:, None] - window
        # In the tile, a key's value is in the row after the key. A product with a matrix of ones and zeros moves the
        # value to the key's row without rounding.
        following = (row[None, :] == row[:, None] + 1).astype(pages.dtype)
        precision = lax.Precision.HIGHEST if pages.dtype == jnp.float32 else None
        values = [plgpu.dot(following, half, precision=precision).astype(half.dtype) for half in new]
        start = initial_carry(row.size, d // 2, len(new))
        top, total, *acc = attend(start, new, new, values, seen, scale=scale, soft_cap=soft_cap)
        place = jnp.arange(block_keys, dtype=jnp.int32)[None, :]
        return new, (top, jnp.where(place == 0, total[:, None], 0.0), *acc)

    carry = attend_to_pages(
        first, position + token, pages, block_table, (b, head), (begin, end), columns=halves(d), page_size=page_size,
        block_keys=block_keys, whole=True, window=window, scale=scale, soft_cap=soft_cap,
        ahead=None if ahead is None else functools.partial(prefetch, ref["next_out"], **ahead),
    )  # fmt: skip
    store_queries(ref["mixed"], result(carry, device), group, *rows)
