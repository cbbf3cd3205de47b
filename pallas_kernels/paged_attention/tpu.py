"""The op paged_attention on TPU: flash attention over pages, which are copied from HBM into two buffers in turn.

A page holds the keys and values of all key-value heads. One program (step of the kernel's grid) has a block of query
rows of all these heads, so that it fetches a page once. The running softmax is that of FlashAttention (Dao et al.,
arxiv.org/abs/2205.14135).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._hbm import in_hbm
from pallas_kernels._types import Ref
from pallas_kernels.device import Device
from pallas_kernels.pages import AnyPages, ScaledPages
from pallas_kernels.tree_mask import FIRST_NODE, POSITION, WORDS, sees

# Limits on the arrays of a program, so that they fit into the 16 MiB of VMEM that a TPU v5e gives it by default.
# Largest number of query rows of a key-value head; largest number of bytes of all heads' queries, results and sums.
MAX_ROWS, ROWS_BYTES = 256, 4 * 2**20
# Largest number of keys fetched at a time; largest number of bytes of the two page buffers together.
MAX_KEYS, PAGES_BYTES = 256, 2 * 2**20
LANES = 128  # lanes of a vector register
MASKED = -1e30  # the score of an unseen key: below all real scores, but finite: a difference of two is 0, not NaN


def fits(query: jax.Array, pages: AnyPages, *_: Any, **options: Any) -> bool:
    """Return whether the kernel supports these arguments."""
    s, g2 = pages.shape[1:3]
    if isinstance(pages, ScaledPages) and (g2 * s % LANES or (s % LANES and LANES % s)):
        return False
    return query.shape[-1] % 64 == 0 and 2 * page_bytes(pages) <= PAGES_BYTES


def page_bytes(pages: AnyPages) -> int:
    """Return the bytes that a page takes in VMEM, where heads and head size are padded."""
    _, s, g2, d = pages.shape
    scale_bytes = 8 * 4 * g2 * s if isinstance(pages, ScaledPages) else 0
    return s * _round_up(g2, 8) * _round_up(d, LANES) * pages.dtype.itemsize + scale_bytes


@functools.partial(jax.jit, static_argnames=("scale", "window", "soft_cap", "device"))
def paged_attention(
    query: jax.Array,
    pages: AnyPages,
    block_table: jax.Array,
    kv_len: jax.Array,
    num_keys: jax.Array | None = None,
    tree: jax.Array | None = None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    device: Device,
) -> jax.Array:
    """Compute the op paged_attention in one kernel, with a program for each row and block of query rows."""
    b, t, h, d = query.shape
    _, s, g2, _ = pages.shape
    n = block_table.shape[1]
    g = g2 // 2
    group = h // g
    rows = t * group  # number of query rows of a key-value head; row r is token r // group, query head r % group
    lanes = _round_up(d, LANES)
    # Bytes of a row of query and out (two buffers) and of acc; of top and total.
    row_bytes = lanes * (4 * query.dtype.itemsize + 4) + 2 * LANES * 4
    block_rows = min(_round_up(rows, 16), MAX_ROWS, max(16, ROWS_BYTES // (g * row_bytes) // 16 * 16))
    padded_rows = _round_up(rows, block_rows)
    block_pages = max(1, min(MAX_KEYS // s, PAGES_BYTES // (2 * page_bytes(pages))))  # at least one page
    stored = list(jax.tree.leaves(pages))  # the pages, or their values and scales

    query = query.reshape(b, t, g, group, d).swapaxes(1, 2).reshape(b, g, rows, d)
    query = jnp.pad(query, ((0, 0), (0, 0), (0, padded_rows - rows), (0, 0)))
    spec = pl.BlockSpec((None, g, block_rows, d), lambda row, block, *_: (row, 0, block, 0))
    # Each program gets only its row of the block table, because the whole table may exceed scalar memory.
    table_spec = pl.BlockSpec((None, 1, n), lambda row, *_: (row, 0, 0), memory_space=pltpu.SMEM)
    nodes, node_specs = [], []
    if tree is not None:  # each token's tree mask is repeated for its query rows
        nodes = [jnp.pad(jnp.repeat(tree, group, axis=1), ((0, 0), (0, padded_rows - rows), (0, 0)))]
        node_specs = [pl.BlockSpec((None, block_rows, tree.shape[2]), lambda row, block, *_: (row, block, 0))]
    out = pl.pallas_call(
        functools.partial(
            _kernel, arrays=len(stored), num_tokens=t, group=group, scale=scale, window=window, soft_cap=soft_cap
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(b, padded_rows // block_rows),
            in_specs=[table_spec, spec, *[pl.BlockSpec(memory_space=pl.ANY) for _ in stored], *node_specs],
            out_specs=spec,
            scratch_shapes=[
                *[pltpu.VMEM((2, block_pages, *x.shape[1:]), x.dtype) for x in stored],
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.VMEM((g, block_rows, 1), jnp.float32),
                pltpu.VMEM((g, block_rows, 1), jnp.float32),
                pltpu.VMEM((g, block_rows, d), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
        interpret=device.interpret,
        name="paged_attention",
    )(
        kv_len,
        kv_len if num_keys is None else num_keys,
        block_table[:, None],
        query,
        *(in_hbm(x, device) for x in stored),
        *nodes,
    )
    result: jax.Array = out[:, :, :rows].reshape(b, g, t, group, d).swapaxes(1, 2).reshape(b, t, h, d)
    return result


def _kernel(
    kv_len: Ref,
    num_keys: Ref,
    block_table: Ref,
    query: Ref,
    *refs: Ref,
    arrays: int,
    num_tokens: int,
    group: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> None:
    stored, rest = refs[:arrays], refs[arrays:]  # the pages, or their values and scales
    *others, semaphores, top, total, acc = rest
    *nodes, out = others[: len(others) - arrays]
    buffer, *scale_buffer = buffers = others[len(others) - arrays :]
    row, (g, block_rows, d) = pl.program_id(0), query.shape
    _, block_pages, s, _, _ = buffer.shape
    num_pages, row_pages = stored[0].shape[0], block_table.shape[1]
    precision = lax.Precision.HIGHEST if query.dtype == jnp.float32 else None

    first_row = pl.program_id(1) * block_rows
    position = kv_len[row] - num_tokens  # position of the row's first query
    first_query = position + first_row // group
    last_query = position + jnp.minimum((first_row + block_rows - 1) // group, num_tokens - 1)
    query_at = position + (first_row + lax.broadcasted_iota(jnp.int32, (block_rows, 1), 0)) // group

    if nodes:
        tree = nodes[0][...]

        def of_query(i: int) -> jax.Array:
            result: jax.Array = tree[:, i : i + 1]
            return result

        query_at = of_query(POSITION)
        first_query = tree[0, FIRST_NODE]  # lower bound of the queries' positions
        last_query = kv_len[row] - 1  # last position, since nodes may see nodes whose queries are in other programs
    here = query_at >= 0

    # This block of queries reads keys [begin, end), which are in the pages [first_page, end_page) of the block table.
    begin = 0 if window is None else jnp.maximum(first_query - window + 1, 0)
    end = jnp.minimum(jnp.clip(last_query + 1, 0, row_pages * s), num_keys[row])
    first_page, end_page = begin // s, pl.cdiv(end, s)
    num_blocks = pl.cdiv(jnp.maximum(end_page - first_page, 0), block_pages)

    def each_page(block: jax.Array | int, act: Callable[[Any], None]) -> None:
        block_start = first_page + block * block_pages

        def copy(i: jax.Array, _: None) -> None:
            page = jnp.minimum(block_table[0, block_start + i], num_pages - 1)
            for pages, target in zip(stored, buffers, strict=True):
                act(pltpu.make_async_copy(pages.at[page], target.at[block % 2, i], semaphores.at[block % 2]))

        lax.fori_loop(0, jnp.minimum(block_pages, end_page - block_start), copy, None)

    def attend(block: jax.Array, _: None) -> None:
        @pl.when(block + 1 < num_blocks)
        def fetch_next() -> None:
            each_page(block + 1, lambda copy: copy.start())

        each_page(block, lambda copy: copy.wait())

        block_start = (first_page + block * block_pages) * s
        key_at = block_start + lax.broadcasted_iota(jnp.int32, (1, block_pages * s), 1)
        if nodes:
            words = [of_query(i) for i in range(WORDS, tree.shape[1])]
            visible = sees(words, key_at - of_query(FIRST_NODE))
        else:
            visible = key_at <= query_at
        visible &= here & (key_at < end)
        if window is not None:
            visible &= key_at > query_at - window
        # Unused values are set to 0: unseen slots and the buffer beyond the last page may hold NaN, and 0 * NaN is NaN.
        value_at = block_start + lax.broadcasted_iota(jnp.int32, (block_pages * s, 1), 0)
        used = (value_at >= begin) & (value_at < end)

        for head in range(g):
            key = buffer[block % 2, :, :, 2 * head, :].reshape(block_pages * s, d)
            value = buffer[block % 2, :, :, 2 * head + 1, :].reshape(block_pages * s, d)
            if scale_buffer:  # scales multiply scores and weights, not the keys and values
                key, value = _converted(key, query.dtype), _converted(value, query.dtype)
                of_keys, of_values = (scales_of(scale_buffer[0], block % 2, 2 * head + x, s) for x in (0, 1))
                of_values = jnp.where(key_at < end, of_values, 0.0)
            value = jnp.where(used, value, jnp.zeros_like(value))
            scores = _dot(query[head], key, 1, precision) * (of_keys * scale if scale_buffer else scale)
            if soft_cap is not None:
                scores = soft_cap * jnp.tanh(scores / soft_cap)
            scores = jnp.where(visible, scores, MASKED)

            old_top = top[head]
            new_top = jnp.maximum(old_top, jnp.max(scores, axis=1, keepdims=True))
            weights = jnp.where(visible, jnp.exp(scores - new_top), 0.0)
            shrink = jnp.exp(old_top - new_top)
            top[head] = new_top
            total[head] = total[head] * shrink + jnp.sum(weights, axis=1, keepdims=True)
            weights = weights * of_values if scale_buffer else weights
            acc[head] = acc[head] * shrink + _dot(weights.astype(value.dtype), value, 0, precision)

    top[...] = jnp.full_like(top, MASKED)
    total[...] = jnp.zeros_like(total)
    acc[...] = jnp.zeros_like(acc)

    @pl.when(num_blocks > 0)
    def fetch_first() -> None:
        each_page(0, lambda copy: copy.start())

    lax.fori_loop(0, num_blocks, attend, None)
    out[...] = (acc[...] / jnp.where(total[...] > 0, total[...], 1.0)).astype(out.dtype)


def scales_of(buffer: Ref, half: jax.Array, head: int, size: int) -> jax.Array:
    """Return the scales f32[1, keys] of a head in a block of pages of `size` slots.

    buffer: f32[2, block_pages, 1, 2G * S], the scales of two blocks of pages. half: index of the block.
    """
    block_pages, first = buffer.shape[1], head * size
    if size >= LANES:
        return jnp.concatenate([buffer[half, i, :, first : first + size] for i in range(block_pages)], axis=1)
    # Each page gives `size` lanes of a row of LANES. The lanes of several pages are moved beside each other.
    per_row = LANES // size
    begin, shift = first // LANES * LANES, first % LANES
    lane_page = lax.broadcasted_iota(jnp.int32, (1, LANES), 1) // size
    rows = []
    for start in range(0, block_pages, per_row):
        row = jnp.zeros((1, LANES), jnp.float32)
        for i in range(min(per_row, block_pages - start)):
            found = buffer[half, start + i, :, begin : begin + LANES]
            row = jnp.where(lane_page == i, pltpu.roll(found, (i * size - shift) % LANES, 1), row)
        rows.append(row)
    return jnp.concatenate(rows, axis=1)[:, : block_pages * size]


def _converted(x: jax.Array, dtype: Any) -> jax.Array:
    """Return 8-bit values in another dtype. A TPU converts integers to float32 only."""
    return x.astype(jnp.float32).astype(dtype)


def _dot(x: jax.Array, y: jax.Array, contracted: int, precision: lax.Precision | None) -> jax.Array:
    """Return the product of x [M, K] and y as float32. contracted: the axis of y that is summed over."""
    dimensions = (((1,), (contracted,)), ((), ()))
    return lax.dot_general(x, y, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _round_up(n: int, multiple: int) -> int:
    """Return n rounded up to a multiple of `multiple`."""
    return pl.cdiv(n, multiple) * multiple
