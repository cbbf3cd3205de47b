"""GPU kernel between the qkv product and attention: bias, norms of the heads, rotary embedding, cache write.

A program (block of the kernel's grid) computes one key-value head of one token: its queries, its key and its value,
which are adjacent columns of the product. A program starts all its reads before it waits for the first.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels._split_product import added
from pallas_kernels._types import Ref, Refs
from pallas_kernels.device import Device
from pallas_kernels.forms import lowered_once
from pallas_kernels.paged_attention.gpu import tile

Reads = dict[str, Any]  # the values that a program has read, by name; each is an array or a list of arrays


@lowered_once("eps", "device")
def heads(
    parts: jax.Array,
    bias: jax.Array | None,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    pages: jax.Array,
    slots: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    eps: float,
    device: Device,
) -> tuple[jax.Array, jax.Array]:
    """Compute the queries of M tokens, and write the tokens' keys and values to the pages.

    Return the queries [M, H * D], and the updated pages.

    parts: [splits, M, (H + 2G) * D], partial sums of the qkv product.
    cos, sin: f32[M, D / 2].
    All other arguments are those of `self_attention`.
    """
    p, s, g2, d = pages.shape
    _, m, width = parts.shape
    operands = {"parts": parts, "bias": bias, "q_norm": q_norm, "k_norm": k_norm, "slots": slots}
    operands = {name: value for name, value in (operands | {"cos": cos, "sin": sin}).items() if value is not None}
    outputs = {"queries": (m, width - g2 * d), "pages": (p * s, g2, d)}
    queries, new_pages = pl.pallas_call(
        functools.partial(_kernel, names=(*operands, "old_pages", *outputs), eps=eps),
        grid=(g2 // 2, m),
        out_shape=[jax.ShapeDtypeStruct(shape, pages.dtype) for shape in outputs.values()],
        input_output_aliases={len(operands): 1},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=device.interpret,
        name="heads",
    )(*operands.values(), pages.reshape(outputs["pages"]))
    return queries, new_pages.reshape(pages.shape)


def _kernel(*refs: Ref, names: tuple[str, ...], eps: float) -> None:
    ref = dict(zip(names, refs, strict=True))
    group = num_queries(ref["parts"], ref["pages"])
    part = jnp.arange(pl.next_power_of_2(group + 2), dtype=jnp.int32)
    rows = pl.program_id(0), jnp.full(part.shape, pl.program_id(1)), part, part < group + 2
    new = new_rows(ref, start_reading(ref, *rows), *rows, eps=eps)
    store_queries(ref["queries"], new, group, *rows)


def num_queries(parts: Ref, pages: Ref) -> int:
    """Return the number of query heads of a key-value head. parts: partial sums of the qkv product."""
    result: int = parts.shape[2] // (pages.shape[-2] // 2 * pages.shape[-1]) - 2
    return result


def halves(d: int) -> list[jax.Array]:
    """Return the column indices of the two halves of a head of size d."""
    return [first + jnp.arange(d // 2, dtype=jnp.int32) for first in (0, d // 2)]


def start_reading(ref: Refs, head: jax.Array, token: jax.Array, part: jax.Array, here: jax.Array) -> Reads:
    """Start all reads from which `new_rows` computes rows of a tile. Return the values that are being read, by name.

    A row of the tile is one query, key or value of a key-value head and token.

    Args:
      ref: the kernel's references, by name.
      head: index of the key-value head.
      token: i32[rows], index of each row's token.
      part: i32[rows], part of the key-value head in each row: 0 and up for its queries, then its key, then its value.
      here: bool[rows], False for padding rows.
    """
    d = ref["pages"].shape[2]
    parts = ref["parts"]
    columns = halves(d)
    mask = tile(here, columns[0], d)

    def load(name: str, *at: Any) -> jax.Array:
        return plgpu.load(ref[name].at[at], mask=mask, other=0).astype(jnp.float32)

    first = ((head * (num_queries(parts, ref["pages"]) + 2) + part) * d)[:, None]
    line, low = token[:, None], columns[0][None, :]
    read: dict[str, Any] = {"slots": plgpu.load(ref["slots"].at[token], mask=here, other=-1)}
    read |= {name: load(name, line, low) for name in ("cos", "sin")}
    read |= {name: [plgpu.load(ref[name].at[at]) for at in columns] for name in ("q_norm", "k_norm") if name in ref}
    splits = [jnp.int32(i) for i in range(parts.shape[0])]
    read["parts"] = [[load("parts", i, line, first + at) for i in splits] for at in columns]
    if "bias" in ref:
        read["bias"] = [load("bias", first + at) for at in columns]
    return read


def new_rows(
    ref: Refs, read: Reads, head: jax.Array, token: jax.Array, part: jax.Array, here: jax.Array, *, eps: float
) -> list[jax.Array]:
    """Compute queries, keys and values of a key-value head, and write keys and values to their pages.

    Return them as rows of a tile, in two halves [rows, D / 2]. Queries and keys are normed and rotated; values are only
    summed over the partial sums of the product, with the bias.

    read: the values that `start_reading` returned. All other arguments are those of `start_reading`.
    """
    pages = ref["pages"]
    group = num_queries(ref["parts"], pages)
    num_slots, _, d = pages.shape
    columns = halves(d)

    def wide(rows: jax.Array) -> jax.Array:
        return tile(rows, columns[0], d)

    x = [added(parts) for parts in read["parts"]]
    if "bias" in read:
        x = [a + b for a, b in zip(x, read["bias"], strict=True)]
    shrink = lax.rsqrt((jnp.sum(x[0] * x[0], axis=1) + jnp.sum(x[1] * x[1], axis=1)) / d + eps)[:, None]
    low, high = x
    for name, mine in (("q_norm", part < group), ("k_norm", part == group)):
        if name in read:
            normed = [(h * shrink * scale).astype(pages.dtype) for h, scale in zip(x, read[name], strict=True)]
            low, high = (jnp.where(wide(mine), a, b) for a, b in zip(normed, (low, high), strict=True))
    cos, sin = read["cos"], read["sin"]
    turned = low * cos - high * sin, high * cos + low * sin
    new = [jnp.where(wide(part <= group), a, b).astype(pages.dtype) for a, b in zip(turned, x, strict=True)]

    write = here & (part >= group) & (read["slots"] >= 0)
    slot = jnp.where(write, read["slots"], num_slots)  # slot to write to; the mask excludes slots beyond the pages
    for at, values in zip(columns, new, strict=True):
        to = slot[:, None], (2 * head + part - group)[:, None], at[None, :]
        plgpu.store(pages.at[to], values, mask=wide(slot < num_slots))
    return new


def store_queries(
    out: Ref,
    values: Sequence[jax.Array],
    group: int,
    head: jax.Array,
    token: jax.Array,
    part: jax.Array,
    here: jax.Array,
) -> None:
    """Write the query rows of a tile to `out` [M, H * D].

    values: the tile in two halves, [rows, D / 2].
    group: number of query heads of a key-value head.
    head, token, part, here: as in `start_reading`.
    """
    d = 2 * values[0].shape[1]
    for at, some in zip(halves(d), values, strict=True):
        to = token[:, None], ((head * group + part) * d)[:, None] + at[None, :]
        plgpu.store(out.at[to], some.astype(out.dtype), mask=tile(here & (part < group), at, d))
