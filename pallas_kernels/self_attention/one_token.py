"""The op self_attention for a single token on GPU, in two kernels: the qkv product, and nearly all the rest.

The second kernel is flash attention over pages, with keys split over programs (blocks of the kernel's grid) as in
`paged_attention`. Each program norms and rotates the queries that it needs. For each key-value head there is one more
program, for the token's own key and value: it norms, rotates, writes and attends to them, so that no other program
waits for them.

A small product is left as partial sums (see `_split_product`), which the second kernel adds up. The last program of a
key-value head to finish then combines the results of all splits of the keys. After a larger product (see `_few_rows`),
another kernel combines these results (see `_combine_splits`).

This file has its own functions to compute queries, keys and values from the product. With those of attention_heads.py
the kernel was slower, and spilled registers on an L4 (see docs/notes/gpu.md).
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import _few_rows, _split_product, _tiling
from pallas_kernels._combine_splits import combined
from pallas_kernels._types import Carry, Ref
from pallas_kernels.device import Device
from pallas_kernels.paged_attention.gpu import (
    LEAST,
    MAX_SPLITS,
    MIN_ROWS,
    SPLIT_KEYS,
    attend,
    attend_to_pages,
    initial_carry,
    prepared,
)
from pallas_kernels.plain import rms_norm
from pallas_kernels.weights import product

# Largest number of partial sums of the qkv product for which this kernel is used. Qwen3-0.6B has 4 partial sums,
# SmolLM2-360M has 15, and Qwen3-8B over 2 or 4 GPUs has 16, which is too many (docs/notes/several.md).
MOST_PARTS = 15
# Largest number of elements that are read at a time to combine the splits' results. Registers hold all elements read.
UNDER_WAY = 1 << 13
# Largest head size for which registers suffice to compute the queries while 64 keys are being read. Larger heads are
# read 32 keys at a time, after the queries were computed.
MAX_HEAD = 128


def has_too_many_parts(qkv: jax.Array) -> bool:
    """Return whether the qkv product would have so many partial sums that the kernels for a few rows are faster.

    Each program of this kernel adds up the partial sums of its queries. There are too many partial sums if the matrix
    has many rows and few columns, for example if it is one device's shard of a wide model's matrix.
    """
    depth, width = qkv.shape
    _, splits = _split_product.tile(depth, width, _split_product.step_of(qkv))
    return _split_product.covers(qkv) and splits > MOST_PARTS


def self_attention(
    x: jax.Array,
    norm: Any,  # scale of the norm, or None if `normed` is given
    normed: jax.Array | None,
    qkv: jax.Array,
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
    summed: bool,
    device: Device,
) -> tuple[Any, jax.Array]:
    """Compute the op self_attention for one row of one token, B = T = 1.

    summed: whether the first result is a `Prepared` with sums.
    """
    p, s, g2, d = pages.shape
    n = block_table.shape[1]
    g = g2 // 2
    rows = qkv.shape[1] // (g * d) - 2
    operands = {"bias": bias, "q_norm": q_norm, "k_norm": k_norm, "slots": slots}
    operands |= {"block_table": block_table, "kv_len": kv_len}
    operands |= {"cos": cos.reshape(-1), "sin": sin.reshape(-1), "old_pages": pages.reshape(p * s, g2, d)}
    in_parts = x.dtype == jnp.bfloat16 and _split_product.covers(qkv)
    splits = max(1, min(pl.cdiv(n * s, SPLIT_KEYS // 2 if in_parts else SPLIT_KEYS), MAX_SPLITS))
    if in_parts:
        x, norm = (x, norm) if normed is None else (normed, None)
        split = _split_product.split_product(x.reshape(-1), qkv, norm=norm, zeros=g, device=device)
        operands |= {"heads": split["sums"], "squares": split.get("squares"), "old_counts": split["zeros"]}
    else:
        normed = rms_norm(norm, x, eps) if normed is None else normed
        normed = jax.tree.map(lambda array: array.reshape(1, -1), normed)
        few = _tiling.covers(1, qkv, device=device)
        heads = _few_rows.product(normed, qkv, device=device)[:, 0] if few else product(normed, qkv, device=device)
        operands["heads"] = heads
    operands = {name: value for name, value in operands.items() if value is not None}
    shape: Callable[..., jax.ShapeDtypeStruct] = jax.ShapeDtypeStruct
    outputs = {"pages": shape((p * s, g2, d), pages.dtype)}
    aliases = {list(operands).index("old_pages"): 0}
    if in_parts:
        aliases[list(operands).index("old_counts")] = 1
        outputs |= {"counts": shape((g,), jnp.int32), "out": shape((g * rows * d,), x.dtype)}
    parts = g, splits + 1, rows
    outputs |= {
        "acc": shape((*parts, d), jnp.float32),
        "top": shape(parts, jnp.float32),
        "total": shape(parts, jnp.float32),
    }
    results = pl.pallas_call(
        functools.partial(
            _kernel, names=(*operands, *outputs), page_size=s, splits=splits,
            block_rows=max(pl.next_power_of_2(rows), MIN_ROWS), block_out=pl.next_power_of_2(rows),
            block_keys=32 if d > MAX_HEAD else 64, width=x.shape[-1], eps=eps,
            scale=scale, window=window, soft_cap=soft_cap, barrier=not device.interpret,
        ),
        grid=(splits + 1, g),
        out_shape=list(outputs.values()),
        input_output_aliases=aliases,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=device.interpret,
        name="self_attention",
    )(*operands.values())  # fmt: skip
    result = dict(zip(outputs, results, strict=True))
    pages = result["pages"].reshape(pages.shape)
    if in_parts:
        return result["out"].reshape(1, 1, -1), pages
    of_splits, count = (result[name] for name in ("acc", "top", "total")), g * rows if summed else 0
    mixed, sums = combined(*of_splits, axis=1, dtype=x.dtype, heads=count, device=device)
    return mixed.reshape(1, 1, -1) if sums is None else prepared(mixed, sums, 1), pages


def _kernel(
    *refs: Ref,
    names: tuple[str, ...],
    page_size: int,
    splits: int,
    block_rows: int,
    block_out: int,
    block_keys: int,
    width: int,
    eps: float,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    barrier: bool,
) -> None:
    ref = dict(zip(names, refs, strict=True))
    heads, pages, block_table = ref["heads"], ref["pages"], ref["block_table"]
    num_slots, g2, d = pages.shape
    row_pages = block_table.shape[1]
    g = g2 // 2
    half = d // 2
    group = heads.shape[1] // (g * d) - 2
    dtype = pages.dtype
    attend_to = functools.partial(attend, scale=scale, soft_cap=soft_cap)
    start = initial_carry(block_rows, half, 2)
    split, head = pl.program_id(0), pl.program_id(1)
    low = jnp.arange(half, dtype=jnp.int32)
    halves = low, low + half
    column = jnp.arange(d, dtype=jnp.int32)

    row = jnp.arange(block_rows, dtype=jnp.int32)
    here = row < group
    position = ref["kv_len"][0] - 1  # position of the token in its row's text

    def product(columns: jax.Array, mask: jax.Array) -> jax.Array:
        """Return these columns of the product of the normed x and qkv, with partial sums added up."""
        parts = [jnp.int32(part) for part in range(heads.shape[0])]

        def load(part: jax.Array | int) -> Any:
            return plgpu.load(heads.at[part, columns], mask=mask, other=0)

        y = _split_product.added(load(part).astype(jnp.float32) for part in parts)
        if "squares" in ref:
            y *= lax.rsqrt(_split_product.added(plgpu.load(ref["squares"].at[part]) for part in parts) / width + eps)
        else:
            # The factor is 1, or 0 for an empty row. Without a factor, the compiler would redistribute each partial sum
            # over the threads, rather than their total only.
            y *= (position >= 0).astype(jnp.float32)
        return y if "bias" not in ref else y + plgpu.load(ref["bias"].at[columns]).astype(jnp.float32)

    def rotated(first: jax.Array, mask: jax.Array, norm: str) -> tuple[jax.Array, jax.Array]:
        """Return heads [rows, D] of the product, normed and rotated, in two halves [rows, D / 2].

        first: i32[rows], first column of each head.
        mask: bool[rows], False for padding rows.
        norm: name of the reference to the norm's scale. Without that reference the heads are not normed.
        """
        mask = jnp.broadcast_to(mask[:, None], (first.shape[0], half))
        x = [product(first[:, None] + at[None, :], mask) for at in halves]
        cos, sin = (plgpu.load(ref[name].at[low])[None, :] for name in ("cos", "sin"))
        if norm in ref:
            shrink = lax.rsqrt((jnp.sum(x[0] * x[0], axis=1) + jnp.sum(x[1] * x[1], axis=1)) / d + eps)[:, None]
            weights = [plgpu.load(ref[norm].at[at])[None, :] for at in halves]
            x = [(a * shrink * w).astype(dtype).astype(jnp.float32) for a, w in zip(x, weights, strict=True)]
        return (x[0] * cos - x[1] * sin).astype(dtype), (x[1] * cos + x[0] * sin).astype(dtype)

    own = head * (group + 2) * d  # first column of this key-value head's queries

    def queries() -> list[jax.Array]:
        return list(rotated(own + row * d, here, "q_norm"))

    def store_carry(carry: Carry) -> None:
        top, total, *acc = carry
        plgpu.store(ref["top"].at[head, split, row], top, mask=here)
        plgpu.store(ref["total"].at[head, split, row], total, mask=here)
        mask = jnp.broadcast_to(here[:, None], (block_rows, half))
        for at, values in zip(halves, acc, strict=True):
            plgpu.store(ref["acc"].at[head, split, row[:, None], at[None, :]], values, mask=mask)

    begin: Any = 0 if window is None else jnp.maximum(position - window + 1, 0)
    end = jnp.clip(position, 0, row_pages * page_size)
    split_keys = pl.cdiv(pl.cdiv(jnp.maximum(end - begin, 0), splits), block_keys) * block_keys
    split_begin = begin + split * split_keys
    split_end = jnp.minimum(split_begin + split_keys, end)

    @pl.when(split < splits)
    def _earlier_tokens() -> None:
        # The first step calls a function that returns the queries, while keys are being read.
        query: Any = queries() if d > MAX_HEAD else lambda: (queries(), start)
        carry = attend_to_pages(
            query, jnp.full(block_rows, position), pages, block_table, (jnp.int32(0), head),
            (split_begin, split_end), columns=halves, page_size=page_size, block_keys=block_keys, whole=False,
            window=window, scale=scale, soft_cap=soft_cap,
        )  # fmt: skip
        store_carry(carry)

    @pl.when(split == splits)
    def _the_token() -> None:
        only = jnp.arange(MIN_ROWS, dtype=jnp.int32) == 0  # the one row in use; a tile has at least MIN_ROWS rows
        tile = (MIN_ROWS, half)
        key = rotated(jnp.full(MIN_ROWS, own + group * d), only, "k_norm")
        mask = jnp.broadcast_to(only[:, None], tile)
        columns = [jnp.broadcast_to(own + (group + 1) * d + at[None, :], tile) for at in halves]
        value = [product(at, mask).astype(dtype) for at in columns]
        slot = ref["slots"][0]
        live = only & (slot >= 0) & (slot < num_slots)
        slot = jnp.where(live, slot, num_slots)  # slot to write to; the mask `live` excludes slots beyond the pages
        live = jnp.broadcast_to(live[:, None], tile)
        for part, tiles in enumerate((key, value)):
            for at, values in zip(halves, tiles, strict=True):
                plgpu.store(pages.at[slot[:, None], 2 * head + part, at[None, :]], values, mask=live)
        store_carry(attend_to(start, queries(), key, value, (only & (position >= 0))[None, :]))

    if "out" not in ref:
        return
    if barrier:  # the barrier makes all writes of this program visible before the program is counted as finished
        plgpu.debug_barrier()
    before = plgpu.atomic_add(ref["counts"], (head,), jnp.int32(1))

    @pl.when(before == splits)
    def _combine() -> None:
        row = jnp.arange(block_out, dtype=jnp.int32)
        here = row < group
        parts = jnp.arange(pl.next_power_of_2(splits + 1), dtype=jnp.int32)
        mask = (parts <= splits)[:, None] & here[None, :]
        at = (head, parts[:, None], row[None, :])
        top = plgpu.load(ref["top"].at[at], mask=mask, other=LEAST)
        total = plgpu.load(ref["total"].at[at], mask=mask, other=0)
        mask = jnp.broadcast_to(here[:, None], (block_out, d))
        at_once = max(1, UNDER_WAY // (block_out * d))

        def read(first: int) -> Iterable[tuple[jax.Array, jax.Array]]:
            """Start reading (largest score, weighted sum) of some splits of the keys, from split `first` on."""
            some = range(first, min(first + at_once, splits + 1))
            tops = [plgpu.load(ref["top"].at[head, i, row], mask=here, other=LEAST) for i in some]
            accs = [plgpu.load(ref["acc"].at[head, i, row[:, None], column[None, :]], mask=mask, other=0) for i in some]
            return zip(tops, accs, strict=True)

        reads = read(0)  # reads that start before the kernel waits for the splits' largest scores
        highest = jnp.max(top, axis=0)
        total = jnp.sum(total * jnp.exp2(top - highest[None, :]), axis=0)
        acc = jnp.zeros((block_out, d), jnp.float32)
        for first in range(0, splits + 1, at_once):
            for part_top, part in reads if first == 0 else read(first):
                acc += part * jnp.exp2(part_top - highest)[:, None]
        acc /= jnp.where(total > 0, total, 1)[:, None]
        to = ((head * group + row) * d)[:, None] + column[None, :]
        plgpu.store(ref["out"].at[to], acc.astype(dtype), mask=mask)
