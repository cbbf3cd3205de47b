"""GPU kernel between the product qkv and attention: bias, norms of the heads, rotary embedding, cache write.

A program has one key-value head of one token: its queries, its key and its value, which are adjacent in the product.
It starts all its reads before it waits for the first.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels._split_product import added
from pallas_kernels.forms import lowered_once
from pallas_kernels.paged_attention.gpu import tile


@lowered_once("eps", "device")
def heads(parts, bias, q_norm, k_norm, pages, slots, cos, sin, *, eps, device):
    """Compute the queries of M tokens, and write their keys and values to the pages. Return queries [M, H * D], pages.

    Args:
      parts: [splits, M, (H + 2G) * D], the parts of the product qkv.
      cos, sin: f32[M, D / 2]. All other arguments are those of `self_attention`.
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


def _kernel(*refs, names, eps):
    ref = dict(zip(names, refs, strict=True))
    group = num_queries(ref["parts"], ref["pages"])
    part = jnp.arange(pl.next_power_of_2(group + 2), dtype=jnp.int32)
    rows = pl.program_id(0), jnp.full(part.shape, pl.program_id(1)), part, part < group + 2
    new = new_rows(ref, start_reading(ref, *rows), *rows, eps=eps)
    store_queries(ref["queries"], new, group, *rows)


def num_queries(parts, pages) -> int:
    """Return the number of queries of a key-value head."""
    return parts.shape[2] // (pages.shape[-2] // 2 * pages.shape[-1]) - 2


def halves(d):
    """Return the column indices of the two halves of a head of size d."""
    return [first + jnp.arange(d // 2, dtype=jnp.int32) for first in (0, d // 2)]


def start_reading(ref, head, token, part, here):
    """Start all reads for rows of a key-value head. Return them by name.

    Args:
      head: the key-value head.
      token: i32[rows], the token of each row.
      part: i32[rows], the part of each row: 0 and up for the queries of the head, then its key, then its value.
      here: bool[rows], False for padding rows.
    """
    d = ref["pages"].shape[2]
    parts = ref["parts"]
    columns = halves(d)
    mask = tile(here, columns[0], d)

    def load(name, *at):
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


def new_rows(ref, read, head, token, part, here, *, eps):
    """Return the rows as attention needs them, in two halves [rows, D / 2], and write keys and values to their pages.

    Queries and keys are normed and rotated; values are only summed over their parts, with the bias. read: the reads of
    `start_reading`, whose arguments the others are.
    """
    pages = ref["pages"]
    group = num_queries(ref["parts"], pages)
    num_slots, _, d = pages.shape
    columns = halves(d)

    def wide(rows):
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
    slot = jnp.where(write, read["slots"], num_slots)  # beyond the pages: masked out of the write
    for at, values in zip(columns, new, strict=True):
        to = slot[:, None], (2 * head + part - group)[:, None], at[None, :]
        plgpu.store(pages.at[to], values, mask=wide(slot < num_slots))
    return new


def store_queries(out, values, group, head, token, part, here):
    """Write the rows that are queries, in two halves [rows, D / 2], to out [M, H * D]."""
    d = 2 * values[0].shape[1]
    for at, some in zip(halves(d), values, strict=True):
        to = token[:, None], ((head * group + part) * d)[:, None] + at[None, :]
        plgpu.store(out.at[to], some.astype(out.dtype), mask=tile(here & (part < group), at, d))
